"""Frozen configurations from plain mappings, as YAML files and checkpoints hold them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from moe_lightning.errors import ConfigurationError

T = TypeVar("T")


def build_config(cls: type[T], values: T | Mapping[str, Any] | None) -> T:
    """An instance of a dataclass from an instance, its keyword arguments, or None for the defaults.

    Raises:
        ConfigurationError: a key that the dataclass lacks, a value of another type than its field's, or one that the
            dataclass refuses.
    """
    if isinstance(values, cls):
        return values
    if values is None:
        return cls()
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{cls.__name__} is made from keyword arguments, not from {values!r}")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"use one of {known}"
            raise ConfigurationError(f"{cls.__name__} has no {key!r}: {hint}")
    for key, hint in get_type_hints(cls).items():
        if key in values and not _fits(values[key], hint):
            raise ConfigurationError(f"{key}={values[key]!r} of {cls.__name__} must be {_in_words(hint)}")
    return cls(**values)


def build_variant(known: Mapping[str, T], name: str, changes: Mapping[str, Any], what: str) -> T:
    """One of several named dataclass instances with some fields replaced; those given as None stay.

    Args:
        what: what the instances are, for the error.

    Raises:
        ConfigurationError: an unknown name, or a field that cannot be so.
    """
    if name not in known:
        raise ConfigurationError(f"{what} {name!r} is unknown: use one of {sorted(known)}")
    given = {key: value for key, value in changes.items() if value is not None}
    return build_config(type(known[name]), vars(known[name]) | given)


_WORDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string", type(None): "null"}


def _fits(value: object, hint: Any) -> bool:
    """Whether a field of this type may hold the value; choices and nested dataclasses are left to the dataclass."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        return is_sequence and all(_fits(item, get_args(hint)[0]) for item in value)  # type: ignore[attr-defined]
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or hint not in _WORDS or isinstance(value, hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_in_words(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each item {_in_words(get_args(hint)[0])}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
