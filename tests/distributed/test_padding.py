"""Padding reaches no expert and counts nowhere: not in statistics, auxiliary losses, tokens, nor in the same loss on
any number of ranks.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.data.instructions import InstructionData
from moe_lightning.moe.layer import moe_layers
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer
from tests.parameters import slow

LENGTH, SAMPLES, BATCH, STEPS, TOP_K = 16, 20, 12, 3, 2
ROUTER = {"top_k": TOP_K, "aux_loss_coef": 0.5, "z_loss_coef": 0.1, "bias_update_rate": 0.01}


def length_of(index: int) -> int:
    """Of a sample's tokens; the first ranks get long ones."""
    return 1 + (index * index) % LENGTH


class Padded(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Samples of unlike lengths, whose padding holds anything; `full` ones have none."""

    def __init__(self, *, full: bool = False, seed: int = 0, longest: int = LENGTH) -> None:
        self.tokens, self.full, self.seed, self.longest = RandomTokens(SAMPLES), full, seed, longest

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = self.tokens[index]
        is_token = torch.arange(LENGTH) < (LENGTH if self.full else min(self.longest, length_of(index)))
        noise = torch.randint(64, x.shape, generator=torch.Generator().manual_seed(self.seed + index))
        return torch.where(is_token, x, noise), y.masked_fill(~is_token, -100), is_token


class Counts(pl.Callback):
    """Assignments of each step by layer and expert."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.steps.append([layer.statistics.tokens_NE.sum(dim=0).tolist() for layer in moe_layers(pl_module)])  # type: ignore[union-attr]


def train(rank: int, world_size: int, dataset: Dataset[Any], *, cp: int = 1, **options: Any) -> dict[str, Any]:
    recorder, counts, telemetry = Recorder(), Counts(), Telemetry(peak_flops_per_s=1e12)
    options = {"max_steps": STEPS, "gradient_clip_val": 1.0} | options
    strategy = {"replicas": min(2, world_size), "mesh": {"cp": cp}}
    trainer = make_trainer(rank, world_size, strategy, callbacks=[recorder, counts, telemetry], **options)
    module = GPTModule(TINY | {"router": ROUTER}, OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"))
    trainer.fit(module, DataLoader(dataset, batch_size=BATCH))
    return {
        "losses": recorder.losses,
        "norms": recorder.gradient_norms,
        "counts": counts.steps,
        "seen": telemetry.tokens_seen,
        "flops": module.flops_per_batch,
        "is_mfu_logged": "train/mfu_ratio" in trainer.callback_metrics,
    }


@cache
def alone(micros: int = 1) -> dict[str, Any]:
    return train(0, 1, Padded(), accumulate_grad_batches=micros)


def tokens_of_step(step: int) -> int:
    first = step * BATCH % (SAMPLES + -SAMPLES % BATCH)
    return sum(length_of(index) for index in range(first, min(first + BATCH, SAMPLES)))


def test_only_tokens_are_routed_and_counted() -> None:
    found = alone()
    expected = [tokens_of_step(step) for step in range(STEPS)]
    for layer in range(2):
        assert [sum(counts[layer]) for counts in found["counts"]] == [TOP_K * tokens for tokens in expected]
    assert found["seen"] == sum(expected)
    full = train(0, 1, Padded(full=True))
    assert found["flops"] * BATCH * LENGTH == full["flops"] * expected[-1]


def test_what_padding_holds_changes_nothing() -> None:
    other = train(0, 1, Padded(seed=1000))
    assert other == alone()


def test_a_mask_without_padding_changes_no_bit() -> None:
    class Unmasked(Padded):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[:2]

    assert train(0, 1, Padded(full=True)) == train(0, 1, Unmasked(full=True))


@pytest.mark.parametrize(
    ("world_size", "cp", "micros"),
    [
        slow(4, 1, 1),
        slow(4, 2, 2),  # the second parts of short sequences hold no token
        slow(2, 1, 1),
        (2, 1, 2),
        slow(4, 4, 1),
    ],
)
def test_the_loss_does_not_depend_on_the_world(world_size: int, cp: int, micros: int) -> None:
    expected = alone(micros)
    for result in run_pooled(world_size, partial(train, dataset=Padded(), cp=cp, accumulate_grad_batches=micros)):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-4)
        assert result["counts"] == expected["counts"]
        assert result["seen"] == expected["seen"]


def test_a_rank_whose_part_of_every_sequence_is_padding_logs_what_others_log() -> None:
    results = run_pooled(2, partial(train, dataset=Padded(longest=LENGTH // 2), cp=2))
    assert [result["flops"] > 0 for result in results] == [True, False]
    assert all(result["is_mfu_logged"] for result in results)


def test_instructions_train_on_their_tokens_only(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [{"prompt": "p" * (1 + i % 5), "response": "r" * (2 * i % 30)} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts, telemetry = Counts(), Telemetry()
    trainer = make_trainer(0, 1, callbacks=[counts, telemetry], max_steps=4, limit_val_batches=0)
    data = InstructionData(path=path, context_length=64, global_batch_size=4, end_token="\0")
    trainer.fit(GPTModule(TINY | {"vocab_size": 256, "context_length": 64}), datamodule=data)
    longest = len(b"<|user|>\n\n<|assistant|>\n\0") + 5 + 30
    assert telemetry.tokens_seen == sum(sum(layers[0]) for layers in counts.steps) / TOP_K <= 16 * longest


def measured(rank: int, world_size: int) -> dict[str, float]:
    trainer = make_trainer(rank, world_size, callbacks=[Telemetry(peak_flops_per_s=1e12)], max_steps=2)
    module = GPTModule(TINY, OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"))
    trainer.fit(module, DataLoader(RandomTokens(14), batch_size=12))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "train/loss"}


def test_a_rank_without_samples_logs_what_others_log() -> None:
    """The last of its steps has two samples, so one of three ranks has no work to count."""
    first, *others = run_pooled(3, measured)
    assert others == [first] * 2
    losses = {name: value for name, value in measured(0, 1).items() if name.endswith("auxiliary_loss")}
    assert len(losses) == 2
    assert {name: first[name] for name in losses} == pytest.approx(losses, rel=1e-5)
    assert first["train/mfu_ratio"] > 0
    assert first["comm/exchange_ms"] > 0
