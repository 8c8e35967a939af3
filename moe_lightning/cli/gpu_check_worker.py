"""Process of one check of `moe-bench gpu-check`: python -m moe_lightning.cli.gpu_check_worker NAME DEVICE.

Prints a note and exits with 0; any other exit is a failure. The abort check aborts communicators of a device during a
collective and builds them again in the same process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moe_lightning import kernels as ops
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import load_balancing_loss
from moe_lightning.moe.router import Router, RouterConfig
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import exchange_rows


def exchanged_after_abort(rank: int, size: int, folder: Path, device: torch.device, timeout: timedelta) -> bool:
    """Exchange rows among ranks that meet in a folder, abort the groups, meet again, exchange; whether rows arrived.

    On CUDA rank 0 waits for an exchange that nobody joins when it aborts; gloo cannot abort, and is only made again.
    """
    arrived = []
    for attempt in range(2):
        store = FileStore(str(folder / f"meeting-{attempt}"), size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        world = World.connect(device, timeout)
        rows = torch.full((size, 4), float(rank), device=device)
        got = exchange_rows(rows, [1] * size, [1] * size, world)
        arrived.append(got[:, 0].tolist() == [float(peer) for peer in range(size)])
        if device.type == "cuda" and not attempt:
            if rank == 0:
                dist.all_reduce(rows, group=world.compute, async_op=True)
            for group in world.all_groups:
                group.abort()
        dist.destroy_process_group()
    return all(arrived)


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest error relative to the largest value."""

_TOKENS, _TOP_K, _EXPERTS, _WIDTH, _HIDDEN = 517, 3, 13, 256, 192
_PINNED_BYTES = 64 << 20
_TIMEOUT = timedelta(seconds=30)


def routing(device: torch.device) -> str:
    """Top-k, counts, sort and order of chunks; the router of bf16 rows, whose values have the digits of fp32."""
    scores_TE = torch.rand(_TOKENS, _EXPERTS, generator=_generator())
    ids_TK = ops.top_k_experts(scores_TE, _TOP_K)
    ids_TK[::7, 0] = -1
    sizes_C = torch.randint(0, 9, (20,), generator=_generator())
    ends_C = sizes_C.flip(0).cumsum(0)  # chunks in the reverse order
    starts_C = (sizes_C.cumsum(0) - sizes_C).flip(0)

    def all_of(device: torch.device) -> list[Tensor]:
        chosen = ops.top_k_experts(scores_TE.to(device), _TOP_K)
        ids = ids_TK.to(device)
        return [chosen, ops.count_by_expert(ids, _EXPERTS), *ops.sort_by_expert(ids, _EXPERTS),
                *ops.reorder_chunks(starts_C.to(device), ends_C.to(device), int(ends_C[-1]))]  # fmt: skip

    return f"{_compared(all_of, device)}, router {_compared(_routed, device, 1e-5)}"


def _routed(device: torch.device) -> list[Tensor]:
    """Values of a router and of its balancing loss, and the gradient of its weights."""
    router = Router(_WIDTH, _EXPERTS, RouterConfig(top_k=_TOP_K))
    with torch.no_grad():
        router.weight.copy_(_leaf(torch.device("cpu"), torch.float32, _EXPERTS, _WIDTH))
    router.to(device)
    found = router(_leaf(device, torch.bfloat16, _TOKENS, _WIDTH).detach())
    loss = load_balancing_loss(found.scores_TE, found.tokens_per_expert_E)
    gradient = torch.autograd.grad(loss + found.weights_TK.square().sum(), router.weight)
    return [found.expert_ids_TK, found.weights_TK, found.scores_TE, found.logits_TE, loss, *gradient]


