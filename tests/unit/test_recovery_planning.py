"""What a recovery does when nobody holds a part of the dense parameters any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_lightning.checkpoint.memory import RecoverySources
from moe_lightning.checkpoint.recovery_plan import RankInventory
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.strategies.recovery import RecoveryPlanner

NAMES = ("dense rows 0 of 2", "dense rows 1 of 2")


def planned(version: int, *, has_trained: bool, sources: RecoverySources | None = None) -> str:
    """The level of the plan of a rank that is left with the first of two parts."""
    planner = RecoveryPlanner(sources)
    survivor = RankInventory(
        rank=0, node="0", live_version=version, sharded_dense=NAMES, owned_dense=NAMES[:1], experts=((0, 0),)
    )
    plan, _ = planner.plan(
        [survivor], World.single(), num_layers=1, num_experts=1, last_step=version, has_trained=has_trained
    )
    return plan.level


def test_where_nobody_has_trained_all_ranks_start_anew() -> None:
    with pytest.raises(PeerFailed, match=r"no rank that has trained is left, .* start over") as caught:
        planned(0, has_trained=False)
    assert caught.value.kind == "death"


def test_later_the_sentence_names_the_cures() -> None:
    with pytest.raises(ConfigurationError, match=r"last committed step was 5: .*dense=hsdp.*PartialExpertsCheckpoint"):
        planned(5, has_trained=True)


def test_who_saves_already_is_told_another_cure(tmp_path: Path) -> None:
    """A rank was lost with its memory before anything was written."""
    sources = RecoverySources(root=tmp_path, name="run", node="0", fallback=tmp_path, report=print)
    with pytest.raises(ConfigurationError, match=r"step was 5: .*dense=hsdp.*protection=arc$"):
        planned(5, has_trained=True, sources=sources)
