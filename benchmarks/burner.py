"""A process that takes a share of one core away from whoever else runs there: `python burner.py CORE SHARE`.

It ends with its parent. Standard library only: it must start at once.
"""

from __future__ import annotations

import os
import sys
import time

_CYCLE_S = 0.01


def burn(core: int, share: float) -> None:
    """Use the share of a core in every cycle of 10 ms, or with 1 all that the scheduler gives."""
    os.sched_setaffinity(0, {core})
    parent = os.getppid()
    while os.getppid() == parent:
        began, used = time.perf_counter(), time.thread_time()
        while time.thread_time() - used < share * _CYCLE_S:
            pass
        if share < 1:
            time.sleep(max(0.0, _CYCLE_S - (time.perf_counter() - began)))


if __name__ == "__main__":
    burn(int(sys.argv[1]), float(sys.argv[2]))
