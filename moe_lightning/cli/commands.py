"""Entry points of the commands: a Ctrl-C during their imports, which take seconds, prints no traceback."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from typing import NoReturn


def moe_train() -> NoReturn:
    """Run `moe-train`."""
    _run("moe-train", "train")


def moe_sim() -> NoReturn:
    """Run `moe-sim`."""
    _run("moe-sim", "sim")


def moe_bench() -> NoReturn:
    """Run `moe-bench`."""
    _run("moe-bench", "bench")


def moe_ckpt() -> NoReturn:
    """Run `moe-ckpt`."""
    _run("moe-ckpt", "ckpt")


def moe_generate() -> NoReturn:
    """Run `moe-generate`."""
    _run("moe-generate", "generate")


def moe_eval() -> NoReturn:
    """Run `moe-eval`."""
    _run("moe-eval", "evaluate")


def moe_data() -> NoReturn:
    """Run `moe-data`."""
    _run("moe-data", "data")


def _run(program: str, module: str) -> NoReturn:
    try:
        sys.exit(importlib.import_module(f"moe_lightning.cli.{module}").main())
    except KeyboardInterrupt:
        print(f"{program}: ended by SIGINT", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGINT)  # half-imported libraries would say more
