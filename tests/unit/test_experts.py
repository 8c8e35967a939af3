"""Stacked experts: the same weights wherever they live, moved whole, computed slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_lightning.data.sampler import StepSampler
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import Experts, deferred_experts

CPU = torch.device("cpu")


def make(seed: int = 3, *, deferred: bool = False, slots: Sequence[int] | None = None, **options: Any) -> Experts:
    torch.manual_seed(seed)
    arguments = {"num_experts": 5, "d_model": 6, "d_expert": 7} | options
    if not deferred:
        experts = Experts(**arguments)
    else:
        with deferred_experts():
            experts = Experts(**arguments)
    if slots is not None:
        experts.place(slots, CPU)
    return experts


def by_hand(experts: Experts, x_MD: Tensor, counts: Sequence[int]) -> Tensor:
    """Each slot's rows through its two matrices, one slot after another."""
    results = []
    for slot, rows in enumerate(x_MD.split(list(counts))):
        hidden = rows @ experts.w_up[slot]
        if experts.b_up is not None:
            hidden = hidden + experts.b_up[slot]
        if experts.activation == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden)
        out = hidden @ experts.w_down[slot]
        results.append(out if experts.b_down is None else out + experts.b_down[slot])
    return torch.cat(results)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", [(3, 0, 4, 1, 0), (0, 0, 0, 0, 0), (0, 0, 9, 0, 0), (1, 1, 1, 1, 1)])
def test_forward_and_gradients(activation: Any, bias: bool, counts: tuple[int, ...]) -> None:
    experts = make(activation=activation, bias=bias, init_std=0.5)
    with torch.no_grad():
        for name, parameter in experts.stacked_parameters().items():
            if name.startswith("b_"):
                parameter.normal_()
    x = torch.randn(sum(counts), 6, requires_grad=True)
    upstream = torch.randn(sum(counts), 6)
    results = []
    for function in (lambda: experts(x, torch.tensor(counts)), lambda: by_hand(experts, x, counts)):
        experts.zero_grad()
        x.grad = None
        out = function()
        out.backward(upstream)
        gradients = {name: p.grad for name, p in experts.stacked_parameters().items()}
        results.append((out.detach(), x.grad, gradients))
    (out, dx, gradients), (expected, expected_dx, expected_gradients) = results
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-5)
    for name, gradient in expected_gradients.items():
        found = gradients[name]
        assert found is not None, f"{name} got no gradient; it must be zero where no token came"
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5, msg=name)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=8), st.booleans(), st.booleans())
def test_weights_depend_on_the_expert_not_on_its_place(slots: list[int], deferred: bool, bias: bool) -> None:
    whole = make(bias=bias)
    placed = make(bias=bias, deferred=deferred, slots=slots)
    assert placed.slot_experts == tuple(slots)
    assert not placed.is_deferred
    for name, parameter in placed.stacked_parameters().items():
        assert parameter.shape[0] == len(slots)
        assert torch.equal(parameter, whole.stacked_parameters()[name][slots]), name


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_rank_without_experts_computes_nothing(activation: Any) -> None:
    experts = make(slots=[], bias=True, activation=activation)
    x = torch.randn(0, 6, requires_grad=True)
    out = experts(x, torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, 6)
    out.sum().backward()
    for name, parameter in experts.stacked_parameters().items():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape, name


def test_experts_differ_and_have_the_stated_spread() -> None:
    experts = make(num_experts=3, d_model=64, d_expert=96, init_std=0.05, down_init_std=0.01, bias=True)
    assert abs(float(experts.w_up.detach().std()) - 0.05) < 0.001
    assert abs(float(experts.w_down.detach().std()) - 0.01) < 0.0005
    assert not experts.b_up.any()  # type: ignore[union-attr]
    assert not torch.equal(experts.w_up[0], experts.w_up[1])
    assert not torch.allclose(experts.w_up[0].flatten()[:64] / 0.05, experts.w_down[0].flatten()[:64] / 0.01)
    torch.manual_seed(4)
    other = Experts(3, 64, 96)
    assert not torch.equal(experts.w_up, other.w_up)


def test_construction_draws_one_number_wherever_experts_are_allocated() -> None:
    states = []
    for deferred in (False, True):
        make(deferred=deferred)
        states.append(torch.rand(3))
    assert torch.equal(states[0], states[1])


