"""Private parts of Hydra and OmegaConf that this library uses.

`hydra.main` answers a wrong option with a screen of usage, so `moe-train` calls what it calls.
"""

from __future__ import annotations

from hydra._internal.utils import _run_hydra as run_hydra
from hydra._internal.utils import get_args_parser
from omegaconf import Node

__all__ = ["full_key", "get_args_parser", "run_hydra"]


def full_key(node: Node) -> str:
    """Return the dotted key of a node in its configuration. The public name is a method of containers only."""
    return node._get_full_key(None)
