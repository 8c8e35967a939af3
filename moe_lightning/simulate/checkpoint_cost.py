"""Cost of saving and loading a model on a cluster: bytes of the busiest rank, and seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, inf

from moe_lightning.checkpoint.protection import protection_cost
from moe_lightning.checkpoint.schedule import OverheadModel, window_bytes
from moe_lightning.checkpoint.selection import full_selection, parse_scopes, sequential_selection
from moe_lightning.checkpoint.sharding import (
    MIXED_PRECISION_BYTES,
    Accounting,
    Module,
    baseline_rank_bytes,
    checkpoint_size,
    equal_expert_writers,
    shard_checkpoint,
)
from moe_lightning.simulate.hardware import Hardware
from moe_lightning.simulate.policy import Policy
from moe_lightning.simulate.step_model import StepCost
from moe_lightning.simulate.workload import Workload


def window_shares(workload: Workload, k: int) -> tuple[float, ...]:
    """Bytes [W] of each snapshot of a window of K experts a turn, as shares of a full checkpoint. Frozen experts are
    kept in the low precision that they compute in."""
    expert = sum(MIXED_PRECISION_BYTES.values()) * workload.expert_params
    sizes = {
        "dense_bytes": sum(MIXED_PRECISION_BYTES.values()) * workload.dense_params,
        "expert_bytes": expert,
        "weight_bytes": MIXED_PRECISION_BYTES["weight"] * workload.expert_params,
    }
    shape = {"num_layers": workload.num_layers, "num_experts": workload.num_experts}
    (whole,) = window_bytes(**shape, k=workload.num_experts, **sizes)
    return tuple(size / whole for size in window_bytes(**shape, k=k, **sizes))


def stall_of(copies_s: tuple[float, ...], overlap_s: float) -> float:
    """Seconds that training waits for copies, each of which hides under one step."""
    return sum(max(0.0, copy_s - overlap_s) for copy_s in copies_s)


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """Cost of one checkpoint.

    Attributes:
        snapshot_bytes: that the busiest rank copies, in all steps of a window.
        persist_bytes: that all ranks write.
        snapshot_s, persist_s: on the slowest rank and node; of a window's snapshots the longest.
        protect_s: sending snapshots, or their parity, to other nodes.
        load_s: reading everything back and sharing it out.
        copies_s: copying in each step of a window; of any other checkpoint in its one step.
    """

    snapshot_bytes: float
    persist_bytes: float
    snapshot_s: float
    persist_s: float
    protect_s: float
    load_s: float
    copies_s: tuple[float, ...]


def accounting(policy: Policy) -> Accounting:
    """Mixed precision; the policy's scopes are partial."""
    return Accounting(scope_bytes=MIXED_PRECISION_BYTES, partial=parse_scopes(policy.scopes))


