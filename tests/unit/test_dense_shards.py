"""What of a tensor is in which part: by tensor index, by rows, and by both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import MeshShape, Part, RowCut, TensorCut
from moe_lightning.state.pieces import Block
from moe_lightning.state.tensors import blocks_of, mark, part_of_whole
from moe_lightning.strategies.dense_parameters import sum_scalars
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS, DenseOptimizerShards, ReplicatedDense, cut_groups
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.stages import StageMap
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

CUTS = [
    TensorCut(shape=(8, 6)),
    TensorCut(shape=(8, 6), sections=(4, 2, 2)),
    TensorCut(shape=(8, 6), dim=1, sections=(6,)),
    TensorCut(shape=(8, 6), sections=(5, 3)),
    TensorCut(shape=(7,), sections=(7,)),
    TensorCut(shape=(5, 4, 2), dim=1, sections=(2, 2)),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("tensors", "rows"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5)])
def test_parts_join_to_what_was_cut(cut: TensorCut, tensors: int, rows: int) -> None:
    whole = torch.arange(float(torch.Size(cut.shape).numel())).view(cut.shape)
    parts = RowCut(holders=((0,),) * (tensors * rows), index=0, tensors=tensors).parts
    held = {part: part_of_whole(whole, cut, part) for part in parts}
    again = torch.full_like(whole, -1)
    for part, values in held.items():
        assert tuple(values.shape) == cut.shape_of(part)
        for here, block in blocks_of(cut, part):
            again[block.slices] = values[here]
    assert torch.equal(again, whole)
    times = tensors if not cut.sections else 1  # what has no tensor index is in the parts of each
    assert sum(values.numel() for values in held.values()) == times * whole.numel()


def test_each_section_is_cut_by_itself_and_then_by_rows() -> None:
    whole, cut = torch.arange(8), TensorCut(shape=(8,), sections=(4, 2, 2))
    found = [
        part_of_whole(whole, cut, Part(tensor=t, tensors=2, row=r, rows=2)).tolist() for t, r in product((0, 1), (0, 1))
    ]
    assert found == [[0, 1], [4, 6], [2, 3], [5, 7]]


def in_world(module: Any, world: World, dense: str, mesh: MeshShape | None = None) -> tuple[TrainState, Worlds]:
    """The state of a rank with a module without experts, and its worlds."""
    worlds = Worlds(mesh)
    worlds.set_present(world)
    state = TrainState(worlds, dense=dense)
    state.set_module(module, PlacedExperts(module, [], world), StageMap(module, worlds))
    return state, worlds


def test_who_updates_a_parameter_does_not_depend_on_what_is_frozen() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    module[0].requires_grad_(False)
    state, _ = in_world(module, World.offline(0, 2, torch.device("cpu")), "zero1")
    state.set_optimizers([torch.optim.AdamW(module.parameters())])
    before = dict(state.shards.ranks)
    module.requires_grad_(True)
    state.shards.begin()
    assert dict(state.shards.ranks) == before
    assert before.keys() == {*module.parameters()}


class InTurn(ReplicatedDense):
    """Assigns parameters to ranks in turn, and nothing else."""

    has_owners = True

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, /) -> None:
        self.owners = {parameter: number % world.size for number, parameter in enumerate(parameters)}


def test_the_groups_of_a_rank_follow_from_the_owners_of_a_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DENSE_SHARDINGS._members, "in turn", InTurn)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state, _ = in_world(module, World.offline(1, 2, torch.device("cpu")), "in turn")
    weight, bias, *others = module.parameters()
    free = nn.Parameter(torch.ones(1))  # of no module: every rank updates it
    optimizer = torch.optim.SGD([{"params": [weight, bias, free]}, {"params": others}])
    first, second = optimizer.param_groups
    own, whole = ([bias, free], others[1:]), ([weight, bias, free], others)

    def groups() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return first["params"], second["params"]

    state.set_optimizers([optimizer])
    assert groups() == own
    with state.shards.whole_groups():
        assert groups() == whole
        with state.shards.own_groups():
            assert groups() == own
        assert groups() == whole
    assert groups() == own


def test_what_a_rank_owns_is_of_the_world_of_its_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery sets the next world before the states have moved."""
    monkeypatch.setitem(DENSE_SHARDINGS._members, "in turn", InTurn)
    module = nn.Linear(2, 2)
    state, worlds = in_world(module, World.offline(0, 2, torch.device("cpu")), "in turn")
    state.set_optimizers([torch.optim.SGD(module.parameters())])
    before = state.shards.owned_states().keys(), [p.shape for p in state.shards.unowned]
    worlds.set_present(World.offline(1, 2, torch.device("cpu")))
    assert (state.shards.owned_states().keys(), [p.shape for p in state.shards.unowned]) == before