def test_deferral_ends_with_its_block() -> None:
    assert make(deferred=True).is_deferred
    assert not make().is_deferred
    with pytest.raises(RuntimeError, match="stop"), deferred_experts():
        raise RuntimeError("stop")
    assert not make().is_deferred


def test_moving_keeps_trained_weights_and_frozen_ones_frozen() -> None:
    experts = make(bias=True)
    with torch.no_grad():
        experts.w_up.add_(1.0)
    experts.w_down.requires_grad_(False)
    trained = experts.w_up.detach().clone()
    experts.place([4, 1, 1], CPU)
    assert torch.equal(experts.w_up, trained[[4, 1, 1]])
    assert experts.w_up.requires_grad
    assert not experts.w_down.requires_grad
    experts.place([1], CPU)  # a subset of what is held
    assert torch.equal(experts.w_up, trained[[1]])


def test_placing_keeps_the_attributes_of_parameters() -> None:
    experts = make()
    experts.w_up.no_decay = True  # type: ignore[attr-defined]
    experts.place([4, 1], CPU)
    assert experts.w_up.no_decay  # type: ignore[attr-defined]
    assert not hasattr(experts.w_down, "no_decay")


def test_an_expert_that_is_not_held_cannot_be_placed() -> None:
    experts = make(slots=[0, 2])
    with pytest.raises(ConfigurationError, match=r"holds experts \[0, 2\] .* cannot fill slots for \[1, 3\]: build"):
        experts.place([0, 1, 2, 3], CPU)


def test_values_set_before_there_are_slots_are_kept_or_refused() -> None:
    saved = {f"0.{name}": stack + 1.0 for name, stack in make().state_dict().items()}
    model = nn.Sequential(loaded := make(deferred=True))
    model.load_state_dict(saved)
    loaded.place([4, 1], CPU)
    assert torch.equal(loaded.w_up, saved["0.w_up"][[4, 1]])
    drawn = make(deferred=True)
    drawn.reset_parameters()  # by which nothing is lost
    nn.init.ones_(drawn.w_down)
    with pytest.raises(ConfigurationError, match=r"experts\.w_down was set in configure_model, .* are lost: set"):
        drawn.place([4, 1], CPU)


def test_hooks_of_stacks_are_not_lost_without_a_word() -> None:
    experts = make()
    experts.w_up.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    experts.place(range(experts.num_experts), CPU)  # where they are
    with pytest.raises(ConfigurationError, match=r"experts\.w_up has a hook of its gradient, which is lost where"):
        experts.place([0, 1], CPU)


def test_hooks_of_wandb_watch_are_no_reason_to_refuse() -> None:
    experts = make()

    def log_gradient(gradient: Tensor) -> None:
        """It only reads."""

    log_gradient.__module__ = "wandb.integration.torch.wandb_torch"
    experts.w_up.register_hook(log_gradient)  # type: ignore[no-untyped-call]
    experts.place([0, 1], CPU)
    assert experts.slot_experts == (0, 1)


def test_place_keeps_the_dtype() -> None:
    experts = make().to(torch.bfloat16)
    experts.place([3, 0], CPU)
    assert {p.dtype for p in experts.parameters()} == {torch.bfloat16}


def test_a_large_bias_gradient_is_summed_in_float32() -> None:
    experts = make(num_experts=1, d_model=8, d_expert=8, bias=True)
    x = torch.zeros(4096, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        experts(x, torch.tensor([4096])).sum().backward()
    torch.testing.assert_close(experts.b_down.grad, torch.full((1, 8), 4096.0))


class NeedsDevices(TorchFunctionMode):
    """Refuses draws that would be made on the default device with a generator of the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drawn = func in (torch.rand, torch.randn, torch.randint, torch.randperm)
        assert not (drawn and kwargs.get("generator") is not None and kwargs.get("device") is None)
        return func(*args, **kwargs)


def test_draws_from_a_generator_name_its_device() -> None:
    """Stock Lightning builds a module where the GPU is the default device."""
    with NeedsDevices():
        make().freeze(rank=2, scale=1.0, in_4_bits=False)
        next(iter(StepSampler(num_samples=8, global_batch_size=2)))


def test_nothing_is_drawn_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", None)
    with torch.device("meta"):
        experts = Experts(5, 6, 7)
    assert all(stack.is_meta for stack in experts.stacked_parameters().values())
