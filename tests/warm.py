"""First uses, made once in the server that tests fork from: its forks share what they have loaded and filled.

One training step of one process halves the processor time of a rank's first step, for caches of validators, lazy imports
and pages of memory are there already. It leaves no thread, file or variable, and no random state.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import tempfile
import warnings

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from tests.distributed.training import train


def warm_up() -> None:
    """Train one step, save and resume."""
    variables, threads, log = dict(os.environ), torch.get_num_threads(), logging.getLogger("lightning.pytorch")
    level = log.level
    torch.set_num_threads(1)  # no pool of threads, which forks would wait for
    try:
        with tempfile.TemporaryDirectory() as name, isolate_rng(), warnings.catch_warnings():
            path = os.path.join(name, "first.ckpt")
            train(0, 1, steps=1, save_to=path)
            train(0, 1, steps=2, ckpt_path=path, validate=True)
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(variables)


warm_up()
gc.collect()
gc.freeze()  # else each fork's collections walk, and so copy, all that was imported here
atexit.register(gc.unfreeze)  # nanobind reports what lives at the end
