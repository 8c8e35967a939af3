"""Grouped matmul and fused activation equal the reference, in value and gradient."""

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from tests.unit.kernels.kernel_cases import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_close,
    assert_equals_reference,
    kernel_settings,
    randn,
    routings,
)

COUNTS = {"list": list, "tuple": tuple, "tensor": torch.tensor, "there": lambda n: torch.tensor(n, device=DEVICE)}
"""What the counts of rows may be."""
KINDS = ["gelu", "swiglu", "gelu_tanh", "swiglu_clamped"]
SIZES = [[0], [1], [40], [0, 0], [3, 0, 5], [0, 33, 0, 1, 0], [1, 1, 1, 61], [0, 0, 2]]


@kernel_settings
@given(
    st.sampled_from(SIZES),
    st.sampled_from([0, 3]),
    st.sampled_from([(1, 1), (16, 8), (24, 40)]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(sorted(COUNTS)),
)
def test_grouped_mm_equals_reference(sizes, tail, widths, dtype, transposed, counts):
    width_in, width_out = widths
    x = randn(sum(sizes) + tail, width_in, dtype=dtype)
    weight = randn(len(sizes), width_in, width_out, dtype=dtype, seed=1)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(ops.grouped_mm(x, weight, COUNTS[counts](sizes))[sum(sizes) :], x.new_zeros(tail, width_out))
    assert_equals_reference(lambda x, w: ops.grouped_mm(x, w, COUNTS[counts](sizes)), x, weight)


@kernel_settings
@given(
    st.sampled_from(SIZES),
    st.sampled_from([0, 3]),
    st.sampled_from([(8, 8), (24, 40), (5, 3)]),
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
)
def test_experts_of_rows_equal_reference(sizes, tail, widths, kind, dtype):
    width, hidden = widths
    x = randn(sum(sizes) + tail, width, dtype=dtype)
    up = randn(len(sizes), width, hidden * (2 if kind.startswith("swiglu") else 1), dtype=dtype, seed=1) / width**0.5
    down = randn(len(sizes), hidden, width, dtype=dtype, seed=2) / hidden**0.5
    assert_equals_reference(lambda x, u, d: ops.expert_mlp(x, u, d, torch.tensor(sizes), kind), x, up, down)


@kernel_settings
@given(routings(), st.sampled_from(KINDS), st.sampled_from(DTYPES))
def test_experts_of_tokens_equal_reference(routing, kind, dtype):
    ids, num_experts = routing
    sort = ops.sort_by_expert(ids, num_experts)
    x, weights = randn(len(ids), 24, dtype=dtype), randn(*ids.shape, seed=3).sigmoid()
    up = randn(num_experts, 24, 40 * (2 if kind.startswith("swiglu") else 1), dtype=dtype, seed=1) / 5
    down = randn(num_experts, 40, 24, dtype=dtype, seed=2) / 6

    def experts(x, up, down, weights):
        return ops.expert_mlp(x, up, down, sort.tokens_per_expert_E, kind, sort=sort, weights_TK=weights)

    assert_equals_reference(experts, x, up, down, weights)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_same_on_all_bodies(activation, bias):
    torch.manual_seed(0)
    layer = MoELayer(16, 24, 5, {"top_k": 2}, activation=activation, bias=bias).to(DEVICE)
    tokens = 9 if INTERPRETED else 33
    x, grad = randn(tokens, 16).requires_grad_(), randn(tokens, 16, seed=1)

    def run():
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)]

    actual = run()
    with ops.backend("reference"):
        expected = run()
    for here, there in zip(actual, expected, strict=True):
        assert_close(here, there)


def test_only_the_wanted_gradient_is_computed():
    x, weight = randn(4, 8), randn(2, 8, 8, seed=1)
    for leaf in (x, weight):
        leaf.requires_grad_()
        ops.grouped_mm(x, weight, [1, 3]).sum().backward()
        assert leaf.grad is not None
        leaf.grad = None
        leaf.requires_grad_(False)
    assert x.grad is None
    assert weight.grad is None


