"""A rank whose losses or gradients differ from those of the others is named; ranks that see the same data never are."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.strategies.rank_outliers import Outlier, RankMedian, outliers
from tests.distributed.harness import run_ranks
from tests.distributed.training import TINY, OwnModule, RandomTokens, make_trainer
from tests.parameters import slow

WRONG = 2
STEPS = 280  # gradients of every eighth are looked at


def medians(numbers_RN: np.ndarray) -> list[RankMedian | None]:
    return [RankMedian.of(own.tolist()) for own in numbers_RN]


@pytest.mark.parametrize("ranks", [3, 4, 7, 64])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "falling"])
def test_ranks_that_draw_from_one_distribution_are_alike(ranks: int, kind: str) -> None:
    draw = np.random.default_rng(ranks)
    for _ in range(max(30, 900 // ranks)):
        noise = draw.standard_t(2, (ranks, 64)) if kind == "heavy-tailed" else draw.normal(size=(ranks, 64))
        trend = np.linspace(2, 0, 64) if kind == "falling" else 0.0
        assert outliers(medians(3 + 0.3 * noise + trend), [0] * ranks) == []


def test_the_one_that_differs_is_found_among_its_kind_only() -> None:
    draw = np.random.default_rng(0)
    for ranks in (3, 5, 64):
        numbers = draw.normal(3.0, 0.1, (ranks, 64))
        numbers[WRONG] *= 1.3
        (found,) = outliers(medians(numbers), [0] * ranks)
        assert isinstance(found, Outlier)
        assert found.rank == WRONG
        assert found.value > found.usual + found.most
        assert outliers(medians(numbers), [*range(ranks)]) == []
    mixed = np.concatenate([numbers[:3], 10 * draw.normal(3.0, 0.1, (3, 64))])  # stages of a pipeline, say
    assert [each.rank for each in outliers(medians(mixed), [0, 0, 0, 1, 1, 1])] == [WRONG]


def test_two_ranks_or_few_numbers_show_nothing() -> None:
    assert RankMedian.of([1.0] * 15) is None
    assert outliers([RankMedian(1.0, 0.0), RankMedian(9.0, 0.0)], [0, 0]) == []
    assert outliers([RankMedian(1.0, 0.0), RankMedian(9.0, 0.0), None], [0, 0, 0]) == []


class OtherData(OwnModule):
    """One rank has losses of another size."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 2.0 if self.trainer.global_rank == WRONG else loss


class WrongGradients(OwnModule):
    """One rank computes gradients that are twice too large."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return 2 * loss - loss.detach() if self.trainer.global_rank == WRONG else loss


def warnings_of(
    rank: int, world_size: int, module: Callable[[], pl.LightningModule], strategy: dict[str, Any]
) -> list[str]:
    text = io.StringIO()
    trainer = make_trainer(
        rank, world_size, strategy, callbacks=[Telemetry()], max_steps=STEPS, log_every_n_steps=STEPS // 4
    )
    with contextlib.redirect_stderr(text):
        trainer.fit(module(), DataLoader(RandomTokens(6 * STEPS), batch_size=6))
    return re.findall("warning: rank.*", text.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "what"), [(OtherData, "median loss"), slow(WrongGradients, "median norm of its own gradients")]
)
def test_a_rank_that_differs_is_named_once(module: type[OwnModule], what: str) -> None:
    found = run_ranks(3, warnings_of, module, {})
    assert found[1:] == [[], []]
    (line,) = found[0]
    assert line.startswith(f"warning: rank {WRONG} has a {what} of ")
    assert "check_arithmetic_every=1" in line


def gpt() -> GPTModule:
    return GPTModule({**TINY, "tie_embeddings": False}, OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"))


CALM: list[Any] = [
    (3, {}),
    slow(3, {"dense": "zero1"}),
    slow(3, {"dense": "fsdp"}),
    slow(6, {"mesh": {"tp": 2}}),
    slow(6, {"mesh": {"cp": 2}}),
    slow(6, {"mesh": {"pp": 2}, "micro_batches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), CALM)
def test_ranks_alike_are_not_named(ranks: int, strategy: dict[str, Any]) -> None:
    assert run_ranks(ranks, warnings_of, gpt, strategy) == [[]] * ranks
