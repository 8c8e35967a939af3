"""Plans made on the device are those of the host, integer by integer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from moe_lightning import kernels as ops
from moe_lightning.arrays import IntArray
from moe_lightning.dispatch import quota
from moe_lightning.dispatch.quota import dispatch_splits, with_slack
from moe_lightning.errors import ConfigurationError

EVEN = ops.QuotaRounds(rounds=0, patience=0, slack=1, one=1)


def case(seed: int) -> tuple[IntArray, IntArray, int]:
    """Tokens [E, N], replicas [E, N] and a rank: few and many experts and tokens, even and skewed, some unheld."""
    rng = np.random.default_rng(seed)
    experts, ranks = int(rng.choice([1, 3, 8, 40, 300])), int(rng.choice([1, 2, 3, 4, 8, 16]))
    replicas = rng.integers(1, 4, (experts, ranks)) * (rng.random((experts, ranks)) < rng.choice([0.1, 0.4, 1.0]))
    lonely = ~replicas.any(axis=1)
    homeless = lonely & (rng.random(experts) < 0.3)
    replicas[lonely & ~homeless, rng.integers(ranks)] = 1
    share = rng.dirichlet(np.full(experts, rng.choice([0.05, 0.5, 5.0])))
    total = int(rng.choice([3, 100, 20_000, 1 << 30]))
    tokens = np.array([rng.multinomial(total, share) for _ in range(ranks)]).T
    tokens[homeless] = 0
    return np.ascontiguousarray(tokens), replicas.astype(np.int64), int(rng.integers(ranks))


def sharing(replicas: IntArray) -> ops.QuotaRounds:
    return ops.QuotaRounds(*quota.sharing_rounds(int((replicas > 0).sum())))


def weighted_quota(tokens: IntArray, replicas: IntArray) -> IntArray:
    """Quotas by `sharing`, in tables of Python's integers."""
    rounds, patience, slack, unit = sharing(replicas)
    tokens_E1, replicas_EN = tokens.astype(object)[:, None], replicas.astype(object)
    num_ranks, total = replicas.shape[1], int(tokens.sum())

    def split(pull_EN: Any) -> Any:
        upto_EN = pull_EN.cumsum(axis=1)
        norm_E1 = np.maximum(upto_EN[:, -1:], 1)
        return tokens_E1 * upto_EN // norm_E1 - tokens_E1 * (upto_EN - pull_EN) // norm_E1

    mean = max(1, -(-total // num_ranks))
    holders_E1 = np.maximum((replicas > 0).sum(axis=1, keepdims=True), 1)
    bound = max(mean, (-(-tokens_E1 // holders_E1)).max())
    one = max(1, min(unit, (1 << 62) // max(mean, (replicas_EN.sum(axis=1, keepdims=True) * tokens_E1).max())))
    weights_N = np.full(num_ranks, one, dtype=object)
    pulls, loads = [], []
    for _ in range(rounds):
        pulls.append(weights_N * replicas_EN)
        load_N = (tokens_E1 * pulls[-1] // np.maximum(pulls[-1].sum(axis=1, keepdims=True), 1)).sum(axis=0)
        loads.append(load_N.max())
        since_best = len(loads) - 1 - loads.index(min(loads))
        if loads[-1] * 500 <= bound * 501 or (since_best >= patience and min(loads) <= bound + bound // slack):
            break
        weights_N = weights_N * mean // np.maximum(load_N, max(1, mean // 64))
        weights_N = np.maximum(weights_N * one // max(1, weights_N.max()), 1)
    best, first = split(pulls[loads.index(min(loads))]), split(pulls[0])
    chosen = first if first.sum(axis=0).max() < best.sum(axis=0).max() else best
    return np.array(chosen, dtype=np.int64)


def compare(seeds: range) -> int:
    """How many of these inputs have the very quotas of `balanced_quota`."""
    same = 0
    for seed in seeds:
        tokens, replicas, rank = case(seed)
        for how, rule in ((sharing(replicas), weighted_quota), (EVEN, quota.equal_quota)):
            wanted_send, wanted_recv = dispatch_splits(tokens, rule(tokens.sum(axis=1), replicas), rank)
            sent, received = ops.plan_rows(torch.from_numpy(tokens), torch.from_numpy(replicas), rank, how)
            assert np.array_equal(sent.numpy(), wanted_send), seed
            assert np.array_equal(received.numpy(), wanted_recv), seed
        same += searches_for_nothing(tokens.sum(axis=1), replicas)
    return same


def searches_for_nothing(tokens: IntArray, replicas: IntArray) -> bool:
    """Whether `balanced_quota` has nothing to move after the weights; then `weighted_quota` is the same."""
    searched = []

    def left_alone(split: IntArray, load: IntArray, bound: int, *_: object, **__: object) -> IntArray:
        searched.append(int(load.max()) > with_slack(bound))
        return split

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quota, "relieve", left_alone)
        weighted = quota.balanced_quota(tokens, replicas)
    settled = weighted_quota(tokens, replicas)
    assert settled.sum(axis=0).max() <= weighted.sum(axis=0).max()
    if any(searched):
        return False
    assert np.array_equal(weighted, settled)
    return True


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_plans_are_those_of_the_host() -> None:
    same = compare(range(3) if INTERPRETED else range(120))
    assert INTERPRETED or same >= 40


@pytest.mark.slow
def test_thousands_of_plans_are_those_of_the_host() -> None:
    assert compare(range(1000, 5000)) > 0


def in_blocks(rows: list[tuple[int, int]], num_ranks: int, block: int) -> list[tuple[int, int] | None]:
    """Rows (rank, expert), already by rank, with None in what is left over."""
    laid: list[tuple[int, int] | None] = []
    for rank in range(num_ranks):
        laid += [row for row in rows if row[0] == rank]
        laid += [None] * ((rank + 1) * block - len(laid))
    return laid


@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 12))
def test_rows_of_a_plan_lie_in_blocks_and_by_slots(seed: int) -> None:
    """Against lists of rows that know their rank and expert."""
    rng = np.random.default_rng(seed)
    experts, ranks, dropped = int(rng.integers(1, 9)), int(rng.integers(1, 6)), int(rng.integers(3))
    send, recv = rng.integers(0, 4, (2, experts, ranks)) * (rng.random((2, experts, ranks)) < 0.6)
    held = rng.permutation(experts)[: rng.integers(1, experts + 1)].tolist()
    recv[[expert for expert in range(experts) if expert not in held]] = 0
    slots = [*held, experts]
    block = int(max(send.sum(axis=0).max(), recv.sum(axis=0).max())) + dropped + 1
    order_A = torch.from_numpy(rng.permutation(int(send.sum()) + dropped + (send.sum() + dropped == 0)))
    runs = ops.plan_runs(torch.from_numpy(send), torch.from_numpy(recv), torch.tensor(slots), block)
    assert runs.tokens_C.tolist() == [*recv[held].sum(axis=1).tolist(), 0]

    sent = [(rank, expert) for expert in range(experts) for rank in range(ranks) for _ in range(send[expert, rank])]
    laid = in_blocks(sorted(sent), ranks, block)
    num_routed = runs.send_starts[experts]
    order_M, inverse_A = ops.fill_blocks(order_A, runs.send_starts, runs.send_ends, num_routed, ranks * block)
    row_of = {int(assignment): row for row, assignment in enumerate(order_M) if laid[row] is not None}
    assert [laid[row_of[int(assignment)]] for assignment in order_A[: len(sent)]] == sent
    assert inverse_A.tolist() == [row_of.get(assignment, -1) for assignment in range(len(order_A))]
    assert set(order_M.tolist()) <= set(order_A.tolist())

    came = [(rank, expert) for rank in range(ranks) for expert in range(experts) for _ in range(recv[expert, rank])]
    laid = in_blocks(came, ranks, block)
    index_M, inverse_M = ops.reorder_chunks(runs.recv_starts, runs.recv_ends, ranks * block)
    by_slot = [(rank, expert) for expert in held for rank in range(ranks) for _ in range(recv[expert, rank])]
    assert [laid[row] for row in index_M] == [*by_slot, *[None] * (ranks * block - len(by_slot))]
    assert torch.equal(inverse_M[index_M], torch.arange(ranks * block))


def test_a_plan_of_other_tables_is_refused() -> None:
    tokens = torch.ones(3, 2, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match=r"tokens \[3, 2\], replicas \[2, 2\] and rank 0 do not fit"):
        ops.plan_rows(tokens, tokens[:2], 0, EVEN)
    with pytest.raises(ConfigurationError, match="rank 2 do not fit"):
        ops.plan_rows(tokens, tokens, 2, EVEN)
    with pytest.raises(ConfigurationError, match=r"send \[3, 2\] and recv \[2, 2\] do not fit"):
        ops.plan_runs(tokens, tokens[:2], torch.tensor([0]), 4)
