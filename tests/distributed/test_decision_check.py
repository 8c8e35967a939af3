"""Ranks that plan differently, or run different versions, end in a sentence and not in an exchange that none meets."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan, equal_split
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel import collectives
from moe_lightning.parallel.collectives import check_versions, fingerprint, require_agreement
from moe_lightning.strategies.placed_experts import PlacedExperts, PlacementOptions
from moe_lightning.strategies.stages import StageMap
from moe_lightning.strategies.worlds import Worlds
from tests.distributed.harness import connect, run_pooled
from tests.distributed.training import OwnModule

EXPERTS = 4
PLACEMENT = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])


def shadow_plan(rank: int) -> ShadowPlan:
    """Expert 0 visits rank 1; on rank 2 its home is another one."""
    shadows = np.zeros((EXPERTS, 3), dtype=bool)
    shadows[0, 1] = True
    homes = PLACEMENT.argmax(axis=1)
    homes[0] = 2 if rank == 2 else 0
    return ShadowPlan(shadows=shadows, homes=homes)


def disagree(rank: int, world_size: int, about: str) -> list[str]:
    """What each of two micro-batches ends in."""
    replicas = PLACEMENT.copy()
    if about == "placement" and rank == 2:
        replicas[3] = [1, 1, 1]
    policy: Any = "equal" if about == "policy" and rank == 2 else "balanced"
    dispatcher = Dispatcher(Placement(replicas=replicas), connect(), [(0, 1, 2)], policy, layer=7)
    if about == "speeds":
        dispatcher.set_speeds(np.array([4096, 2048, 4096 if rank == 2 else 4095]))
    if about == "shadows":
        dispatcher.set_shadows(shadow_plan(rank))
    if about == "quota" and rank == 2:
        dispatcher._quotas._rule = equal_split
    ended = []
    for _ in range(2):
        try:
            dispatcher.plan(dispatcher.gather_counts(torch.tensor([4, 1, 1, 0])))
            ended.append("")
        except ConfigurationError as error:
            ended.append(str(error))
    return ended


@pytest.mark.parametrize("about", ["placement", "policy", "shadows", "speeds"])
def test_another_plan_ends_the_step_before_anything_travels(about: str) -> None:
    first, second, third = run_pooled(3, disagree, about)
    assert first == second == third
    assert first[0].startswith("the plan (placement, shadows, quotas) of MoE layer 7 of ranks [2] differs from that of")
    assert "rank 0: give all ranks the same files, settings and versions" in first[0]


def test_another_quota_ends_the_next_micro_batch() -> None:
    first, second, third = run_pooled(3, disagree, "quota")
    assert first == second == third
    assert first[0] == ""
    assert "MoE layer 7 of ranks [2] differs" in first[1]


def test_ranks_that_agree_go_on() -> None:
    assert run_pooled(3, disagree, "nothing") == [["", ""]] * 3


def move_elsewhere(rank: int, world_size: int, num_more: int) -> str:
    module, world, worlds = OwnModule(), connect(), Worlds()
    worlds.set_present(world)
    experts = PlacedExperts(module, [uniform_placement(6, 2)], world, PlacementOptions(slots=4))
    replicas = uniform_placement(6, 2).replicas.copy()
    replicas[5] = [1, 0] if rank == 0 else [1, 1]
    placements = [Placement(replicas=replicas)] * (1 + num_more * rank)
    with pytest.raises(ConfigurationError) as raised:
        StageMap(module, worlds).replace(experts, placements, [], world.nodes)
    return str(raised.value)


@pytest.mark.parametrize("num_more", [0, 1])
def test_no_expert_moves_to_where_not_all_ranks_want_it(num_more: int) -> None:
    first, second = run_pooled(2, move_elsewhere, num_more)
    assert first == second
    assert first.startswith("the new placement of ranks [1] differs from that of rank 0")


# ---------------------------------------------------------------------- versions


def meet_with(rank: int, world_size: int, name: str, version: str, recovers: bool) -> tuple[str, list[str]]:
    own = collectives.versions()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        if rank == 1:
            patch.setattr(collectives, "versions", lambda: own | {name: version})
        warnings.simplefilter("always")
        try:
            check_versions(connect(), recovers=recovers)
        except ConfigurationError as error:
            return str(error), []
    return "", [str(warning.message) for warning in caught if "install the same" in str(warning.message)]


OTHERS = [("moe-lightning", "0.0.9"), ("Python", "3.99.1"), ("NumPy", "1.26.0"), ("torch", "2.1.0")]


@pytest.mark.parametrize(("name", "version"), OTHERS)
def test_another_version_is_refused_on_all_ranks(name: str, version: str) -> None:
    first, second, third = run_pooled(3, meet_with, name, version, False)
    ours = collectives.versions()[name]
    sentence = f"rank 1 has {name} {version} where rank 0 has {ours}, and would plan otherwise: install the same on all"
    assert first == second == third == (sentence, [])


def test_an_elastic_world_goes_on_without_the_rank_of_another_version() -> None:
    first, second = run_pooled(2, meet_with, *OTHERS[1], True)
    assert second[0].startswith("rank 1 has Python 3.99.1 where rank 0 has")
    assert first == ("", [second[0]])


def test_another_patch_is_not_worth_a_word() -> None:
    version = ".".join([*np.__version__.split(".")[:2], "99"])
    assert run_pooled(2, meet_with, "NumPy", version, False) == [("", [])] * 2


# ---------------------------------------------------------------------- hashes


def test_a_hash_tells_values_shapes_types_and_order() -> None:
    a, b = np.arange(6), np.arange(6).reshape(2, 3)
    prints = [fingerprint(a), fingerprint(b), fingerprint(b.T), fingerprint(a.astype(np.int32)), fingerprint(a, a)]
    prints += [fingerprint(a, "x"), fingerprint("x", a), fingerprint("xy"), fingerprint("x", "y")]
    assert len(set(prints)) == len(prints)
    assert all(0 <= value < 2**63 for value in prints)
    assert fingerprint(b.T) == fingerprint(np.ascontiguousarray(b.T))
    with pytest.raises(AssertionError):
        fingerprint(np.zeros(2))


def test_the_fewest_are_named() -> None:
    require_agreement([5, 5, 5], "x")
    require_agreement([], "x")
    with pytest.raises(ConfigurationError, match=r"^x of ranks \[0, 3\] differs from that of rank 1"):
        require_agreement([7, 5, 5, 8, 5], "x")
