"""Which bodies the tests of this folder exercise, and poison for every uninitialised buffer.

The process runs the torch bodies; with TRITON_INTERPRET=1 (see test_triton_interpreter.py) the Triton ones; with a GPU
the Triton ones for tensors there, and the torch ones for the others.
"""

import os

import pytest
import torch

from moe_lightning import kernels as ops
from tests.gpu.interpreter import widen_bf16

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = INTERPRETED or torch.cuda.is_available()
BACKEND = "triton" if INTERPRETED else "auto" if TRITON else "torch"


@pytest.fixture(autouse=True, scope="module")
def _body():
    with ops.backend(BACKEND):
        yield


@pytest.fixture(autouse=True, scope="session")
def _bf16():
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            widen_bf16(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """torch.empty and the buffer pool hand out NaN (the largest integer), so that an element left unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
