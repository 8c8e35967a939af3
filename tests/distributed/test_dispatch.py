"""Law L2 on real ranks: every routed assignment is computed exactly once, whatever placement, groups and drops."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning import kernels
from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import Placement, dispatch_groups, uniform_placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from tests.distributed.harness import connect, run_pooled

CASES = 25
D_MODEL = 3


def random_case(seed: int, world_size: int) -> dict[str, Any]:
    """The same case on every rank: sizes, placement, groups, and all ranks' choices (-1 is dropped)."""
    rng = np.random.default_rng((seed, world_size))
    num_experts, top_k = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    top_k = min(top_k, num_experts)
    ep_size = int(rng.choice([n for n in range(1, world_size + 1) if world_size % n == 0]))
    groups = dispatch_groups(world_size, ep_size)
    replicas = rng.integers(0, 3, (num_experts, world_size)) * (rng.random((num_experts, world_size)) < 0.4)
    for expert, group in itertools.product(range(num_experts), groups):
        if not replicas[expert, list(group)].any():
            replicas[expert, rng.choice(group)] = 1
    skew = rng.dirichlet(np.full(num_experts, 0.5))
    ids = []
    for _ in range(world_size):
        num_tokens = int(rng.choice([0, 1, 5, 17]))
        gumbel = np.log(skew + 1e-9) - np.log(-np.log(rng.random((num_tokens, num_experts))))
        chosen = np.argsort(-gumbel, axis=1)[:, :top_k]
        dropped = rng.random(chosen.shape) < rng.choice([0.0, 0.3, 1.0], p=[0.6, 0.3, 0.1])
        ids.append(torch.from_numpy(np.where(dropped, -1, chosen)))
    quota = str(rng.choice(["balanced", "equal"]))
    return {"placement": Placement(replicas=replicas), "groups": groups, "ids": ids, "quota": quota}


def inputs_of(case: dict[str, Any], seed: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's choices, tokens and weights, which differ from those of the others."""
    ids_TK: Tensor = case["ids"][rank]
    torch.manual_seed(1000 * seed + rank)
    x_TD = torch.randn(len(ids_TK), D_MODEL, requires_grad=True)
    return ids_TK, x_TD, torch.rand(ids_TK.shape, requires_grad=True)


def check_cases(rank: int, world_size: int) -> list[int]:
    """Dispatch, compute, combine; the results and gradients must be those of the dense computation."""
    world = connect()
    rows_computed = []
    for seed in range(CASES):
        case = random_case(seed, world_size)
        placement: Placement = case["placement"]
        ids_TK, x_TD, weights_TK = inputs_of(case, seed, rank)
        scales_E = torch.arange(1.0, placement.num_experts + 1)
        dispatcher = Dispatcher(placement, world, case["groups"], case["quota"])
        own = torch.bincount(ids_TK[ids_TK >= 0], minlength=placement.num_experts)
        counts_NE = dispatcher.gather_counts(own)
        for peer, peer_ids in enumerate(case["ids"]):
            expected = torch.bincount(peer_ids[peer_ids >= 0], minlength=placement.num_experts)
            assert torch.equal(counts_NE[peer], expected)
        sent = dispatcher.dispatch(x_TD, ids_TK, counts_NE)
        rows_MD = sent.rows_MD
        slots = placement.experts_on(rank)
        assert len(sent.tokens_per_slot_S) == len(slots)
        assert int(sent.tokens_per_slot_S.sum()) == len(rows_MD)
        scale_M = scales_E[list(slots)].repeat_interleave(sent.tokens_per_slot_S)
        out_TD = dispatcher.combine(rows_MD * scale_M[:, None], sent, weights_TK)

        kept = (ids_TK >= 0).float()
        dense_T = (weights_TK * kept * scales_E[ids_TK.clamp_min(0)]).sum(dim=1)
        torch.testing.assert_close(out_TD, x_TD * dense_T[:, None], rtol=1e-5, atol=1e-6)
        upstream = torch.randn_like(out_TD)
        found = torch.autograd.grad(out_TD, (x_TD, weights_TK), upstream)
        wanted = torch.autograd.grad(x_TD * dense_T[:, None], (x_TD, weights_TK), upstream)
        for gradient, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)

        by_expert_E = torch.zeros(placement.num_experts, dtype=torch.int64)
        by_expert_E[list(slots)] = sent.tokens_per_slot_S
        dist.all_reduce(by_expert_E)
        assert torch.equal(by_expert_E, counts_NE.sum(dim=0)), "an assignment was lost or computed twice"
        if world_size > 1:
            assert dispatcher.last_rank_loads[rank] == len(rows_MD)
        rows_computed.append(len(rows_MD))
    return rows_computed


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_assignment_is_computed_exactly_once(world_size: int) -> None:
    computed = np.array(run_pooled(world_size, check_cases))
    for seed in range(CASES):
        case = random_case(seed, world_size)
        assert computed[:, seed].sum() == sum(int((ids >= 0).sum()) for ids in case["ids"])
        for group in case["groups"]:
            routed = sum(int((case["ids"][rank] >= 0).sum()) for rank in group)
            assert computed[list(group), seed].sum() == routed, "tokens left their dispatch group"


