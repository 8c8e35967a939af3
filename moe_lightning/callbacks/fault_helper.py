"""A process that outlives the one it serves: continues a stopped process, or holds a disk's space for a while.

Run by its path with an interpreter that imports nothing else (`python -I -S fault_helper.py ...`): it must be ready
within moments. Prints one line when it is.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time

_PIECE_BYTES = 1 << 20


def continue_process(pid: int, seconds: float) -> None:
    """Send SIGCONT after a while, to the very process that had this id at first."""
    descriptor = os.pidfd_open(pid)
    print("ready", flush=True)
    time.sleep(seconds)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGCONT)
    except ProcessLookupError:
        return  # it was killed while it was stopped


def fill(folder: str, megabytes: float, seconds: float) -> None:
    """Take space with a file that has no name, so that it is free again whenever this process ends."""
    with tempfile.TemporaryFile(dir=folder) as file:
        wanted, taken = round(megabytes * 1e6), 0
        with contextlib.suppress(OSError):  # full, which is what was asked for
            while taken < wanted:
                piece = min(_PIECE_BYTES, wanted - taken)
                os.posix_fallocate(file.fileno(), taken, piece)
                taken += piece
        print(f"{taken} bytes", flush=True)
        time.sleep(seconds)


if __name__ == "__main__":
    if sys.argv[1] == "continue":
        continue_process(int(sys.argv[2]), float(sys.argv[3]))
    else:
        fill(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
