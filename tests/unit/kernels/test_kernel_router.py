"""The router in one operation: as exact as fp32, the choice of the kernels of its own, gradients of fp64."""

import pytest
import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.losses import load_balancing_loss
from moe_lightning.moe.router import Router, RouterConfig
from tests.unit.kernels.kernel_cases import DEVICE, INTERPRETED, randn

pytestmark = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="only Triton has a body for it")

WIDTH = 40
PLAIN = ops.Choice(top_k=3, is_sigmoid=False, normalizes=True, scale=1.0)


def rows(num_tokens: int, seed: int = 0) -> Tensor:
    return randn(num_tokens, WIDTH, dtype=torch.bfloat16, seed=seed)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, ids_TK: Tensor, choice: ops.Choice) -> tuple[Tensor, ...]:
    """Logits, scores and weights in the dtype that is given."""
    logits = x @ weight.t() + (0 if bias is None else bias)
    scores = logits.sigmoid() if choice.is_sigmoid else logits.softmax(1)
    weights = scores.gather(1, ids_TK)
    if choice.normalizes:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-20)
    return logits, scores, weights * choice.scale


def worst(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max())


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "choice", "is_biased"),
    [
        (37, 5, PLAIN, False),
        (37, 17, ops.Choice(top_k=4, is_sigmoid=True, normalizes=True, scale=2.5), True),
        (1, 3, ops.Choice(top_k=1, is_sigmoid=True, normalizes=False, scale=1.0), False),
        (16, 16, ops.Choice(top_k=2, is_sigmoid=False, normalizes=False, scale=0.5), False),
    ],
)
def test_values_and_gradients_are_those_of_fp64(num_tokens, num_experts, choice, is_biased):
    leaves = [rows(num_tokens), randn(num_experts, WIDTH, seed=1)]
    leaves += [randn(num_experts, seed=2)] if is_biased else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    selection = randn(num_experts, seed=3) if is_biased else None
    routed = ops.route(leaves[0], leaves[1], choice, bias_E=leaves[2] if is_biased else None, selection_E=selection)
    chosen_by = routed.scores_TE.detach() + (0 if selection is None else selection)
    assert torch.equal(routed.ids_TK, ops.top_k_experts(chosen_by, choice.top_k))

    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    bias = exact_leaves[2] if is_biased else None
    wanted = exact(exact_leaves[0], exact_leaves[1], bias, routed.ids_TK, choice)
    single = exact(
        leaves[0].detach().float(), leaves[1].detach(), leaves[2].detach() if is_biased else None, routed.ids_TK, choice
    )
    for found, truth, fp32 in zip(routed[:3], wanted, single, strict=True):
        # Tensor cores add products of bf16 with fewer digits than fp32 has.
        assert worst(found, truth) <= 2 * worst(fp32, truth) + (1e-7 if DEVICE.type == "cpu" else 1e-6)

    upstream = [randn(*part.shape, seed=seed) for seed, part in enumerate(routed[:3], 4)]
    grads = torch.autograd.grad(routed[:3], leaves, upstream)
    truths = torch.autograd.grad(wanted, exact_leaves, [part.double() for part in upstream])
    assert worst(grads[0], truths[0]) < 2**-7
    for found, truth in zip(grads[1:], truths[1:], strict=True):
        assert worst(found, truth) < 1e-6


def test_the_gradient_of_who_goes_on_with_the_rows_is_added_once():
    x, weight = rows(37).requires_grad_(), randn(5, WIDTH, seed=1).requires_grad_()
    routed = ops.route(x, weight, PLAIN)
    upstream, beside = randn(37, PLAIN.top_k, seed=2), rows(37, seed=3)
    (own,) = torch.autograd.grad(routed.weights_TK, x, upstream, retain_graph=True)
    assert torch.equal(routed.x_TD, x)
    (both,) = torch.autograd.grad([routed.weights_TK, routed.x_TD], x, [upstream, beside], retain_graph=True)
    torch.testing.assert_close(both.float(), own.float() + beside.float(), rtol=2**-7, atol=1e-2)
    (alone,) = torch.autograd.grad(routed.x_TD, x, beside)
    assert torch.equal(alone, beside)
    assert ops.route(x.detach(), weight, PLAIN).x_TD is None, "rows without a gradient stay so"


def test_logits_keep_every_digit_of_their_weights():
    """Two terms of bf16 would be 2**-17 away."""
    weight = torch.tensor([[1.0 + 2.0**-23, 0.0], [2.0**-23 + 2.0**-9 + 1.0, 3.0]], device=DEVICE)
    x = torch.eye(2, device=DEVICE, dtype=torch.bfloat16)
    choice = PLAIN._replace(top_k=1)
    assert torch.equal(ops.route(x, weight, choice).logits_TE, weight.t())


