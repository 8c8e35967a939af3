"""Checks a configuration against the constructors it names, then calls them.

Hydra would answer a misspelt argument or a wrong type with a traceback from deep inside a constructor; here it is one
sentence with the key as the user typed it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from moe_lightning.cli.limits import limits_of
from moe_lightning.config import TARGET, hints_of, require, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import one_line, suggestion

_REFUSALS = (ValueError, TypeError, LookupError, OSError, ModuleNotFoundError, ArithmeticError)
_FILLED_LATER = {"vocab_size": "auto", "num_classes": "auto"}  # decided by the data

_TYPED = {"module.config": "model", "module.optimizer": "optimizer", "trainer.devices": "ranks"}
"""Keys of the composed configuration that take what users type elsewhere."""

_NAMED = re.compile(r"(\w+)=")


def build_object(node: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    """Instantiate a node of the configuration, the nested ones before it.

    Args:
        node: with `_target_`.
        key: where the node is, for messages.
        arguments: objects passed beside the node's own values.

    Raises:
        ConfigurationError: the constructor refuses its arguments.
    """
    built = {str(name): _built(child, _child(key, name)) for name, child in node.items()}
    try:
        return instantiate(built, **arguments, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
    # Only here: launchers use this module, and importing Lightning would take them seconds.
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(cause, ConfigurationError):
        raise ConfigurationError(_with_key(str(cause), node, key)) from cause
    if isinstance(cause, (*_REFUSALS, MisconfigurationException)):
        raise ConfigurationError(f"{typed(key)} cannot be built: {one_line(cause)}") from cause
    raise cause


def _built(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return build_object(value, key)
        return {name: _built(child, _child(key, name)) for name, child in value.items()}
    if isinstance(value, list):
        return [_built(child, f"{key}[{index}]") for index, child in enumerate(value)]
    return value


def _with_key(message: str, node: Mapping[str, Any], key: str) -> str:
    """A constructor's sentence that begins with one of its arguments, with the argument's whole key."""
    match = _NAMED.match(message)
    return f"{typed(_child(key, match[1]))}{message[match.end(1) :]}" if match and match[1] in node else message


def typed(key: str) -> str:
    """The key as users type it."""
    for composed, name in _TYPED.items():
        if key == composed or key.startswith((f"{composed}.", f"{composed}[")):
            return name + key[len(composed) :]
    return key


def check_arguments(node: Any, key: str = "") -> None:
    """Check the names and values of all arguments below a node against the constructors' annotations.

    Raises:
        ConfigurationError: a class that cannot be imported, an argument it lacks, or a value that does not fit.
    """
    if isinstance(node, Mapping):
        if TARGET in node:
            _check_call(node, key)
        for name, child in node.items():
            check_arguments(child, _child(key, name))
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for index, child in enumerate(node):
            check_arguments(child, f"{key}[{index}]")


def _child(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _check_call(node: Mapping[str, Any], key: str) -> None:
    function = located(node[TARGET], key)
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    hints = hints_of(function) | limits_of(function)
    for name, value in _arguments(node):
        if name not in parameters and not open_ended:
            raise ConfigurationError(
                f"{typed(_child(key, name))} is not an argument of {function.__name__}{suggestion(name, parameters)}: "
                f"it takes {', '.join(parameters)}"
            )
        if (name in _FILLED_LATER and value == _FILLED_LATER[name]) or _is_default(value, parameters.get(name)):
            continue
        if name in hints:
            require(value, hints[name], typed(_child(key, name)))


def _arguments(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of the call; `_target_` and its like are Hydra's."""
    return ((name, value) for name, value in node.items() if not (name.startswith("_") and name.endswith("_")))


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether it is what the constructor takes by itself, which not every library's annotations allow."""
    return parameter is not None and type(value) is type(parameter.default) and value == parameter.default


def located(target: Any, key: str) -> Callable[..., Any]:
    """The class or function of a dotted name; what else goes wrong in importing a module is its author's to see in
    full.
    """
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise ConfigurationError(f"{key}.{TARGET}={shown(target)} must be the dotted name of a class or function")
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
                raise ConfigurationError(
                    f"{key}.{TARGET}={target} cannot be imported ({one_line(error)}): give PACKAGE.MODULE.CLASS"
                ) from None
    for name in attributes:
        if not hasattr(found, name):
            raise ConfigurationError(f"{key}.{TARGET}={target} does not exist: {module} has no {name}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigurationError(f"{key}.{TARGET}={target} is not a class or function: name one")
    return found
