"""Replica gradients against a dense sum over ranks: odd sizes, several layers and dtypes, missing gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_lightning.dispatch.placement import Placement
from moe_lightning.dispatch.replicas import ExpertStack, ReplicaSum
from moe_lightning.parallel.context import World
from tests.distributed.harness import connect, run_pooled
from tests.parameters import slow

SHAPES: tuple[tuple[int, ...], ...] = ((1,), (7,), (3, 5), (2, 1, 3))
Layers = list[tuple[Placement, tuple[int, ...], torch.dtype]]


def random_layers(seed: int, world_size: int) -> Layers:
    """The same layers on every rank; some ranks hold nothing of some layers."""
    rng = np.random.default_rng((seed, world_size))
    layers: Layers = []
    for _ in range(3):
        num_experts = int(rng.integers(1, 5))
        table = rng.integers(0, 3, (num_experts, world_size)) * (rng.random((num_experts, world_size)) < 0.5)
        empty = ~table.any(axis=1)
        table[empty, rng.integers(world_size)] = 1
        dtype = [torch.float32, torch.bfloat16, torch.float64][int(rng.integers(3))]
        layers.append((Placement(replicas=table), SHAPES[int(rng.integers(len(SHAPES)))], dtype))
    return layers


def gradient_of(seed: int, layer: int, rank: int, expert: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, layer, rank, expert)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype)


def stack(parameters: list[nn.Parameter], experts: tuple[int, ...], placement: Placement, rank: int) -> ExpertStack:
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    return ExpertStack(parameters=named, slot_experts=experts, placement=placement, rank=rank)


def stacks(layers: Layers, seed: int, rank: int, silent: set[tuple[int, int]]) -> list[ExpertStack]:
    """This rank's parameters with gradients, of which the first of (layer, rank) pairs in `silent` got none."""
    found = []
    for index, (placement, shape, dtype) in enumerate(layers):
        experts = placement.experts_on(rank)
        parameter = nn.Parameter(torch.zeros(len(experts), *shape, dtype=dtype))
        if (index, rank) not in silent and experts:
            parameter.grad = torch.stack([gradient_of(seed, index, rank, e, shape, dtype) for e in experts])
        other = nn.Parameter(torch.zeros(len(experts), 1, dtype=dtype))
        other.grad = torch.zeros_like(other)
        found.append(stack([parameter, other], experts, placement, rank))
    return found


def sum_gradients(rank: int, world_size: int, seeds: range) -> list[list[dict[int, Tensor]]]:
    world = connect()
    results: list[list[dict[int, Tensor]]] = []
    for seed in seeds:
        layers = random_layers(seed, world_size)
        silent = {(seed % 3, seed % world_size)}
        stacked = stacks(layers, seed, rank, silent)
        ReplicaSum(stacked, world)()
        results.append([])
        for held in stacked:
            gradient = held.parameters["0"].grad
            results[-1].append({expert: gradient[slot] for slot, expert in held.held()})
    return results


@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
def test_sums_equal_the_dense_ones_and_agree_bit_by_bit(world_size: int) -> None:
    seeds = range(15)
    results: list[Any] = run_pooled(world_size, sum_gradients, seeds)
    for seed in seeds:
        for index, (placement, shape, dtype) in enumerate(random_layers(seed, world_size)):
            for expert in range(placement.num_experts):
                holders = placement.holders(expert)
                parts = [
                    gradient_of(seed, index, rank, expert, shape, dtype)
                    for rank in holders
                    if (index, rank) != (seed % 3, seed % world_size)
                ]
                expected = sum((part.double() for part in parts), torch.zeros(shape, dtype=torch.float64))
                copies = [results[rank][seed][index][expert] for rank in holders]
                tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
                torch.testing.assert_close(copies[0].double(), expected, rtol=tolerance, atol=tolerance)
                for copy in copies[1:]:
                    assert torch.equal(copy, copies[0]), "replicas differ"


def layouts_and_frozen_rows(rank: int, world_size: int) -> tuple[bool, bool]:
    world = connect()
    placement = Placement(replicas=np.ones((2, world_size), dtype=np.int64))
    strided, frozen = nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    strided.grad = torch.arange(24.0).view(2, 4, 3).transpose(1, 2)
    expected = strided.grad * world_size
    ReplicaSum([stack([strided, frozen], (0, 1), placement, rank)], world)()
    return torch.equal(strided.grad, expected), frozen.grad is None


def test_strided_gradients_are_summed_and_frozen_experts_left_alone() -> None:
    assert run_pooled(2, layouts_and_frozen_rows) == [(True, True)] * 2


def rest(rank: int, world_size: int) -> bool:
    world = connect()
    parameter = nn.Parameter(torch.zeros(2, 3))
    placement = Placement(replicas=np.ones((2, world_size), dtype=np.int64))
    ReplicaSum([stack([parameter], (0, 1), placement, rank)], world)()
    return parameter.grad is None


def test_a_layer_without_gradients_is_left_alone() -> None:
    assert run_pooled(2, rest) == [True, True]


def test_one_rank_has_nothing_to_sum() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    placement = Placement(replicas=np.array([[1], [2]]))
    ReplicaSum([stack([parameter], (0, 1), placement, 0)], World.single())()
    assert parameter.grad is None
