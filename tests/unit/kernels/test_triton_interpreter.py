"""The Triton bodies pass the tests of the torch bodies, in Triton's interpreter, in a process of their own.

TRITON_INTERPRET must be set before the kernels are defined, so the choice belongs to a process.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program
from tests.unit.kernels.kernel_cases import EXAMPLES

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
@pytest.mark.parametrize("examples", [2, 12])
def test_triton_bodies_equal_reference(examples):
    files = [str(HERE / f"test_kernel_{part}.py") for part in ("rows", "experts", "router", "bytes", "plan", "stream")]
    variables = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", EXAMPLES: str(examples)}
    done = run_program("-m", "pytest", "-x", "-p", "no:cacheprovider", *files, folder=ROOT, variables=variables)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
