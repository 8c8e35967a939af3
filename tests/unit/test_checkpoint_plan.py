"""From a policy to keys: scopes, two levels, and files that die together on storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.policy import CheckpointLedger
from moe_lightning.checkpoint.selection import parse_scopes
from moe_lightning.errors import ConfigurationError
from tests.unit.checkpoint_state import EXPERTS, EXTRA, LAYERS, node, state_of, whole_state

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
        counted.ledger.record(np.array([[0, 9, 0, 1], [5, 0, 0, 0]]))
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
