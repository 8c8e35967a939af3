"""Weights that are gathered in what autocast rounds them to: the same training as with weights gathered in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies import fsdp
from tests.distributed.harness import run_pooled
from tests.distributed.same_training import CASES, assert_replicas_identical
from tests.distributed.training import BRIEF_ACCUMULATION, train
from tests.parameters import slow

MIXED = {"precision": "bf16-mixed"}


class Gathered(pl.Callback):
    """What modules compute with, and what rows and gradients are in; calls the module once more at the end."""

    def __init__(self) -> None:
        self.computed: set[tuple[str, torch.dtype]] = set()
        self.kept: set[torch.dtype] = set()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for part in pl_module.modules():
            if isinstance(part, nn.Linear | nn.LayerNorm | nn.Embedding):
                part.register_forward_hook(
                    lambda part, *_: self.computed.add((type(part).__name__, part.weight.dtype))  # type: ignore[misc]
                )

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.kept |= {t.dtype for p in pl_module.parameters() for t in (p, p.grad) if t is not None}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            pl_module(torch.zeros(1, 4, dtype=torch.int64))


def both(rank: int, world_size: int, *, strategy: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """A training with weights gathered in float32, and as they are gathered by themselves."""
    own, results = fsdp._autocasts, []
    for autocasts in (lambda module: False, own):
        seen = Gathered()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "_autocasts", autocasts)
            result = train(rank, world_size, strategy=strategy, callbacks=[seen], **options)
        results.append(result | {"computed": seen.computed, "kept": seen.kept})
    return results


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        (2, {"dense": "fsdp", "replicas": 2}, {"steps": 3, "trainer": MIXED}),
        slow(
            4, {"dense": "hsdp"}, BRIEF_ACCUMULATION | {"trainer": MIXED | BRIEF_ACCUMULATION["trainer"]},
        ),
        slow(3, {"dense": "fsdp"}, CASES["llama"] | {"steps": 8, "trainer": MIXED}),
        slow(
            2, {"dense": "fsdp"}, {"model": {"tie_embeddings": True}, "steps": 6, "trainer": MIXED},
        ),
    ],
)  # fmt: skip
def test_gathered_in_bfloat16_the_training_is_the_same_to_the_bit(
    ranks: int, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    alone = run_pooled(1, partial(train, **options))[0]
    results = run_pooled(ranks, partial(both, strategy=strategy, **options))
    for stock, ours in results:
        assert ours["losses"] == stock["losses"]
        assert ours["gradient_norms"] == stock["gradient_norms"]
        assert ("Linear", torch.bfloat16) not in stock["computed"]
        assert ("Linear", torch.bfloat16) in ours["computed"]
        assert {dtype for kind, dtype in ours["computed"] if kind != "Linear"} == {torch.float32}
        assert ours["kept"] == {torch.float32}
        np.testing.assert_allclose(ours["losses"], alone["losses"], rtol=0, atol=0.02)
    for name, values in results[0][0]["state"].items():
        np.testing.assert_array_equal(results[0][1]["state"][name], values, err_msg=name)
    assert_replicas_identical([ours for _, ours in results])


def test_other_parameters_of_a_layer_are_gathered_as_they_are() -> None:
    layer = nn.Linear(2, 2)
    assert fsdp._are_of_linear([(layer, "weight")])
    assert not fsdp._are_of_linear([(layer, "weight_g")])
    assert not fsdp._are_of_linear([(layer, "weight"), (nn.Embedding(2, 2), "weight")])


def test_a_layer_outside_of_autocast_is_refused_in_a_sentence() -> None:
    layer = nn.Linear(2, 2).bfloat16()
    fsdp._require_autocast(layer.float(), ())
    with torch.autocast("cpu"):
        fsdp._require_autocast(layer.bfloat16(), ())
    with pytest.raises(ConfigurationError, match=r"outside of autocast.* call it inside of"):
        fsdp._require_autocast(layer, ())
