"""Private parts of Hydra and OmegaConf that this library uses.

`hydra.main` answers a wrong option with a screen of usage, so `moe-train` calls what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import _run_hydra as run_hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, Node

__all__ = ["checked_compositions", "full_key", "get_args_parser", "run_hydra"]

Compose = Callable[[list[str]], DictConfig]


def full_key(node: Node) -> str:
    """Return the dotted key of a node in its configuration. The public name is a method of containers only."""
    return node._get_full_key(None)


@contextmanager
def checked_compositions(check: Callable[[DictConfig, Sequence[str], Compose], None]) -> Iterator[None]:
    """Check what Hydra composes inside before it acts on it: it makes callbacks, handlers of logs and launchers, and
    sets environment variables, before a job is called.

    Args:
        check: gets the configuration, the overrides it is composed from, and a function that composes from others.
    """
    original = ConfigLoaderImpl._load_configuration_impl
    is_checking = False

    def load(loader: ConfigLoaderImpl, **options: Any) -> DictConfig:
        nonlocal is_checking
        composed = original(loader, **options)
        if not is_checking:
            is_checking = True
            try:
                name, mode, from_shell = (options[key] for key in ("config_name", "run_mode", "from_shell"))
                check(
                    composed,
                    options["overrides"],
                    lambda others: loader.load_configuration(name, others, mode, from_shell, False),
                )
            finally:
                is_checking = False
        return composed

    ConfigLoaderImpl._load_configuration_impl = load  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ConfigLoaderImpl._load_configuration_impl = original  # type: ignore[method-assign]
