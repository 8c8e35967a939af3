"""Frozen configurations from plain mappings, as YAML files and checkpoints hold them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Mapping
from typing import Any, TypeVar

from moe_lightning.errors import ConfigurationError
from moe_lightning.mistakes import nearest
from moe_lightning.values import described, fits, hints_of, shown

T = TypeVar("T")


def build_config(cls: type[T], values: T | Mapping[str, Any] | None, *, key: str | None = None) -> T:
    """An instance of a dataclass from an instance, its keyword arguments, or None for the defaults.

    Args:
        key: where the arguments stand in a configuration, for messages.

    Raises:
        ConfigurationError: a key that the dataclass lacks, a value of another type than its field's, or one that the
            dataclass refuses.
    """
    if isinstance(values, cls):
        return values
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{cls.__name__} is made from keyword arguments, not from {values!r}")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = nearest(str(name), known)
            hint = f"did you mean {near!r}?" if near else f"use one of {', '.join(known)}"
            raise ConfigurationError(f"{key or cls.__name__} has no {name!r}: {hint}")
    for name, hint in hints_of(cls).items():
        if name in values and not fits(values[name], hint):
            what = f"{key}.{name}={shown(values[name])}" if key else f"{name}={shown(values[name])} of {cls.__name__}"
            raise ConfigurationError(f"{what} must be {described(hint)}")
    missing = [field.name for field in dataclasses.fields(cls) if _is_needed(field) and field.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ConfigurationError(f"{key or cls.__name__} lacks {', '.join(missing)}: give each of them")
    try:
        return cls(**values)
    except ConfigurationError as error:
        if key is None:
            raise
        raise ConfigurationError(with_key(str(error), values, key)) from error


_NAMED = re.compile(r"(\w+)=")


def with_key(message: str, names: Container[str], key: str) -> str:
    """A constructor's sentence that begins with one of its arguments, `NAME=value ...`, with the argument's whole key.

    Args:
        names: of the arguments.
        key: where they stand.
    """
    match = _NAMED.match(message)
    return f"{key}.{message}" if match and match[1] in names else message


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def build_variant(known: Mapping[str, T], name: str, changes: Mapping[str, Any], key: str) -> T:
    """One of several named dataclass instances with some fields replaced; those given as None stay.

    Args:
        key: where the name stands in a configuration, for messages: `GROUP.NAME`, beside the fields.

    Raises:
        ConfigurationError: an unknown name, or a field that cannot be so.
    """
    if name not in known:
        raise ConfigurationError(f"{key}={name!r} is unknown: use one of {', '.join(sorted(known))}")
    given = {key: value for key, value in changes.items() if value is not None}
    return build_config(type(known[name]), vars(known[name]) | given, key=key.rpartition(".")[0])
