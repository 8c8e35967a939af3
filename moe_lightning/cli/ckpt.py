"""`moe-ckpt`: inspect, verify, export, edit and delete checkpoints.

`moe-ckpt --help` lists the commands. DIR is a checkpoint, a run directory such as outputs/NAME, a `.ckpt` file or a
directory of these (not for prune), or the URL of a store such as s3://BUCKET/NAME. Exit codes: 0 done, 1 a damaged
checkpoint, 2 a user error, such as a path where there is none.

This module parses; what needs torch, which takes seconds to import, is imported for a command that is run.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from moe_lightning import user_errors
from moe_lightning.arguments import Count, Parser, input_file, output_file, value
from moe_lightning.config import NonNegativeInt
from moe_lightning.errors import CheckpointError, ConfigurationError, MissingCheckpointError
from moe_lightning.user_errors import printable

if TYPE_CHECKING:
    from moe_lightning.checkpoint.storage.interface import Place

_Times = Annotated[int, Interval(ge=1, le=1024)]
"""GPUs that share experts: beyond, planning takes hours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed usage and reason
        return int(stop.code or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    try:
        from moe_lightning.cli.checkpoint_commands import run

        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return user_errors.stop_printing()
    except MissingCheckpointError as error:
        return user_errors.report("moe-ckpt", error)
    except CheckpointError as error:
        user_errors.report("moe-ckpt", error)
        return 1
    except OSError as error:
        path = error.filename or getattr(arguments, "path", "")
        sentence = f"{printable(str(path))} cannot be read or written ({error.strerror}): give another path"
        print(f"moe-ckpt: error: {sentence}", file=sys.stderr)
        return 2
    except Exception as error:
        return user_errors.report("moe-ckpt", error)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="moe-ckpt", description="Inspect, verify, export and prune checkpoints.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    inspect_ = commands.add_parser("inspect", help="sizes, versions of every expert, lost tokens")
    verify = commands.add_parser("verify", help="compare every file with its checksum")
    export = commands.add_parser("export", help="write one safetensors file")
    export_hf = commands.add_parser("export-hf", help="write a folder that plain transformers loads")
    export_gguf = commands.add_parser("export-gguf", help="write a GGUF file that llama.cpp loads")
    export_loads = commands.add_parser("export-loads", help="write the placement that SGLang begins with")
    edit = commands.add_parser("edit", help="prune, merge and duplicate the experts of a checkpoint file")
    _add_edits(edit)
    prune = commands.add_parser("prune", help="delete all but the newest checkpoints")
    clean = commands.add_parser("clean", help="list, or delete, snapshots that dead runs left in memory")
    clean.add_argument("path", type=Path, metavar="DIR", nargs="*", help="where runs keep snapshots beside /dev/shm")
    clean.add_argument("--yes", action="store_true", help="delete what is listed")
    for command in (inspect_, verify, export, prune):
        command.add_argument(
            "path", metavar="DIR", help="a run, a checkpoint, a .ckpt file, or what holds them; a path or a URL"
        )
    export.add_argument("target", type=_target, metavar="FILE", help="the safetensors file to write; a path or a URL")
    for command in (export_hf, export_gguf):
        command.add_argument("path", metavar="CKPT", help="a .ckpt file, or a directory as above")
        command.add_argument("--dtype", help="of its tensors, such as bfloat16; default: that of the original")
    export_hf.add_argument("target", type=Path, metavar="DIR", help="the folder to write; it must not exist")
    export_gguf.add_argument(
        "target", type=output_file, metavar="FILE", help="the .gguf file to write; it must not exist"
    )
    export_hf.add_argument("--adapter", action="store_true", help="write the adapters alone, as peft loads them")
    export_loads.add_argument(
        "source", type=input_file, metavar="LOADS", help="routing_trace.npz or expert_load.csv of a run"
    )
    export_loads.add_argument("target", type=output_file, metavar="FILE", help="the JSON file to write")
    export_loads.add_argument("--ranks", type=value(_Times), required=True, metavar="N", help="GPUs that share experts")
    export_loads.add_argument("--slots", type=value(Count), required=True, metavar="S", help="experts on each")
    export_loads.add_argument(
        "--dense-layers", type=int, nargs="+", default=[], metavar="I", help="layers without experts"
    )
    prune.add_argument("--keep", type=value(int), required=True, metavar="N", help="whole checkpoints to keep")
    return parser


def _add_edits(edit: argparse.ArgumentParser) -> None:
    edit.add_argument("source", type=input_file, metavar="CKPT", help="a .ckpt file of a GPTModule")
    edit.add_argument("target", type=output_file, metavar="FILE", help="the .ckpt file to write")
    for kind, example in (("prune", "3,5"), ("merge", "0+3"), ("duplicate", "2")):
        help_ = f"experts such as {example}, or of one layer such as 1:{example}"
        edit.add_argument(f"--{kind}", nargs="+", default=[], metavar="E", help=help_)
    edit.add_argument(
        "--batches", type=value(NonNegativeInt), default=8, metavar="N", help="of the report (default: 8)"
    )


def _target(text: str) -> Place:
    from moe_lightning.checkpoint.storage import place_of

    try:
        place = place_of(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return output_file(text) if isinstance(place, Path) else place


if __name__ == "__main__":
    sys.exit(main())
