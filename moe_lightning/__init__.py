"""Mixture-of-Experts training for PyTorch Lightning: expert parallelism with replicated experts.

The names below load on first use, so that small tools start without importing Lightning. The strategy registers
itself as "expert_parallel"
when Lightning is already imported, as in `import lightning; import moe_lightning`, and else when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lightning.callbacks.dynamic_k import DynamicK
    from moe_lightning.callbacks.partial_experts_checkpoint import PartialExpertsCheckpoint
    from moe_lightning.data.step_loader import StepLoader
    from moe_lightning.data.step_sampler import StepSampler
    from moe_lightning.errors import CheckpointError, ConfigurationError
    from moe_lightning.models.gpt import GPT
    from moe_lightning.models.gpt_config import GPTConfig
    from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
    from moe_lightning.modules.forced_routing import ForcedRouting
    from moe_lightning.modules.losses import auxiliary_loss
    from moe_lightning.modules.moe_layer import MoELayer
    from moe_lightning.modules.router import RouterConfig
    from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "errors",
    "ConfigurationError": "errors",
    "DynamicK": "callbacks.dynamic_k",
    "ExpertParallelStrategy": "strategies",
    "ForcedRouting": "modules.forced_routing",
    "GPT": "models.gpt",
    "GPTConfig": "models.gpt_config",
    "GPTModule": "models.gpt_module",
    "MoELayer": "modules.moe_layer",
    "OptimizerConfig": "models.gpt_module",
    "RouterConfig": "modules.router",
    "PartialExpertsCheckpoint": "callbacks.partial_experts_checkpoint",
    "StepLoader": "data.step_loader",
    "StepSampler": "data.step_sampler",
    "auxiliary_loss": "modules.losses",
}

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DynamicK",
    "ExpertParallelStrategy",
    "ForcedRouting",
    "GPT",
    "GPTConfig",
    "GPTModule",
    "MoELayer",
    "OptimizerConfig",
    "PartialExpertsCheckpoint",
    "RouterConfig",
    "StepLoader",
    "StepSampler",
    "auxiliary_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


if "lightning.pytorch" in sys.modules:
    importlib.import_module(f"{__name__}.strategies")
