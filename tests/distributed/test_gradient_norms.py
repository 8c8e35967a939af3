"""Norms of gradients over all ranks, parameter by parameter: those of one rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moe_lightning import GPTModule, OptimizerConfig, gradient_norms
from tests.distributed.harness import run_pooled, run_refused
from tests.distributed.training import TINY, OwnModule, train
from tests.parameters import slow


class Norms(pl.Callback):
    """Of one training's gradients, by our function or by Lightning's."""

    def __init__(self, norms: Any) -> None:
        self._norms = norms
        self.found: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.found = {name: float(norm) for name, norm in self._norms(pl_module).items()}


def norms(rank: int, world_size: int, strategy: dict[str, Any], of_lightning: bool = False) -> dict[str, float]:
    seen = Norms(partial(grad_norm, norm_type=2) if of_lightning else gradient_norms)
    result = train(rank, world_size, strategy=strategy, steps=2, callbacks=[seen])
    assert seen.found["grad_2.0_norm_total"] == pytest.approx(result["gradient_norms"][-1])
    return seen.found


@cache
def of_one_rank() -> dict[str, float]:
    found: dict[str, float] = run_pooled(1, norms, {}, True)[0]
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, {"dense": "fsdp"}),
        slow(4, {"dense": "hsdp", "replicas": 2}),
        slow(2, {"dense": "zero1", "replicas": 2}),
        slow(2, {"mesh": {"tp": 2}}),
    ],
)
def test_norms_are_those_of_one_rank(ranks: int, strategy: dict[str, Any]) -> None:
    for found in run_pooled(ranks, norms, strategy):
        assert found == pytest.approx(of_one_rank(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("function", [partial(norms, strategy={"dense": "fsdp"}, of_lightning=True)])
def test_stock_functions_name_ours(function: Any) -> None:
    assert_refused(r"grad_norm cannot read gradients .* use moe_lightning.gradient_norms", function)


# ---------------------------------------------------------------------- clipping by the user


class Clips(GPTModule):
    """Clips by torch's function where Lightning asks it to."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def clip_by_hand(module: nn.Module) -> None:
    """Clip by the norm of the gradients that this rank has."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((0.05 / norm).clamp(max=1.0))


class ClipsByHand(Clips):
    """Computes the norm by itself, of the gradients that a rank has."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        clip_by_hand(self)


class ClipsByHandBefore(GPTModule):
    """Does so in a hook for all kinds of things."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_by_hand(self)


class ClipsExpertsByHand(GPTModule):
    """Trains experts alone."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".experts." in name)

    def on_after_backward(self) -> None:
        clip_by_hand(self)


class ClipsByHandInACallback(pl.Callback):
    """Of one rank, beside a callback that changes nothing."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clip_by_hand(pl_module)


class ClipsByValue(Clips):
    """Needs no norm."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)


class ClipsManually(OwnModule):
    """Steps by itself."""

    clip = staticmethod(torch.nn.utils.clip_grad_norm_)

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip(self.parameters(), 0.05)
        optimizer.step()  # type: ignore[union-attr]


class ClipsManuallyByInfinity(ClipsManually):
    """Clips by the largest gradient."""

    clip = staticmethod(partial(torch.nn.utils.clip_grad_norm_, norm_type=float("inf")))  # type: ignore[assignment]


class BackwardByHand(ClipsManually):
    """Computes gradients past Lightning."""

    def manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()

    clip = staticmethod(lambda *_: None)  # type: ignore[assignment]


class ClipsInACallback(pl.Callback):
    """Clips where hooks see gradients."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 0.05)


class ClipsInTwoSteps(ClipsInACallback):
    """By torch's public functions for the norm and for the scaling."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        parameters = [p for p in pl_module.parameters() if p.grad is not None]
        norm = get_total_norm(p.grad.detach() for p in parameters if p.grad is not None)
        clip_grads_with_norm_(parameters, 0.05, norm)