def test_a_row_does_not_see_its_batch():
    x, weight = rows(50), randn(9, WIDTH, seed=1)
    whole, part = ops.route(x, weight, PLAIN), ops.route(x[16:41], weight, PLAIN)
    for found, wanted in zip(part[:4], whole[:4], strict=True):
        assert torch.equal(found, wanted[16:41])


def test_biases_may_have_gaps():
    x, weight, gaps = rows(9), randn(6, WIDTH, seed=1), randn(12, seed=2)[::2]
    found = ops.route(x, weight, PLAIN, bias_E=gaps, selection_E=gaps)
    wanted = ops.route(x, weight, PLAIN, bias_E=gaps.contiguous(), selection_E=gaps.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found[:4], wanted[:4], strict=True))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x_TD": rows(3).float()}, "no kernel routes torch.float32 rows"),
        ({"weight_ED": randn(300, WIDTH)}, "to 300 experts in one operation"),
        ({"weight_ED": randn(6, WIDTH + 1)}, "does not fit weight"),
        ({"choice": PLAIN._replace(top_k=7)}, "top_k=7 must be from 1 to 6 experts"),
        ({"bias_E": randn(2)}, "bias has 2 values for 6 experts"),
        ({"selection_E": randn(6, 1)}, r"selection has shape \[6, 1\]"),
    ],
)
def test_wrong_operands_are_one_sentence(change, sentence):
    right = {"x_TD": rows(3), "weight_ED": randn(6, WIDTH), "choice": PLAIN}
    with pytest.raises(ConfigurationError, match=sentence):
        ops.route(**right | change)
    with pytest.raises(ConfigurationError, match="counts 2 experts, but scores have 6"):
        ops.balance(randn(3, 6), torch.ones(2, dtype=torch.int64))


def test_gradients_are_not_differentiated_in_silence():
    weight = randn(6, WIDTH).requires_grad_()
    loss = ops.route(rows(3), weight, PLAIN).weights_TK.square().sum() + weight.square().sum()
    with pytest.raises(ConfigurationError, match="kernels have no second derivatives"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_ties_go_to_the_lower_expert_and_no_tokens_to_none():
    weight = torch.zeros(4, WIDTH, device=DEVICE)
    assert ops.route(rows(3), weight, PLAIN).ids_TK.tolist() == [[0, 1, 2]] * 3
    leaves = [rows(0).requires_grad_(), weight.requires_grad_()]
    grads = torch.autograd.grad(ops.route(leaves[0], leaves[1], PLAIN).weights_TK.sum(), leaves)
    assert grads[0].shape == (0, WIDTH)
    assert not grads[1].any()


@pytest.mark.parametrize(
    "settings",
    [{}, {"score": "sigmoid", "bias_update_rate": 0.1, "scale": 2.5}, {"softmax_after_top_k": True}],
    ids=["softmax", "biased", "late"],
)
def test_the_module_takes_it_for_bf16_and_says_the_same(settings, monkeypatch):
    torch.manual_seed(0)
    router = Router(WIDTH, 6, RouterConfig(top_k=2, **settings)).to(DEVICE)
    if router.has_selection_bias:
        router.expert_bias_E.copy_(randn(6, seed=3))
    x = rows(21)
    launched = []
    route = ops.route
    monkeypatch.setattr(ops, "route", lambda *args, **more: launched.append(1) or route(*args, **more))
    found = router(x)
    assert launched
    wanted = router(x.float())
    assert len(launched) == 1, "rows in fp32 stay with the exact matmul"
    assert torch.equal(found.expert_ids_TK, wanted.expert_ids_TK)
    for name in ("weights_TK", "scores_TE", "logits_TE"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (70, 5)])
def test_the_balancing_loss_of_one_pass_is_that_of_many(num_tokens, num_experts):
    scores = randn(num_tokens, num_experts).sigmoid()
    if num_tokens:
        scores[3] = 0.0
    counts = torch.arange(num_experts, device=DEVICE)
    found, wanted = scores.clone().requires_grad_(), scores.double().requires_grad_()
    loss = ops.balance(found, counts)
    truth = load_balancing_loss(wanted, counts)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    if num_tokens:
        grads = torch.autograd.grad(0.5 * loss, found)[0], torch.autograd.grad(0.5 * truth, wanted)[0]
        kept = scores.sum(1) > 0  # a row without any score has a slope of 1e20
        torch.testing.assert_close(grads[0][kept].double(), grads[1][kept], rtol=1e-5, atol=1e-8)
