"""Entry points of the commands: a Ctrl-C during their imports, which take seconds, prints no traceback."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from functools import partial
from typing import NoReturn


def _run(program: str, module: str) -> NoReturn:
    try:
        sys.exit(importlib.import_module(f"moe_lightning.cli.{module}").main())
    except KeyboardInterrupt:
        print(f"{program}: ended by SIGINT", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # half-imported libraries would say more


moe_train = partial(_run, "moe-train", "train")
moe_sim = partial(_run, "moe-sim", "sim")
moe_bench = partial(_run, "moe-bench", "bench")
moe_ckpt = partial(_run, "moe-ckpt", "ckpt")
moe_generate = partial(_run, "moe-generate", "generate")
moe_eval = partial(_run, "moe-eval", "evaluate")
moe_data = partial(_run, "moe-data", "data")