@pytest.mark.skipif(INTERPRETED, reason="the Triton bodies compute in fp32")
def test_gradients_equal_finite_differences():
    x, weight = (t.double().requires_grad_() for t in (randn(5, 3), randn(3, 3, 4, seed=1)))
    torch.autograd.gradcheck(lambda x, w: ops.grouped_mm(x, w, [2, 0, 2]), (x, weight))
    h = randn(5, 4).double().requires_grad_()
    for kind in KINDS:
        torch.autograd.gradcheck(lambda h, kind=kind: ops.expert_activation(h, kind), h)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (40, 72), (3, 5000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_equals_reference(kind, shape, dtype):
    assert_equals_reference(lambda h: ops.expert_activation(h, kind), randn(*shape, dtype=dtype) * 3)


def test_the_backward_keeps_h_only():
    h = randn(8, 4).requires_grad_()
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        ops.expert_activation(h, "gelu")
    assert len([t for t in tensors if t.dim() == 2]) == 1


def test_autocast_casts_both_operands():
    x, weight = randn(3, 8).requires_grad_(), randn(1, 8, 8, seed=1).requires_grad_()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = ops.grouped_mm(x, weight, [3])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("said", "precision"), [("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")])
def test_matmuls_hear_what_torch_was_told_of_tf32(said, precision):
    from moe_lightning.kernels.triton import tiles as triton_tiles

    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = said  # where it is "tf32", reading allow_tf32 raises
    try:
        assert triton_tiles.precision() == precision
    finally:
        settings.fp32_precision = before


@pytest.mark.skipif(not INTERPRETED, reason="counts on a GPU are trusted by the host alone")
@pytest.mark.parametrize("counts", [[1 << 40, -5, 3], [-1, -1, -1], [39, 39, 39], [1 << 31, 1 << 31, 1 << 31]])
def test_counts_of_an_aborted_collective_end_and_stay_inside(counts):
    from moe_lightning.kernels.triton import matmul as room

    x, weight = randn(40, 16), randn(3, 16, 24, seed=1)
    cut = room.cut(torch.tensor(counts), len(x), x)
    starts = cut.starts_S.tolist()
    assert starts == sorted(starts)
    assert 0 <= starts[0] <= starts[-1] <= len(x)
    assert int(cut.total) <= cut.capacity
    y = room.grouped_mm(x, weight, cut)
    assert not y[starts[-1] :].any()
    assert room.grouped_wgrad(x, y, cut).isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("widths", [(16, 16), (16, 10), (7, 16)])
def test_rows_past_the_sum_are_zero_whatever_the_weights_are(widths, value):
    x, weight = randn(40, widths[0]), randn(2, *widths, seed=1)
    weight[-1, 0, 0] = value
    assert not ops.grouped_mm(x, weight, [16, 8])[24:].any()


X, W = torch.zeros(4, 8), torch.zeros(2, 8, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.grouped_mm(X, W, [1, 2, 1]), "counts 3 slots, but weight has 2"),
        (lambda: ops.grouped_mm(X, W, [3, 2]), "sum to 5, but x holds 4 rows"),
        (lambda: ops.grouped_mm(X, W, [5, -1]), "counts are at least 0"),
        (lambda: ops.grouped_mm(X, W, [1.0, 2.0]), "tokens_per_slot is torch.float32"),
        (lambda: ops.grouped_mm(X[:, :7], W, [1, 2]), "x has 7 columns, but weight expects 8"),
        (lambda: ops.grouped_mm(X, W.bfloat16(), [1, 2]), "weight is torch.bfloat16, but x is torch.float32"),
        (lambda: ops.grouped_mm(X, W[0], [1, 2]), "weight has shape .* needs 3 dimensions"),
        (lambda: ops.expert_mlp(X, W, W, [1, 3], "gelu", weights_TK=X), "give both or neither"),
        (lambda: ops.expert_activation(X, "relu"), "'relu' does not exist: use one of gelu, swiglu"),
        (lambda: ops.expert_activation(X[:, :7], "swiglu"), "halves its 7 columns"),
    ],
)
def test_wrong_input_is_one_sentence(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()
