"""Ranks compute each other's products again: one that computes wrong is named, and calm runs give no alarm."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.silent.products import WrongProducts
from moe_lightning.strategies import arithmetic_check
from moe_lightning.strategies.arithmetic_check import Dispute
from moe_lightning.strategies.products import Element, Products
from tests.chaos.elastic_worker import state_digests
from tests.distributed.harness import run_pooled
from tests.distributed.training import OwnModule, RandomTokens, Warned, make_trainer, train
from tests.parameters import slow


class Wrong(pl.Callback):
    """Makes all products of a rank wrong in some steps."""

    def __init__(self, rank: int, steps: range) -> None:
        self.rank, self.steps = rank, steps
        self.mode = WrongProducts(np.random.default_rng(0))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        is_on = trainer.global_rank == self.rank and trainer.global_step in self.steps
        self.mode.number = -1 if is_on else None

    def on_train_start(self, *_: Any) -> None:
        self.mode.__enter__()

    def on_train_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)


def fit(rank: int, world_size: int, faulty: int, steps: range, every: int) -> tuple[int, list[str]]:
    """Wrong products that checks have found on this rank, and what was said here."""
    warned = Warned()
    logging.getLogger("moe_lightning").addHandler(warned)
    options = {"check_arithmetic_every": every, "replicas": 2}
    trainer = make_trainer(rank, world_size, options, callbacks=[Wrong(faulty, steps)], max_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(OwnModule(), DataLoader(RandomTokens(96), batch_size=12))
    logging.getLogger("moe_lightning").removeHandler(warned)
    times = trainer.strategy.update.arithmetic_check.times_wrong  # type: ignore[attr-defined]
    return times, [*warned.lines, *(line for each in caught if "computed" in (line := str(each.message)))]


@pytest.mark.parametrize(("ranks", "faulty"), [(2, 0), (2, 1), (3, 2)])
def test_a_rank_that_computes_wrong_is_named_at_the_next_check(ranks: int, faulty: int) -> None:
    results = run_pooled(ranks, fit, faulty, range(2, 3), 2)
    assert [times for times, _ in results] == [int(rank == faulty) for rank in range(ranks)]
    (line,) = results[0][1]
    assert line.startswith(f"rank {faulty} has computed ")
    assert " in the step after step 2: look at its processor; this step changes nothing" in line
    assert all(lines == [] for _, lines in results[1:])


def fit_calm(
    rank: int, world_size: int, every: int, strategy: dict[str, Any], options: dict[str, Any], steps: int
) -> tuple[int, Any]:
    """Errors that checks have found, and the state at the end."""
    found = 0
    states = States()
    model = {"tie_embeddings": False, "router": {"top_k": 2, "bias_update_rate": 0.01}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* computed ")
        train(
            rank, world_size, model=model, strategy={"check_arithmetic_every": every, **strategy}, trainer=options,
            steps=steps, dataset_size=24, callbacks=[states],
        )  # fmt: skip
    return found, states.last


class States(pl.Callback):
    """Digests of the last step's state, and the checks that were made."""

    def __init__(self) -> None:
        self.last: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.last = state_digests(trainer.strategy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        (2, {"replicas": 2}, {}),
        slow(2, {"replicas": 2}, {"precision": "bf16-mixed"}),
        slow(2, {}, {"precision": "16-mixed"}),
        slow(2, {"dense": "zero1"}, {}),
        slow(2, {"dense": "fsdp"}, {}),
        (2, {"mesh": {"tp": 2}}, {}),
        slow(2, {"mesh": {"cp": 2}}, {"precision": "bf16-mixed"}),
        slow(4, {"dense": "hsdp", "shard_size": 2}, {}),
        slow(4, {"mesh": {"pp": 2}, "dense": "zero1"}, {"precision": "bf16-mixed"}),
        slow(2, {"mesh": {"pp": 2}}, {"accumulate_grad_batches": 2}),
        slow(4, {"mesh": {"tp": 2}, "dense": "fsdp"}, {}),
    ],
    ids=str,
)
def test_calm_runs_give_no_alarm_and_stay_as_they_are(
    ranks: int, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    checked = run_pooled(ranks, fit_calm, 1, strategy, options, 3)
    assert checked == run_pooled(ranks, fit_calm, 0, strategy, options, 3)


def count_exchanges(rank: int, world_size: int, every: int) -> tuple[int, int]:
    """Exchanges of checks, and modes of torch that are left at the end of steps."""
    counted, left = 0, 0
    stock = arithmetic_check.transfer

    def counting(*args: Any) -> int:
        nonlocal counted
        counted += 1
        return stock(*args)

    class Left(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            nonlocal left
            left += torch._C._len_torch_dispatch_stack()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic_check, "transfer", counting)
        trainer = make_trainer(rank, world_size, {"check_arithmetic_every": every}, callbacks=[Left()], max_steps=8)
        trainer.fit(OwnModule(), DataLoader(RandomTokens(96), batch_size=12))
    return counted, left


@pytest.mark.parametrize(("every", "exchanges"), [(3, 2), (0, 0)])
def test_steps_that_are_not_checked_exchange_nothing(every: int, exchanges: int) -> None:
    assert run_pooled(2, count_exchanges, every) == [(exchanges, 0)] * 2


# ---------------------------------------------------------------------- products


class Parts(nn.Module):
    """Products of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).relu())
        scores = torch.bmm(h, h.transpose(1, 2))
        return torch.addmm(scores[0], h[0], h[1].t(), beta=0.5, alpha=2.0).sum() + scores.square().sum()


def screened(number: int | None, dtype: torch.dtype = torch.float32) -> tuple[Element, int, int]:
    """The worst element where one product is wrong, the number of products, and of flips."""
    torch.manual_seed(0)
    module, wrong = Parts().to(dtype), WrongProducts(np.random.default_rng(number))
    products, wrong.number = Products(seed=0), number
    x = torch.randn(3, 20, 24, dtype=dtype)
    with wrong, products:
        module(x).backward()
    return products.worst, wrong.count, wrong.flips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_wrong_element_of_any_product_is_found(dtype: torch.dtype) -> None:
    worst, count, _ = screened(None, dtype)
    assert count > 8
    assert not worst.differ(worst.value, worst.computed)
    for number in range(count):
        worst, _, flips = screened(number, dtype)
        assert flips == 1
        assert worst.differ(worst.value, worst.computed) or not math.isfinite(worst.rounding), number
        assert worst.again == worst.computed


def test_an_element_knows_the_shapes_of_its_product() -> None:
    assert screened(3)[0].place == "a product of [20, 16] and [16, 20]"


# ---------------------------------------------------------------------- who is wrong

ONE = Element(value=1.0, again=1.0, terms=torch.ones(2, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("value", "again", "judged", "votes", "wrong"),
    [
        (9.0, 1.0, 1.0, [1.0, 1.0, 1.0], (0,)),  # once
        (9.0, 8.0, 1.0, [7.0, 1.0, 1.0], (0,)),  # always
        (1.0, 9.0, 1.0, [1.0, 1.0, 1.0], (0,)),
        (1.0, 1.0, 9.0, [1.0, 1.0, 1.0], (1,)),
        (1.0, 1.0, 9.0, [1.0, 8.0, 1.0], (1,)),
        (9.0, 1.0, 8.0, [1.0, 1.0, 1.0], (0, 1)),
        (9.0, 9.0, 1.0, [9.0, 1.0, 1.0], (0,)),
        (1.0, 1.0, 9.0, [1.0, 9.0, 1.0], (1,)),
        (9.0, 1.0, 1.0, [1.0, 1.0], (0,)),
        (9.0, 8.0, 1.0, [7.0, 1.0], (0,)),
        (1.0, 1.0, 9.0, [1.0, 8.0], (1,)),
        (9.0, 9.0, 1.0, [9.0, 1.0], ()),  # two ranks that each stand by their result
        (1.0, 1.0, math.inf, [1.0, math.nan], (1,)),
    ],
)
def test_the_majority_decides_or_who_differs_from_himself(
    value: float, again: float, judged: float, votes: list[float], wrong: tuple[int, ...]
) -> None:
    element = Element(value=value, again=again, terms=ONE.terms)
    dispute = Dispute(suspect=0, judge=1, element=element, judged=judged)
    assert dispute.wrong_ranks(votes) == wrong
    assert (" to decide" in dispute.describe(votes)) == (not wrong)


@pytest.mark.slow
def test_ranks_that_compute_right_are_never_named() -> None:
    for size in (3, 4, 5):
        places = itertools.product(range(size), range(size), itertools.product([1.0, 5.0, 6.0], repeat=4))
        for bad, suspect, results in places:
            judge, (vote, value, again, judged) = (suspect + 1) % size, results
            votes = [vote if rank == bad else 1.0 for rank in range(size)]
            value, again = (value, again) if suspect == bad else (1.0, 1.0)
            element = Element(value=value, again=again, terms=ONE.terms)
            dispute = Dispute(suspect, judge, element, judged if judge == bad else 1.0)
            assert set(dispute.wrong_ranks(votes)) <= {bad}
