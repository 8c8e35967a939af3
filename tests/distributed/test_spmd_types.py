"""Our collectives of layers that are cut over ranks, beside those of torch's type checker for SPMD programs, which
accepts a collective only where its gradient is that of the declared types.
"""

from __future__ import annotations

import re

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
from spmd_types import P, R, V
from torch import Tensor
from torch.distributed import init_device_mesh

from moe_lightning.parallel.tensor import TensorRanks
from tests.distributed.harness import RankFailure, run_ranks


def collectives(rank: int, size: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Result and gradient of ours and theirs, by name."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    ours = TensorRanks(group=group, rank=rank, size=size)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    forms = {
        "sum": (P, R, ours.sum, lambda x: spmd.all_reduce(x, group, src=P, dst=R)),
        "gather": (V, R, lambda x: ours.gather(x, 0), lambda x: spmd.all_gather(x, group, src=spmd.S(0), dst=R)),
        "sum_parts": (
            P,
            V,
            lambda x: ours.sum_parts(x, 0),
            lambda x: spmd.reduce_scatter(x, group, src=P, dst=spmd.S(0)),
        ),
    }
    for name, (source, result, *functions) in forms.items():
        for number, function in enumerate(functions):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            if number:
                with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck():
                    spmd.assert_type(x, {group: source})
                    y = function(x)
                    spmd.assert_type(y, {group: result})
            else:
                y = function(x)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(10 + rank))
            y.backward(weights)  # type: ignore[no-untyped-call]
            assert x.grad is not None
            found.setdefault(name, []).append((y.detach(), x.grad))
    return found


def test_collectives_have_the_gradients_of_their_types() -> None:
    for of_rank in run_ranks(2, collectives):
        assert list(of_rank) == ["sum", "gather", "sum_parts"]
        for name, (ours, theirs) in of_rank.items():
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, msg=name)


def summed_twice(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck():
        x = torch.ones(2)
        spmd.assert_type(x, {group: P})
        y = spmd.all_reduce(x, group, src=P, dst=R)
        spmd.all_reduce(y, group, src=P, dst=R)


def test_the_checker_refuses_a_sum_of_sums() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, summed_twice)
    assert re.search("SpmdTypeError|src", str(failure.value))
