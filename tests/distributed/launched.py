"""What the ranks of the launcher's tests do; without torch, so that they start at once.

Usage: python -m tests.distributed.launched BEHAVIOUR FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from moe_lightning.elastic.worker import end_with_launcher, leave, report_failure, work


def main() -> NoReturn:
    end_with_launcher()
    behaviour, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    if behaviour == "environment":
        (folder / f"rank{rank}.json").write_text(json.dumps(dict(os.environ)))
    elif behaviour == "folder":
        status = os.lstat(meeting := os.environ["MOE_LIGHTNING_STORE"])
        told = {"folder": meeting, "mode": stat.S_IMODE(status.st_mode), "owner": status.st_uid}
        (folder / f"rank{rank}.json").write_text(json.dumps(told))
    elif behaviour == "mistake":
        report_failure("mistake", "a value is wrong", "")
        sys.exit(2)
    elif behaviour == "crash" and rank == 1:
        report_failure("crash", "ValueError: no", "Traceback: ...")
        sys.exit(1)
    elif behaviour == "crashes" and rank == 1:
        starts = json.loads(os.environ["MOE_LIGHTNING_ELASTIC"])["starts"]
        place = "train.py:1" if starts < 3 else "train.py:2"
        report_failure("crash", "ValueError: no", f"Traceback: {place}", place)
        sys.exit(1)
    elif behaviour == "peer" and rank == 1:
        report_failure("peer", "rank 7 on node far was killed by SIGKILL", "")
        sys.exit(1)
    elif behaviour == "silent" and rank == 1:
        print("last words", file=sys.stderr)
        sys.exit(3)
    elif behaviour == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "saving":
        leave(work("launched", partial(_save_at_the_end, folder, rank)))
    elif behaviour not in ("environment", "folder"):
        _wait_for_signals(folder, stubborn=behaviour == "stubborn")
    sys.exit(0)


def _wait_for_signals(folder: Path, *, stubborn: bool) -> None:
    """Say so once all handlers are set, then sleep until a signal ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if stubborn else signal.SIG_DFL)
    _say_ready(folder)
    while True:
        signal.pause()


def _save_at_the_end(folder: Path, rank: int) -> None:
    """Print, save and print again once it is interrupted."""
    try:
        _say_ready(folder)
        while True:  # a signal just before `signal.pause` would not end it
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("saves", flush=True)
        (folder / f"saved{rank}").touch()
        print("has saved")
        raise


def _say_ready(folder: Path) -> None:
    pipe = folder / "ready"
    if pipe.exists():
        pipe.write_text(f"{os.getpid()}\n")


if __name__ == "__main__":
    main()
