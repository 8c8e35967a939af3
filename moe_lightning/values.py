"""Values against annotations: whether one fits, what would in words, and constructors that check what they are given.

An annotation says all that can be said of one argument alone: its type, that a number is finite, its range
(`Annotated[float, Range(above=0)]`), that text is not empty. What several arguments must be together is left to the
constructor's body.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from moe_lightning.errors import ConfigurationError

T = TypeVar("T")

TARGET = "_target_"
"""Key of a mapping that stands for an object which is built later."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Limits of a number; None: no limit. No range holds nan."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = (("of at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {_plain(limit)}" for word, limit in limits if limit is not None)


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
Fraction = Annotated[float, Range(least=0, most=1)]
Probability = Annotated[float, Range(least=0, below=1)]
"""Of dropping something: with 1 nothing would be left."""
Coefficient = Annotated[float, Range(least=0, most=1e6)]
"""Factor of a term of the loss, or of a random width: far below it lies all that trains, far above it float32's end."""
Seconds = Annotated[float, Range(above=0, most=1e9)]
"""A wait of at most 30 years: what clocks, stores and collectives can count down."""


def fits(value: Any, hint: Any) -> bool:
    """Whether a value may be given where this annotation stands.

    Mappings stand for the dataclasses that are made from them, and with `_target_` for any object. Annotations that say
    nothing of values (Any, protocols, type variables) are fit by all.
    """
    if isinstance(value, Mapping) and TARGET in value:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(limit.holds(value) for limit in _ranges(hint))
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if isinstance(origin, type):
        return _fits_container(value, origin, arguments)
    return _fits_class(value, hint)


def _fits_class(value: Any, hint: Any) -> bool:
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if isinstance(value, bool) and hint in (int, float):
        return False
    if hint is int:
        return isinstance(value, numbers.Integral)
    if hint is float:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    if hint is str:
        return isinstance(value, str) and value != ""
    if hint in (Path, os.PathLike):
        return isinstance(value, str | os.PathLike) and value != ""
    if hint is Any or hint is object or not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return True
    return isinstance(value, hint) or (dataclasses.is_dataclass(hint) and isinstance(value, Mapping))


def _fits_container(value: Any, origin: type, arguments: tuple[Any, ...]) -> bool:
    if issubclass(origin, os.PathLike):
        return _fits_class(value, Path)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(item, arguments[-1]) for item in value.values())
    if origin is tuple and Ellipsis not in arguments:
        return isinstance(value, list | tuple) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if issubclass(origin, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str) and all(fits(i, arguments[0]) for i in value)
    if issubclass(origin, Set):
        return isinstance(value, Set | Sequence) and not isinstance(value, str)
    if origin is Iterable or origin is Collection:
        return isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    if origin is type:
        return isinstance(value, type)
    return not isinstance(value, bool | int | float | str | list | dict | None)


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "text",
    type(None): "null",
    None: "null",
    Path: "a path",
    os.PathLike: "a path",
    dict: "a mapping",
    list: "a list",
}


def described(hint: Any) -> str:
    """An annotation in the words of a configuration file."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = ", ".join(str(limit) for limit in _ranges(hint))
        return f"{described(arguments[0]).replace('finite ', '')} {limits}".strip()
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(option) for option in arguments))
    if origin is Literal:
        return " or ".join(shown(option) for option in arguments)
    if hint in _WORDS:
        return _WORDS[hint]
    if isinstance(origin, type):
        return _described_container(origin, arguments)
    if dataclasses.is_dataclass(hint):
        return f"a mapping of {getattr(hint, '__name__', hint)}'s arguments"
    return getattr(hint, "__name__", str(hint))


def _described_container(origin: type, arguments: tuple[Any, ...]) -> str:
    if issubclass(origin, os.PathLike):
        return "a path"
    if issubclass(origin, Mapping):
        return "a mapping"
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)}, each {' or '.join(dict.fromkeys(map(described, arguments)))}"
    if issubclass(origin, Sequence | Iterable):
        item = "" if arguments[0] is Any else f", each item {described(arguments[0])}"
        return f"a list{item}"
    return origin.__name__


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float | list | tuple | dict):
        return repr(value) if len(text := repr(value)) <= 100 else f"{text[:97]}..."
    return f"an instance of {type(value).__name__}"


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolved annotations of the arguments of a function or class, ranges included; those are left out that name what
    exists for type checkers only.
    """
    plain = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    try:
        return typing.get_type_hints(function if dataclasses.is_dataclass(function) else plain, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return _resolved_one_by_one(plain)


def _resolved_one_by_one(function: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= typing.get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)
        except (NameError, TypeError, AttributeError):
            continue
    return found


def validated(cls: type[T]) -> type[T]:
    """Class decorator: the constructor refuses arguments that do not fit their annotations, before it runs.

    Raises (the constructor):
        ConfigurationError: the argument's name, its value and what it must be.
    """
    plain = cls.__init__
    signature = inspect.signature(plain)

    @functools.cache
    def hints() -> dict[str, Any]:
        return hints_of(cls)

    @functools.wraps(plain)
    def checking(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:  # an argument too many or too few: Python's own words are clear
            given = {}
        for name, value in given.items():
            if name in hints() and value is not signature.parameters[name].default and not fits(value, hints()[name]):
                raise ConfigurationError(f"{name}={shown(value)} of {cls.__name__} must be {described(hints()[name])}")
        plain(self, *args, **kwargs)

    cls.__init__ = checking  # type: ignore[assignment]
    return cls


def _ranges(hint: Any) -> list[Range]:
    return [limit for limit in get_args(hint)[1:] if isinstance(limit, Range)]


def _plain(limit: float) -> str:
    """A limit as a user would write it: whole numbers in full, others short."""
    return str(int(limit)) if limit == int(limit) and abs(limit) < 1e10 else f"{limit:g}"
