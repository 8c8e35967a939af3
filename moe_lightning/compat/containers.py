"""Containers of OmegaConf, in which users keep configurations and Lightning hyper-parameters, in checkpoints.

A checkpoint holds the class and plain values, so any process with OmegaConf reads it as such a container, and stock
Lightning's `load_from_checkpoint` gives it to a module. Interpolations are resolved at the save: a checkpoint holds the
values of the run, whatever the environment is where it is loaded. Text that looks like one stays text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from typing_extensions import override

if TYPE_CHECKING:  # a process that has none of its containers need not import it
    from omegaconf import DictConfig, ListConfig


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Container of another library, which is saved as a call of its class.

    Attributes:
        kind: the class, which torch.load must be allowed to call.
        content: its argument, a plain value.
    """

    kind: type
    content: Any

    @override
    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return self.kind, (self.content,)


def _plain(container: object) -> Any:
    """Return the plain value of a container, whose interpolations are resolved; any other value as it is.

    Raises:
        ValueError: an interpolation in it cannot be resolved.
    """
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(container, Container):
        return container
    try:
        return OmegaConf.to_container(container, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _saved(container: object) -> Any:
    """Return the class of a container and its plain value, which load as such a container.

    Raises:
        ValueError: as `_plain`.
    """
    from omegaconf import Container, DictConfig, ListConfig, OmegaConf

    if not isinstance(container, Container):
        return container
    kind = ListConfig if OmegaConf.is_list(container) else DictConfig
    return Rebuilt(kind, tree_map(_text, _plain(container)))


AS_PLAIN = {"omegaconf": _plain}
"""Converter of containers, by the library of their class, for values that are sent to other ranks."""

AS_CONTAINERS = {"omegaconf": _saved}
"""The same for checkpoints."""


def _text(value: Any) -> Any:
    return _literal(str(value)) if isinstance(value, str | PurePath) else value


_INTERPOLATION = re.compile(r"(\\*)\$\{")


def _literal(text: str) -> str:
    """Return what OmegaConf reads as this text, and not as an interpolation."""
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + r"\${", text)


def _without_interpolations(value: Any) -> Any:
    is_live = isinstance(value, str) and any(len(found[1]) % 2 == 0 for found in _INTERPOLATION.finditer(value))
    return _literal(value) if is_live else value


class _Dictionary:
    """Container that looks nothing up: resolvers may run code, and this is what `weights_only` calls. As a class it has
    torch refuse the form in which OmegaConf itself would be saved.
    """

    def __new__(cls, content: Any = None) -> DictConfig:  # type: ignore[misc]
        from omegaconf import DictConfig

        return DictConfig(tree_map(_without_interpolations, content))


class _List:
    def __new__(cls, content: Any = None) -> ListConfig:  # type: ignore[misc]
        from omegaconf import ListConfig

        return ListConfig(tree_map(_without_interpolations, content))


# In any process that can train with this library, load_from_checkpoint reads the containers, with `weights_only` too.
torch.serialization.add_safe_globals(
    [(_Dictionary, "omegaconf.dictconfig.DictConfig"), (_List, "omegaconf.listconfig.ListConfig")]
)
