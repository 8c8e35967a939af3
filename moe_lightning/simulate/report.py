"""The end of a simulation, in figures."""

from __future__ import annotations

from moe_lightning.simulate.accounts import Accounts
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.failures import NS
from moe_lightning.simulate.history import History
from moe_lightning.simulate.lossless import WindowCost, stall_of
from moe_lightning.simulate.scenario import Report, Scenario, format_bytes
from moe_lightning.simulate.state import SavedState
from moe_lightning.simulate.step_model import StepCost, StepModel

_BUFFERS = 3  # of snapshots: being taken, being written, kept for a recovery


def closing_report(
    scenario: Scenario,
    model: StepModel,
    first_cost: StepCost,
    *,
    books: Accounts,
    saved: SavedState,
    history: History,
    interval_steps: int,
) -> Report:
    """What a finished simulation found; the books are closed."""
    hardware = scenario.hardware
    ranks = model.ranks(model.usable_nodes(scenario.num_nodes))
    save = save_cost(scenario.workload, hardware, scenario.policy, ranks, saved.k_snapshot, saved.k_persist)
    rank_bytes = model.rank_memory_bytes()
    host_bytes = _BUFFERS * save.snapshot_bytes * hardware.ranks_per_node
    window = None
    if len(save.copies_s) > 1:
        window = WindowCost(
            steps=len(save.copies_s),
            copied_bytes=tuple(copy_s * hardware.host_copy_bytes_per_s for copy_s in save.copies_s),
            stall_s=stall_of(save.copies_s, first_cost.overlap_s),
            replay_s=(len(save.copies_s) - 1) * first_cost.step_s,
        )
    limits = (
        ("weights and optimizer state of a rank", rank_bytes, hardware.memory_bytes),
        ("snapshots of a node", host_bytes, hardware.host_memory_bytes),
    )
    return Report(
        provided_ns=books.provided_ns,
        useful_ns=books.useful_ns,
        lost_ns=books.lost_ns,
        overhead_ns=books.overhead_ns,
        idle_ns=books.idle_ns,
        steps=books.step,
        samples=books.samples,
        duration_s=scenario.duration_s,
        step_s=first_cost.step_s,
        imbalance=first_cost.imbalance,
        stall_s=history.stall_ns / NS,
        rebalance_s=history.rebalance_ns / NS,
        plt=saved.plt,
        k_persist=saved.k_persist,
        interval_steps=interval_steps,
        checkpoints=saved.saves,
        written_bytes=saved.written_bytes,
        exchange_bytes=first_cost.exchange_bytes,
        rank_bytes=rank_bytes,
        host_bytes=host_bytes,
        warnings=tuple(
            f"{what} need {format_bytes(size)}, more than the {format_bytes(room)} there are"
            for what, size, room in limits
            if size > room
        ),
        window=window,
        recoveries=tuple(history.recoveries),
        spans=history.spans(),
    )
