"""Effects of a model's options, declared at their dataclass fields for all code that depends on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moe_lightning.config import hints_of

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
