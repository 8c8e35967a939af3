"""Frozen configurations from plain mappings, as YAML files and checkpoints hold them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from moe_lightning.errors import ConfigurationError

T = TypeVar("T")


def build_config(cls: type[T], values: T | Mapping[str, Any] | None) -> T:
    """An instance of a dataclass from an instance, its keyword arguments, or None for the defaults.

    Raises:
        ConfigurationError: a key that the dataclass lacks, or values that it refuses.
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
    return cls(**values)
