"""Command-line options: fields of a dataclass, validated like values of a configuration.

Every error is one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from annotated_types import Interval
from typing_extensions import override

from moe_lightning import __version__
from moe_lightning.config import described, fits, shown
from moe_lightning.user_errors import EXIT_MISTAKE, one_line

T = TypeVar("T")

Count = Annotated[int, Interval(ge=1, le=1e6)]
"""Of measurements and of sizes: beyond lies what no machine measures in a year."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of a screen of usage; so do its subcommands."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **keywords})
        if " " not in self.prog:  # no subcommand
            self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse what is known. The word help alone in the place of a subcommand is --help, and a subcommand refuses the
        rest itself, since its own --help lists its options.
        """
        given = sys.argv[1:] if args is None else list(args)
        if given == ["help"] and self._subparsers is not None:
            given = ["--help"]
        known, rest = super().parse_known_args(given, namespace)
        if rest and " " in self.prog:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(EXIT_MISTAKE, f"{self.prog}: error: {one_line(message)} ({self.prog} --help shows the options)\n")


def option(help_: str, default: Any = MISSING, **keywords: Any) -> Any:
    """A field of a dataclass that `add_options` makes an option of; one without a default must be given, by position.

    Args:
        keywords: further ones of argparse's `add_argument`.
    """
    metadata = {"help": help_, **keywords}
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """An option for each field of a dataclass, of the type that its annotation says: a bool is a switch, a Literal a
    choice, a list takes one value or more, a tuple any number of them.
    """
    hints = typing.get_type_hints(options, include_extras=True)
    for item in fields(options):
        name, keywords = item.name, _taken(hints[item.name]) | item.metadata
        if keywords.get("action") == "append":
            del keywords["nargs"]
        if "choices" in item.metadata:  # the default lists them
            keywords["metavar"] = item.name.upper()
        if item.default is not MISSING or item.default_factory is not MISSING:
            name = f"--{item.name.replace('_', '-')}"
            keywords["default"] = default = item.default if item.default_factory is MISSING else item.default_factory()
            if default is not None and default is not False and default != [] and "(default" not in keywords["help"]:
                words = " ".join(map(str, default)) if isinstance(default, list) else default
                keywords["help"] += f" (default: {words})"
        parser.add_argument(name, **keywords)


def read_options(options: type[T], namespace: argparse.Namespace) -> T:
    """The dataclass that `add_options` described, from what was given."""
    return options(**{item.name: getattr(namespace, item.name) for item in fields(options)})  # type: ignore[arg-type]


def _taken(hint: Any) -> dict[str, Any]:
    """Return argparse's keywords for a field's annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is bool:
        return {"action": "store_true"}
    if origin in (Union, types.UnionType):  # or None
        return _taken(arguments[0])
    if origin in (list, tuple):
        return _taken(arguments[0]) | {"nargs": "+" if origin is list else "*"}
    if origin is Literal:
        return {"choices": arguments}
    if origin is Annotated and callable(arguments[1]):
        return {"type": arguments[1]}
    if hint is Path:
        return {"type": any_path}
    return {"type": hint if hint is str else value(hint)}


def value(hint: Any) -> Callable[[str], Any]:
    """Return a parser of numbers as argparse's `type`, with the annotation's range.

    Args:
        hint: int, float, or these with a range.
    """
    read: type[int] | type[float] = int if hint is int or int in get_args(hint) else float

    def parsed(text: str) -> int | float:
        try:
            number = read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} must be {described(hint)}") from None
        if not fits(number, hint):
            raise argparse.ArgumentTypeError(f"{shown(number)} must be {described(hint)}")
        return number

    return parsed


def any_path(text: str) -> Path:
    """A path with its tilde expanded, as argparse's `type`: most shells leave that of --name=~/path as it is."""
    return Path(os.path.expanduser(text))


def nonempty(text: str) -> str:
    """Text that is not empty, as argparse's `type`."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty: give a value")
    return text


def input_file(text: str) -> Path:
    """A file that can be read, as argparse's `type`."""
    path = any_path(text)
    if not _is(os.path.isfile, path):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a file: give the path of one")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{shown(text)} may not be read by this user: give another, or chmod it")
    return path


def output_file(text: str) -> Path:
    """A file that can be written when the work is done, as argparse's `type`; it is opened for a moment."""
    path = any_path(text)
    is_new = not _is(os.path.lexists, path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK))
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no name of a file"
        raise argparse.ArgumentTypeError(
            f"{shown(text)} cannot be written ({reason}): give a file in a folder of yours that exists"
        ) from None
    return path


def output_folder(text: str) -> Path:
    """A folder that is there or can be made, as argparse's `type`; it and a file in it are made for a moment."""
    path = any_path(text)
    new = [place for place in (path, *path.parents) if not _is(os.path.lexists, place)]
    try:
        path.mkdir(parents=True, exist_ok=bool(text))
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a folder, and none can be created there: give a path in a folder of yours"
        ) from None
    finally:
        for place in new:
            with contextlib.suppress(OSError, ValueError):
                place.rmdir()
    return path


InputFile = Annotated[Path, input_file]
OutputFile = Annotated[Path, output_file]
OutputFolder = Annotated[Path, output_folder]


def _is(test: Callable[[Path], bool], path: Path) -> bool:
    """True if a test of os.path holds for any text; False for names that no file system accepts."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False
