"""The MoE layer against a plain loop over tokens' experts: forward, gradients, drops, edge cases."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.dispatch.shadow_exchange import StepShadowTransfers
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import reference
from moe_lightning.kernels.interface import ACTIVATIONS
from moe_lightning.moe.layer import MoELayer, moe_layers
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.parallel.context import World

D_MODEL = 8


def make(seed: int = 0, num_experts: int = 5, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(D_MODEL, 6, num_experts, init_std=0.5, **options)


def expert_by_hand(layer: MoELayer, e: int, x_D: Tensor) -> Tensor:
    experts = layer.experts
    hidden = x_D @ experts.w_up[e]
    if experts.b_up is not None:
        hidden = hidden + experts.b_up[e]
    hidden = reference.expert_activation(hidden[None], experts.activation)[0]
    out = hidden @ experts.w_down[e]
    return out if experts.b_down is None else out + experts.b_down[e]


def by_hand(layer: MoELayer, x: Tensor) -> Tensor:
    """One token and one choice after another."""
    x_TD = x.reshape(-1, D_MODEL)
    routing = layer.router(x_TD)
    rows = []
    for t, x_D in enumerate(x_TD):
        row = torch.zeros(D_MODEL)
        for e, weight in zip(routing.expert_ids_TK[t].tolist(), routing.weights_TK[t], strict=True):
            if e >= 0:
                row = row + weight * expert_by_hand(layer, e, x_D)
        if (shared := layer.shared_expert) is not None:
            row = row + shared.down(reference.expert_activation(shared.up(x_D)[None], shared.activation)[0])
        rows.append(row)
    return torch.stack(rows).view_as(x) if rows else x.clone()


def outcome(layer: MoELayer, x: Tensor, out: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    x.grad = None
    out.backward(upstream)
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "dx": x.grad.clone()} | gradients


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_layer_equals_the_loop(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 6))
    router: dict[str, object] = {
        "top_k": data.draw(st.integers(1, num_experts)),
        "score": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "capacity_factor": data.draw(st.sampled_from([None, 0.4, 1.0])),
        "drop_policy": data.draw(st.sampled_from(["probability", "position"])),
        "scale": 1.5,
    }
    layer = make(
        seed=data.draw(st.integers(0, 99)),
        num_experts=num_experts,
        router=router,
        activation=data.draw(st.sampled_from(ACTIVATIONS)),
        bias=data.draw(st.booleans()),
        num_shared_experts=data.draw(st.integers(0, 2)),
    )
    x = torch.randn((*data.draw(st.sampled_from([(1,), (7,), (2, 3), (2, 2, 2)])), D_MODEL), requires_grad=True)
    upstream = torch.randn(x.shape)
    found = outcome(layer, x, layer(x), upstream)
    expected = outcome(layer, x, by_hand(layer, x), upstream)
    assert set(expected) <= set(found)
    for name, values in found.items():
        reference = expected.get(name, torch.zeros_like(values))
        torch.testing.assert_close(values, reference, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "top_groups": 2}])
@pytest.mark.parametrize("shape", [(0, D_MODEL), (3, 0, D_MODEL)])
def test_no_token_at_all(shape: tuple[int, ...], groups: dict[str, int]) -> None:
    router = {"z_loss_coef": 0.1, **groups}
    layer = make(num_experts=6, router=router, num_shared_experts=1, activation="swiglu_clamped")
    x = torch.randn(*shape, requires_grad=True)
    out = layer(x)
    assert out.shape == shape
    assert torch.isfinite(layer.auxiliary_loss)
    (out.sum() + layer.auxiliary_loss).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def test_statistics_count_before_and_after_drops() -> None:
    layer = make(router={"capacity_factor": 0.5})
    x = torch.randn(20, D_MODEL)
    layer(x)
    routing, statistics = layer.router(x), layer.statistics
    assert statistics.tokens_NE.shape == (1, 5)
    assert torch.equal(statistics.tokens_NE[0], routing.tokens_per_expert_E)
    kept = routing.expert_ids_TK[routing.expert_ids_TK >= 0]
    assert torch.equal(statistics.computed_NE[0], torch.bincount(kept, minlength=5))


def test_bf16_autocast_stays_close() -> None:
    layer, x = make(activation="swiglu", bias=True), torch.randn(30, D_MODEL)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out.float(), exact, rtol=0.1, atol=0.1)
    (out.float().sum() + layer.auxiliary_loss).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_rows_travel_in_the_dtype_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, found = make(activation="swiglu"), torch.randn(30, D_MODEL, requires_grad=True), []
    for stays_here in (True, False):
        monkeypatch.setattr(layer.experts, "takes_tokens", lambda _, stays_here=stays_here: stays_here)
        spied = mock.patch.object(layer.dispatcher, "dispatch", wraps=layer.dispatcher.dispatch)
        with spied as dispatch, torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
        found.append((out, *torch.autograd.grad(out.float().sum(), x)))
    assert dispatch.call_args.args[0].dtype == torch.bfloat16
    for sent, expected in zip(*found, strict=True):
        assert torch.equal(sent, expected), "on several ranks tokens are not what they are on one"


def test_the_layer_works_under_activation_checkpointing() -> None:
    layer, x = make(router={"noisy_top_k": True, "jitter": 0.1}), torch.randn(12, D_MODEL, requires_grad=True)
    layer.router.stream.advance(step=0, first_sample=0, num_samples=12)
    upstream = torch.randn(12, D_MODEL)
    plain = outcome(layer, x, layer(x), upstream)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    for name, values in outcome(layer, x, again, upstream).items():
        torch.testing.assert_close(values, plain[name], msg=name)


def test_evaluation_counts_nothing_for_the_bias() -> None:
    layer, x = make(router={"bias_update_rate": 0.1}), torch.randn(9, D_MODEL)
    layer.eval()(x)
    layer.router.update_bias()
    assert not layer.router.expert_bias_E.any()
    layer.train()(x)
    layer.router.update_bias()
    assert layer.router.expert_bias_E.any()


def test_layers_are_found_in_order_and_once() -> None:
    shared, other = make(), make()
    model = nn.ModuleList([shared, nn.Sequential(other, shared)])
    assert moe_layers(model) == [shared, other]


def test_a_layer_can_be_copied_after_a_forward_pass() -> None:
    layer = MoELayer(8, 8, 4, {"aux_loss_coef": 0.5, "bias_update_rate": 0.1})
    x = torch.randn(10, 8)
    out = layer(x)
    copied = copy.deepcopy(nn.Sequential(layer, layer))
    assert copied[0] is copied[1]
    assert copied[0].auxiliary_loss is None
    assert layer.auxiliary_loss is not None
    torch.testing.assert_close(copied[0](x), out)
    with torch.no_grad():
        copied[0].experts.w_up.zero_()
    torch.testing.assert_close(layer(x), out)


def test_a_copy_draws_for_itself_unless_a_strategy_drives_it() -> None:
    dropout = StreamDropout(0.5)
    x = torch.ones(50, 4)
    assert copy.deepcopy(dropout).stream is not dropout.stream
    dropout.stream.advance(step=3, first_sample=0, num_samples=50)
    follower = copy.deepcopy(dropout)
    dropout.stream.advance(step=4, first_sample=0, num_samples=50)
    assert torch.equal(dropout(x), follower(x))


def test_a_dummy_batch_is_routed_to_no_expert() -> None:
    layer = MoELayer(8, 8, 4, {"aux_loss_coef": 0.5, "bias_update_rate": 0.1}, num_shared_experts=1)
    layer.router.stream.advance(step=0, first_sample=0, num_samples=0)
    x = torch.randn(10, 8)
    out = layer(x)
    assert int(layer.statistics.tokens_NE.sum()) == 0
    assert layer.shared_expert is not None
    torch.testing.assert_close(out, layer.shared_expert(x))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_padding_is_as_if_it_were_not_there(data: st.DataObject) -> None:
    router: dict[str, object] = {
        "top_k": data.draw(st.integers(1, 3)),
        "z_loss_coef": 0.1,
        "bias_update_rate": 0.01,
        "capacity_factor": data.draw(st.sampled_from([None, 0.5])),
        "drop_policy": data.draw(st.sampled_from(["probability", "position"])),
    }
    layer = make(seed=data.draw(st.integers(0, 99)), router=router)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=1, max_size=12)))
    x = torch.randn(len(mask), D_MODEL, generator=torch.Generator().manual_seed(1))
    found: list[dict[str, Tensor]] = []
    for rows, options in ((x, (mask,)), (x[mask], ())):
        rows = rows.clone().requires_grad_()
        out = layer(rows, *options)
        assert layer.auxiliary_loss is not None
        assert layer.statistics is not None
        numbers = {
            "loss": layer.auxiliary_loss.detach(),
            "tokens": layer.statistics.tokens_NE,
            "computed": layer.statistics.computed_NE,
        }
        upstream = torch.ones_like(out) * torch.arange(D_MODEL)
        layer.zero_grad()
        (layer.auxiliary_loss + (out * upstream).sum()).backward()
        numbers |= {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        assert rows.grad is not None
        kept = mask if options else slice(None)
        found.append(numbers | {"out": out.detach()[kept], "dx": rows.grad[kept]})
        if options:
            assert not out[~mask].any()
            assert not rows.grad[~mask].any()
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], msg=name)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"is_token has the shape \[3\], but x of \[3, 2, 8\] needs \[3, 2\]"):
        make()(torch.randn(3, 2, D_MODEL), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("router", [{"top_k": 2}, {"top_k": 2, "score": "sigmoid", "noisy_top_k": True, "jitter": 0.1}])
def test_float64_stays_float64(router: dict[str, Any]) -> None:
    layer = make(router=router).double().eval()
    x = torch.randn(3, D_MODEL, dtype=torch.float64, requires_grad=True)
    assert layer.router(x.detach()).logits_TE.dtype == torch.float64
    weights = dict(layer.named_parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *weights.values()), eps=1e-6, atol=1e-7)
    layer.train()
    assert layer(x).dtype == torch.float64


def test_bias_gradients_of_float64_are_summed_in_it() -> None:
    layer = make(bias=True, router={"top_k": 1}).double()
    x = torch.randn(64, D_MODEL, dtype=torch.float64)
    upstream = torch.randn_like(x)
    layer(x).backward(upstream)
    routing = layer.router(x)
    for expert in range(5):
        chosen = routing.expert_ids_TK[:, 0] == expert
        expected = (routing.weights_TK * upstream)[chosen].sum(dim=0)
        torch.testing.assert_close(layer.experts.b_down.grad[expert], expected, rtol=0, atol=1e-12)  # type: ignore[index]


def test_rows_of_another_width_are_refused() -> None:
    layer = MoELayer(8, 8, 4)
    with pytest.raises(
        ConfigurationError, match=r"shape \(2, 3, 6\) has rows of 6 features, .* give MoELayer d_model=6"
    ):
        layer(torch.randn(2, 3, 6))


def test_shadows_with_rounded_weights_compute_in_their_precision_only() -> None:
    layer, x = MoELayer(8, 8, num_experts=2), torch.randn(5, 8)
    plan = ShadowPlan(shadows=np.zeros((2, 1), dtype=np.bool_), homes=np.zeros(2, dtype=np.int64))
    step = StepShadowTransfers(World.single(), torch.bfloat16)
    layer.shadow_transfers = step.add_layer(layer.experts.stacked_parameters(), layer.experts.slot_experts, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
        with (
            torch.autocast("cpu", enabled=False),
            pytest.raises(ConfigurationError, match="compute in float32, but weights of shadow experts travel in bfl"),
        ):
            layer(x)


def test_shadows_of_narrow_weights_compute_in_any_precision() -> None:
    """They are not rounded on their way."""
    layer = MoELayer(8, 8, num_experts=2).to(torch.bfloat16)
    plan = ShadowPlan(shadows=np.zeros((2, 1), dtype=np.bool_), homes=np.zeros(2, dtype=np.int64))
    step = StepShadowTransfers(World.single(), layer.experts.dtype)
    layer.shadow_transfers = step.add_layer(layer.experts.stacked_parameters(), layer.experts.slot_experts, plan)
    assert layer(torch.randn(5, 8)).isfinite().all()
