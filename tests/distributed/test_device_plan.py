"""Plans made on the device: every assignment is computed once, and the loss is that of the host's plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.padded_dispatch import PADDED
from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World
from tests.distributed.harness import connect, run_pooled
from tests.distributed.test_dispatch import D_MODEL, inputs_of, random_case
from tests.parameters import slow


def check_cases(rank: int, world_size: int, first: int, last: int) -> int:
    """Results and gradients are those of the dense computation, whatever placement, skew and drops; how many rows
    were computed here.
    """
    world = connect()
    computed = 0
    whole = [tuple(range(world_size))]
    for seed in range(first, last):
        case = random_case(seed, world_size)
        placement: Placement = case["placement"]
        ids_TK, x_TD, weights_TK = inputs_of(case, seed, rank)
        upstream = torch.randn(len(ids_TK), D_MODEL)
        scales_E = torch.arange(1.0, placement.num_experts + 1)
        own = torch.bincount(ids_TK[ids_TK >= 0], minlength=placement.num_experts)
        held = np.array(placement.experts_on(rank), dtype=np.int64)
        slots = [*np.random.default_rng(seed).permutation(held).tolist(), -1]
        kept = (ids_TK >= 0).float()
        dense_TD = x_TD * (weights_TK * kept * scales_E[ids_TK.clamp_min(0)]).sum(dim=1)[:, None]
        wanted = torch.autograd.grad(dense_TD, (x_TD, weights_TK), upstream)
        dispatcher = Dispatcher(placement, world, whole, case["quota"], slots, plan_on="device")
        counts_NE = dispatcher.gather_counts(own)
        sent = dispatcher.dispatch(x_TD, ids_TK, counts_NE)
        assert sent.tokens_per_slot_S[-1] == 0
        slot_M = torch.arange(len(slots)).repeat_interleave(sent.tokens_per_slot_S)
        scale_M = torch.zeros(len(sent.rows_MD))
        scale_M[: len(slot_M)] = scales_E[torch.tensor(slots)[slot_M]]
        rows_MD = torch.where(scale_M[:, None] > 0, sent.rows_MD, torch.nan) * scale_M[:, None]
        out_TD = dispatcher.combine(rows_MD, sent, weights_TK)
        torch.testing.assert_close(out_TD, dense_TD, rtol=1e-5, atol=1e-6)
        for found, expected in zip(torch.autograd.grad(out_TD, (x_TD, weights_TK), upstream), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        by_expert_E = torch.zeros(placement.num_experts, dtype=torch.int64)
        by_expert_E[slots[:-1]] = sent.tokens_per_slot_S[:-1]
        dist.all_reduce(by_expert_E)
        assert torch.equal(by_expert_E, counts_NE.sum(dim=0)), "an assignment was lost or computed twice"
        computed += int(sent.tokens_per_slot_S.sum())
    return computed


@pytest.mark.parametrize(("world_size", "cases"), [(3, 12), slow(2, 60), slow(4, 60)])
def test_every_assignment_is_computed_exactly_once(world_size: int, cases: int) -> None:
    assert sum(run_pooled(world_size, check_cases, 0, cases)) > 100


def refusals(rank: int, world_size: int) -> list[str]:
    world = connect()
    whole, place = [tuple(range(world_size))], uniform_placement(4, world_size)
    elastic = World(rank=rank, size=world_size, device=world.device, compute=world.compute, is_aborted=lambda: False)
    on_device: dict[str, Any] = {"plan_on": "device"}
    dispatcher = Dispatcher(place, world, whole, **on_device)
    x_TD, ids_TK, counts_E = torch.zeros(2, 3), torch.tensor([[0], [1]]), torch.tensor([1, 1, 0, 0])
    dispatcher.dispatch(x_TD, ids_TK, dispatcher.gather_counts(counts_E))
    shadows = np.zeros((4, world_size), dtype=bool)
    shadows[0, 1] = True

    def more() -> None:
        dispatcher.dispatch(torch.zeros(4, 3), ids_TK.repeat(2, 1), dispatcher.gather_counts(2 * counts_E))

    def other_placement() -> None:
        other = Placement(replicas=place.replicas[::-1].copy()) if rank else place
        dispatcher = Dispatcher(other, world, whole, **on_device)
        dispatcher.gather_counts(counts_E)
        dispatcher.gather_counts(counts_E)

    cases = [
        lambda: Dispatcher(uniform_placement(4, world_size, world_size), world, [(0,), (1,)], **on_device),
        lambda: Dispatcher(place, world, whole, backend=PADDED, **on_device),
        lambda: Dispatcher(place, elastic, whole, **on_device),
        lambda: dispatcher.set_speeds(np.array([1, 2])),
        lambda: dispatcher.set_shadows(ShadowPlan(shadows=shadows, homes=np.array([0, 0, 1, 1]))),
        lambda: dispatcher.dispatch(x_TD, ids_TK, dispatcher.gather_counts(counts_E), lambda: None),
        more,
        other_placement,
        lambda: MoELayer(4, 4, 4, {"capacity_factor": 1.0}).place(dispatcher, world.device),
        lambda: MoELayer(4, 4, 4, bias=True).place(dispatcher, world.device),
    ]
    told = []
    for case in cases:
        with pytest.raises(ConfigurationError) as caught:
            case()
        told.append(str(caught.value))
    return told


def test_what_it_does_not_do_is_a_sentence() -> None:
    told = run_pooled(2, refusals)[0]
    parts = (
        "does not support dispatch groups", "dispatch='padded'", "elastic runs", "unequal speeds", "shadows",
        "read the counts", "room for the 2 tokens that a rank had at first, but this",
        "the placement of MoE layer 0 of ranks [1] differs", "capacity_factor: use plan='host'", "biases of experts",
    )  # fmt: skip
    assert all(part in sentence for part, sentence in zip(parts, told, strict=True)), told
