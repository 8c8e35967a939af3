"""Auxiliary losses against their formulas, and as means that slices of a batch add up to."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_lightning.moe.adapters import add_adapters
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import (
    _warn_of_lost_gradient,
    auxiliary_loss,
    global_mean,
    global_sum,
    load_balancing_loss,
    mean_over_targets,
    num_targets,
    router_z_loss,
    warn_of_unused_loss,
)
from moe_lightning.moe.randomness import SampleStream


def test_load_balancing_formula() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.2]])  # the second row sums to 0.4, as sigmoid scores may
    counts = torch.tensor([3, 1, 0])
    means = [(0.5 + 0.25) / 2, (0.25 + 0.25) / 2, (0.25 + 0.5) / 2]
    expected = 3 * (3 / 4 * means[0] + 1 / 4 * means[1])
    assert float(load_balancing_loss(scores, counts)) == pytest.approx(expected, rel=1e-6)


def test_slices_with_global_counts_average_to_the_batch() -> None:
    scores, counts = torch.rand(12, 5), torch.tensor([3, 0, 9, 7, 5])
    whole = load_balancing_loss(scores, counts)
    parts = [(load_balancing_loss(scores[a:b], counts), (b - a) / 12) for a, b in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(sum(loss * share for loss, share in parts), whole)


def test_nothing_routed_is_no_loss() -> None:
    assert float(load_balancing_loss(torch.rand(3, 4), torch.zeros(4, dtype=torch.int64))) == 0.0


def test_z_loss_formula() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    expected = (math.log(2) ** 2 + math.log(math.e + math.e**2) ** 2) / 2
    assert float(router_z_loss(logits)) == pytest.approx(expected, rel=1e-6)
    assert torch.isfinite(router_z_loss(torch.tensor([[1e4, -1e4]])))


def test_a_model_sums_the_losses_of_its_layers() -> None:
    model = nn.Sequential(
        MoELayer(8, 8, 4, {"aux_loss_coef": 0.5, "z_loss_coef": 0.25}),
        MoELayer(8, 8, 4, {"aux_loss_coef": 0.0}),
        MoELayer(8, 8, 4, {"aux_loss_coef": 0.0, "z_loss_coef": 2.0}),
    )
    x = torch.randn(10, 8)
    model(x)
    first, second, third = (layer.auxiliary_loss for layer in model)
    assert second is None
    torch.testing.assert_close(auxiliary_loss(model), first + third)
    routing = model[0].router(x)
    expected = 0.5 * load_balancing_loss(routing.scores_TE, routing.tokens_per_expert_E)
    torch.testing.assert_close(first, expected + 0.25 * router_z_loss(routing.logits_TE))


def test_a_module_without_parameters_has_no_loss_and_does_not_end_the_epoch() -> None:
    assert auxiliary_loss(nn.Identity()) == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("loss", ["aux_loss_coef", "z_loss_coef"])
def test_reentrant_recomputation_loses_the_gradient_with_a_warning(
    loss: str, use_reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_lost_gradient.cache_clear()
    layer = MoELayer(8, 8, 4, router={"aux_loss_coef": 0.0, "bias_update_rate": 0.1, loss: 1.0})
    for _ in range(2):
        y = checkpoint(layer, torch.randn(6, 8, requires_grad=True), use_reentrant=use_reentrant)
        auxiliary = auxiliary_loss(layer)
        (y.square().mean() + auxiliary).backward()
    assert auxiliary.requires_grad is not use_reentrant
    assert layer.router.unbalanced_tokens_E.sum() == 2 * 6 * 2  # type: ignore[attr-defined]  # once for each choice
    told = [text for text in caplog.messages if "use_reentrant=False" in text]
    assert len(told) == use_reentrant


def test_a_frozen_router_loses_no_gradient(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_lost_gradient.cache_clear()
    layer = MoELayer(8, 8, 4)
    layer.router.requires_grad_(False)  # type: ignore[attr-defined]
    layer(torch.randn(6, 8))
    assert not auxiliary_loss(layer).requires_grad
    assert not caplog.messages


@pytest.mark.parametrize("uses", [True, False])
def test_a_loss_that_nobody_adds_is_told_once(uses: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unused_loss.cache_clear()
    layers = [MoELayer(8, 8, 4), MoELayer(8, 8, 4, router={"aux_loss_coef": 0.0})]
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    for _ in range(30):
        y = torch.randn(6, 8)
        for layer in layers:
            y = layer(y)
        loss = y.square().mean()
        (loss + auxiliary_loss(torch.nn.ModuleList(layers)) if uses else loss).backward()
        optimizer.step()
    told = [text for text in caplog.messages if "was in no loss of 20 steps" in text]
    assert len(told) == (not uses)


@pytest.mark.parametrize("trained", ["lora_a", "head"])
def test_steps_of_a_layer_with_frozen_experts_are_told_apart(trained: str) -> None:
    layer, head = MoELayer(8, 8, 4), torch.nn.Linear(8, 1)
    if trained == "lora_a":
        add_adapters(layer, {"rank": 2})
    else:
        layer.requires_grad_(False)
    parameters = [p for module in (layer, head) for p in module.parameters() if p.requires_grad]
    optimizer, x = torch.optim.SGD(parameters, lr=0.0), torch.randn(6, 8)
    losses = []
    for _ in range(3):
        loss = head(layer(x)).square().mean() + auxiliary_loss(layer)
        losses.append(float(auxiliary_loss(layer)))
        loss.backward()
        optimizer.step()
    assert losses == losses[:1] * 3


def test_the_loss_of_float64_logits_is_float64() -> None:
    logits, targets = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(7, (3, 5))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(mean_over_targets(logits, targets), expected, rtol=1e-14, atol=0)


def test_evaluation_has_no_auxiliary_loss() -> None:
    layer = MoELayer(8, 8, 4)
    layer(torch.randn(10, 8))
    assert layer.auxiliary_loss is not None
    layer.eval()(torch.randn(10, 8))
    loss = auxiliary_loss(layer)
    assert loss.shape == ()
    assert float(loss) == 0.0


def test_passes_beside_the_trained_one_change_nothing() -> None:
    """As sampling, a teacher or reference logits in a training step."""
    layer, x, other = MoELayer(8, 8, 4, {"bias_update_rate": 0.1}), torch.randn(10, 8), torch.randn(6, 8)
    for _ in range(2):
        with torch.no_grad():
            layer(other)
        out = layer(x)
        trained, statistics = auxiliary_loss(layer), layer.statistics
        with torch.no_grad():
            layer(other)
        layer.eval()(other)
        layer.train()
        assert auxiliary_loss(layer) is not trained
        assert torch.equal(auxiliary_loss(layer), trained)
        assert layer.statistics is statistics
        (out.sum() + auxiliary_loss(layer)).backward()
    assert layer.router.unbalanced_tokens_E.sum() == 2 * 2 * 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_driven", [True, False])
def test_several_passes_of_a_micro_batch_are_added(is_driven: bool) -> None:
    """As in siamese networks and layers that share weights; a backward pass in between begins another sum."""
    layer = MoELayer(8, 8, 4)
    stream: SampleStream = layer.router.stream  # type: ignore[assignment]
    parts, single = [torch.randn(4, 8), torch.randn(6, 8)], []
    for part in parts:
        layer(part)
        single.append(layer.auxiliary_loss.detach())
        layer.auxiliary_loss.backward()
    for _ in range(2):
        if is_driven:
            stream.begin_micro_batch()
        for part in parts:
            layer(part)
        torch.testing.assert_close(auxiliary_loss(layer), single[0] + single[1])
        assert layer.statistics is not None
        assert layer.statistics.tokens_NE.sum() == 2 * (10 if is_driven else 6)
        auxiliary_loss(layer).backward()
    for part in parts if is_driven else ():  # the micro-batches' losses are never used
        stream.begin_micro_batch()
        layer(part)
    if is_driven:
        torch.testing.assert_close(auxiliary_loss(layer), single[1])


def test_a_mean_over_targets_leaves_out_the_ignored_ones() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 7, 11), torch.randint(11, (4, 7))
    targets[0, :5] = targets[2] = -100
    by_hand = [-logits[b, i].log_softmax(-1)[targets[b, i]] for b in range(4) for i in range(7) if targets[b, i] >= 0]
    torch.testing.assert_close(mean_over_targets(logits, targets), torch.stack(by_hand).mean())
    parts = [(mean_over_targets(logits[b], targets[b]), num_targets(targets[b])) for b in range(4)]
    weighed = torch.stack([loss * count for loss, count in parts]).sum() / num_targets(targets)
    torch.testing.assert_close(weighed, torch.stack(by_hand).mean())
    assert float(parts[2][0]) == 0.0
    assert int(num_targets(targets)) == len(by_hand) == 16


def test_without_a_strategy_a_loss_is_what_it_is() -> None:
    module, loss = pl.LightningModule(), torch.tensor(2.0, requires_grad=True)
    for trainer in (None, pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")):
        module._trainer = trainer
        assert global_mean(module, loss, weight=0) is loss
        assert global_sum(nn.Linear(2, 2), loss) is loss


def test_the_balancing_loss_is_not_rounded_by_autocast() -> None:
    torch.manual_seed(0)
    scores = (0.02 * torch.randn(512, 16)).softmax(dim=-1).requires_grad_()
    counts = torch.arange(992, 1008)
    losses = [load_balancing_loss(scores, counts)]
    with torch.autocast("cpu", torch.bfloat16):
        losses.append(load_balancing_loss(scores, counts))
    wanted, found = (torch.autograd.grad(loss, scores)[0] for loss in losses)
    assert torch.equal(found, wanted)
