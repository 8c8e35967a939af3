"""Who stands where: against torch's own layout of a mesh."""

from __future__ import annotations

from itertools import chain, combinations, product
from typing import Any

import pytest
import torch

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.mesh import STAGES_PER_RANK, MeshShape, chosen_axes, stage_ranks
from moe_lightning.strategies.checks import chosen_micro_batches

AXES = MeshShape().axes
SHAPES = [MeshShape(pp=pp, dp=dp, cp=cp, tp=tp) for pp, dp, cp, tp in product((1, 2, 3), (1, 2), (1, 2), (1, 3))]
SOME_AXES: list[tuple[str, ...]] = list(chain.from_iterable(combinations(AXES, n) for n in range(5)))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape.sizes)))
def test_ranks_stand_as_in_a_tensor_of_the_meshs_shape(shape: MeshShape) -> None:
    layout = torch.arange(shape.num_ranks).view(shape.sizes)
    for rank in range(shape.num_ranks):
        place = [int(i) for i in (layout == rank).nonzero()[0]]
        assert [shape.index(rank, axis) for axis in AXES] == place
        for axes in SOME_AXES:
            chosen = tuple(slice(None) if axis in axes else i for axis, i in zip(AXES, place, strict=True))
            assert shape.peers(rank, axes) == tuple(layout[chosen].flatten().tolist())


@pytest.mark.parametrize("axes", SOME_AXES, ids=lambda axes: "+".join(axes) or "none")
def test_groups_hold_every_rank_once(axes: tuple[str, ...]) -> None:
    for shape in SHAPES:
        groups = shape.groups(axes)
        assert sorted(chain.from_iterable(groups)) == list(range(shape.num_ranks))
        assert all(shape.peers(rank, axes) == group for group in groups for rank in group)


def test_every_schedule_of_several_stages_needs_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    four: Any = "four"
    monkeypatch.setitem(STAGES_PER_RANK, four, 4)
    assert chosen_micro_batches(6, four, 2) == 6
    with pytest.raises(ConfigurationError, match=r"schedule=four needs a multiple of mesh.pp=2 .*: use 4 or 6"):
        chosen_micro_batches(5, four, 2)


def test_a_stage_is_a_run_of_ranks() -> None:
    assert MeshShape(pp=2, dp=2, tp=2).stages == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_data_takes_what_the_other_axes_leave() -> None:
    assert MeshShape(pp=2, cp=2, tp=3).over(24) == MeshShape(pp=2, dp=2, cp=2, tp=3)
    assert MeshShape().over(5) == MeshShape(dp=5)


@pytest.mark.parametrize(("ranks", "axes"), [(6, {"pp": 4}), (2, {"tp": 4}), (9, {"cp": 2})])
def test_axes_that_do_not_divide_the_ranks_are_refused(ranks: int, axes: dict[str, int]) -> None:
    (size,) = axes.values()
    with pytest.raises(ConfigurationError, match=rf"needs a multiple of {size} ranks, not {ranks}: change the axes"):
        MeshShape(**axes).over(ranks)


def test_an_axis_of_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.tp=0 must be at least 1"):
        MeshShape(tp=0)


def test_axes_that_are_not_chosen_have_one_rank() -> None:
    assert chosen_axes(None) == chosen_axes({}) == chosen_axes({"pp": 1, "cp": 1, "tp": 1}) == MeshShape()


@pytest.mark.parametrize(
    ("ranks", "axes", "stages"),
    [
        (4, {"pp": 2}, [[0, 1], [2, 3]]),
        (5, {"pp": 2}, [[0, 1], [2, 3]]),
        (8, {"pp": 2, "cp": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (1, {"pp": 2}, [[0], [0]]),
        (3, {"pp": 4}, [[0, 1, 2]] * 4),
    ],
)
def test_stages_are_dealt_to_the_first_ranks(ranks: int, axes: dict[str, int], stages: list[list[int]]) -> None:
    """Those that are left over have none, and where they are too few each has all."""
    count = len(stages)
    assert [list(stage_ranks(stage, ranks, MeshShape(**axes))) for stage in range(count)] == stages
    assert stage_ranks(count, ranks, MeshShape(**axes)) == stage_ranks(0, ranks, MeshShape(**axes))  # interleaved
