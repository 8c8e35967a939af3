"""What a run has counted fits the room that is reserved for it, however long it is."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.policy import CheckpointLedger
from moe_lightning.checkpoint.selection import parse_scopes


def new_ledger(layers: int, experts: int) -> CheckpointLedger:
    return CheckpointLedger(
        num_layers=layers,
        num_experts=experts,
        planned_assignments=10**9,
        owners=np.zeros((layers, experts), dtype=np.int64),
        num_ranks=1,
        scopes=parse_scopes("full"),
    )


@pytest.mark.parametrize("how", ["storage", "live", "joined"])
def test_losses_are_exact_where_a_round_takes_more_checkpoints_than_are_kept(how: str) -> None:
    """100 experts, one of which is saved at a time."""
    rng, shape = np.random.default_rng(0), (2, 100)
    kept, versions, at_version = new_ledger(*shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    processed = np.zeros(shape, np.int64)
    for step in range(1, 151):
        counts = rng.integers(0, 1000, shape)
        processed += counts
        kept.ledger.record(counts)
        plan = kept.plan(1, 1, full=step == 1)
        kept.begin(step, plan)
        versions[plan.persist.mask()] = step
        at_version[plan.persist.mask()] = processed[plan.persist.mask()]
    assert 150 - versions.min() > 64
    if how == "storage":
        lost = new_ledger(*shape).restore(kept.dump(), 150, versions)
    else:
        if how == "joined":
            kept, state = new_ledger(*shape), kept.state_dict()
            kept.load_state_dict(state)
        lost = kept.lose({(la, e): int(versions[la, e]) for la in range(shape[0]) for e in range(shape[1])})
    np.testing.assert_array_equal(lost, processed - at_version)


@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (3, 5), (16, 64)])
def test_a_dump_never_outgrows_its_room(layers: int, experts: int) -> None:
    kept = new_ledger(layers, experts)
    for step in range(70):
        kept.ledger.record(np.full((layers, experts), 10**6))
        kept.begin(step, kept.plan(1, 1))
        if step in (0, 69):
            assert len(dump_object(kept.dump())) <= kept.largest_dump_bytes
    assert len(dump_object(kept.dump())) > 0.5 * kept.largest_dump_bytes - (16 << 10)


def test_losses_are_never_told_too_low_where_storage_stood_still_for_long() -> None:
    """Nothing was committed for more checkpoints than are remembered, and then all of them are needed."""
    rng, shape = np.random.default_rng(0), (2, 4)
    kept, tokens = new_ledger(*shape), {}
    for step in range(1, 101):
        kept.ledger.record(rng.integers(1, 1000, shape))
        tokens[step] = kept.ledger.processed.copy()
        kept.begin(step, kept.plan(2, 1, full=step == 1))
    for version in (1, 20, 36, 37, 90):
        lost = new_ledger(*shape).restore(kept.dump(), 100, np.full(shape, version))
        exact = tokens[100] - tokens[version]
        assert (lost >= exact).all()
        assert version < 37 or (lost == exact).all()


def test_books_stay_small_however_many_checkpoints_are_begun() -> None:
    def size(checkpoints: int) -> int:
        kept = new_ledger(8, 64)
        for step in range(1, checkpoints + 1):
            kept.ledger.record(np.ones((8, 64), dtype=np.int64))
            kept.begin(step, kept.plan(1, 1))
        return len(pickle.dumps(kept))

    assert size(300) < 1.1 * size(100)
