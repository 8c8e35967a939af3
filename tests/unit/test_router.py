"""Every way of choosing experts, against the definition written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_lightning.moe.randomness import SampleStream, attach_stream
from moe_lightning.moe.router import Router, RouterConfig, Routing, drop_overflow

D_MODEL = 8


def make_router(num_experts: int = 6, seed: int = 0, std: float = 0.5, **options: Any) -> Router:
    torch.manual_seed(seed)
    return Router(D_MODEL, num_experts, RouterConfig(**options), init_std=std)


def tokens(num_tokens: int = 17, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, D_MODEL, generator=torch.Generator().manual_seed(seed))


def choose_by_hand(
    scores: list[float], top_k: int, num_groups: int = 1, top_groups: int = 1, group_top_k: int = 2
) -> list[int]:
    """Experts of one token: the best ones inside the best groups, where a group is worth some of its best."""
    size = len(scores) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    worth = [sum(sorted((scores[e] for e in group), reverse=True)[:group_top_k]) for group in groups]
    best = sorted(range(num_groups), key=lambda g: (-worth[g], g))[:top_groups]
    allowed = [e for g in best for e in groups[g]]
    return sorted(allowed, key=lambda e: (-scores[e], e))[:top_k]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_choices_and_weights_match_the_definition(data: st.DataObject) -> None:
    num_groups = data.draw(st.sampled_from([1, 2, 3]))
    top_groups = data.draw(st.integers(1, num_groups))
    num_experts = num_groups * data.draw(st.integers(1, 4))
    group_top_k = data.draw(st.integers(1, 3))
    top_k = data.draw(st.integers(1, num_experts // num_groups * top_groups))
    score = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    late = score == "softmax" and data.draw(st.booleans())
    normalize, scale = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 2.5]))
    router = make_router(
        num_experts,
        seed=data.draw(st.integers(0, 99)),
        top_k=top_k,
        score=score,
        softmax_after_top_k=late,
        normalize_top_k=normalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
        group_top_k=group_top_k,
    )
    x_TD = tokens(7)
    routing = router(x_TD)
    counts = [0] * num_experts
    for t in range(7):
        logits = [float(router.weight.detach()[e].double() @ x_TD[t].double()) for e in range(num_experts)]
        exps = [math.exp(v) for v in logits]
        scores = [v / sum(exps) for v in exps] if score == "softmax" else [1 / (1 + math.exp(-v)) for v in logits]
        ids = choose_by_hand(scores, top_k, num_groups, top_groups, group_top_k)
        assert routing.expert_ids_TK[t].tolist() == ids
        if late:
            weights = [exps[e] / sum(exps[i] for i in ids) for e in ids]
        else:
            total = sum(scores[e] for e in ids) if normalize and top_k > 1 else 1.0
            weights = [scores[e] / total for e in ids]
        torch.testing.assert_close(routing.weights_TK[t], scale * torch.tensor(weights), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(routing.scores_TE[t], torch.tensor(scores), rtol=1e-4, atol=1e-6)
        for e in ids:
            counts[e] += 1
    assert routing.tokens_per_expert_E.tolist() == counts


def test_weights_and_scores_train_the_router() -> None:
    for options in ({}, {"score": "sigmoid"}, {"softmax_after_top_k": True}, {"noisy_top_k": True}):
        router = make_router(**options)
        routing = router(tokens())
        (routing.weights_TK[:, 0].sum() + routing.scores_TE[:, 0].sum()).backward()
        for name, parameter in router.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_one_choice_still_trains_the_router() -> None:
    router = make_router(top_k=1)
    router(tokens()).weights_TK.sum().backward()
    assert router.weight.grad.abs().sum() > 0, "a lone weight was normalised to the constant 1"


def test_autocast_leaves_the_router_in_float32() -> None:
    router, x_TD = make_router(), tokens(64)
    exact = router(x_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = router(x_TD)
    assert under.weights_TK.dtype == under.logits_TE.dtype == under.scores_TE.dtype == torch.float32
    assert torch.equal(under.weights_TK, exact.weights_TK)
    router.to(torch.bfloat16)
    rounded = router(x_TD.bfloat16())
    assert rounded.logits_TE.dtype == torch.float32


def _drawn(router: Router, x_TD: Tensor, first: int, step: int = 3) -> Routing:
    stream = SampleStream(seed=5)
    attach_stream(router, stream)
    stream.advance(step=step, first_sample=first, num_samples=len(x_TD))
    routing: Routing = router(x_TD)
    return routing


@pytest.mark.parametrize("options", [{"noisy_top_k": True}, {"jitter": 0.3}, {"forced": {"kind": "zipf"}}])
def test_noise_follows_the_sample_and_the_step(options: dict[str, Any]) -> None:
    router, x_TD = make_router(**options), tokens(24)
    whole = _drawn(router, x_TD, 0)
    for first, last in ((0, 10), (10, 24)):
        part = _drawn(router, x_TD[first:last], first)
        assert torch.equal(part.expert_ids_TK, whole.expert_ids_TK[first:last])
        assert torch.equal(part.logits_TE, whole.logits_TE[first:last])
    later = _drawn(router, x_TD, 0, step=4)
    assert not torch.equal(later.expert_ids_TK, whole.expert_ids_TK)


def test_noise_is_for_training_only() -> None:
    router, plain = make_router(noisy_top_k=True, jitter=0.3), make_router()
    x_TD = tokens()
    assert not torch.allclose(router(x_TD).logits_TE, plain(x_TD).logits_TE)
    assert torch.equal(router.eval()(x_TD).logits_TE, plain(x_TD).logits_TE)


def test_noise_has_the_stated_size() -> None:
    router, plain, x_TD = make_router(noisy_top_k=True), make_router(), tokens(20_000)
    noise_TE = (router(x_TD).logits_TE - plain(x_TD).logits_TE).detach()
    assert abs(float(noise_TE.mean())) < 0.02
    assert abs(float(noise_TE.std()) - math.log(2)) < 0.02, "softplus(0) is log 2"
    jittered = make_router(jitter=0.25)
    ones = torch.zeros(20_000, D_MODEL)
    ones[:, 0] = 1.0
    factors = (jittered(ones).logits_TE[:, 0] / jittered.weight[0, 0]).detach()
    assert 0.75 <= float(factors.min()) < 0.76
    assert 1.24 < float(factors.max()) <= 1.25
    assert abs(float(factors.mean()) - 1) < 0.01


def test_bias_moves_against_the_load() -> None:
    router = make_router(4, bias_update_rate=0.1)
    router.count_for_bias(torch.tensor([5, 0, 3, 0]))
    router.count_for_bias(torch.tensor([5, 1, 1, 1]))
    router.update_bias()
    torch.testing.assert_close(router.expert_bias_E, torch.tensor([-0.1, 0.1, 0.0, 0.1]))
    router.update_bias()  # nothing was counted since: all are even
    torch.testing.assert_close(router.expert_bias_E, torch.tensor([-0.1, 0.1, 0.0, 0.1]))
    assert set(router.state_dict()) == {"weight", "expert_bias_E"}


def test_bias_selects_but_does_not_weigh() -> None:
    router, x_TD = make_router(4, bias_update_rate=0.1, top_k=1, normalize_top_k=False), tokens()
    router.expert_bias_E[2] = 10.0
    routing = router(x_TD)
    assert (routing.expert_ids_TK == 2).all()
    torch.testing.assert_close(routing.weights_TK[:, 0], routing.scores_TE[:, 2])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_capacity_keeps_what_the_policy_says(data: st.DataObject) -> None:
    num_tokens, top_k, num_experts = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3)), 4
    limit = data.draw(st.integers(0, 4))
    seed = data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    weights_TK = torch.randint(0, 4, (num_tokens, top_k), generator=generator).float()  # with ties
    for policy in ("probability", "position"):
        kept_TK = drop_overflow(ids_TK, weights_TK, limit, num_experts, policy)  # type: ignore[arg-type]
        assert ((kept_TK == ids_TK) | (kept_TK == -1)).all()
        for expert in range(num_experts):
            asked = [(t, k) for t in range(num_tokens) for k in range(top_k) if ids_TK[t, k] == expert]
            if policy == "probability":
                asked.sort(key=lambda at: -float(weights_TK[at]))  # stable: earlier tokens win ties
            kept = [at for at in asked if kept_TK[at] == expert]
            assert kept == asked[:limit]


def test_capacity_is_that_of_the_decimal_factor() -> None:
    factors = {1.1: 11, 1.05: 11, 1: 10, 0.7: 7, 1e-5: 1}
    assert {factor: RouterConfig(capacity_factor=factor).capacity(100, 10) for factor in factors} == factors


def test_capacity_counts_before_dropping() -> None:
    router, x_TD = make_router(capacity_factor=0.5, drop_policy="position"), tokens(24)
    routing, dropless = router(x_TD), make_router()(x_TD)
    limit = math.ceil(0.5 * 24 * 2 / 6)
    assert torch.equal(routing.tokens_per_expert_E, dropless.tokens_per_expert_E)
    kept_E = torch.bincount(routing.expert_ids_TK[routing.expert_ids_TK >= 0], minlength=6)
    assert torch.equal(kept_E, dropless.tokens_per_expert_E.clamp_max(limit))
    assert (routing.expert_ids_TK == -1).any()


def test_weights_multiply_what_experts_read() -> None:
    """And not what shared experts read."""
    from moe_lightning.moe.layer import MoELayer

    torch.manual_seed(0)
    router = {"top_k": 1, "score": "sigmoid", "aux_loss_coef": 0.0, "weigh_inputs": True}
    layer, x_TD = MoELayer(8, 16, 4, router, num_shared_experts=1), torch.randn(5, 8)
    routing = layer.router(x_TD)
    assert layer.shared_expert is not None
    for row, expert, weight in zip(x_TD, routing.expert_ids_TK[:, 0].tolist(), routing.weights_TK[:, 0], strict=True):
        hidden = torch.nn.functional.gelu((row * weight) @ layer.experts.w_up[expert])
        torch.testing.assert_close(
            layer(row[None])[0], hidden @ layer.experts.w_down[expert] + layer.shared_expert(row)
        )