def check_second_derivatives(rank: int, world_size: int) -> None:
    """A penalty on gradients goes through both exchanges, as in the dense computation."""
    world = connect()
    dispatcher = Dispatcher(uniform_placement(4, world_size), world, [tuple(range(world_size))])
    ids_TK = torch.tensor([[3, 1], [0, 2], [1, 0]])
    torch.manual_seed(rank)
    x_TD = torch.randn(3, D_MODEL, requires_grad=True)
    weights_TK = torch.rand(3, 2)

    def penalty_gradient(out_TD: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(out_TD.sum(), x_TD, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x_TD)[0]

    with kernels.backend("reference"):
        sent = dispatcher.dispatch(x_TD, ids_TK, dispatcher.gather_counts(torch.bincount(ids_TK.flatten())))
        found = penalty_gradient(dispatcher.combine(sent.rows_MD.pow(3), sent, weights_TK))
    torch.testing.assert_close(found, penalty_gradient(x_TD.pow(3) * weights_TK.sum(dim=1, keepdim=True)))


def test_second_derivatives_pass_through_both_exchanges() -> None:
    run_pooled(2, check_second_derivatives)  # which asserts on every rank


def tokens_stay_in_their_precision(rank: int, world_size: int) -> tuple[torch.dtype, bool]:
    world = connect()
    dispatcher = Dispatcher(uniform_placement(4, world_size), world, [tuple(range(world_size))])
    ids_TK = torch.tensor([[3], [0], [1], [2]])
    x_TD = torch.randn(4, 8, dtype=torch.bfloat16)
    sent = dispatcher.dispatch(x_TD, ids_TK, dispatcher.gather_counts(torch.ones(4, dtype=torch.int64)))
    back = dispatcher.combine(sent.rows_MD, sent, torch.ones(4, 1))
    return sent.rows_MD.dtype, torch.equal(back.bfloat16(), x_TD)


def test_bf16_rows_travel_as_they_are() -> None:
    assert run_pooled(2, tokens_stay_in_their_precision) == [(torch.bfloat16, True)] * 2


def wrong_dispatchers(rank: int, world_size: int) -> list[str]:
    world = connect()
    whole = [tuple(range(world_size))]
    one_sided = Placement(replicas=np.array([[1, 0], [1, 1]]))
    cases: list[tuple[Any, ...]] = [
        (uniform_placement(4, 3), world, whole),
        (uniform_placement(4, world_size), world, whole, "equal", None, 0, "exchanges"),
        (one_sided, world, [(0,), (1,)]),
    ]
    messages = []
    for arguments in cases:
        with pytest.raises(ConfigurationError) as caught:
            Dispatcher(*arguments)
        messages.append(str(caught.value))
    return messages


def test_wrong_dispatchers() -> None:
    size, backend, group = run_pooled(2, wrong_dispatchers)[0]
    assert "3 ranks" in size
    assert "2 are running" in size
    assert "dispatch='exchanges' is not a known dispatch (did you mean 'exchange'?): use one of exchange" in backend
    assert "ranks [1] holds no replica of expert 0" in group


def test_a_world_of_one_needs_no_group() -> None:
    world = World.single()
    dispatcher = Dispatcher.local(3)
    ids_TK = torch.tensor([[2, 0], [-1, 1]])
    counts = torch.tensor([1, 1, 1])
    x_TD = torch.tensor([[1.0], [10.0]])
    sent = dispatcher.dispatch(x_TD, ids_TK, dispatcher.gather_counts(counts))
    assert sent.rows_MD[:, 0].tolist() == [1.0, 10.0, 1.0]
    assert dispatcher.combine(sent.rows_MD, sent, torch.ones(2, 2))[:, 0].tolist() == [2.0, 10.0]
    assert dispatcher.last_rank_loads is None
    world.close()
