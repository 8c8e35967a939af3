"""Dispatch plans: exact, minimal, the same seen from both ends, equal to matching token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.dispatch.quota import balanced_quota, dispatch_splits, padded_rows


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [E, N], replicas [E, N], quota [E, N])."""
    num_experts, num_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 5))

    def table(largest: int) -> np.ndarray:
        row = st.lists(st.integers(0, largest), min_size=num_ranks, max_size=num_ranks)
        return np.array(draw(st.lists(row, min_size=num_experts, max_size=num_experts)), dtype=np.int64)

    tokens, replicas = table(draw(st.sampled_from([1, 20]))), table(1)
    replicas[replicas.sum(axis=1) == 0, draw(st.integers(0, num_ranks - 1))] = 1
    return tokens, replicas, balanced_quota(tokens.sum(axis=1), replicas)


def whole_plan(tokens: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """D [E, N, N] from the rows of all ranks, checked against their columns."""
    splits = [dispatch_splits(tokens, quota, rank) for rank in range(tokens.shape[1])]
    dispatch = np.stack([send for send, _ in splits], axis=1)
    assert (dispatch == np.stack([recv for _, recv in splits], axis=2)).all(), "senders and receivers disagree"
    return dispatch


def token_by_token(tokens: np.ndarray, quota: np.ndarray) -> np.ndarray:
    """Keep what the quota allows; then the next surplus token goes to the next free place, both in rank order."""
    num_experts, num_ranks = tokens.shape
    dispatch = np.zeros((num_experts, num_ranks, num_ranks), dtype=np.int64)
    for e in range(num_experts):
        kept = [min(int(t), int(q)) for t, q in zip(tokens[e], quota[e], strict=True)]
        surplus = [n for n in range(num_ranks) for _ in range(int(tokens[e, n]) - kept[n])]
        places = [n for n in range(num_ranks) for _ in range(int(quota[e, n]) - kept[n])]
        for n in range(num_ranks):
            dispatch[e, n, n] = kept[n]
        for source, target in zip(surplus, places, strict=True):
            dispatch[e, source, target] += 1
    return dispatch


@settings(max_examples=100, deadline=None)
@given(layers())
def test_plan_equals_matching_token_by_token(layer):
    tokens, _, quota = layer
    assert (whole_plan(tokens, quota) == token_by_token(tokens, quota)).all()


def test_plans_do_not_depend_on_memory_layout_or_repetition():
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, 500, (24, 12))
    replicas = (generator.random((24, 12)) < 0.25).astype(np.int64)
    replicas[:, 3] += replicas.sum(axis=1) == 0
    quota = balanced_quota(tokens.sum(axis=1), replicas)
    assert np.array_equal(balanced_quota(tokens.sum(axis=1), np.asfortranarray(replicas)), quota)
    for rank in range(12):
        first = dispatch_splits(tokens, quota, rank)
        again = dispatch_splits(np.asfortranarray(tokens), np.asfortranarray(quota), rank)
        assert np.array_equal(first, again)


def test_padded_rows_follow_the_fullest_buffer():
    assert padded_rows(np.array([[1, 7], [3, 0], [0, 0]])) == 21