@pytest.mark.parametrize(("dense", "moves"), [("fsdp", False), ("zero1", True)])
def test_rows_that_are_kept_are_no_optimizer_states(dense: str, moves: bool) -> None:
    """They have arrived before anything is overwritten."""
    state, _ = in_world(nn.Linear(2, 2), World.offline(0, 2, torch.device("cpu")), dense)
    state.transfer._detached = {"stage 0, dense rows 0 of 2": {}}
    assert state.transfer.moves_optimizers is moves


def test_a_sharding_that_hides_its_owners_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(DenseOptimizerShards):
        has_owners = False

    monkeypatch.setitem(DENSE_SHARDINGS._members, "silent", Silent)
    module = nn.Linear(4, 4)
    state, _ = in_world(module, World.offline(0, 2, torch.device("cpu")), "silent")
    with pytest.raises(ConfigurationError, match=r"dense=silent gives .*: set has_owners = True on its class"):
        state.set_optimizers([torch.optim.AdamW(module.parameters())])


def test_a_module_is_cut_for_the_former_world_until_it_is_cut_for_the_next_one() -> None:
    """Parts in inventories, and what is sent of them, are those that are here."""
    module, mesh = nn.Linear(4, 4, bias=False), MeshShape(tp=2)
    former = World(rank=1, size=2, device=torch.device("cpu"), shape=mesh, shards=((0, 1),))
    state, worlds = in_world(module, former, "ddp", mesh)
    mark(module.weight, TensorCut(shape=(8, 4), sections=(8,)))
    state.parts.begin_run(former)
    halves = [f"stage 0, dense rows 0 of 1 in part {tensor} of 2" for tensor in range(2)]
    for world in (former, World.single()):
        worlds.set_present(world)
        assert state.transfer.names() == (tuple(halves), (halves[1],))
        ((_, block),) = state.parts.held()
        assert block.offsets == (4, 0)
    state.transfer.install({("weight", Block.of((8, 4))): {"weight": torch.ones(8, 4)}}, World.single())
    assert state.transfer.names() == (("stage 0, dense rows 0 of 1",),) * 2
    assert torch.equal(module.weight, torch.ones(8, 4))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.sampled_from(["fsdp", "hsdp"]))
def test_the_ranks_of_a_group_ascend_wherever_they_came_from(nodes: list[int], dense: str) -> None:
    """As in a process group, which decides which rows a rank has: one that was lost and came back is the last."""
    groups = cut_groups(dense, nodes, None)
    assert all(list(group) == sorted(group) for group in groups)
    assert sorted(rank for group in groups for rank in group) == list(range(len(nodes))) * bool(groups)


def test_rows_lie_among_the_ranks_of_a_tensor_index() -> None:
    """Eight ranks on two nodes, in pairs that compute layers together."""
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    assert cut_groups("ddp", nodes, None, tensors=2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cut_groups("fsdp", nodes, None, tensors=2) == ((0, 2, 4, 6, 1, 3, 5, 7),)
    groups = cut_groups("hsdp", nodes, None, tensors=2)
    assert groups == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert cut_groups("hsdp", nodes, 8, tensors=2) == cut_groups("fsdp", nodes, None, tensors=2)
    own = RowCut.among(groups, 6, tensors=2)
    assert own.part == Part(tensor=0, tensors=2, row=1, rows=2)
    assert own.holders_of(TensorCut(shape=(4,), sections=(4,))) == (2, 6)
    assert own.holders_of(TensorCut(shape=(4,))) == (2, 3, 6, 7)


def test_gradients_of_scalars_keep_their_precision() -> None:
    scalars = [nn.Parameter(torch.tensor(2.0, dtype=torch.float64)) for _ in range(2)]
    scalars[0].grad = torch.tensor(1.0 + 2**-40, dtype=torch.float64)
    sum_scalars(scalars, World.offline(0, 1, torch.device("cpu")))
    assert scalars[0].grad == 1.0 + 2**-40
    assert scalars[1].grad is None
