"""Sharding, the overhead model and checkpoint sizes: bounds by brute force and the papers' numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.gpt_tensors import (
    gpt_moe_tensors,
)
from moe_lightning.arrays import cut
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.policy import CheckpointLedger
from moe_lightning.checkpoint.schedule import OverheadModel, adapt
from moe_lightning.checkpoint.selection import parse_scopes, sequential_selection
from moe_lightning.checkpoint.sharding import (
    Module,
    balanced_expert_writers,
    equal_expert_writers,
    longest_processing_time,
    shard_checkpoint,
)
from moe_lightning.errors import ConfigurationError
from tests.unit.checkpoint_state import EXPERTS, EXTRA, LAYERS, node, state_of, whole_state

GPT_125M_8E = gpt_moe_tensors(width=768, num_layers=12, num_experts=8, tied=False, causal_mask_buffers=True)


# --- sharding -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_greedy_assignment_is_within_its_bound(sizes: list[int], ranks: int) -> None:
    assigned = longest_processing_time(sizes, ranks)
    load = Counter[int]()
    for size, rank in zip(sizes, assigned, strict=True):
        load[rank] += size
    best = min(
        max(sum(s for s, r in zip(sizes, choice, strict=True) if r == rank) for rank in range(ranks))
        for choice in itertools.product(range(ranks), repeat=len(sizes))
    )
    assert max(load.values()) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_imbalance_criterion_is_exact() -> None:
    checked = 0
    for ep_size, groups, layers, per_rank in itertools.product((1, 2, 4), (1, 2, 3), (1, 4, 6), (1, 2)):
        num_experts = ep_size * per_rank
        for k in range(1, num_experts + 1):
            dp_size = ep_size * groups
            selection = sequential_selection(
                ordinal=1, k=k, num_layers=layers, num_experts=num_experts, ep_size=ep_size
            )
            writers = equal_expert_writers(selection, dp_size=dp_size, ep_size=ep_size)
            assert all(rank % ep_size == expert // per_rank for (_, expert), rank in writers.items())
            load = Counter(writers.values())
            unequal = len({load[rank] for rank in range(dp_size)}) > 1
            assert unequal == (k * layers % dp_size != 0)
            checked += 1
    assert checked > 72


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_row_is_written_once(shapes: list[tuple[int, int]], ranks: int, experts: int, adaptive: bool) -> None:
    modules = [Module(name=f"m{i}", nbytes=nbytes, rows=rows) for i, (nbytes, rows) in enumerate(shapes)]
    writers = {(0, expert): expert % ranks for expert in range(experts)}
    plan = shard_checkpoint(writers, expert_bytes=700, modules=modules, num_ranks=ranks, adaptive=adaptive)
    for module in modules:
        pieces = sorted((p.first_row, p.last_row) for p in plan.pieces if p.module == module.name)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == module.rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert sum(p.nbytes for p in plan.pieces if p.module == module.name) == module.nbytes
    parts = [(p.rank, p.module) for p in plan.pieces]
    assert len(parts) == len(set(parts)), "a rank has one range of rows of a tensor"
    assert sum(plan.rank_bytes) == sum(m.nbytes for m in modules) + 700 * experts


@settings(deadline=None, max_examples=100)
@example([(400, 5), (1000, 3)], 2)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5)), min_size=1, max_size=6), st.integers(1, 8))
def test_modules_of_few_rows_stay_where_the_greedy_assignment_put_them(
    shapes: list[tuple[int, int]], ranks: int
) -> None:
    """Rows of 60 bytes each: parts of unlike size must not change their ranks when a rank's rows become one range."""
    modules = [Module(name=f"m{i}", nbytes=60 * n * rows, rows=rows) for i, (n, rows) in enumerate(shapes)]
    fair_share = -(-sum(m.nbytes for m in modules) // ranks)
    sizes = []
    for module in modules:
        bounds = cut(module.rows, min(module.rows, -(-module.nbytes // fair_share)))
        sizes += [module.nbytes * (b - a) // module.rows for a, b in itertools.pairwise(bounds)]
    loads = [0] * ranks
    for size, rank in zip(sizes, longest_processing_time(sizes, ranks), strict=True):
        loads[rank] += size
    plan = shard_checkpoint({}, expert_bytes=1, modules=modules, num_ranks=ranks)
    assert list(plan.rank_bytes) == loads


def test_adaptive_sharding_fills_the_ranks_without_experts() -> None:
    modules = [Module(name=f"m{i}", nbytes=10) for i in range(8)]
    writers = {(0, 0): 0, (1, 0): 0}
    equal = shard_checkpoint(writers, expert_bytes=20, modules=modules, num_ranks=4, adaptive=False)
    adaptive = shard_checkpoint(writers, expert_bytes=20, modules=modules, num_ranks=4)
    assert equal.bottleneck_bytes == 60
    assert adaptive.bottleneck_bytes == 40
    assert sum(adaptive.rank_bytes) == 120


def test_writers_under_any_placement() -> None:
    holders = [[(0, 1), (0,), (0, 1, 2)]] * 2
    writers = balanced_expert_writers(holders)
    assert all(rank in holders[layer][expert] for (layer, expert), rank in writers.items())
    assert Counter(writers.values()) == {0: 2, 1: 2, 2: 2}


def test_who_writes_an_expert_goes_on_where_it_still_holds_it() -> None:
    rng, shape = random.Random(0), (3, 8)
    holders = [[sorted(rng.sample(range(4), 2)) for _ in range(shape[1])] for _ in range(shape[0])]
    before = balanced_expert_writers(holders)
    assert balanced_expert_writers(holders, before) == before
    lost = before[1, 5]
    holders[1][5] = [rank for rank in holders[1][5] if rank != lost]
    after = balanced_expert_writers(holders, before)
    assert {pair for pair in before if after[pair] != before[pair]} == {(1, 5)}
    assert after[1, 5] in holders[1][5]


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_sizes_refuse_nonsense() -> None:
    with pytest.raises(ConfigurationError, match="moe_every=5"):
        gpt_moe_tensors(width=8, num_layers=12, num_experts=2, moe_every=5)


# --- overhead -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 2), st.floats(0, 20), st.floats(0, 5), st.floats(1e-6, 1e-2))
def test_best_interval_beats_every_other(step_s: float, snapshot_s: float, persist_s: float, rate: float) -> None:
    model = OverheadModel(
        step_s=step_s, overlap_s=0.7 * step_s, snapshot_s=snapshot_s, persist_s=persist_s, failure_rate_per_s=rate
    )
    best = model.best_interval_steps()
    assert best >= model.min_interval_steps
    for other in {model.min_interval_steps, best + 1, 2 * best, max(model.min_interval_steps, best - 1)}:
        assert model.overhead_share(best) <= model.overhead_share(other) * (1 + 1e-12)


def test_overhead_at_the_best_interval_is_youngs() -> None:
    model = OverheadModel(
        step_s=0.01, overlap_s=0.0, snapshot_s=2.0, persist_s=1.0, restart_s=30, failure_rate_per_s=1e-4
    )
    best = model.best_interval_steps()
    assert best * 0.01 == pytest.approx(math.sqrt(2 * 2.0 / 1e-4), rel=1e-3)
    assert model.overhead_share(best) == pytest.approx(math.sqrt(2 * 2.0 * 1e-4) + 30e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("snapshot_s", "persist_s", "shape", "k_snapshot", "k_persist", "steps", "save_s"),
    [
        (lambda k: 0.1 + 0.1 * k, lambda k: 1.0 + 2.0 * k, (12, 16, 8), 4, 1, 3, 0.0),
        # One expert on a rank anyway: 5 * 12 still fit 64 ranks.
        (lambda k: 0.1, lambda k: 1.0, (12, 16, 64), 16, 5, 1, 0.0),
        (lambda k: 9.0 * k, lambda k: 0.1, (2, 4, 2), 1, 1, 1, 8.45),
        (lambda k: 0.5, lambda k: 2.5, (1, 0, 2), 0, 0, 3, 0.0),
    ],
    ids=["some hide", "spare capacity", "nothing hides", "dense"],
)
def test_adaptive_configuration(
    snapshot_s: Callable[[int], float],
    persist_s: Callable[[int], float],
    shape: tuple[int, int, int],
    k_snapshot: int,
    k_persist: int,
    steps: int,
    save_s: float,
) -> None:
    layers, experts, ep_size = shape
    chosen = adapt(snapshot_s=snapshot_s, persist_s=persist_s, step_s=1.0, overlap_s=0.55, num_layers=layers,
                   num_experts=experts, ep_size=ep_size)  # fmt: skip
    found = (chosen.k_snapshot, chosen.k_persist, chosen.interval_steps, chosen.save_s)
    assert found == (k_snapshot, k_persist, steps, save_s)


def test_overhead_refuses_nonsense() -> None:
    with pytest.raises(ConfigurationError, match="step_s=0"):
        OverheadModel(step_s=0, overlap_s=0, snapshot_s=0, persist_s=0)
    with pytest.raises(ConfigurationError, match="persist_s=-1"):
        OverheadModel(step_s=1, overlap_s=0, snapshot_s=0, persist_s=-1)
    with pytest.raises(ConfigurationError, match="failure_rate_per_s=0"):
        OverheadModel(step_s=1, overlap_s=0, snapshot_s=1, persist_s=0).best_interval_steps()


# ----------------------------------------------------------------------
# From a policy to keys: scopes, two levels, and files that die together on storage.


KEYS = list(whole_state(0))


def ledger(**options: Any) -> CheckpointLedger:
    return CheckpointLedger(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        planned_assignments=1000,
        owners=np.broadcast_to(np.arange(EXPERTS), (LAYERS, EXPERTS)),
        num_ranks=1,
        **{"scopes": parse_scopes("full"), **options},
    )


def test_keys_follow_the_selection() -> None:
    plan = ledger().plan(2, 1)
    fresh, persisted = plan.fresh(KEYS), plan.persisted(KEYS)
    assert persisted < fresh
    assert len(fresh) == 2 * len(persisted) == LAYERS * 2 * 3
    assert {key.split("/")[2] for key in fresh if key.startswith("expert/0/")} == {"0", "1"}
    assert {key.split("/")[2] for key in fresh if key.startswith("expert/1/")} == {"2", "3"}
    full = ledger().plan(2, 1, full=True)
    assert full.fresh(KEYS) == full.persisted(KEYS) == {key for key in KEYS if key.startswith("expert/")}


def test_other_scopes_are_always_saved() -> None:
    plan = ledger(scopes=parse_scopes(["exp_avg"])).plan(1, 1)
    persisted = plan.persisted(KEYS)
    assert {key for key in KEYS if "/weight/" in key and key.startswith("expert/")} <= persisted
    assert sum("/exp_avg/" in key for key in persisted) == LAYERS
    groups = plan.groups(KEYS)
    assert {groups[key] for key in persisted if "/weight/" in key} == {"experts-always"}
    assert all(groups[key].startswith("experts-slot") for key in persisted if "/exp_avg/" in key)


def test_load_aware_orders_follow_the_counters() -> None:
    for order in ("load_aware", "load_aware_global"):
        counted = ledger(order=order)
        counted.record(np.array([[0, 9, 0, 1], [5, 0, 0, 0]]))
        assert counted.plan(1, 1).snapshot.experts == ((1,), (0,))


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ConfigurationError, match="order='random'"):
        ledger(order="random")


def test_files_of_replaced_experts_leave_the_disk(tmp_path: Path) -> None:
    """After every expert was saved again, no file of the first full checkpoint is left, and disk use does not grow."""
    rule = ledger()
    versions = dict.fromkeys(KEYS, 1)
    with node(tmp_path, keep_last=1) as made:
        sizes = []
        for step in range(1, 12):
            plan = rule.plan(1, 1, full=step == 1)
            rule.begin(step, plan)
            versions |= dict.fromkeys(plan.persisted(KEYS), step)
            for rank, snapshotter in enumerate(made.ranks):
                state = state_of(rank, 2, step)
                snapshotter.start(
                    step,
                    state,
                    fresh=plan.fresh(state),
                    persist=plan.persisted(state),
                    groups=plan.groups(state),
                    extra=EXTRA,
                )
            for snapshotter in made.ranks:
                snapshotter.finish()
            made.persist()
            checkpoint = find_newest(made.root).checkpoint
            assert checkpoint is not None
            for key in (key for key in KEYS if key.startswith("expert/")):
                assert torch.equal(checkpoint.read(key), whole_state(versions[key])[key]), (step, key)
            names = {name for name in checkpoint.manifest.files if "experts" in name}
            if step > EXPERTS:
                assert not any("step00000001." in name for name in names)
            sizes.append(sum(record.nbytes for record in checkpoint.manifest.files.values()))
        assert max(sizes[EXPERTS:]) <= 1.02 * sizes[0]