class ClipsWithAnother(ClipsInACallback):
    """With a parameter that is none of the module's, and has the same gradient on every rank."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        other = nn.Parameter(torch.zeros(2))
        other.grad = torch.full((2,), 0.1)
        torch.nn.utils.clip_grad_norm_([other, *pl_module.parameters()], 0.05)


def gpt(kind: type[GPTModule]) -> pl.LightningModule:
    model = TINY | {"tie_embeddings": False, "router": {"aux_loss_coef": 0.0}}  # as pipelines need them
    return kind(model, OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant"))


def clipped(rank: int, world_size: int, kind: Any, strategy: dict[str, Any]) -> tuple[list[float], bytes]:
    """Losses, and the dense weights that every rank has."""
    with_module: dict[str, Any] = {"trainer": {"gradient_clip_val": None}}
    if issubclass(kind, pl.Callback):
        with_module["callbacks"] = [kind()] if kind is not ClipsByHandInACallback or rank == 0 else []
    else:
        with_module["own_module"] = partial(gpt, kind) if issubclass(kind, GPTModule) else kind
    result = train(rank, world_size, strategy=strategy, steps=3, **with_module)
    dense = [state.tobytes() for name, state in sorted(result["state"].items()) if ".experts." not in name]
    return result["losses"], b"".join(dense)


@cache
def clipped_on_one_rank(kind: type) -> list[float]:
    losses: list[float] = run_pooled(1, clipped, kind, {})[0][0]
    return losses


@pytest.mark.parametrize(
    ("kind", "ranks", "strategy"),
    [
        (Clips, 2, {}),
        (ClipsManually, 2, {"dense": "zero1", "replicas": 2}),
        slow(ClipsManually, 3, {}),
        slow(ClipsByValue, 2, {}),
        (ClipsInACallback, 2, {"dense": "fsdp"}),
        (ClipsInTwoSteps, 2, {}),
        slow(ClipsInTwoSteps, 2, {"dense": "fsdp"}),
        (ClipsWithAnother, 2, {}),
        (Clips, 2, {"mesh": {"tp": 2}}),
        slow(Clips, 4, {"mesh": {"tp": 2}, "dense": "fsdp"}),
    ],
)
def test_own_clipping_is_that_of_one_rank(kind: type, ranks: int, strategy: dict[str, Any]) -> None:
    for losses, _ in run_pooled(ranks, clipped, kind, strategy):
        assert losses == pytest.approx(clipped_on_one_rank(kind), rel=0, abs=1e-5)


def assert_refused(message: str, function: Callable[..., Any], *args: Any) -> None:
    """On all ranks."""
    for said in run_refused(2, function, *args):
        assert re.search(message, said, re.DOTALL)


ONE_REPLICATED = [[1, 1], [1, 0], [1, 0], [1, 0], [0, 1], [0, 1]]
"""Only the first expert is on both ranks."""


@pytest.mark.parametrize(
    ("kind", "strategy", "message"),
    [
        (
            ClipsByHand,
            {},
            r"configure_gradient_clipping of ClipsByHand leaves .*dense param.*self\.clip_gradients",
        ),
        (ClipsByHandBefore, {}, r"on_before_optimizer_step of ClipsByHandBefore leaves .* dense parameters different"),
        (
            ClipsByHandInACallback,
            {},
            r"on_after_backward of ClipsByHandInACallback .* dense parameters",
        ),
        (ClipsExpertsByHand, {"placement": ONE_REPLICATED}, r"on_after_backward of .* replicas of experts different"),
        (ClipsManuallyByInfinity, {}, r"norm_type=inf is not computed over all ranks: use norm_type=2"),
    ],
)
def test_clipping_by_what_one_rank_knows_is_refused_before_the_update(
    kind: type, strategy: dict[str, Any], message: str
) -> None:
    assert_refused(message, clipped, kind, strategy)


class ExpertsByHand(BackwardByHand):
    """Trains experts of one rank each, whose gradients no other rank has to compare with."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for name, p in self.named_parameters() if ".experts." in name], lr=0.1)


@pytest.mark.parametrize("kind", [BackwardByHand, ExpertsByHand])
def test_a_backward_pass_past_the_strategy_is_named(kind: type) -> None:
    assert_refused(r"call self\.manual_backward\(loss\) instead", clipped, kind, {})


def test_clipping_by_torch_is_refused_in_stages() -> None:
    message = r"know one stage of mesh.pp only: use self\.clip_gradients"
    assert_refused(message, clipped, Clips, {"mesh": {"pp": 2}, "timeout_s": 20})
