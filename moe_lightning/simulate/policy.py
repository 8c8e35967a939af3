"""Policies of placement, saving and recovery: ours, and those of the papers.

The seconds of detection and restarting are the papers' where these print them (Lazarus 6.3: 10-20 s until collectives
time out, 5-15 s for new groups) and assumptions elsewhere; every one of them can be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval

from moe_lightning.balancing.rules import PLACEMENT_RULES, STRATEGIES, Strategy
from moe_lightning.checkpoint.protection import PROTECTIONS, ProtectionLayout, aec_layout, protected_by
from moe_lightning.checkpoint.selection import parse_scopes
from moe_lightning.config import NonNegativeInt, PositiveInt, build_variant, validated
from moe_lightning.errors import ConfigurationError

Layout = Literal["replicated", "groups"]
Saving = Literal["none", "blocking", "async"]
Sharding = Literal["baseline", "full"]
Delay = Annotated[float, Interval(ge=0, le=1e9)]


@validated
@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to train through faults.

    Attributes:
        layout: "replicated": experts in slots under any placement, all nodes train; "groups": expert-parallel groups
            that each hold every expert once, whole groups only.
        strategy: placement, shadows and quotas: a name in `balancing.rules.STRATEGIES`.
        placement: the rule that places experts, instead of the strategy's: a name in
            `balancing.rules.PLACEMENT_RULES`; None: the strategy's.
        by_speed: whether tokens, samples and placements follow the ranks' speeds.
        slots: resident experts of a rank; None: as many as the layout needs, for two replicas of each expert.
        min_replicas: distinct nodes of each expert, where slots allow.
        rebalance_every: steps between placements; 0: never.
        saving: of checkpoints: none, blocking, or async (copied under the next step, written behind it).
        interval_steps: between checkpoints, never shorter than writing one takes; None: the interval that costs least.
        k_snapshot, k_persist: experts of a layer copied and written; None: all.
        scopes: state of experts to which K applies.
        lossless: windows of sparse snapshots of k_snapshot experts each, whose steps a restore runs again: no token is
            lost, and all that is copied is written.
        plt_threshold: Dynamic-K keeps the proportion of lost tokens under it; None: K stays.
        plt_lookahead: whether K also rises when one more fault could exceed the threshold (ours), or only after a fault
            has exceeded its part of it (MoC-System).
        sharding: "baseline" (Megatron-DeepSpeed: the first ranks write the weights) or "full" (all ranks alike).
        live_recovery: whether an expert with a live replica is fetched from it, without going back.
        memory_recovery: whether survivors restore from their own snapshots in host memory what they hold.
        protection: of snapshots in host memory: none, aec (parity: one loss in each group), arc (copies on other
            nodes), or another name in `checkpoint.protection.PROTECTIONS`.
        protection_group: nodes of a group of aec.
        protection_copies: of each snapshot on other nodes, for arc; to others, the failures that they shall survive.
        memory_interval_steps: between snapshots that are only protected, not written; None: those of checkpoints.
        detect_s: from a fault until the survivors know.
        regroup_s: new groups of running processes.
        restart_s: new processes, up to the first step, without loading.
        join_wait_s: new nodes are collected so long before the world is formed again.

    Raises:
        ConfigurationError: a value that cannot be, or parts that contradict each other.
    """

    layout: Layout = "replicated"
    strategy: str = "packed"
    placement: str | None = None
    by_speed: bool = False
    slots: Annotated[int, Interval(ge=1, le=1e5)] | None = None
    min_replicas: PositiveInt = 2
    rebalance_every: NonNegativeInt = 200
    saving: Saving = "async"
    interval_steps: PositiveInt | None = None
    k_snapshot: PositiveInt | None = None
    k_persist: PositiveInt | None = None
    scopes: str = "full"
    lossless: bool = False
    plt_threshold: Annotated[float, Interval(gt=0, lt=1)] | None = None
    plt_lookahead: bool = True
    sharding: Sharding = "full"
    live_recovery: bool = True
    memory_recovery: bool = True
    protection: str = "none"
    protection_group: Annotated[int, Interval(ge=2)] = 6
    protection_copies: PositiveInt = 1
    memory_interval_steps: PositiveInt | None = None
    detect_s: Delay = 15.0
    regroup_s: Delay = 10.0
    restart_s: Delay = 60.0
    join_wait_s: Delay = 120.0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigurationError(
                f"policy.strategy={self.strategy!r} is unknown: use one of {', '.join(STRATEGIES)}"
            )
        if self.placement is not None:
            PLACEMENT_RULES.find(self.placement, "policy.placement")
            if self.layout != "replicated":
                raise ConfigurationError(
                    f"policy.placement={self.placement!r} has no effect with layout={self.layout}: use "
                    "layout=replicated"
                )
        PROTECTIONS.find(self.protection, "policy.protection")
        parse_scopes(self.scopes)
        if self.k_snapshot and self.k_persist and self.k_persist > self.k_snapshot:
            raise ConfigurationError(
                f"policy.k_persist={self.k_persist} exceeds k_snapshot={self.k_snapshot}: lower it, as only copies "
                "are written"
            )
        if self.lossless and (self.k_persist is not None or self.scopes != "full" or self.saving != "async"):
            raise ConfigurationError(
                f"policy.lossless=true writes all state of every expert behind training, which it cannot with "
                f"k_persist={self.k_persist}, scopes={self.scopes}, saving={self.saving}: use null, full and async"
            )
        if self.saving == "none" and self.protection != "none":
            raise ConfigurationError(
                f"policy.protection={self.protection} protects snapshots: use saving=async with it"
            )

    def layout_of(self, nodes: int) -> ProtectionLayout:
        """Return the nodes of the second copies of a world's snapshots; none with one node."""
        protection = PROTECTIONS[self.protection]
        if protection is aec_layout:
            protection = partial(aec_layout, group_nodes=self.protection_group)
        return protected_by(protection, range(nodes), self.protection_copies)

    @property
    def balancing(self) -> Strategy:
        """The strategy with this policy's replicas and placement."""
        chosen = STRATEGIES[self.strategy]
        rule = self.placement or chosen.placement.rule
        placement = replace(chosen.placement, rule=rule, min_replicas=self.min_replicas)
        return replace(chosen, placement=placement, by_speed=self.by_speed)


