"""One thread for each test process, and fast tests first: pure parts, then ranks, then commands, then kills."""

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # the ranks of a distributed test share the machine's few cores

_ORDER = ("unit", "distributed", "integration", "chaos")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder; inside one the order stays as it is."""
    items.sort(key=lambda item: next((i for i, name in enumerate(_ORDER) if name in item.path.parts), -1))
