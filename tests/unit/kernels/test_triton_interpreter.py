"""The Triton bodies pass the tests of the torch bodies, in Triton's interpreter, in a process of their own.

TRITON_INTERPRET must be set before the kernels are defined, so the choice belongs to a process.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
def test_triton_bodies_equal_reference():
    files = [str(HERE / f"test_kernel_{part}.py") for part in ("rows", "experts", "bytes")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
