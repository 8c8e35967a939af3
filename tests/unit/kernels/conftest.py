"""Which bodies the tests of this folder exercise, and poison for every uninitialised buffer.

The process runs the torch bodies; with TRITON_INTERPRET=1 (see test_triton_interpreter.py) or a GPU the Triton ones.
"""

import os

import pytest
import torch

from moe_lightning import kernels as ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = INTERPRETED or torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def _body():
    with ops.backend("triton" if TRITON else "torch"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _bf16():
    """The interpreter keeps bf16 as bits, and multiplies the bits: widen them first."""
    if not INTERPRETED:
        yield
        return
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(self, a, b, d, *options):
        wide = [self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, d, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", widened)
        yield


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """torch.empty and the buffer pool hand out NaN (the largest integer), so that an element left unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
