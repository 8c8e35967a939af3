"""End of a worker: registered functions run, and nothing that could report or abort is taken down first."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ENDING = """
import atexit, sys, threading
from moe_lightning.elastic.worker import leave

class Leak:
    def __del__(self):
        print("leaked", flush=True)  # as bindings do of what the interpreter takes down

leak = Leak()
atexit.register(lambda: print("registered", hasattr(sys, "last_value")))
if sys.argv[1] == "0":  # else it would not be waited for
    threading.Thread(target=lambda: print("a thread")).start()
print("last words", end=" ")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_nothing_is_taken_down(code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDING, str(code)], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stderr == ""
    assert "last words" in ended.stdout
    assert code or "a thread" in ended.stdout
    assert f"registered {code != 0}" in ended.stdout
    assert "leaked" not in ended.stdout
