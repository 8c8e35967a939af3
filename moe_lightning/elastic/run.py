"""Launcher of any script in elastic workers:

    python -m moe_lightning.elastic.run --ranks 4 SCRIPT ARGUMENTS...
    python -m moe_lightning.elastic.run --ranks 8 --num-nodes 4 --rdzv-endpoint HOST:PORT --secret-file FILE SCRIPT ...
    python -m moe_lightning.elastic.run --ranks 8 --num-nodes 4 --set membership=etcd --rdzv-id NAME \
        --rdzv-endpoint https://HOST:2379 SCRIPT ...

The second or third on every node. The script is run as `python SCRIPT ARGUMENTS...` would run it, once in each worker.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from moe_lightning.arguments import OutputFolder, Parser, add_options, option, read_options
from moe_lightning.config import NonNegativeInt, PositiveInt, build_config
from moe_lightning.elastic.launcher import ElasticLauncher
from moe_lightning.elastic.membership import ELASTIC_VARIABLE, ElasticSettings
from moe_lightning.elastic.worker import LAUNCHER_PID_VARIABLE, Interrupted, leave, work
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import one_line, report

_PROGRAM, _MODULE = "elastic", "moe_lightning.elastic.run"


@dataclass(frozen=True, kw_only=True)
class ElasticRunOptions:
    """Options of the command line."""

    ranks: Annotated[int, Interval(ge=1, le=1024)] = option("workers of this machine", 2)
    num_nodes: PositiveInt = option("machines that run this command", 1)
    rdzv_endpoint: str | None = option(
        "of the rendezvous host or etcd, for several machines", None, metavar="HOST:PORT"
    )
    rdzv_id: str | None = option("name of the run in etcd", None, metavar="NAME")
    secret_file: Path | None = option("a copy of the rendezvous host's", None, metavar="FILE")
    node: str | None = option("this machine's name as a failure domain", None)
    log_dir: OutputFolder = option("output of the other ranks", Path("logs"))
    max_restarts: NonNegativeInt = option("workers started again in the whole run", 20)
    set: list[str] = option("a setting, see ElasticSettings", [], action="append", metavar="NAME=VALUE")
    script: str = option("a Python script")
    arguments: list[str] = option("its arguments", nargs=argparse.REMAINDER)


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch the workers; in a worker, run the script. Return the exit code: 0, 1 (a defect), 2 (a user error) or
    128 + signal.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if ELASTIC_VARIABLE in os.environ and LAUNCHER_PID_VARIABLE in os.environ:
        leave(work(_PROGRAM, partial(_run_script, *arguments)))
    parser = Parser(prog=f"python -m {_MODULE}", description="Run a script in elastic workers.")
    add_options(parser, ElasticRunOptions)
    options = read_options(ElasticRunOptions, parser.parse_args(arguments))
    try:
        if not os.path.isfile(options.script):
            raise ConfigurationError(f"{one_line(options.script)} is not there: give the path of a Python script")
        launcher = ElasticLauncher(
            num_ranks=options.ranks,
            log_dir=options.log_dir,
            settings=_settings(options.set),
            module=_MODULE,
            program=_PROGRAM,
            max_restarts=options.max_restarts,
            rdzv_endpoint=options.rdzv_endpoint,
            rdzv_id=options.rdzv_id,
            secret_file=options.secret_file,
            num_nodes=options.num_nodes,
            node=options.node,
        )
        launcher.check()
        launcher.run([options.script, *options.arguments])
    except Interrupted as stop:
        return 128 + stop.signal
    except Exception as error:
        return report(_PROGRAM, error)
    return 0


def _run_script(script: str, *arguments: str) -> None:
    """Run `python SCRIPT ARGUMENTS` in this process."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _settings(texts: Sequence[str]) -> ElasticSettings:
    """Parse the settings given as NAME=VALUE.

    Raises:
        ConfigurationError: a name or value is invalid.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            values[name] = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            values[name] = value
    return build_config(ElasticSettings, values, key="--set")


if __name__ == "__main__":
    sys.exit(main())
