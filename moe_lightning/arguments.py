"""Command-line options: fields of a dataclass, validated like values of a configuration.

Every error is one sentence.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from annotated_types import Interval

from moe_lightning import __version__
from moe_lightning.config import described, fits, shown
from moe_lightning.user_errors import EXIT_MISTAKE, suggestion

T = TypeVar("T")

Count = Annotated[int, Interval(ge=1, le=1e6)]
"""Of measurements and of sizes: beyond lies what no machine measures in a year."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of a screen of usage; so do its subcommands. `help` and `--version`
    stand for what they do elsewhere.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **keywords})
        if " " not in self.prog:  # no subcommand
            self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        missing = re.fullmatch("the following arguments are required: (.+)", message)
        if missing:
            message = f"{missing[1]} must be given"
        self.exit(EXIT_MISTAKE, f"{self.prog}: error: {shortened(message)} ({self.prog} --help shows the options)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse them; what a subcommand does not know, it says itself."""
        words = [with_home(word, self._names()) for word in (sys.argv[1:] if args is None else args)]
        if words[:1] == ["help"]:
            words[:1] = ["--help"]
        commands = self._commands()
        if commands and words and words[0].startswith("-") and words[0].partition("=")[0] not in self._names():
            if near := suggestion(words[0], self._names()):
                self.error(f"there is no option {words[0]}{near}")
            named = next((word for word in words if word in commands), "COMMAND")
            self.error(f"{words[0]} stands before the command: write {self.prog} {named} {words[0]} ...")
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(self._unknown(rest))
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choices that there are."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = suggestion(str(value).replace("_", "-"), known)
            option = "/".join(action.option_strings)
            what = f"{option} {value} is not a choice" if option else f"{shown(value)} is not a command"
            raise argparse.ArgumentError(None, f"{what}{near}: choose one of {', '.join(known)}")

    def _unknown(self, words: Sequence[str]) -> str:
        """The sentence for words that nothing takes."""
        word = words[0]
        name, has_value, value = word.partition("=")
        option = f"--{name.lstrip('-').replace('_', '-')}"
        names = [known for known in self._names() if known.startswith("--") and known not in ("--help", "--version")]
        if has_value and option in names and not word.startswith("-"):
            return f"options are written with dashes: write {option} {value} in place of {word}"
        if not word.startswith("-"):
            return f"{shown(word)} is one argument too many: leave it out"
        listed = f": it has {', '.join(names)}" if names else ", it has none: leave it out"
        return f"there is no option {word}{suggestion(name, names)}{listed}"

    def _names(self) -> list[str]:
        return list(self._option_string_actions)

    def _commands(self) -> Collection[str]:
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return actions[0].choices if actions else ()


def with_home(word: str, options: Collection[str]) -> str:
    """An option `--name=~/path` as its command gets `--name ~/path`: behind `=` most shells leave the tilde as it is.

    Args:
        options: names that the command knows.
    """
    name, _, text = word.partition("=")
    is_path = name in options and (text == "~" or text.startswith("~/"))
    return f"{name}={os.path.expanduser(text)}" if is_path else word


def shortened(message: str) -> str:
    """The message with words cut off that are too long to be a value."""
    return re.sub(r"(\S{150})\S{100,}", r"\1...", message)


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
    return {"type": hint if hint in (str, Path) else value(hint)}


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


def input_file(text: str) -> Path:
    """A file that can be read, as argparse's `type`."""
    path = Path(text)
    if not _is(os.path.isfile, path):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a file: give the path of one")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{shown(text)} may not be read by this user: give another, or chmod it")
    return path


def output_file(text: str) -> Path:
    """A file that can be written when the work is done, as argparse's `type`; it is opened for a moment."""
    path = Path(text)
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
    """A folder that is there or can be made, as argparse's `type`."""
    path = Path(text)
    there = next(place for place in (path, *path.parents) if _is(os.path.lexists, place) or place == Path(place.root))
    if not text or not _is(os.path.isdir, there) or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a folder, and none can be created there: give a path in a folder of yours"
        )
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
