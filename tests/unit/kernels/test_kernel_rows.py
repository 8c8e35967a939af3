"""Routing and row movement equal the reference, in value and gradient."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import reference
from tests.unit.kernels.kernel_cases import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_equals_reference,
    kernel_settings,
    randn,
    routings,
)


@kernel_settings
@given(st.data())
def test_top_k_equals_reference_with_ties_to_the_lower_id(data):
    num_tokens, num_experts = data.draw(st.sampled_from([(0, 3), (1, 1), (17, 5), (40, 64)]))
    top_k = data.draw(st.integers(1, min(4, num_experts)))
    dtype = data.draw(st.sampled_from(DTYPES))
    levels = data.draw(st.sampled_from([2, 5, 10**6]))  # few levels: many ties
    scores = (randn(num_tokens, num_experts, seed=levels) * levels).round().div(levels).to(dtype)
    if num_experts > 2:
        scores[:, 2] = -torch.inf
    with ops.backend("reference"):
        expected = ops.top_k_experts(scores, top_k)
    ids = ops.top_k_experts(scores, top_k)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected)


def test_top_k_treats_both_zeros_alike():
    ids = ops.top_k_experts(torch.tensor([[-0.0, 0.0, -1.0]], device=DEVICE), 2)
    assert ids.tolist() == [[0, 1]]


@kernel_settings
@given(routings())
def test_sort_equals_reference(routing):
    ids, num_experts = routing
    expected = reference.sort_by_expert(ids, num_experts)
    for actual, wanted in zip(ops.sort_by_expert(ids, num_experts), expected, strict=True):
        assert actual.dtype == torch.int64
        assert torch.equal(actual, wanted)
    if not (ids < 0).any():
        for actual, wanted in zip(ops.sort_by_expert(ids, num_experts, num_rows=ids.numel()), expected, strict=True):
            assert torch.equal(actual, wanted)


@kernel_settings
@given(routings(), st.sampled_from([1, 3, 16, 40]), st.sampled_from(DTYPES))
def test_permute_and_unpermute_equal_reference(routing, width, dtype):
    ids, num_experts = routing
    sort = ops.sort_by_expert(ids, num_experts)
    x = randn(len(ids), width, dtype=dtype)
    rows = randn(len(sort.order_M), width, dtype=dtype, seed=1)
    weights = randn(*ids.shape, seed=2).sigmoid()
    assert_equals_reference(lambda x: ops.permute(x, sort.order_M, sort.inverse_TK), x)
    assert_equals_reference(lambda r: ops.unpermute(r, sort.inverse_TK, sort.order_M), rows)
    assert_equals_reference(lambda r, w: ops.unpermute(r, sort.inverse_TK, sort.order_M, w), rows, weights)
    assert_equals_reference(lambda w: ops.unpermute(rows, sort.inverse_TK, sort.order_M, w), weights)


@pytest.mark.skipif(INTERPRETED, reason="blocks belong to the torch bodies")
@pytest.mark.parametrize("drop", [False, True])
def test_results_of_many_blocks_equal_those_of_one(drop, monkeypatch):
    ids = torch.randint(-1 if drop else 0, 7, (300, 2), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    sort = ops.sort_by_expert(ids, 7)
    x, rows, weights = randn(300, 24), randn(len(sort.order_M), 24, seed=4), randn(300, 2, seed=5)
    monkeypatch.setattr("moe_lightning.kernels.torch_kernels._BLOCK_BYTES", 64)
    monkeypatch.setattr("moe_lightning.kernels.torch_kernels._HEAP_BYTES", 64)
    assert_equals_reference(lambda x: ops.permute(x, sort.order_M, sort.inverse_TK), x)
    assert_equals_reference(lambda r, w: ops.unpermute(r, sort.inverse_TK, sort.order_M, w), rows, weights)
    assert_equals_reference(lambda h: ops.expert_activation(h, "swiglu"), rows)


def test_an_infinite_row_reaches_its_own_token_only():
    ids = torch.tensor([[0, -1], [1, -1], [-1, -1]], device=DEVICE)
    sort = ops.sort_by_expert(ids, 2)
    rows = torch.tensor([[torch.inf], [2.0]], device=DEVICE)
    weights = torch.ones(3, 2, device=DEVICE)
    assert ops.unpermute(rows, sort.inverse_TK, sort.order_M, weights).tolist() == [[torch.inf], [2.0], [0.0]]
    assert ops.unpermute(rows, sort.inverse_TK, sort.order_M).tolist() == [[torch.inf], [2.0], [0.0]]


def test_unpermute_accumulates_in_fp32():
    if INTERPRETED:
        pytest.skip("the interpreter stores bf16 by truncation")
    # The spacing of bf16 is 2 here: 257.2 rounds to 258, but 0.6 alone vanishes.
    rows = torch.tensor([[256.0], [0.6], [0.6]], dtype=torch.bfloat16, device=DEVICE)
    sort = ops.sort_by_expert(torch.tensor([[0, 1, 2]], device=DEVICE), 3)
    assert ops.unpermute(rows, sort.inverse_TK, sort.order_M).item() == 258.0


@kernel_settings
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12).flatmap(lambda sizes: st.permutations(list(enumerate(sizes))))
)
def test_reorder_chunks_and_permute(chunks):
    sizes = [size for _, size in sorted(chunks)]
    starts = [sum(sizes[:old]) for old, _ in chunks]
    ends = list(itertools.accumulate(size for _, size in chunks))
    places = torch.tensor([starts, ends], device=DEVICE)
    index, inverse = ops.reorder_chunks(places[0], places[1], ends[-1])
    old = [range(start, start + size) for start, (_, size) in zip(starts, chunks, strict=True)]
    assert index.tolist() == list(itertools.chain(*old))
    assert torch.equal(index[inverse], torch.arange(len(index), device=DEVICE))
    x = randn(len(index), 5)
    assert_equals_reference(lambda x: ops.permute(x, index, inverse.unsqueeze(1)), x)


def test_strided_inputs_are_handled():
    ids = torch.tensor([[0, 1, 0, 2], [2, 1, 1, 0]], device=DEVICE).t()
    sort = ops.sort_by_expert(ids, 3)
    for actual, wanted in zip(sort, reference.sort_by_expert(ids, 3), strict=True):
        assert torch.equal(actual, wanted)
    x = randn(6, 4).t()
    assert_equals_reference(lambda x: ops.permute(x, sort.order_M, sort.inverse_TK), x)
    rows, weights = randn(16, 8)[:, ::2].t()[:8].t()[:8], randn(2, 4).t()
    assert_equals_reference(lambda r, w: ops.unpermute(r, sort.inverse_TK, sort.order_M, w), rows, weights)
    assert ops.top_k_experts(randn(5, 3).t(), 2).shape == (3, 2)


X = torch.zeros(2, 4)
IDS = torch.zeros(2, 1, dtype=torch.int64)
ORDER = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.top_k_experts(X, 5), "top_k=5 does not fit 4 experts"),
        (lambda: ops.top_k_experts(X[0], 1), "needs 2 dimensions"),
        (lambda: ops.top_k_experts(X.long(), 1), "scores is torch.int64"),
        (lambda: ops.sort_by_expert(IDS.int(), 2), r"needs int64: call .long\(\)"),
        (lambda: ops.sort_by_expert(IDS + 2, 2), "from 2 to 2, but must lie in -1..1"),
        (lambda: ops.sort_by_expert(IDS - 1, 2, num_rows=2), r"must lie in 0\.\.1"),
        (lambda: ops.sort_by_expert(IDS, 0), "num_experts=0"),
        (lambda: ops.permute(torch.zeros(3, 4), ORDER, IDS), "made for 2 tokens, but x holds 3"),
        (lambda: ops.permute(X.to("meta"), ORDER, IDS), "order is on cpu"),
        (lambda: ops.unpermute(torch.zeros(3, 4), IDS, ORDER), "order lists 2 rows, but there are 3"),
        (lambda: ops.unpermute(X, IDS, ORDER, torch.zeros(2, 2)), "weights .* do not fit inverse"),
    ],
)
def test_wrong_input_is_one_sentence(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: ops.expert_activation(x, "swiglu"),
        lambda x: ops.permute(x, torch.tensor([1, 0], device=DEVICE), torch.tensor([[1], [0]], device=DEVICE)),
    ],
)
def test_no_operation_has_a_second_derivative(operation):
    x = randn(2, 6).requires_grad_()
    with pytest.raises(ConfigurationError, match="kernels have no second derivatives"):
        torch.autograd.grad(operation(x).square().sum(), x, create_graph=True)
