"""A worker that trains a toy state and snapshots it after every step; run as a process that the kill tests may kill.

    python -m tests.chaos.checkpoint_worker BASE RANK WORLD SESSION FIRST_STEP LAST_STEP

It resumes from what it is given and checks nothing; the tests check. The state is a pure function of the step, so that
a restored one can be recognised.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from moe_lightning.checkpoint.snapshotter import Snapshotter
from tests.unit.checkpoint_state import EXPERTS, EXTRA, expert_keys, state_of


def main() -> int:
    base, rank, world, session, first, last = (
        cast(a) for cast, a in zip((Path, int, int, str, int, int), sys.argv[1:], strict=True)
    )
    snapshotter = Snapshotter(
        base / "arenas" / f"rank{rank:05d}.arena",
        run="chaos",
        session=session,
        rank=rank,
        world_size=world,
        state=state_of(rank, world, 0),
        objects=0,
    )
    for step in range(first, last + 1):
        fresh = None if step == first else expert_keys([step % EXPERTS, (step + 1) % EXPERTS])
        persist = None if step == first else expert_keys([step % EXPERTS])
        snapshotter.start(step, state_of(rank, world, step), fresh=fresh, persist=persist, extra=EXTRA)
        snapshotter.wait_before_update()
        snapshotter.finish()
        time.sleep(0.002)  # the forward and backward of the next step
    return 0


if __name__ == "__main__":
    sys.exit(main())
