"""Other ways for rows to travel: their results are those of the all-to-all. Fakes stand in for what needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS, Dispatcher
from tests.distributed.harness import connect, run_ranks
from tests.distributed.test_dispatch import random_case
from tests.documented import ROOT, blocks


class FakeDeepEP:
    """`deep_ep.Buffer` on gloo, as far as the documented example goes; every row has one target."""

    def __init__(self, group: Any, *, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group = group

    def dispatch(
        self, x: Tensor, *, handle: Any = None, num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None, is_token_in_rank: Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        if handle is None:
            assert torch.equal(is_token_in_rank.sum(0).int(), num_tokens_per_rank)
            assert torch.equal(is_token_in_rank.int().argmax(1), is_token_in_rank.int().argmax(1).sort().values)
            arrived = torch.empty_like(num_tokens_per_rank)
            dist.all_to_all_single(arrived, num_tokens_per_rank, group=self.group)
            handle = num_tokens_per_rank.tolist(), arrived.tolist()
        return self._moved(x, *handle), None, None, handle[1], handle, None

    def combine(self, x: Tensor, handle: Any) -> tuple[Any, ...]:
        return self._moved(x, *handle[::-1]), None, None

    def _moved(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        rows = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(rows, x.contiguous(), recv, send, group=self.group)
        return rows


def register_the_documented_one(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=FakeDeepEP))  # type: ignore[arg-type]
    pages = blocks(ROOT / "docs" / "extending.md", "python")
    (source,) = (code for code in pages if code.startswith("# deep_ep_dispatch.py"))
    made: dict[str, Any] = {}
    exec(compile(source, "deep_ep_dispatch.py", "exec"), made)
    DISPATCH_BACKENDS.register("deep_ep")(made["DeepEP"])


def all_ways(rank: int, world_size: int) -> int:
    """Values and gradients of the backends, bit by bit; how many rows were compared."""
    world, compared = connect(), 0
    with pytest.MonkeyPatch.context() as patch:
        register_the_documented_one(patch)
        for seed in range(8):
            case = random_case(seed, world_size)
            ids_TK = case["ids"][rank]
            torch.manual_seed(10 * seed + rank)
            x_TD = torch.randn(len(ids_TK), 4, requires_grad=True)
            weights_TK, upstream = torch.rand(ids_TK.shape), torch.randn(len(ids_TK), 4)
            own = torch.bincount(ids_TK[ids_TK >= 0], minlength=case["placement"].num_experts)
            results = []
            for backend in ("exchange", "deep_ep"):
                arguments = case["placement"], world, case["groups"], case["quota"]
                dispatcher = Dispatcher(*arguments, backend=backend)
                sent = dispatcher.dispatch(x_TD, ids_TK, dispatcher.gather_counts(own))
                out_TD = dispatcher.combine(sent.rows_MD * 2, sent, weights_TK)
                (grad_TD,) = torch.autograd.grad(out_TD, x_TD, upstream)
                results.append((sent.rows_MD, sent.tokens_per_slot_S, out_TD, grad_TD))
            for wanted, *found in zip(*results, strict=True):
                assert all(torch.equal(wanted, other) for other in found)
            compared += len(results[0][0])
    return compared


def test_rows_are_those_of_the_all_to_all() -> None:
    assert sum(run_ranks(3, all_ways)) > 100
