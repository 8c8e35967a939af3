"""Adafactor as torch has it for one tensor, for every expert by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_lightning import GPT, GPTConfig
from moe_lightning.models.optimizers import Adafactor, by_expert, parameter_groups
from tests.unit.test_muon import gradients, trained

OPTIONS: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1}


@pytest.mark.parametrize("shape", [(12, 20), (20, 1), (7,), (), (2, 3, 5)])
def test_a_tensor_is_updated_as_torch_does(shape: tuple[int, ...]) -> None:
    ours, theirs = (nn.Parameter(torch.full(shape, 0.3)) for _ in range(2))
    wanted = trained(torch.optim.Adafactor([theirs], **OPTIONS), theirs)
    torch.testing.assert_close(trained(Adafactor([ours], **OPTIONS), ours), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 6), (6,)])
def test_an_expert_is_updated_as_if_it_were_alone(shape: tuple[int, ...]) -> None:
    stack = nn.Parameter(torch.arange(3.0).reshape(3, *[1] * len(shape)).expand(3, *shape).clone())
    optimizer = Adafactor([stack], stacked=True, **OPTIONS)
    before = stack.detach().clone()
    all_of_them = trained(optimizer, stack)
    assert {state.shape[0] for name, state in optimizer.state[stack].items() if name != "step"} == {3}
    for expert in range(3):
        alone = nn.Parameter(before[expert].clone())
        theirs = torch.optim.Adafactor([alone], **OPTIONS)
        for gradient in gradients((3, *shape)):
            alone.grad = gradient[expert]
            theirs.step()
        torch.testing.assert_close(all_of_them[expert], alone.detach(), rtol=1e-5, atol=1e-6)


def test_a_vacant_slot_stays_zero() -> None:
    stack = nn.Parameter(torch.zeros(2, 4, 3))
    optimizer = Adafactor([stack], stacked=True, **OPTIONS)
    stack.grad = torch.zeros_like(stack)
    optimizer.step()
    assert not stack.any()


def test_experts_have_groups_of_their_own() -> None:
    model = GPT(
        GPTConfig(
            vocab_size=32, context_length=8, num_layers=2, d_model=16, num_heads=2, num_experts=4, d_expert=8, bias=True
        )
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = by_expert(model, parameter_groups(model, 0.1))
    kinds = {names[p]: (group["stacked"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(kinds) == len(names)
    assert kinds["blocks.1.feed_forward.experts.w_up"] == (True, 0.1)
    assert kinds["blocks.1.feed_forward.experts.b_up"] == (True, 0.0)
    assert kinds["token_embedding.weight"] == (False, 0.1)