_IN_GROUPS = Policy(layout="groups", strategy="plain", rebalance_every=0, live_recovery=False)
"""Expert-parallel groups without replicas."""
_DEEPSPEED = replace(_IN_GROUPS, strategy="padded", saving="blocking", sharding="baseline", memory_recovery=False)
_IN_PEERS = replace(_IN_GROUPS, memory_interval_steps=1, restart_s=30.0)
"""Every step's snapshot is protected on other nodes."""

POLICIES: dict[str, Policy] = {
    # This library: membership by its rendezvous host and two groups (no group per expert); seconds measured on local
    # processes, with a margin of ten for a cluster.
    "ours": Policy(by_speed=True, plt_threshold=0.0375, detect_s=2.0, regroup_s=2.0, restart_s=30.0),
    "lazarus": Policy(
        strategy="lazarus", saving="blocking", sharding="baseline", interval_steps=250, memory_recovery=False
    ),
    "ds": replace(_DEEPSPEED, interval_steps=50),
    "ds_ft": replace(_DEEPSPEED, interval_steps=250, live_recovery=True),
    "blocking": replace(_IN_GROUPS, saving="blocking", sharding="baseline", memory_recovery=False),
    "base_async": replace(_IN_GROUPS, sharding="baseline", memory_recovery=False),
    "moc": replace(_IN_GROUPS, k_snapshot=4, k_persist=1, scopes="moc", plt_threshold=0.0375, plt_lookahead=False),
    "reft": replace(_IN_PEERS, protection="aec"),
    # Gemini: every snapshot also on one peer, machines replaced, processes restarted.
    "gemini": replace(_IN_PEERS, protection="arc"),
}


def policy(name: str, *, key: str = "policy.name", **changes: Any) -> Policy:
    """A policy with some parts replaced; those given as None stay.

    Args:
        key: where the name stands, for messages.

    Raises:
        ConfigurationError: an unknown policy, or a part that cannot be.
    """
    return build_variant(POLICIES, name, changes, key)
