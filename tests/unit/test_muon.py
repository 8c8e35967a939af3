"""Muon as torch has it for one matrix, for every expert by itself, and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_lightning import GPT, GPTConfig
from moe_lightning.checkpoint.optimizer_shards import AdamWReplay
from moe_lightning.errors import ConfigurationError
from moe_lightning.models import optimizers
from moe_lightning.models.optimizers import Adafactor, Muon, muon_groups, orthogonalised, parameter_groups
from moe_lightning.moe.adapters import add_adapters
from moe_lightning.moe.experts import Experts
from moe_lightning.parallel.context import World
from moe_lightning.state import tensors
from moe_lightning.state.tensors import Updates
from moe_lightning.strategies.gradients import global_gradient_norm, scale_gradients


def gradients(shape: tuple[int, ...], steps: int = 4) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def trained(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    for gradient in gradients(tuple(parameter.shape)):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_a_matrix_is_updated_as_torch_does(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    stock = torch.optim.Muon([theirs], lr=1e-2, adjust_lr_fn="match_rms_adamw")
    wanted = trained(stock, theirs)
    more = nn.Parameter(torch.ones(shape))
    assert torch.allclose(trained(Muon([more], lr=1e-2), more), wanted, atol=2e-3)
    monkeypatch.setattr(optimizers, "orthogonalised", lambda matrix: orthogonalised(matrix, torch.bfloat16))
    assert torch.equal(trained(Muon([ours], lr=1e-2), ours), wanted)


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


@pytest.mark.parametrize("optimizer", [Muon, partial(Muon, matrices="none"), Adafactor])
def test_counts_do_not_end_under_a_default_of_half_precision(optimizer: Callable[..., Muon | Adafactor]) -> None:
    """Manual optimization steps under it in bf16-true; bfloat16 counts to 256."""
    parameter = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = optimizer([parameter])
        for _ in range(258):
            built.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert built.state[parameter]["step"] == 258


@pytest.mark.parametrize("kind", [Muon, Adafactor])
def test_updates_inside_of_autocast_keep_their_precision(kind: type[Muon] | type[Adafactor]) -> None:
    """As manual optimization makes them; a closure computes in the precision of the caller."""
    inside, outside = (nn.Parameter(torch.ones(12, 20)) for _ in range(2))
    trained(kind([outside]), outside)
    with torch.autocast("cpu", torch.bfloat16):
        optimizer = kind([inside])
        trained(optimizer, inside)
        inside.grad = None
        assert optimizer.step(lambda: inside @ inside.T).dtype == torch.bfloat16
    assert torch.equal(inside, outside)


def test_updates_are_nearly_orthogonal_and_nothing_comes_of_nothing() -> None:
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(24, 40)))
    assert 0.5 < singular.min() <= singular.max() < 1.4
    assert not orthogonalised(torch.zeros(3, 4)).any()


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


@pytest.mark.parametrize("num_experts", [1, 4])
def test_groups_do_not_depend_on_the_number_of_slots(num_experts: int) -> None:
    """Nor where a matrix of an adapter has one row."""
    layer = nn.Sequential(Experts(num_experts, 6, 5))
    add_adapters(layer, {"rank": 1, "targets": ["experts"]})
    trained = {p for p in layer.parameters() if p.requires_grad}
    assert len(trained) == 4
    for groups in (parameter_groups(layer, 0.1), muon_groups(layer, 0.1)):
        assert {p for group in groups if group["weight_decay"] for p in group["params"]} == trained


# ----------------------------------------------------------------------
# The norm of the whole model's gradients, in every precision of training.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_scaling_in_every_precision(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2, 2, dtype=dtype))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = global_gradient_norm(parameters, {}, World.single())
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(28**0.5)
    scale_gradients(parameters, norm, 1.0)
    assert parameters[0].grad.float().tolist() == pytest.approx([2 / 28**0.5] * 3, rel=1e-2)


# ----------------------------------------------------------------------
# What of updates on the host needs no ranks.


def test_sparse_gradients_of_embeddings_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "lies_on_a_device", lambda parameter: True)
    monkeypatch.setattr(tensors, "page_locked", lambda shape, dtype: torch.empty(*shape, dtype=dtype))
    found = []
    for on_host in (False, True):
        torch.manual_seed(0)
        table, updates = nn.Embedding(8, 4, sparse=True), Updates(on_host=on_host)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for step, is_sparse in enumerate((True, True, False, True)):
            optimizer.zero_grad()
            table.sparse = is_sparse
            table(torch.tensor([step, 3, 3])).square().sum().backward()
            with updates.around(optimizer, ()):
                optimizer.step()
        found.append(table.weight.detach().clone())
    assert torch.equal(*found)


# ----------------------------------------------------------------------
# Replayed AdamW steps are the owner's, bit by bit; sums of squares or plain SGD would not be.


SHAPES = {"a": (7, 3), "b": (5,), "c": ()}


def parameters(seed: int, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for n, shape in SHAPES.items()}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    foreach=st.sampled_from([None, True, False]),
    amsgrad=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    since=st.integers(0, 5),
)
def test_weights_and_moments_are_bit_equal(
    seed: int, steps: int, dtype: torch.dtype, foreach: bool | None, amsgrad: bool, decay: float, since: int
) -> None:
    """Two groups, a learning rate that changes, missing gradients; the replay may begin in the middle."""
    live = parameters(seed, dtype)
    groups = [{"params": [live["a"]], "weight_decay": decay}, {"params": [live["b"], live["c"]], "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, amsgrad=amsgrad, foreach=foreach, weight_decay=0.01)
    replay: AdamWReplay | None = None
    generator = torch.Generator().manual_seed(seed ^ 1)
    for step in range(steps):
        if step == min(since, steps - 1):
            replay = AdamWReplay(optimizer, [{"a": live["a"]}, {"b": live["b"], "c": live["c"]}], version=step)
            for name, parameter in live.items():
                replay.load(name, {"weight": parameter.detach(), **optimizer.state[parameter]})
        for name, parameter in live.items():
            skipped = (step + len(name) + ord(name)) % 5 == 0
            parameter.grad = None if skipped else torch.randn(parameter.shape, generator=generator).to(dtype)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        gradients = {name: p.grad for name, p in live.items() if p.grad is not None}
        if replay is not None:
            replay.replay(gradients, optimizer)
        optimizer.step()
    assert replay.version == steps
    for name, parameter in live.items():
        states = replay.states(name)
        assert torch.equal(states.pop("weight"), parameter)
        assert states.keys() == optimizer.state[parameter].keys()
        for scope, tensor in states.items():
            assert torch.equal(tensor, optimizer.state[parameter][scope]), (name, scope)


def test_checksums_see_a_single_bit() -> None:
    live = parameters(0, torch.float32)
    optimizer = torch.optim.AdamW(live.values())
    first, second = (AdamWReplay(optimizer, [live]) for _ in range(2))
    gradients = {name: torch.ones_like(p) for name, p in live.items()}
    first.replay(gradients, optimizer)
    gradients["b"].view(-1)[0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    second.replay(gradients, optimizer)
    differ = {name for name, digest in first.digests().items() if digest != second.digests()[name]}
    assert differ == {"b"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p), "only torch.optim.AdamW can be replayed, not SGD"),
        (lambda p: torch.optim.Adam(p), "not Adam:"),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused AdamW rounds differently"),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)), "learning rate in a tensor"),
    ],
)
def test_what_would_not_be_exact_is_refused(make: object, message: str) -> None:
    live = parameters(0, torch.float32)
    optimizer = make(list(live.values()))  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match=message):
        AdamWReplay(optimizer, [live])
