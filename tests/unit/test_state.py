"""The state table: pieces under keys, who holds them, and states that a newcomer makes; blocks of any shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moe_lightning.checkpoint.manifest import check_coverage, dump_json, read_json
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import CheckpointError
from moe_lightning.state.averages import Averages
from moe_lightning.state.pieces import Block, Location, Piece, StatePiece, describe, is_expert_key, is_moment
from moe_lightning.state.table import State

PLACEMENT = Placement(replicas=np.array([[1, 0], [1, 1], [0, 1]]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 2))
        self.dense = nn.Linear(2, 3)
        self.frozen = nn.Parameter(torch.randn(2))
        self.register_buffer("counts", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def state_of(module: Model, *, steps: int = 1, state_ranks: dict[nn.Parameter, int] | None = None) -> State:
    """Of rank 0 of two, with experts 1 and 0 in three slots."""
    stack = ExpertStack(parameters={"w": module.experts}, slot_experts=(1, -1, 0), placement=PLACEMENT, rank=0)
    groups = [list(module.parameters())]
    optimizer = torch.optim.AdamW(groups[0], lr=0.1)
    for _ in range(steps):
        for parameter in (module.experts, *module.dense.parameters()):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return State(module, [stack], [(optimizer, groups)], state_ranks=state_ranks or {}, rank=0, world_size=2)


def test_every_piece_has_its_key_and_holders() -> None:
    module = Model()
    pieces = {p.key: p for p in state_of(module, state_ranks={module.dense.bias: 1}).pieces()}
    scopes = ("master", "exp_avg", "exp_avg_sq")
    experts: dict[str, tuple[int, ...]] = {}
    for expert, held in ((1, (0, 1)), (0, (0,))):
        experts |= {f"expert/0/{expert}/{scope}/w": held for scope in scopes}
    dense: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("frozen/weight", "dense.weight/weight", "dense.weight/exp_avg"), (0, 1)
    )
    dense |= {"dense.weight/exp_avg_sq": (0, 1), "dense.bias/weight": (0, 1), "counts/buffer": (0, 1)}
    dense |= {"dense.bias/exp_avg": (1,), "dense.bias/exp_avg_sq": (1,)}
    assert {key: piece.holders for key, piece in pieces.items()} == experts | {
        f"dense/{k}": h for k, h in dense.items()
    }
    assert {key for key in pieces if is_expert_key(key)} == set(experts)
    moments = {key for key in pieces if is_moment(key)}
    assert moments == {key for key in pieces if "exp_avg" in key}
    assert torch.equal(pieces["expert/0/0/master/w"].tensor, module.experts[2])
    assert pieces["expert/0/0/master/w"].tensor.data_ptr() == module.experts[2].data_ptr(), "a view, not a copy"


@pytest.fixture
def scaled() -> State:
    """The state of a module with a parameter that is a single number, and with averages."""
    module = nn.Module()
    module.scale, module.weight = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))
    groups = [list(module.parameters())]
    optimizer = torch.optim.AdamW(groups[0])
    (module.scale * module.weight).sum().backward()
    optimizer.step()
    averages = Averages({}, use_buffers=False)
    averages.begin(module, optimizer, lambda parameter: parameter.device)
    return State(module, [], [(optimizer, groups)], state_ranks={}, rank=0, world_size=1, averages=averages)


def test_the_average_of_a_single_number_is_saved_like_any_other(scaled: State) -> None:
    keys = {piece.key for piece in scaled.pieces() if "average" in piece.key}
    assert keys == {"dense/scale/average", "dense/weight/average"}
    assert not any("average" in own for own in scaled.objects()["optimizer/0"]["scalars"].values())


def test_states_of_a_single_number_lie_where_it_lies(scaled: State) -> None:
    module = nn.Module()
    module.scale, module.weight = (nn.Parameter(p.detach().to("meta")) for p in scaled.module.parameters())
    groups = [list(module.parameters())]
    new = State(module, [], [(torch.optim.AdamW(groups[0]), groups)], state_ranks={}, rank=0, world_size=1)
    new.adopt(scaled.objects(), scaled.moment_shapes())
    for parameter in groups[0]:
        places = {name: value.device.type for name, value in new.optimizers[0][0].state[parameter].items()}
        assert places == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_a_newcomer_makes_the_states_that_others_have() -> None:
    told, new = state_of(Model(), steps=2), state_of(Model(), steps=0)
    new.adopt(told.objects(), told.moment_shapes())
    shapes = [{p.key: p.tensor.shape for p in state.pieces()} for state in (told, new)]
    assert shapes[0] == shapes[1]
    optimizer, _ = new.optimizers[0]
    assert optimizer.state[new.dense["dense.bias"]]["step"] == 2
    assert not optimizer.state[new.dense["dense.bias"]]["exp_avg"].any()
    assert new.dense["frozen"] not in optimizer.state


@pytest.mark.parametrize("option", ["fused", "capturable", "foreach"])
def test_steps_are_counted_where_the_optimizer_reads_them(option: str) -> None:
    told, new = state_of(Model()), state_of(Model().to("meta"), steps=0)
    for group in told.optimizers[0][0].param_groups:
        group[option] = True
    new.adopt(told.objects(), told.moment_shapes())
    state = new.optimizers[0][0].state[new.dense["dense.bias"]]
    assert state["step"].device.type == ("cpu" if option == "foreach" else "meta")
    assert state["exp_avg"].device.type == "meta"


def test_scalars_of_a_shard_that_others_keep_are_those_of_all_but_nobody_gets_half_a_state() -> None:
    told, new = state_of(Model()), state_of(Model(), steps=0)
    objects: dict[str, Any] = told.objects()
    kept_elsewhere = told.dense["dense.bias"]
    (number,) = (number for number, parameter in enumerate(told.numbered(0)) if parameter is kept_elsewhere)
    del objects["optimizer/0"]["scalars"][number]
    new.adopt(objects, told.moment_shapes())
    optimizer, _ = new.optimizers[0]
    assert set(optimizer.state[new.dense["dense.bias"]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert new.dense["frozen"] not in optimizer.state
    for parameter in new.numbered(0):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_states_that_nobody_describes_stay() -> None:
    """As those of experts that live on, when a part of the dense state is read from a snapshot without experts."""
    told, own = state_of(Model(), steps=2), state_of(Model(), steps=1)
    shapes = {key: shape for key, shape in told.moment_shapes().items() if key.startswith("dense/")}
    moments = {name: tensor.clone() for name, tensor in own.moments(own.stacks[0].parameters["w"]).items()}
    own.adopt(told.objects(), shapes)
    kept = own.moments(own.stacks[0].parameters["w"])
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {n: t.tolist() for n, t in moments.items()}
    assert set(moments) == {"exp_avg", "exp_avg_sq"}


def piece_of(block: Block) -> Piece:
    live = StatePiece(key="dense/w/weight", tensor=torch.zeros(block.sizes), block=block)
    return describe(live, version=3, group="dense")


def columns(first: int, last: int) -> Block:
    return Block(offsets=(0, first), sizes=(4, last - first), whole=(4, 6))


def test_columns_are_pieces_too() -> None:
    left, right = piece_of(columns(0, 2)), piece_of(columns(2, 6))
    check_coverage([left, right])
    for pieces in ([left], [left, right, right], [left, piece_of(columns(1, 6))]):
        with pytest.raises(CheckpointError, match="parts of dense/w/weight are missing or there twice"):
            check_coverage(pieces)


def test_what_blocks_share() -> None:
    rows = Block.of_rows((2, 6), 1, 4)
    shared = rows.intersection(columns(2, 6))
    assert shared.within(rows) == (slice(0, 2), slice(2, 6))
    assert shared.within(columns(2, 6)) == (slice(1, 3), slice(0, 4))
    assert rows.intersection(Block.of_rows((1, 6), 3, 4)) is None
    assert Block.of(()).intersection(Block.of(())) == Block.of(())


LOCATIONS = [None, Location(data_offset=64), Location(data_offset=9, file="f", length=40)]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("block", [Block.of(()), Block.of_rows((2, 3), 5, 7), columns(2, 6)])
def test_pieces_are_read_as_they_were_listed(location: Location | None, block: Block) -> None:
    piece = replace(piece_of(block), location=location, due=4)
    assert read_json(list[Piece], dump_json(list[Piece], [piece, piece]), "it") == [piece, piece]
