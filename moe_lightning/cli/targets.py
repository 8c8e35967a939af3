"""Classes and functions that a configuration may name as `_target_`, and URLs that it may give as paths.

A recipe and the `config.yaml` of a run choose among the public classes of this library, of Lightning and of torch that
a training is made of, so they cannot run code of their own. Everything else is named by the user in
`MOE_LIGHTNING_ALLOW`. Lightning opens paths with fsspec, some of whose protocols render templates of the
file that they read, or send code to other processes: no configuration needs them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from moe_lightning.config import TARGET, is_below, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import one_line

ALLOW_VARIABLE = "MOE_LIGHTNING_ALLOW"
"""Packages, modules, classes and functions that the user trusts, separated by commas. Ranks inherit it."""

_OWNERS = (
    *(f"moe_lightning.{name}" for name in ("callbacks", "data", "doctor")),
    *(f"moe_lightning.{name}" for name in ("elastic.launcher", "elastic.membership", "models", "moe", "strategies")),
    *(f"lightning.pytorch.{name}" for name in ("callbacks", "loggers", "plugins")),
    *("lightning.pytorch.profilers", "lightning.pytorch.trainer"),
    *("lightning.fabric.plugins", "torch.nn", "torch.optim"),
)
"""Packages whose public classes every configuration may name. The libraries as a whole would not do: they have
functions that load and run files, and classes that start processes or, as Lightning's strategies, unpickle.
"""


_NO_STORAGE = frozenset(
    (
        *("async_wrapper", "asyncwrapper", "blockcache", "cached", "dir", "filecache", "generic", "simplecache"),
        *("dask", "dvc", "gist", "git", "github", "jlab", "jupyter", "libarchive", "pyscript", "reference", "tar"),
        "zip",
    )
)
"""Protocols of fsspec that hold no files of their own: they read other URLs, archives or repositories, or run code."""


def without_storage(text: str) -> str | None:
    """Return the first of these protocols in a URL or a chain of URLs; None where there is none."""
    links = [link.partition("://") for link in text.split("::")]
    named = (name.lower() for name, mark, _ in links if mark or len(links) > 1)
    return next((name for name in named if name in _NO_STORAGE), None)


def located(target: Any, key: str) -> Callable[..., Any]:
    """The class or function of a dotted name; what else goes wrong in importing a module is its author's to see in
    full.

    Raises:
        ConfigurationError: no dotted name, nothing callable, or nothing that the configuration may name.
    """
    if not isinstance(target, str) or not _is_dotted(target):
        raise ConfigurationError(f"{key}.{TARGET}={shown(target)} must be the dotted name of a class or function")
    is_named = is_allowed(target)
    if not is_named and not is_below(target, [owner.partition(".")[0] for owner in _OWNERS]):
        raise _refusal(target, target.partition(".")[0], key)  # before it is imported, which runs it
    found: Callable[..., Any] = _imported(target, key)
    if not callable(found):
        raise ConfigurationError(f"{key}.{TARGET}={target} is not a class or function: name one")
    if not is_named and not _is_public_class(found):
        raise _refusal(target, target, key)
    return found


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def is_allowed(name: str) -> bool:
    """True if the user has named this or what it belongs to."""
    return is_below(name, [word.strip() for word in os.environ.get(ALLOW_VARIABLE, "").split(",") if word.strip()])


def _imported(target: str, key: str) -> Any:
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
    return found


def _is_public_class(found: Any) -> bool:
    """True if a class is defined in one of the packages: a module's attributes also lead to what it has imported."""
    if not isinstance(found, type) or found.__qualname__.startswith("_"):
        return False
    return is_below(found.__module__, _OWNERS)


def _refusal(target: str, trusted: str, key: str) -> ConfigurationError:
    return ConfigurationError(
        f"{key}.{TARGET}={target} is not a class that a configuration may name: if you trust it, set "
        f"{ALLOW_VARIABLE}={trusted} in the environment"
    )
