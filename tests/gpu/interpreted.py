"""Runs a module on forked ranks whose Triton kernels are interpreted."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from tests.distributed.harness import run_ranks


def run_interpreted(ranks: int, module: str, *arguments: Any) -> list[Any]:
    """Return what MODULE.run(rank, ranks, *arguments) finds on every rank; a race between streams fails.

    Args:
        module: by name, because Triton reads at import that it interprets.
    """
    return run_ranks(ranks, _run, module, *arguments)


def _run(rank: int, ranks: int, module: str, *arguments: Any) -> Any:
    for name in [name for name in sys.modules if re.match(r"triton(?!\._C)\b", name)]:
        del sys.modules[name]  # torch has imported it; only its C library cannot be loaded again
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    found = importlib.import_module(module).run(rank, ranks, *arguments)
    importlib.import_module("tests.gpu.fake_streams").assert_no_races()
    return found
