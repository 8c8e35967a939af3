"""The GPU half of moe-bench kernels: rates against the measured limits of the device, memory, host synchronisations.

Shapes: T tokens, K choices, E experts, M = T*K rows, D model width.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_lightning import kernels as ops
from moe_lightning.bench.kernel_contenders import Contender, Shape, contenders
from moe_lightning.bench.measure import interleaved_medians, table

SHAPES = (
    Shape(name="wide", tokens=32768, d_model=4096, d_expert=2048, experts=64, top_k=4),
    Shape(name="sonic usage", tokens=32768, d_model=4096, d_expert=1536, experts=128, top_k=8),
    Shape(name="sonic fine", tokens=32768, d_model=4096, d_expert=512, experts=256, top_k=16),
    Shape(name="sonic small", tokens=40960, d_model=768, d_expert=256, experts=128, top_k=8),
    Shape(name="gpt-l", tokens=16384, d_model=1024, d_expert=4096, experts=32, top_k=2),
    Shape(name="mixtral", tokens=16384, d_model=4096, d_expert=14336, experts=8, top_k=2),
)


def run(rounds: int) -> None:
    """Print all GPU tables."""
    device = torch.device("cuda")
    peak = _matmul_flops(device, rounds)
    bandwidth = _copy_bytes(device, rounds)
    print(f"dense bf16 matmul {peak / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s (read + written)")
    for shape in SHAPES:
        print(_mlp_table(shape, device, rounds, peak))
        torch.cuda.empty_cache()
    print(_rows_table(device, rounds, bandwidth))


def _matmul_flops(device: torch.device, rounds: int) -> float:
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds({"mm": lambda: torch.mm(a, b, out=out)}, rounds)["mm"]


def _copy_bytes(device: torch.device, rounds: int) -> float:
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds({"copy": lambda: target.copy_(source)}, rounds)["copy"]


def _seconds(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    return interleaved_medians(functions, rounds, warmup=5)


def _mlp_table(shape: Shape, device: torch.device, rounds: int, peak: float) -> str:
    headers = ("kernel", "fwd ms", "TFLOP/s", "% of mm", "bwd ms", "TFLOP/s", "% of mm", "kept MiB", "host syncs")
    built, absent = contenders(shape, device, torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(1)
    x_TD = torch.randn(
        shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16, generator=generator
    ).requires_grad_()
    scores_TE = torch.rand(shape.tokens, shape.experts, device=device, generator=generator)
    weights_TK, ids_TK = (t.detach() for t in ops.top_k_routing(scores_TE, shape.top_k))
    rows = []
    for name, contender in built.items():
        try:
            row = _mlp_row(contender, shape, (x_TD, ids_TK, weights_TK), rounds, peak)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            if name == "ours":
                raise
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        rows.append((name, *row))
    for name, reason in absent.items():
        print(f"{shape.name}: {name} left out: {reason}")
    return table(headers, rows, f"{shape.name}: {shape}, bf16")


def _mlp_row(
    contender: Contender, shape: Shape, inputs: tuple[Tensor, Tensor, Tensor], rounds: int, peak: float
) -> list[str]:
    leaves = [inputs[0], *contender.parameters]
    grad_TD = torch.ones_like(inputs[0])
    y_TD = contender.forward(*inputs)  # compiles and tunes what wants to be
    torch.autograd.grad(y_TD, leaves, grad_TD, allow_unused=True)
    del y_TD
    syncs = _host_syncs(lambda: contender.forward(*inputs))
    before = torch.cuda.memory_allocated()
    y_TD = contender.forward(*inputs)
    kept_mib = (torch.cuda.memory_allocated() - before) / 2**20

    def backward() -> None:
        torch.autograd.grad(y_TD, leaves, grad_TD, retain_graph=True, allow_unused=True)

    times = _seconds({"forward": lambda: contender.forward(*inputs), "backward": backward}, rounds)
    cells: list[str] = []
    for name, flops in (("forward", shape.forward_flops), ("backward", 2 * shape.forward_flops)):
        rate = flops / times[name]
        cells += [f"{times[name] * 1e3:.2f}", f"{rate / 1e12:.0f}", f"{100 * rate / peak:.0f}"]
    return [*cells, f"{kept_mib:.0f}", str(syncs)]


def _host_syncs(function: Callable[[], object]) -> int:
    """How often a call makes the host wait for the device."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _rows_table(device: torch.device, rounds: int, bandwidth: float) -> str:
    """Permute and unpermute; bytes count each row and each token once, read or written."""
    rows = []
    for tokens, top_k, width in ((32768, 4, 4096), (32768, 8, 4096), (40960, 8, 768)):
        x_TD = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        ids_TK = torch.rand(tokens, 64, device=device).topk(top_k, dim=1).indices
        weights_TK = torch.rand(tokens, top_k, device=device)
        sort = ops.sort_by_expert(ids_TK, 64, may_drop=False)
        rows_MD = ops.permute(x_TD, sort.order_M, sort.inverse_TK)
        moved = (x_TD.numel() + rows_MD.numel()) * 2
        calls = {
            "permute": functools.partial(ops.permute, x_TD, sort.order_M, sort.inverse_TK),
            "unpermute": functools.partial(ops.unpermute, rows_MD, sort.inverse_TK, sort.order_M, weights_TK),
        }
        for name, seconds in _seconds(calls, rounds).items():
            rate = moved / seconds
            cells = (tokens, top_k, width, f"{seconds * 1e3:.3f}", f"{rate / 1e9:.0f}", f"{100 * rate / bandwidth:.0f}")
            rows.append((name, *cells))
    return table(("rows", "T", "K", "D", "ms", "GB/s", "% of copy"), rows, "row movement, bf16")