@lru_cache(maxsize=256)
def save_cost(
    workload: Workload, hardware: Hardware, policy: Policy, num_ranks: int, k_snapshot: int, k_persist: int
) -> SaveCost:
    """Seconds and bytes of a checkpoint with K experts of each layer (K = E: all)."""
    if policy.lossless:
        plain = replace(policy, lossless=False)
        whole = save_cost(workload, hardware, plain, num_ranks, workload.num_experts, workload.num_experts)
        return _window_cost(whole, window_shares(workload, policy.k_snapshot or workload.num_experts))
    accounts = accounting(policy)
    tensors = workload.tensors()
    written = checkpoint_size(tensors, accounting=accounts, k=k_persist).total_bytes
    everything = checkpoint_size(tensors, accounting=accounts).total_bytes
    nodes = max(1, num_ranks // hardware.ranks_per_node)
    busiest_snapshot = bottleneck_bytes(workload, policy, num_ranks, k_snapshot)
    busiest_persist = bottleneck_bytes(workload, policy, num_ranks, k_persist)
    in_node = min(num_ranks, hardware.ranks_per_node)
    node_bytes = busiest_persist * (in_node if policy.sharding == "full" else 1)
    node_bytes = max(node_bytes, written / nodes)
    layout = policy.layout_of(min(nodes, 4 * policy.protection_group))  # all groups are alike
    sent_bytes = protection_cost(layout, [round(busiest_snapshot)] * len(layout.node_of)).sent_bytes
    shared = hardware.storage_total_bytes_per_s or inf
    return SaveCost(
        snapshot_bytes=busiest_snapshot,
        persist_bytes=written,
        snapshot_s=busiest_snapshot / hardware.host_copy_bytes_per_s,
        persist_s=max(node_bytes / hardware.storage_bytes_per_s, written / shared),
        protect_s=sent_bytes / hardware.link_bytes_per_s,
        load_s=max(everything / nodes / hardware.storage_bytes_per_s, everything / shared)
        + everything / num_ranks / hardware.host_copy_bytes_per_s
        + workload.dense_params * workload.state_bytes / hardware.link_bytes_per_s,
        copies_s=(busiest_snapshot / hardware.host_copy_bytes_per_s,),
    )


def _window_cost(whole: SaveCost, shares: tuple[float, ...]) -> SaveCost:
    """Return the cost of a window whose snapshots have these shares of a full one; each step hides its own copy."""
    total = sum(shares)
    return SaveCost(
        snapshot_bytes=total * whole.snapshot_bytes,
        persist_bytes=total * whole.persist_bytes,
        snapshot_s=max(shares) * whole.snapshot_s,
        persist_s=total * whole.persist_s,
        protect_s=total * whole.protect_s,
        load_s=total * whole.load_s,
        copies_s=tuple(share * whole.snapshot_s for share in shares),
    )


def cheapest_interval(
    workload: Workload,
    hardware: Hardware,
    policy: Policy,
    num_ranks: int,
    step: StepCost,
    *,
    faults_per_s: float,
) -> int:
    """The policy's steps between checkpoints, or where it leaves them open those that cost least (MoC eq. 4)."""
    if policy.interval_steps is not None or policy.saving == "none":
        return policy.interval_steps or 1
    k_snapshot = min(workload.num_experts, policy.k_snapshot or workload.num_experts)
    k_persist = min(k_snapshot, policy.k_persist or workload.num_experts)
    save = save_cost(workload, hardware, policy, num_ranks, k_snapshot, k_persist)
    blocking = policy.saving == "blocking"
    return OverheadModel(
        step_s=step.step_s,
        overlap_s=0.0 if blocking else step.overlap_s,
        snapshot_s=save.snapshot_s + (save.persist_s if blocking else 0.0),
        persist_s=0.0 if blocking else save.snapshot_s + save.persist_s,
        restart_s=policy.restart_s,
        failure_rate_per_s=faults_per_s,
    ).best_interval_steps()


def bottleneck_bytes(workload: Workload, policy: Policy, num_ranks: int, k: int) -> float:
    """Bytes that the busiest rank saves: fully sharded (EE and AN), or in Megatron-DeepSpeed's layout."""
    ep_size = gcd(workload.num_experts, num_ranks)
    if policy.sharding == "baseline":
        experts = workload.num_layers * workload.num_experts * workload.expert_params
        # The layout writes everything, so a partial selection scales the experts' part of it.
        saved = checkpoint_size(workload.tensors(), accounting=accounting(policy), k=k).expert_bytes
        share = saved / checkpoint_size(workload.tensors(), accounting=accounting(policy)).expert_bytes
        busiest = baseline_rank_bytes(
            dense_params=workload.dense_params,
            expert_params=round(experts * share),
            weight_bytes=2,
            optimizer_bytes=12,
            dp_size=num_ranks,
            ep_size=ep_size,
        )
        return float(busiest.max())
    layers, number = workload.num_layers, workload.num_experts
    selection = (
        full_selection(layers, number)
        if k >= number
        else sequential_selection(ordinal=0, k=k, num_layers=layers, num_experts=number, ep_size=ep_size)
    )
    partial = accounting(policy)
    selected = sum(size for scope, size in partial.scope_bytes.items() if scope in partial.partial)
    always = sum(partial.scope_bytes.values()) - selected
    rows = max(1, workload.dense_params // workload.d_model)
    modules = [
        Module(name="dense", nbytes=workload.dense_params * workload.state_bytes, rows=rows),
        Module(name="experts", nbytes=always * layers * number * workload.expert_params, rows=layers * number),
    ]
    plan = shard_checkpoint(
        equal_expert_writers(selection, dp_size=num_ranks, ep_size=ep_size),
        expert_bytes=selected * workload.expert_params,
        modules=[module for module in modules if module.nbytes],
        num_ranks=num_ranks,
    )
    return float(plan.bottleneck_bytes)
