"""Shapes, tolerances and the comparison with the reference that the kernel tests share."""

import os
from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from moe_lightning import kernels as ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
# The interpreter takes milliseconds a program: it gets smaller cases.
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if INTERPRETED else [])]
ROUNDED = DTYPES[:1] if INTERPRETED else DTYPES
"""What results can be compared in bit by bit: the interpreter cuts to bf16 instead of rounding."""
EXPERTS = [1, 2, 5, 17 if INTERPRETED else 64]
TOKENS = [0, 1, 2, 7, 33, *([] if INTERPRETED else [130])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}
"""Largest error relative to the largest magnitude of the expected tensor."""

EXAMPLES = "MOE_LIGHTNING_KERNEL_EXAMPLES"
"""The variable that says how many routings, sizes and values each property is tried on."""

kernel_settings = settings(max_examples=int(os.environ.get(EXAMPLES, "40")), deadline=None)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """(expert ids [T, K], E): uniform, skewed to one expert, with empty experts, with dropped assignments."""
    num_experts = draw(st.sampled_from(EXPERTS))
    top_k = draw(st.integers(1, min(3, num_experts)))
    num_tokens = draw(st.sampled_from(TOKENS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, 0] += draw(st.sampled_from([0.0, 10.0]))
    ids = scores.topk(top_k, dim=1).indices
    if draw(st.booleans()):
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    return ids.to(DEVICE), num_experts


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= tolerance * max(1.0, float(expected.double().abs().max())), float(error)


def assert_equals_reference(operation: Callable[..., Tensor], *inputs: Tensor | None) -> None:
    """Compare value and gradients with the reference, and a second run with the first bit by bit."""

    def run(detached_is_zero: bool = False) -> list[Tensor]:
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
        result = operation(*leaves)
        given = [leaf for leaf in leaves if leaf is not None]
        if detached_is_zero and not result.requires_grad:  # the reference of no rows touches none of its inputs
            return [result, *map(torch.zeros_like, given)]
        weight = randn(*result.shape, dtype=result.dtype, seed=99)
        return [result.detach(), *torch.autograd.grad(result, given, weight, materialize_grads=detached_is_zero)]

    with ops.backend("reference"):
        expected = run(detached_is_zero=True)
    first = run()
    second = first if INTERPRETED else run()  # the interpreter has one order of programs
    tolerance = max(TOLERANCE[x.dtype] for x in (*inputs, *expected) if x is not None)
    for actual, again, wanted in zip(first, second, expected, strict=True):
        assert_close(actual, wanted, tolerance)
        assert torch.equal(actual, again), "two runs differ"
