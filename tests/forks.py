"""The server process that tests fork ranks, workers, agents and commands from, in a tenth of a second each.

It has imported what they need, which costs every fresh interpreter seconds, but has run nothing.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "lightning.pytorch",
        "torch._dynamo",
        "torch._subclasses.fake_tensor",
        "torch.distributed.checkpoint",
        "moe_lightning.checkpoint.agent",
        "moe_lightning.cli.train",
        "moe_lightning.cli.worker",
        "moe_lightning.elastic.engine",
        "moe_lightning.elastic.launcher",
        "moe_lightning.strategies",
        "tests.chaos.elastic_worker",
    ]
)
