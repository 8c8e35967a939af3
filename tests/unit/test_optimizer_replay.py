"""Replayed AdamW steps are the owner's, bit by bit; sums of squares or plain SGD would not be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_lightning.checkpoint.optimizer_shards import AdamWReplay
from moe_lightning.errors import ConfigurationError

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
    assert replay is not None
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


def test_groups_must_fit() -> None:
    live = parameters(0, torch.float32)
    with pytest.raises(ConfigurationError, match=r"2 groups .* with 1"):
        AdamWReplay(torch.optim.AdamW(live.values()), [live, {}])
