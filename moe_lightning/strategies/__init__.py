"""The Lightning strategy; `moe_lightning.strategies.expert_parallel` registers it under the name "expert_parallel"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

__all__ = ["ExpertParallelStrategy"]


def __getattr__(name: str) -> Any:  # imported on first use: packages below need its compat users only
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moe_lightning.strategies import expert_parallel

    return getattr(expert_parallel, name)
