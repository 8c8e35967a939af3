"""Mixture-of-Experts training for PyTorch Lightning: expert parallelism with replicated experts.

The names below load on first use, so that small tools start without importing Lightning. The strategy registers itself
as "expert_parallel" when Lightning is already imported, as in `import lightning; import moe_lightning`, and else when
it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lightning.callbacks.compile_dense import CompileDense
    from moe_lightning.callbacks.dynamic_k import DynamicK
    from moe_lightning.callbacks.fault_recovery import FaultRecovery
    from moe_lightning.callbacks.huggingface_export import HuggingFaceExport, export_to_huggingface
    from moe_lightning.callbacks.load_balancer import LoadBalancer
    from moe_lightning.callbacks.model_summary import ExpertModelSummary
    from moe_lightning.callbacks.parity_doctor import ParityDoctor
    from moe_lightning.callbacks.partial_experts_checkpoint import PartialExpertsCheckpoint
    from moe_lightning.callbacks.recompute_dense import RecomputeDense
    from moe_lightning.callbacks.routing_replay import RoutingReplay
    from moe_lightning.data.step_loader import StepLoader
    from moe_lightning.data.step_sampler import StepSampler
    from moe_lightning.errors import CheckpointError, ConfigurationError, ParityError
    from moe_lightning.models.gpt import GPT
    from moe_lightning.models.gpt_config import GPTConfig
    from moe_lightning.models.gpt_module import GPTModule, OptimizerConfig
    from moe_lightning.models.huggingface.module import HuggingFaceConfig, HuggingFaceModule
    from moe_lightning.models.swin import SwinConfig, SwinModule
    from moe_lightning.models.upcycling import UpcyclingConfig
    from moe_lightning.modules.context import ContextParallel
    from moe_lightning.modules.forced_routing import ForcedRouting
    from moe_lightning.modules.losses import auxiliary_loss, global_mean, global_sum
    from moe_lightning.modules.moe_layer import MoELayer
    from moe_lightning.modules.router import RouterConfig
    from moe_lightning.modules.routing_replay import record_routing, replay_routing
    from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
    from moe_lightning.strategies.gradient_norm import gradient_norms

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "errors",
    "CompileDense": "callbacks.compile_dense",
    "ConfigurationError": "errors",
    "ContextParallel": "modules.context",
    "DynamicK": "callbacks.dynamic_k",
    "ExpertModelSummary": "callbacks.model_summary",
    "ExpertParallelStrategy": "strategies.expert_parallel",
    "FaultRecovery": "callbacks.fault_recovery",
    "ForcedRouting": "modules.forced_routing",
    "GPT": "models.gpt",
    "GPTConfig": "models.gpt_config",
    "GPTModule": "models.gpt_module",
    "HuggingFaceConfig": "models.huggingface.module",
    "HuggingFaceExport": "callbacks.huggingface_export",
    "HuggingFaceModule": "models.huggingface.module",
    "LoadBalancer": "callbacks.load_balancer",
    "MoELayer": "modules.moe_layer",
    "OptimizerConfig": "models.gpt_module",
    "ParityDoctor": "callbacks.parity_doctor",
    "ParityError": "errors",
    "PartialExpertsCheckpoint": "callbacks.partial_experts_checkpoint",
    "RecomputeDense": "callbacks.recompute_dense",
    "RouterConfig": "modules.router",
    "RoutingReplay": "callbacks.routing_replay",
    "StepLoader": "data.step_loader",
    "StepSampler": "data.step_sampler",
    "SwinConfig": "models.swin",
    "SwinModule": "models.swin",
    "UpcyclingConfig": "models.upcycling",
    "auxiliary_loss": "modules.losses",
    "export_to_huggingface": "callbacks.huggingface_export",
    "global_mean": "modules.losses",
    "global_sum": "modules.losses",
    "gradient_norms": "strategies.gradient_norm",
    "record_routing": "modules.routing_replay",
    "replay_routing": "modules.routing_replay",
}

__all__ = [
    "CheckpointError",
    "CompileDense",
    "ConfigurationError",
    "ContextParallel",
    "DynamicK",
    "ExpertModelSummary",
    "ExpertParallelStrategy",
    "FaultRecovery",
    "ForcedRouting",
    "GPT",
    "GPTConfig",
    "GPTModule",
    "HuggingFaceConfig",
    "HuggingFaceExport",
    "HuggingFaceModule",
    "LoadBalancer",
    "MoELayer",
    "OptimizerConfig",
    "ParityDoctor",
    "ParityError",
    "PartialExpertsCheckpoint",
    "RecomputeDense",
    "RouterConfig",
    "RoutingReplay",
    "StepLoader",
    "StepSampler",
    "SwinConfig",
    "SwinModule",
    "UpcyclingConfig",
    "auxiliary_loss",
    "export_to_huggingface",
    "global_mean",
    "global_sum",
    "gradient_norms",
    "record_routing",
    "replay_routing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


if "lightning.pytorch" in sys.modules:
    importlib.import_module(f"{__name__}.strategies.expert_parallel")
