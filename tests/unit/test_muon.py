"""Muon as torch has it for one matrix, for every expert by itself, and AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_lightning import GPT, GPTConfig
from moe_lightning.models.optimizers import Muon, muon_groups, orthogonalised, parameter_groups


def gradients(shape: tuple[int, ...], steps: int = 4) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def trained(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    for gradient in gradients(tuple(parameter.shape)):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_a_matrix_is_updated_as_torch_does(shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    stock = torch.optim.Muon([theirs], lr=1e-2, adjust_lr_fn="match_rms_adamw")
    wanted = trained(stock, theirs)
    assert torch.equal(trained(Muon([ours], lr=1e-2, ns_dtype=torch.bfloat16), ours), wanted)
    more = nn.Parameter(torch.ones(shape))
    assert torch.allclose(trained(Muon([more], lr=1e-2), more), wanted, atol=2e-3)


def test_an_expert_is_updated_as_if_it_were_alone() -> None:
    stack = nn.Parameter(torch.ones(3, 8, 6))
    all_of_them = trained(Muon([stack], lr=1e-2, matrices="stack"), stack)
    for expert in range(3):
        alone = nn.Parameter(torch.ones(8, 6))
        optimizer = Muon([alone], lr=1e-2)
        for gradient in gradients((3, 8, 6)):
            alone.grad = gradient[expert]
            optimizer.step()
        assert torch.equal(all_of_them[expert], alone)


def test_vectors_are_updated_by_adamw() -> None:
    ours, theirs = (nn.Parameter(torch.ones(7)) for _ in range(2))
    wanted = trained(torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1), theirs)
    assert torch.equal(trained(Muon([ours], lr=1e-2, matrices="none"), ours), wanted)


@pytest.mark.parametrize(("matrices", "shape"), [("one", (4, 3)), ("stack", (2, 4, 3)), ("none", (7,))])
def test_every_state_counts_its_steps(matrices: str, shape: tuple[int, ...]) -> None:
    """Where one rank keeps a state for all, another tells what it is like."""
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = Muon([parameter], matrices=matrices)
    trained(optimizer, parameter)
    assert optimizer.state[parameter]["step"] == 4


def test_updates_are_nearly_orthogonal_and_nothing_comes_of_nothing() -> None:
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(24, 40), steps=5, dtype=torch.float32))
    assert 0.5 < singular.min() <= singular.max() < 1.4
    assert not orthogonalised(torch.zeros(3, 4), steps=5, dtype=torch.float32).any()


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_its_algorithm(tied: bool) -> None:
    model = GPT(
        GPTConfig(
            vocab_size=32, context_length=8, num_layers=2, d_model=16, num_heads=2, num_experts=4, d_expert=8,
            bias=True, tie_embeddings=tied,
        )
    )  # fmt: skip
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = muon_groups(model, 0.1)
    kinds = {names[p]: (group["matrices"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(kinds) == len(names)
    assert kinds["blocks.1.feed_forward.experts.w_up"] == ("stack", 0.1)
    assert kinds["blocks.1.feed_forward.experts.b_up"] == ("none", 0.0)
    assert kinds["blocks.0.attention.qkv.weight"] == ("one", 0.1)
    assert kinds["blocks.1.feed_forward.router.weight"] == ("one", 0.1)
    assert kinds["token_embedding.weight"] == kinds["position_embedding.weight"] == ("none", 0.1)
    assert tied or kinds["head.weight"] == ("none", 0.1)
    decays = {names[p]: group["weight_decay"] for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert decays == {name: decay for name, (_, decay) in kinds.items()}
