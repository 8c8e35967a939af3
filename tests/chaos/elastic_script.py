"""A script for the elastic launcher: sums in a loop until its folder holds a file `stop`, through every world.

    python -m moe_lightning.elastic.run ... tests/chaos/elastic_script.py FOLDER

Each world that has done a step is a line in FOLDER/worlds. Files in FOLDER decide what a worker does in its first life:
`freeze-SLOT`: it stands still with Python's lock in its hands, as a hanging library call may; `hang-SLOT`: it does not
come back from a broken world; `fate-SLOT`: it gets a signal while it builds groups, "SIGKILL" when the others have its
address, "SIGKILL 0.008" that long after the join. Between two sums it rests, as training computes: gloo may never wake
a rank whose bytes were on their way to one that dies (`parallel.abort`), so a loop of sums alone meets that often.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from moe_lightning.compat import private_torch
from moe_lightning.elastic.membership import membership_from_environment
from moe_lightning.elastic.preemption import EXIT_PREEMPTED
from moe_lightning.elastic.worker import take_over_terminal
from moe_lightning.parallel.abort import GroupAborter, begin_build

_STEP_S = 0.01

folder = Path(sys.argv[1])
torch.set_num_threads(1)
engine = membership_from_environment()
assert engine is not None
print(f"start {engine.task.starts} of worker {engine.task.slot}", flush=True)
stop, worlds = False, 0


def has_fate(name: str) -> bool:
    return engine.task.starts == 1 and (folder / f"{name}-{engine.task.slot}").exists()


def set_and_die(set_key, number, *args):
    set_key(*args)
    os.kill(os.getpid(), number)


while not stop:
    members = engine.join()
    fate = (folder / f"fate-{engine.task.slot}").read_text().split() if has_fate("fate") else []
    if len(fate) == 2:
        threading.Timer(float(fate[1]), os.kill, (os.getpid(), signal.Signals[fate[0]])).start()
    if members.rank == 0 and (worlds or engine.task.slot):
        take_over_terminal()
    reason = engine.reason
    try:
        store = dist.PrefixStore(members.name, engine.store)
        with GroupAborter() as aborter:
            engine.guard(members, aborter.abort)
            timeout = begin_build(store, members.size, engine.task.settings.build_timeout_s)
            if len(fate) == 1:
                engine.store.set = partial(set_and_die, engine.store.set, signal.Signals[fate[0]])
            dist.init_process_group("gloo", store=store, rank=members.rank, world_size=members.size, timeout=timeout)
        private_torch.set_group_timeout(dist.group.WORLD, timedelta(seconds=30))
        state = torch.zeros(3)
        worlds += 1
        while not state[0]:
            if has_fate("freeze"):
                ctypes.PyDLL(None).sleep(600)
            wishes = [(folder / "stop").exists(), engine.has_newcomers(), engine.notice is not None]
            state = torch.tensor([float(wish) for wish in wishes])
            dist.all_reduce(state)
            engine.record_progress()
            time.sleep(_STEP_S)
            if worlds:
                facts = {
                    "number": members.number, "rank": members.rank, "size": members.size, "slot": engine.task.slot,
                    "pid": os.getpid(), "reason": reason, "starts": engine.task.starts, "nodes": members.nodes,
                }  # fmt: skip
                with (folder / "worlds").open("a") as file:
                    file.write(json.dumps(facts) + "\n")
                if members.rank == 0:
                    print(f"a world of {members.size}", flush=True)
                worlds, reason = 0, None
            if state[1] or state[2]:
                break
        stop = bool(state[0])
    except (RuntimeError, ValueError, TimeoutError) as error:
        engine.abort(str(error))
        if has_fate("hang"):
            time.sleep(3600)
    worlds += 1
    if dist.is_initialized():
        dist.destroy_process_group()
    if engine.notice is not None:
        engine.close()
        sys.exit(EXIT_PREEMPTED)
engine.close()
