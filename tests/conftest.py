"""One thread for each test process, fast tests first, the same examples in every run, and no test leaves the next one
a launcher's variables.

`pytest --hypothesis-profile=explore` looks for examples that the fixed ones do not show.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)  # the ranks of a distributed test share the machine's few cores

settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")

_ORDER = ("unit", "distributed", "integration", "chaos")
_LAUNCHED = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder: pure parts, ranks, commands, kills; inside one the order stays as it is."""
    items.sort(key=lambda item: next((i for i, name in enumerate(_ORDER) if name in item.path.parts), -1))


@pytest.fixture(autouse=True)
def _not_launched() -> Iterator[None]:
    """A Trainer in the test's own process sets variables by which a later one would take itself for a launched rank."""
    before = {name: os.environ.get(name) for name in _LAUNCHED}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
