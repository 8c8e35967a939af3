"""Typed configurations: validation of values, construction from mappings, effects of options.

An annotation says all that can be said of one argument alone: its type and its range
(`Annotated[float, Interval(gt=0)]`); numbers are finite and text is not empty. Values are checked and never converted:
"3" is no number, true is no 1, but a number of NumPy is one, and a list may stand for a tuple. (pydantic's strict mode
refuses the last two, its lax mode accepts all four.) What several arguments must be together is left to the body of the
constructor.

The effects of a model's option (`option`) are declared at its dataclass field, for all code that depends on them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Interval

from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import nearest

T = TypeVar("T")

TARGET = "_target_"
"""Key of a mapping that stands for an object which is built later."""

PositiveInt = Annotated[int, Interval(ge=1)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
NonNegative = Annotated[float, Interval(ge=0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Probability = Annotated[float, Interval(ge=0, lt=1)]
"""Probability of dropping something, below 1: with 1 nothing would be left."""
Coefficient = Annotated[float, Interval(ge=0, le=1e6)]
"""Factor of a term of the loss, or of a random width: far below it lies all that trains, far above it float32's end."""
Seconds = Annotated[float, Interval(gt=0, le=1e9)]
"""A wait of at most 30 years: what clocks, stores and collectives can count down."""


def require(value: Any, hint: Any, name: str, owner: str = "") -> None:
    """Refuse a value that does not fit an annotation.

    Args:
        name: of the value, as users type it.
        owner: what the name belongs to, where the name does not say it.

    Raises:
        ConfigurationError: the name, its value and what it must be.
    """
    if not fits(value, hint):
        raise ConfigurationError(f"{name}={shown(value)}{owner and f' of {owner}'} must be {described(hint)}")


def fits(value: Any, hint: Any) -> bool:
    """True if a value may be given where this annotation stands.

    Mappings stand for the dataclasses that are made from them, and with `_target_` for any object. Annotations that say
    nothing of values (Any, protocols, type variables) are fit by all.
    """
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if _is_built_later(value):
        return True
    if kind is Annotated:
        return fits(value, arguments[0]) and all(_is_within(value, limit) for limit in arguments[1:])
    if kind in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if kind is Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if kind in _TESTS:
        return _TESTS[kind](value)
    if kind in _CONTAINERS:
        return _is_a(*_CONTAINERS[kind])(value) and _items_fit(value, kind, arguments)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, kind | Mapping)
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol
        return True


def _is_built_later(value: Any) -> bool:
    return isinstance(value, Mapping) and TARGET in value


def _is_a(*kinds: type, but: tuple[type, ...] = (str, bytes, bytearray)) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, but)


def _is_finite(value: Any) -> bool:
    try:
        return type(value) is not bool and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and value != ""


_TESTS: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: type(value) is bool,
    int: _is_a(numbers.Integral, but=(bool,)),
    float: _is_finite,
    str: lambda value: isinstance(value, str) and value != "",
    Path: _is_path,
    os.PathLike: _is_path,
    Iterable: _is_a(Iterable, but=(str, bytes, Mapping)),  # reading its items could exhaust it
}
_CONTAINERS: Mapping[Any, tuple[type, ...]] = {
    **dict.fromkeys((list, tuple, Sequence), (Sequence,)),
    **dict.fromkeys((set, frozenset), (Sequence, Set)),
    **dict.fromkeys((dict, Mapping), (Mapping,)),
}
"""What stands for a container of each kind."""


def _items_fit(values: Any, kind: type, arguments: tuple[Any, ...]) -> bool:
    if not arguments:
        return True
    if isinstance(values, Mapping):
        return all(fits(value, arguments[1]) for value in values.values())
    if kind is tuple and Ellipsis not in arguments:
        return len(values) == len(arguments) and all(map(fits, values, arguments))
    return all(fits(value, arguments[0]) for value in values)


def _is_within(value: Any, limit: Any) -> bool:
    ends = {name: getattr(limit, name, None) for name in ("ge", "gt", "le", "lt")}
    return all(getattr(operator, name)(value, end) for name, end in ends.items() if end is not None)


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
        limits = ", ".join(filter(None, map(_limits, arguments[1:])))
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
            if name in hints() and value is not signature.parameters[name].default:
                require(value, hints()[name], name, cls.__name__)
        plain(self, *args, **kwargs)

    cls.__init__ = checking  # type: ignore[assignment]
    return cls


def _limits(limit: Any) -> str:
    """An interval, or one end of it, in words."""
    words = {"of at least": "ge", "above": "gt", "at most": "le", "below": "lt"}
    ends = {word: getattr(limit, name, None) for word, name in words.items()}
    return " and ".join(f"{word} {_plain(end)}" for word, end in ends.items() if end is not None)


def _plain(limit: float) -> str:
    """A limit as a user would write it: whole numbers in full, others short."""
    return str(int(limit)) if limit == int(limit) and abs(limit) < 1e10 else f"{limit:g}"


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
        if name in values:
            require(values[name], hint, f"{key}.{name}" if key else name, "" if key else cls.__name__)
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


def is_below(name: str, owners: Iterable[str]) -> bool:
    """Return True if a dotted name is one of the owners, or belongs to one."""
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


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


_EFFECT, _OPTIONS = "effect", "options"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effects of one option; the defaults are those of an option that declares none.

    Attributes:
        changes_function: a trained model with the same weights computes something else with another value. False for
            losses, balance, drops and noise: these may be set for pretrained checkpoints too.
        is_resumable: a run may go on from its checkpoints with another value; so it may with every option that does not
            change the function.
        is_fused: `kernels.route` serves every value of this option, or has nothing to do with it.
        draws_noise: when a value other than the default makes the module draw keyed noise.
    """

    changes_function: bool = True
    is_resumable: bool = False
    is_fused: bool = False
    draws_noise: Literal["never", "in training", "always"] = "never"


def option(default: Any, **effect: Any) -> Any:
    """Return the dataclass field of an option.

    Args:
        default: value of the option.
        effect: attributes of its `Effect`.
    """
    return dataclasses.field(default=default, metadata={_EFFECT: Effect(**effect)})


def options_of(config: type) -> Any:
    """Return the field of a mapping whose keys are options of this dataclass."""
    return dataclasses.field(default_factory=dict, metadata={_OPTIONS: config})


def effects(config: type) -> dict[str, Effect]:
    """Return the effect of each option of a dataclass."""
    return {field.name: field.metadata.get(_EFFECT, Effect()) for field in dataclasses.fields(config)}


def pretrained_options(config: type) -> tuple[str, ...]:
    """Return the names of the options that may be set for pretrained checkpoints."""
    return tuple(name for name, effect in effects(config).items() if not effect.changes_function)


def is_resumable(config: type, path: Sequence[str]) -> bool:
    """True if a run may go on from its checkpoints with another value of an option.

    Args:
        config: class of the model's configuration; one that is no dataclass declares nothing.
        path: names from the configuration to the option, such as ("router", "top_k").
    """
    if not dataclasses.is_dataclass(config):
        return False
    field = next((field for field in dataclasses.fields(config) if field.name == path[0]), None)
    if field is None:
        return False
    effect = field.metadata.get(_EFFECT, Effect())
    if effect.is_resumable or not effect.changes_function:
        return True
    inner = field.metadata.get(_OPTIONS, hints_of(config)[field.name])
    return len(path) > 1 and isinstance(inner, type) and is_resumable(inner, path[1:])