def rows(device: torch.device) -> str:
    """Permute and unpermute, and their gradients."""

    def all_of(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        sort = ops.sort_by_expert(_ids(device), _EXPERTS)
        x, weights = _leaf(device, dtype, _TOKENS, _WIDTH), _leaf(device, torch.float32, _TOKENS, _TOP_K)
        moved = ops.permute(x, sort.order_M, sort.inverse_TK)
        y = ops.unpermute(moved * 2, sort.inverse_TK, sort.order_M, weights)
        return [y, *torch.autograd.grad(y, [x, weights], torch.ones_like(y))]

    return _compared_in_all_dtypes(all_of, device)


def matmul(device: torch.device) -> str:
    """Grouped matmul with its gradients, and the activations."""

    def all_of(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        sort = ops.sort_by_expert(_ids(device), _EXPERTS)
        x = _leaf(device, dtype, len(sort.order_M), _WIDTH)
        weight = _leaf(device, dtype, _EXPERTS, _WIDTH, _HIDDEN)
        y = ops.expert_activation(ops.grouped_mm(x, weight, sort.tokens_per_expert_E), "gelu")
        return [y, *torch.autograd.grad(y, [x, weight], torch.ones_like(y))]

    return _compared_in_all_dtypes(all_of, device)


def grouped(device: torch.device) -> str:
    """The same with torch's own grouped matmul."""
    with ops.backend("grouped"):
        return matmul(device)


def experts(device: torch.device) -> str:
    """Both projections with what is fused into them, by tokens, and all gradients."""

    def all_of(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        sort = ops.sort_by_expert(_ids(device), _EXPERTS)
        x, weights = _leaf(device, dtype, _TOKENS, _WIDTH), _leaf(device, torch.float32, _TOKENS, _TOP_K)
        up, down = _leaf(device, dtype, _EXPERTS, _WIDTH, 2 * _HIDDEN), _leaf(device, dtype, _EXPERTS, _HIDDEN, _WIDTH)
        y = ops.expert_mlp(x, up, down, sort.tokens_per_expert_E, "swiglu", sort=sort, weights_TK=weights)
        return [y, *torch.autograd.grad(y, [x, up, down, weights], torch.ones_like(y))]

    return _compared_in_all_dtypes(all_of, device)


def buffers(device: torch.device) -> str:
    """Parity, and sums in the order of ranks."""
    parts = torch.randn(3, 100_001, generator=_generator())
    numbers = torch.randint(0, 256, (3, 100_001), generator=_generator(), dtype=torch.uint8)

    def all_of(device: torch.device) -> list[Tensor]:
        return [ops.sum_in_rank_order(parts.to(device)), ops.xor_parity(list(numbers.to(device).unbind()))]

    return _compared(all_of, device)


def pinned_copy(device: torch.device) -> str:
    """Page-locked memory up and down again, without waiting in between."""
    is_cuda = device.type == "cuda"
    source = torch.arange(_PINNED_BYTES // 8, dtype=torch.int64)
    target = torch.zeros_like(source)
    if is_cuda:
        source, target = source.pin_memory(), target.pin_memory()
    began = time.perf_counter()
    target.copy_(source.to(device, non_blocking=True), non_blocking=True)
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert torch.equal(source, target), "what came back differs from what was sent"
    return f"{2 * _PINNED_BYTES / seconds / 1e9:.1f} GB/s there and back"


def training(device: torch.device) -> str:
    """Three steps of a layer, beside the same steps on the CPU."""

    def losses(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layer = MoELayer(64, 96, 8, {"top_k": 2}, activation="swiglu").to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        x = torch.randn(256, 64, generator=_generator()).to(device)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (layer(x) - x).square().mean() + layer.auxiliary_loss
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    return _compared(losses, device)


def communicators(device: torch.device) -> str:
    """Abort and meet again, on two devices."""
    with tempfile.TemporaryDirectory(prefix="moe-gpu-check-") as folder:
        context = torch.multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_reconnect, args=(rank, folder, device.type)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        codes = [process.exitcode for process in ranks]
    assert codes == [0, 0], f"the two ranks ended with {codes}"
    return "aborted and made again"


CHECKS: dict[str, Callable[[torch.device], str]] = {
    check.__name__: check
    for check in (routing, rows, matmul, grouped, experts, buffers, pinned_copy, training, communicators)
}


def _reconnect(rank: int, folder: str, device_type: str) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    assert exchanged_after_abort(rank, 2, Path(folder), device, _TIMEOUT), "rows were misplaced"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(device: torch.device) -> Tensor:
    scores_TE = torch.rand(_TOKENS, _EXPERTS, generator=_generator())
    return scores_TE.topk(_TOP_K, dim=1).indices.to(device)


def _leaf(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    values: Tensor = torch.randn(shape, generator=_generator()) / shape[-2] ** 0.5
    return values.to(dtype).to(device).requires_grad_()


def _compared_in_all_dtypes(all_of: Callable[..., list[Tensor]], device: torch.device) -> str:
    return ", ".join(_compared(partial(all_of, dtype=dtype), device, most) for dtype, most in TOLERANCE.items())


def _compared(all_of: Callable[[torch.device], list[Tensor]], device: torch.device, most: float = 1e-4) -> str:
    """Raise where a result on the device differs from torch's on the CPU."""
    with ops.backend("torch"):
        expected = all_of(torch.device("cpu"))
    worst = 0.0
    for place, (found, wanted) in enumerate(zip(all_of(device), expected, strict=True)):
        found = found.detach().cpu()
        assert found.dtype == wanted.dtype, f"result {place} is {found.dtype}"
        if not wanted.is_floating_point():
            assert torch.equal(found, wanted), f"result {place} differs"
            continue
        scale = max(1e-6, float(wanted.detach().abs().max()))
        error = float((found.double() - wanted.detach().double()).abs().max()) / scale
        assert error <= most, f"result {place} differs by {error:.1e} of its largest value, more than {most:.0e}"
        worst = max(worst, error)
    return f"within {worst:.0e}"


if __name__ == "__main__":
    print(CHECKS[sys.argv[1]](torch.device(sys.argv[2])))
