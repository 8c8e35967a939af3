"""Full states cut to slots and back, on one process: every shape of state that a module or optimizer may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_lightning.checkpoint.full_state import (
    full_model_state,
    full_optimizer_state,
    load_local_optimizer_state,
    local_model_state,
)
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import Part
from moe_lightning.state.table import State

TABLE = Placement(replicas=np.array([[1, 0, 1], [0, 2, 0], [1, 1, 1], [0, 0, 1]]))


def rows_on(rank: int) -> ExpertStack:
    return ExpertStack(parameters={}, slot_experts=TABLE.experts_on(rank), placement=TABLE, rank=rank)


def whole() -> dict[str, Tensor]:
    return {"w": torch.randn(4, 2, 3), "dense": torch.randn(5)}


def cut_for(rank: int, full: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    local = {"w": torch.zeros(len(TABLE.experts_on(rank)), 2, 3), "dense": torch.zeros(5)}
    return local_model_state(full, local, {"w": rows_on(rank)}, Part(), **options)


def test_every_expert_is_spoken_for_once() -> None:
    owned = [expert for rank in range(3) for _, expert in rows_on(rank).owned()]
    assert sorted(owned) == [0, 1, 2, 3]
    assert list(rows_on(2).owned()) == [(2, 3)], "rank 2 holds 0, 2 and 3, of which others own the first two"


def test_each_rank_gets_its_rows() -> None:
    full = whole()
    for rank in range(3):
        local = cut_for(rank, full)
        assert torch.equal(local["w"], full["w"][list(TABLE.experts_on(rank))])
        assert torch.equal(local["dense"], full["dense"])


def test_cutting_copies() -> None:
    full = whole()
    kept = full["w"].clone()
    cut_for(0, full)["w"].zero_()
    assert torch.equal(full["w"], kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda full: full.pop("w"), r"lacks 'w' \(1 missing, 0 unknown tensors\).*another model configuration"),
        (lambda full: full.update(new=torch.zeros(1)), "has 'new', which the model lacks"),
        (lambda full: full.update(w=full["w"][:3]), r"'w' has shape \[3, 2, 3\], the model's \[4, 2, 3\]"),
        (lambda full: full.update(dense=torch.zeros(6)), r"'dense' has shape \[6\], the model's \[5\]"),
    ],
)
def test_states_of_other_models(change: Any, message: str) -> None:
    full = whole()
    change(full)
    with pytest.raises(CheckpointError, match=message):
        cut_for(0, full)


def test_without_strictness_only_shapes_must_agree() -> None:
    full = whole() | {"new": torch.zeros(1)}
    del full["dense"]
    assert set(cut_for(0, full, strict=False)) == {"w"}
    with pytest.raises(CheckpointError, match="has shape"):
        cut_for(0, full | {"dense": torch.zeros(9)}, strict=False)


def test_one_rank_writes_what_it_has() -> None:
    placement = Placement(replicas=np.ones((4, 1), dtype=np.int64))
    rows = ExpertStack(parameters={}, slot_experts=(0, 1, 2, 3), placement=placement, rank=0)
    state: dict[str, Any] = {**whole(), "note": {"plain": "value"}}
    full = full_model_state(state, {"w": rows}, World.single())
    assert list(full) == list(state)
    assert torch.equal(full["w"], state["w"])
    assert full["note"] == {"plain": "value"}
    assert local_model_state(full, state, {"w": rows}, Part())["note"] == {"plain": "value"}


def trained(kind: Any, parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(1)
    optimizer: torch.optim.Optimizer = kind(parameters, **{"lr": 0.1} | options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adafactor, {}),
]


def state_of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], rows: ExpertStack) -> State:
    stack = replace(rows, parameters={"w": parameters[0]})
    module = nn.ParameterList(parameters)
    return State(module, [stack], [(optimizer, [parameters])], state_ranks={}, rank=rows.rank, world_size=1)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_optimizer_states_survive_the_way_through_a_full_one(kind: Any, options: dict[str, Any]) -> None:
    one = Placement(replicas=np.ones((4, 1), dtype=np.int64))
    rows = ExpertStack(parameters={}, slot_experts=(0, 1, 2, 3), placement=one, rank=0)
    parameters = [nn.Parameter(torch.randn(4, 2, 3)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(()))]
    optimizer = trained(kind, parameters, **options)
    full = full_optimizer_state(state_of(optimizer, parameters, rows), 0, World.single())
    stock = optimizer.state_dict()
    assert full["param_groups"] == stock["param_groups"]
    for index, entry in stock["state"].items():
        for name, value in entry.items():
            found = full["state"][index][name]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, f"{index}/{name}"

    for rank in range(3):
        experts = list(TABLE.experts_on(rank))
        local = [
            nn.Parameter(torch.zeros(len(experts), 2, 3)),
            *(nn.Parameter(torch.zeros_like(p)) for p in parameters[1:]),
        ]
        fresh = kind(local, **{"lr": 7.0} | options)
        load_local_optimizer_state(state_of(fresh, local, rows_on(rank)), 0, full)
        assert fresh.param_groups[0]["lr"] == 0.1
        for index, parameter in enumerate(local):
            for name, value in stock["state"].get(index, {}).items():
                expected = value[experts] if index == 0 and isinstance(value, Tensor) and value.ndim else value
                found = fresh.state[parameter][name]
                assert torch.equal(found, expected) if isinstance(value, Tensor) else found == value, f"{index}/{name}"


def test_optimizer_states_without_a_row_for_each_expert_are_refused() -> None:
    parameters = [nn.Parameter(torch.randn(len(TABLE.experts_on(0)), 2, 3))]
    optimizer = trained(torch.optim.AdamW, parameters)
    optimizer.state[parameters[0]]["absmax1"] = torch.ones(5)
    state = state_of(optimizer, parameters, rows_on(0))
    with pytest.raises(ConfigurationError, match=r"'absmax1' of 0 has shape \[5\], which cannot be cut by expert"):
        full_optimizer_state(state, 0, World.offline(0, 3, torch.device("cpu")))


def test_other_parameter_groups_are_refused() -> None:
    one = Placement(replicas=np.ones((4, 1), dtype=np.int64))
    rows = ExpertStack(parameters={}, slot_experts=(0, 1, 2, 3), placement=one, rank=0)
    parameters = [nn.Parameter(torch.randn(4, 2, 3)), nn.Parameter(torch.randn(5))]
    optimizer = trained(torch.optim.AdamW, parameters)
    full = full_optimizer_state(state_of(optimizer, parameters, rows), 0, World.single())
    fewer = parameters[:1]
    with pytest.raises(CheckpointError, match=r"groups of \[2\] tensors, this one of \[1\]: use the configuration"):
        load_local_optimizer_state(state_of(torch.optim.AdamW(fewer), fewer, rows), 0, full)
