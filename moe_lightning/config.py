"""Frozen configurations from plain mappings, as YAML files and checkpoints hold them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from moe_lightning.errors import ConfigurationError
from moe_lightning.values import described, fits, hints_of, shown

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
    for key, hint in hints_of(cls).items():
        if key in values and not fits(values[key], hint):
            raise ConfigurationError(f"{key}={shown(values[key])} of {cls.__name__} must be {described(hint)}")
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
