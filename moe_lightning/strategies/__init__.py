"""The Lightning strategy; importing this room registers it under the name "expert_parallel"."""

from lightning.pytorch.strategies import StrategyRegistry

from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

ExpertParallelStrategy.register_strategies(StrategyRegistry)

__all__ = ["ExpertParallelStrategy"]
