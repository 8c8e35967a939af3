"""Directory checkpoints refuse optimizers whose groups hold other parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from moe_lightning.checkpoint.loader import CheckpointSource
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.errors import CheckpointError
from moe_lightning.state.table import State


class Saved:
    """A checkpoint of the objects of a state."""

    path = Path("step-00000001")

    def __init__(self, state: State) -> None:
        self._objects = state.objects()
        self._shapes = state.moment_shapes()

    def read_object(self, key: str) -> Any:
        return self._objects[key]

    def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self._objects if key.startswith(prefix)]

    def shapes(self) -> Any:
        return self._shapes


def state_of(*groups: list[str]) -> TrainingState:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    named = dict(module.named_parameters())
    parameters = [[named[name] for name in group] for group in groups]
    rates = [{"params": group, "lr": 0.1 * number} for number, group in enumerate(parameters, 1)]
    optimizer = torch.optim.SGD(cast(Any, rates))
    return TrainingState(module, [], [(optimizer, parameters)], state_ranks={}, rank=0, world_size=1)


WEIGHTS, BIASES = ["0.weight", "1.weight"], ["0.bias", "1.bias"]


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([BIASES, WEIGHTS], r"parameter 0 of the checkpoint's optimizer is 0.weight, and of this one 0.bias"),
        ([[*WEIGHTS, BIASES[0]], BIASES[1:]], r"groups of \[2, 2\] tensors in optimizer 0, this run of \[3, 1\]: use"),
    ],
)
def test_groups_of_other_parameters_are_refused(groups: list[list[str]], sentence: str) -> None:
    saved = cast(CheckpointSource, Saved(state_of(WEIGHTS, BIASES)))
    with pytest.raises(CheckpointError, match=sentence):
        state_of(*groups).restore_optimizers(saved)


def test_the_same_groups_are_restored() -> None:
    saved = cast(CheckpointSource, Saved(state_of(WEIGHTS, BIASES)))
    own = state_of(WEIGHTS, BIASES)
    optimizer, _ = own.optimizers[0]
    optimizer.param_groups[1]["lr"] = 9.0
    own.restore_optimizers(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
