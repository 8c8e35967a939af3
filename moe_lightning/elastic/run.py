"""Starts any script in elastic workers:

    python -m moe_lightning.elastic.run --ranks 4 SCRIPT ARGUMENTS...
    python -m moe_lightning.elastic.run --ranks 8 --nodes 4 --lighthouse HOST:PORT --secret-file FILE SCRIPT ...

The second on every node. The script is run as `python SCRIPT ARGUMENTS...` would run it, once in each worker.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from moe_lightning.arguments import Parser, output_folder, shortened, value
from moe_lightning.elastic.elastic_launcher import ElasticLauncher
from moe_lightning.elastic.failure import Interrupted, PeerFailed, Preempted, RunFinished, report_failure
from moe_lightning.elastic.lifeline import LAUNCHER_PID_VARIABLE, end_with_launcher, leave, leave_process_groups
from moe_lightning.elastic.preemption import EXIT_PREEMPTED
from moe_lightning.elastic.processes import RanksFailed
from moe_lightning.elastic.settings import ELASTIC_VARIABLE, ElasticSettings
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.values import NonNegativeInt, PositiveInt, Range

EXIT_CRASH, EXIT_MISTAKE = 1, 2
_Ranks = Annotated[int, Range(least=1, most=1024)]
_MODULE = "moe_lightning.elastic.run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch the workers; in a worker, run the script. Returns the exit code: 0, 1 (a defect), 2 (the user's mistake)
    or 128 + signal.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if ELASTIC_VARIABLE in os.environ and LAUNCHER_PID_VARIABLE in os.environ:
        leave(_work(arguments))
    options = _parser().parse_args(arguments)
    if not os.path.isfile(options.script):
        return _say(f"{options.script} is not there: give the path of a Python script")
    try:
        settings = ElasticSettings(**_settings(options.set))
        ElasticLauncher(
            num_ranks=options.ranks,
            log_dir=options.log_dir,
            settings=settings,
            module=_MODULE,
            max_restarts=options.max_restarts,
            lighthouse=options.lighthouse,
            secret_file=options.secret_file,
            num_nodes=options.nodes,
            node=options.node,
        ).run([options.script, *options.arguments])
    except ConfigurationError as error:
        return _say(str(error))
    except RanksFailed as failed:
        if failed.failure.kind == "mistake":
            return _say(failed.failure.message)
        if failed.failure.details:
            print(failed.failure.details, file=sys.stderr)
        print(f"elastic: crash: {failed.failure.message}", file=sys.stderr)
        return EXIT_CRASH
    except Interrupted as stop:
        return 128 + stop.signal
    return 0


def _work(arguments: Sequence[str]) -> int:
    """Run the script in this process, and tell the launcher how it failed."""
    end_with_launcher()
    script, *rest = arguments
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except RunFinished:
        return 0
    except Preempted:
        return EXIT_PREEMPTED
    except PeerFailed as error:
        print(error, file=sys.stderr)
        report_failure(error.kind, str(error), "")
        return EXIT_CRASH
    except (ConfigurationError, CheckpointError) as error:
        report_failure("mistake", str(error), "")
        return EXIT_MISTAKE
    except Exception as error:
        details = traceback.format_exc()
        print(details, file=sys.stderr)
        report_failure("crash", f"{type(error).__name__}: {error}", details)
        return EXIT_CRASH
    leave_process_groups()
    return 0


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """The settings given as NAME=VALUE.

    Raises:
        ConfigurationError: a name or value that is none.
    """
    types = {f.name: type(f.default) for f in fields(ElasticSettings)}
    values: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in types:
            raise ConfigurationError(f"--set {text}: {name!r} is not a setting: use one of {', '.join(types)}")
        try:
            if types[name] is float:
                values[name] = float(value)
            elif types[name] is int:
                values[name] = int(value)
            elif types[name] is bool:
                values[name] = {"true": True, "false": False}[value.lower()]
            else:
                values[name] = value
        except (ValueError, KeyError):
            raise ConfigurationError(f"--set {text}: {value!r} is not a {types[name].__name__}") from None
    return values


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m {_MODULE}", description="Run a script in elastic workers.")
    parser.add_argument("--ranks", type=value(_Ranks), default=2, help="workers of this machine")
    parser.add_argument("--nodes", type=value(PositiveInt), default=1, help="machines that run this command")
    parser.add_argument("--lighthouse", metavar="HOST:PORT", help="of the rendezvous host, for several machines")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="a copy of the rendezvous host's")
    parser.add_argument("--node", help="this machine's name as a failure domain")
    parser.add_argument("--log-dir", type=output_folder, default="logs", help="output of the other ranks")
    parser.add_argument("--max-restarts", type=value(NonNegativeInt), default=20)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, see ElasticSettings"
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _say(sentence: str) -> int:
    print(f"elastic: error: {shortened(sentence)}", file=sys.stderr)
    return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
