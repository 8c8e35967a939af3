"""Bases of the model files in conf/model, generated from the dataclasses: every option with its default.

A model file begins with `defaults: [_gpt, _self_]` and states what differs. The bases are nodes of Hydra's ConfigStore;
their values are plain, so that `auto` and interpolations fit everywhere, and constructors check them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hydra.core.config_store import ConfigStore

from moe_lightning.config import TARGET, pretrained_options
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.moe.router import RouterConfig


def node_of(config: Any) -> dict[str, Any]:
    """Return the node of a configuration that builds this dataclass instance."""
    node: dict[str, Any] = {TARGET: f"{type(config).__module__}.{type(config).__qualname__}"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        node[field.name] = node_of(value) if dataclasses.is_dataclass(value) else value
    return node


def register() -> None:
    """Add the bases to Hydra's ConfigStore."""
    bases = {
        "_gpt": node_of(GPTConfig()),
        "_router": node_of(RouterConfig()),
        "_pretrained_router": dict.fromkeys(pretrained_options(RouterConfig)),  # null: as in the checkpoint
    }
    for name, node in bases.items():
        ConfigStore.instance().store(group="model", name=name, node=node)
