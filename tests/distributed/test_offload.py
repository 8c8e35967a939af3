"""Updates on the host under every `strategy.dense`: a CPU that is taken for a device goes through all copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.state import tensors
from moe_lightning.strategies.optimizer_checks import require_host_updates
from tests.distributed.same_training import on_one_world
from tests.distributed.training import train
from tests.parameters import slow

STEPS = 4
SAVED = 2


class Pretended(pl.Callback):
    """While it trains, the CPU is a device: how many copies on the host there were."""

    def __init__(self) -> None:
        self.copies = 0

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        tensors.lies_on_a_device = lambda parameter: True
        tensors.page_locked = lambda shape, dtype: torch.empty(*shape, dtype=dtype)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.copies = len(trainer.strategy.state.updates._copies)  # type: ignore[attr-defined]


def on_host(rank: int, ranks: int, **options: Any) -> dict[str, Any]:
    pretended = Pretended()
    options["strategy"] = {"offload_optimizer": True, **options.get("strategy", {})}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lies_on_a_device", "page_locked"):  # what the callback replaces ends with the training
            patch.setattr(tensors, name, getattr(tensors, name))
        return train(rank, ranks, callbacks=[pretended], **options) | {"copies": pretended.copies}


def either(rank: int, ranks: int, *, offloads: bool, **options: Any) -> dict[str, Any]:
    return (on_host if offloads else train)(rank, ranks, **options)


@pytest.mark.parametrize(
    ("ranks", "choices", "options"),
    [
        (2, ("zero1",), {}),
        slow(2, ("fsdp",), {}),
        slow(1, ("ddp",), {"trainer": {"accumulate_grad_batches": 2}}),
        slow(2, ("ddp", "zero1"), {"optimizer": {"name": "adafactor", "lr": 1e-2}}),
        slow(2, ("ddp", "zero1"), {"optimizer": {"name": "muon"}}),
        slow(2, ("ddp", "fsdp"), {"optimizer": {"fused": True}}),
        slow(2, ("ddp", "fsdp", "zero1"), {"model": {"dropout": 0.1}, "trainer": {"precision": "bf16-mixed"}}),
        slow(4, ("ddp", "zero1", "fsdp", "hsdp"), {}),
    ],
)
def test_losses_norms_and_checkpoints_are_the_same_bits(
    ranks: int, choices: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    for dense in choices:
        paths = [str(tmp_path / f"{dense}-{offloads}.ckpt") for offloads in (False, True)]
        common = {"strategy": {"dense": dense}, **options}
        cases = [
            *({"offloads": o, "steps": SAVED, "save_to": paths[o], **common} for o in (False, True)),
            *({"offloads": o, "steps": STEPS, "ckpt_path": paths[not o], **common} for o in (False, True)),
        ]
        first, first_there, second, second_there = on_one_world(ranks, either, cases)
        for plain, offloaded in zip(first + second, first_there + second_there, strict=True):
            assert offloaded["copies"] > 0
            assert len(plain["losses"]) >= SAVED
            assert offloaded["losses"] == plain["losses"]
            assert offloaded["gradient_norms"] == plain["gradient_norms"]
            for name, values in plain["state"].items():
                np.testing.assert_array_equal(offloaded["state"][name], values, err_msg=name)
        _assert_same_optimizers(*paths)


def _assert_same_optimizers(plain: str, offloaded: str) -> None:
    one, other = (torch.load(path, weights_only=True)["optimizer_states"][0]["state"] for path in (plain, offloaded))
    assert one.keys() == other.keys()
    for number, state in one.items():
        assert state.keys() == other[number].keys()
        assert all(torch.equal(value, other[number][name]) for name, value in state.items())


class Foreign(torch.optim.SGD):
    """An optimizer of a package that is not known."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot update parameters on the host"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "AdamW cannot .* use AdamW without capturable"),
        (lambda p: Foreign(p, lr=0.1), "Foreign cannot update parameters on the host"),
    ],
)
def test_optimizers_that_cannot_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        require_host_updates([make([nn.Parameter(torch.ones(2, 3))])])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_others_are_not_even_with_a_warm_up(make: Any) -> None:
    require_host_updates([make([nn.Parameter(torch.ones(2, 3))], lr=0.0)])  # raises nothing
