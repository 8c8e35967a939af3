"""Checks a configuration against the constructors it names, then calls them.

Hydra would answer a misspelt argument or a wrong type with a traceback from deep inside a constructor; here it is one
sentence with the key as the user typed it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from moe_lightning.cli.mistakes import one_line, suggestion
from moe_lightning.errors import ConfigurationError

TARGET = "_target_"
_REFUSALS = (ValueError, TypeError, LookupError, OSError, ModuleNotFoundError)
_FILLED_LATER = {"vocab_size": "auto", "num_classes": "auto"}  # decided by the data


def build_object(node: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    """Instantiate a node of the configuration, the nested ones included.

    Args:
        node: with `_target_`.
        key: where the node is, for messages.
        arguments: objects passed beside the node's own values.

    Raises:
        ConfigurationError: the constructor refuses its arguments.
    """
    try:
        return instantiate(dict(node), **arguments, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
    # Only here: launchers use this module, and importing Lightning would take them seconds.
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(cause, (*_REFUSALS, MisconfigurationException)) and not isinstance(cause, ConfigurationError):
        raise ConfigurationError(f"{key} cannot be built: {one_line(cause)}") from cause
    raise cause


def check_arguments(node: Any, key: str = "") -> None:
    """Check the names and types of all arguments below a node.

    Raises:
        ConfigurationError: a class that cannot be imported, an argument it lacks, or a value of another type.
    """
    if isinstance(node, Mapping):
        if TARGET in node:
            _check_call(node, key)
        for name, child in node.items():
            check_arguments(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for index, child in enumerate(node):
            check_arguments(child, f"{key}[{index}]")


def _check_call(node: Mapping[str, Any], key: str) -> None:
    function = located(node[TARGET], key)
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    hints = _type_hints(function)
    for name, value in node.items():
        if name.startswith("_") and name.endswith("_"):
            continue
        if name not in parameters and not open_ended:
            raise ConfigurationError(
                f"{key}.{name} is not an argument of {function.__name__}{suggestion(name, parameters)}: "
                f"it takes {', '.join(parameters)}"
            )
        if _FILLED_LATER.get(name) == value:
            continue
        if name in hints and not matches(value, hints[name]):
            raise ConfigurationError(f"{key}.{name}={shown(value)} has the wrong type: use {described(hints[name])}")


def located(target: str, key: str) -> Callable[..., Any]:
    """The class or function of a dotted name; what else goes wrong in importing a module is its author's to see in
    full.
    """
    module, attributes = target, list[str]()
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise ConfigurationError(
                    f"{key}.{TARGET}={target} needs a missing package: {one_line(error)}"
                ) from error
            module, _, name = module.rpartition(".")
            attributes.insert(0, name)
            if not module:
                raise ConfigurationError(f"{key}.{TARGET}={target} cannot be imported: {one_line(error)}") from None
    for name in attributes:
        if not hasattr(found, name):
            raise ConfigurationError(f"{key}.{TARGET}={target} does not exist: {module} has no {name}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigurationError(f"{key}.{TARGET}={target} is not a class or function: name one")
    return found


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Resolved annotations of the arguments; none where a name in them exists for type checkers only."""
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except NameError:
        return {}


def matches(value: Any, hint: Any) -> bool:
    """Whether a value from YAML fits an annotation; nodes with `_target_` and annotations without a rule here always
    do.
    """
    if isinstance(value, Mapping) and TARGET in value:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(matches(value, option) for option in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is not None and inspect.isclass(origin):
        return _matches_container(value, origin, arguments)
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (Path, os.PathLike):
        return isinstance(value, str)
    if hint in (bool, str, list, dict):
        return isinstance(value, hint)
    return True


def _matches_container(value: Any, origin: type, arguments: tuple[Any, ...]) -> bool:
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is tuple and Ellipsis not in arguments:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(matches, value, arguments))
    if issubclass(origin, Sequence):
        return isinstance(value, list) and all(matches(item, arguments[0]) for item in value)
    return not isinstance(value, bool) and (not issubclass(origin, os.PathLike) or isinstance(value, str))


def described(hint: Any) -> str:
    """An annotation in the words of a configuration file."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(option) for option in arguments))
    if origin is Literal:
        return " or ".join(shown(option) for option in arguments)
    names = {
        float: "a number",
        int: "an integer",
        bool: "true or false",
        str: "text",
        type(None): "null",
        None: "null",
        Path: "a path",
        os.PathLike: "a path",
    }
    if hint in names:
        return names[hint]
    if origin is not None and inspect.isclass(origin):
        if issubclass(origin, Mapping):
            return "a mapping"
        if issubclass(origin, Sequence):
            return "a list"
        if issubclass(origin, os.PathLike):
            return "a path"
    return getattr(hint, "__name__", str(hint))


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)
