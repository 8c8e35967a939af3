"""Which layers of a dense architecture hold experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_lightning.config import NonNegativeInt, PositiveInt, build_config, validated
from moe_lightning.moe.router import RouterConfig


@validated
@dataclass(frozen=True, kw_only=True)
class SparseLayers:
    """Which feed-forward layers of a dense architecture become MoE layers, and what these are.

    Attributes:
        num_experts: of each MoE layer.
        moe_every: layers moe_every - 1, 2 * moe_every - 1, ... become MoE layers: 1 is every layer.
        num_dense_layers: so many layers stay dense at the front, whatever `moe_every` says.
        router: how tokens choose.

    Raises:
        ConfigurationError: sizes out of range, or a router that cannot serve so many experts.
    """

    num_experts: PositiveInt = 8
    moe_every: PositiveInt = 1
    num_dense_layers: NonNegativeInt = 0
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "router", build_config(RouterConfig, self.router))
        self.router.check(self.num_experts)

    def is_moe_layer(self, index: int) -> bool:
        """Whether feed-forward layer `index` (0-based, in the model's order) becomes an MoE layer."""
        return index >= self.num_dense_layers and (index + 1) % self.moe_every == 0
