"""Snapshots hold what a module and its optimizers have bound at their step, and what the next forward pass leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from moe_lightning.checkpoint.contents import SnapshotContents
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings
from moe_lightning.checkpoint.schedule import AdaptiveConfiguration
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack
from moe_lightning.state.pieces import StatePiece

EXPERTS = 3


class Model(nn.Module):
    """Experts, a dense layer and a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.ones(EXPERTS, 2))
        self.dense = nn.Linear(2, 4)
        self.target = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))


class AssigningMomentum(torch.optim.Optimizer):
    """Makes a new tensor of its state in each update, as hand-written optimizers do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(parameter)) + 1
            parameter -= state["momentum"]


class Run:
    """A model of one rank that makes updates.

    Args:
        settings: of its checkpoints.

    Attributes:
        contents: of its snapshots.
    """

    def __init__(self, **settings: Any) -> None:
        self.model = Model()
        groups = [[p for p in self.model.parameters() if p.requires_grad]]
        self.optimizer = AssigningMomentum(groups[0])
        self.optimizer.step()
        placement = Placement(replicas=np.ones((EXPERTS, 1), dtype=np.int64))
        slots = tuple(range(EXPERTS))
        stack = ExpertStack(parameters={"w": self.model.experts}, slot_experts=slots, placement=placement, rank=0)
        self.state = TrainingState(
            self.model, [stack], [(self.optimizer, groups)], state_ranks={}, rank=0, world_size=1
        )
        self.contents = SnapshotContents(self.state, CheckpointSettings(**{"every_n_steps": 1, **settings}))
        self.ledger = CheckpointLedger(
            num_layers=1,
            num_experts=EXPERTS,
            planned_assignments=np.array([1]),
            owners=np.zeros((1, EXPERTS), dtype=np.int64),
            num_ranks=1,
            scopes=frozenset({"weights", "optimizer"}),
            order="sequential",
        )

    def saved(self, step: int) -> dict[str, Tensor]:
        return {key: piece.tensor.clone() for key, piece in self.contents.begin(step, self.ledger).pieces.items()}

    def live(self) -> dict[str, Tensor]:
        pieces: dict[str, StatePiece] = {piece.key: piece for piece in self.state.pieces()}
        return {key: piece.tensor.clone() for key, piece in pieces.items()}


def buffer_is_assigned(run: Run) -> None:
    run.model.mean = run.model.mean + 5


def values_are_assigned(run: Run) -> None:
    run.model.target.data = run.model.target.data * 0.5


def experts_are_assigned(run: Run) -> None:
    run.model.experts.data = run.model.experts.data * 0.5


def optimizer_assigns(run: Run) -> None:
    run.optimizer.step()


def states_are_made_anew(run: Run) -> None:
    run.optimizer.state.clear()
    run.optimizer.step()


@pytest.mark.parametrize(
    "change",
    [buffer_is_assigned, values_are_assigned, experts_are_assigned, optimizer_assigns, states_are_made_anew],
)
def test_a_snapshot_holds_tensors_that_were_bound_since_the_last_one(change: Callable[[Run], None]) -> None:
    run = Run()
    run.saved(1)
    for step in (2, 3):
        change(run)
        saved, live = run.saved(step), run.live()
        assert saved.keys() == live.keys()
        assert all(torch.equal(saved[key], live[key]) for key in live)


def test_later_steps_of_a_window_hold_tensors_that_were_bound_since_its_first() -> None:
    run = Run(lossless=True, k_snapshot=1)
    run.saved(1)  # everything
    run.optimizer.step()
    run.saved(2)
    assert run.contents.window is not None
    run.optimizer.step()
    pieces, live = run.contents.next(3).pieces, run.live()
    states = {key: piece.tensor for key, piece in pieces.items() if key.endswith("momentum/w")}
    assert states
    assert all(torch.equal(states[key], live[key]) for key in states)


def test_a_buffer_is_copied_before_the_next_forward_pass_changes_it_in_place() -> None:
    run = Run()
    pieces = run.contents.begin(1, run.ledger).pieces
    run.model.mean += 1
    assert torch.equal(pieces["dense/mean/buffer"].tensor, torch.zeros(2))
    assert pieces["dense/dense.weight/weight"].tensor.data_ptr() == run.model.dense.weight.data_ptr()


def test_states_that_were_dropped_are_in_no_snapshot() -> None:
    run = Run()
    run.saved(1)
    run.optimizer.state.clear()
    saved = run.saved(2)
    assert saved.keys() == {key for key in run.live() if "momentum" not in key}
    assert torch.equal(saved["dense/dense.weight/weight"], run.model.dense.weight)


def test_writers_change_only_where_room_for_all_experts_was_reserved() -> None:
    run = Run()
    assert run.contents.reassign(run.state) is None, "a new session follows"
    ready = SnapshotContents(run.state, CheckpointSettings(every_n_steps=1), experts_move=True)
    owners = ready.reassign(run.state)
    assert owners is not None
    assert owners.tolist() == [[0] * EXPERTS]


def test_a_parameter_without_elements_is_written_by_one_rank() -> None:
    parameters = {"place": nn.Parameter(torch.empty(0)), "weight": nn.Parameter(torch.ones(4, 2))}
    names: list[str] = []
    for rank in range(2):
        optimizers = [(torch.optim.SGD(parameters.values(), lr=0.1), [[*parameters.values()]])]
        module = nn.ParameterDict(parameters)
        state = TrainingState(module, [], optimizers, state_ranks={}, rank=rank, world_size=2)
        names += state.dense_of(state.dense_plan(1))
    assert names.count("dense/place/weight") == 1


def adapt(contents: SnapshotContents, *, overlap_s: float = 1.0) -> AdaptiveConfiguration:
    """Three experts, one of which is copied in a second."""
    copied_bytes = {0: 0, 1: 1, 2: 2, 3: 3}
    return contents.adapt(copy_s=3.0, persist_s=9.0, step_s=2.0, overlap_s=overlap_s, copied_bytes=copied_bytes)


@pytest.mark.parametrize(
    ("settings", "k_snapshot", "k_persist", "interval"),
    [
        ({}, 3, 3, 5),
        ({"k_snapshot": 2}, 2, 2, 3),
        ({"k_snapshot": 2, "k_persist": 1}, 2, 1, 2),
        ({"k_persist": 2}, 3, 2, 3),
        ({"k_snapshot": "auto"}, 1, 1, 2),
        ({"k_snapshot": "auto", "k_persist": 2}, 1, 1, 2),
        ({"k_snapshot": 2, "lossless": True}, 2, 2, 5),
    ],
)
def test_an_automatic_interval_leaves_the_numbers_of_experts_that_were_asked_for(
    settings: dict[str, Any], k_snapshot: int, k_persist: int, interval: int
) -> None:
    contents = Run(every_n_steps="auto", **settings).contents
    adapted = adapt(contents)
    assert (contents.k_snapshot, contents.k_persist) == (k_snapshot, k_persist)
    assert adapted.interval_steps == interval, "each is written before the next begins"


def test_all_experts_that_hide_are_written_where_nothing_else_is_asked_for() -> None:
    contents = Run(k_snapshot="auto").contents
    adapt(contents, overlap_s=2.0)
    assert (contents.k_snapshot, contents.k_persist) == (2, 2)


def test_predicted_bytes_are_those_of_the_experts_that_are_written_now() -> None:
    contents = Run(k_snapshot=1).contents
    for k in (1, 2, 3):
        contents.raise_k(k)
        assert contents.predicted_bytes == contents.rank_bytes(k)
    contents = Run(k_snapshot="auto").contents
    adapt(contents)
    assert contents.predicted_bytes == contents.rank_bytes(1) < contents.rank_bytes(3)
