"""The GPU half of moe-bench kernels: rates against the measured limits of the device, memory, host synchronisations.

Shapes: T tokens, K choices, E experts, M = T*K rows, D model width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_contenders import Layer, Shape, layer_contenders
from benchmarks.kernels_exchange import exchange_table
from benchmarks.measuring import interleaved_medians, timed
from benchmarks.race import disagreements, race, reason
from moe_lightning import kernels as ops
from moe_lightning.text_table import table

SHAPES = (
    Shape(name="wide", tokens=32768, d_model=4096, d_expert=2048, experts=64, top_k=4),
    Shape(name="sonic usage", tokens=32768, d_model=4096, d_expert=1536, experts=128, top_k=8),
    Shape(name="sonic fine", tokens=32768, d_model=4096, d_expert=512, experts=256, top_k=16),
    Shape(name="sonic small", tokens=40960, d_model=768, d_expert=256, experts=128, top_k=8),
    Shape(name="gpt-l", tokens=16384, d_model=1024, d_expert=4096, experts=32, top_k=2),
    Shape(name="mixtral", tokens=16384, d_model=4096, d_expert=14336, experts=8, top_k=2),
)

_JUDGE = "torch grouped_mm"
"""Whose values are taken for right: torch's own kernels, with nothing of ours in them."""

_MOST_ERROR = 0.02
"""Relative, of bf16 results over sums of thousands of products."""


def run(rounds: int) -> None:
    """Print all GPU tables, each from a process of its own: an illegal access in one leaves no device to the others."""
    apart("limits of the device", print_limits, rounds)
    for shape in SHAPES:
        apart(shape.name, print_layer, shape, rounds)
    apart("row movement", print_rows, rounds)
    if torch.cuda.device_count() > 1:
        print_or_say("exchange", lambda: print(exchange_table(torch.cuda.device_count(), rounds)))


def apart(name: str, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in a process of its own, and say so where it does not come back."""
    process = torch.multiprocessing.get_context("spawn").Process(target=print_or_say, args=(name, function, *arguments))
    process.start()
    process.join()
    if process.exitcode:
        print(f"{name} left out: its process ended with {process.exitcode}")


def print_or_say(name: str, function: Callable[..., None], *arguments: object) -> None:
    """Call what prints, or say in a line why it did not."""
    try:
        function(*arguments)
    except Exception as error:  # whatever a device raises
        print(f"{name} left out: {reason(error)}", flush=True)


def print_limits(rounds: int) -> None:
    """Of this device, as torch's own kernels reach them."""
    device = torch.device("cuda")
    peak, bandwidth = _matmul_flops(device, rounds), _copy_bytes(device, rounds)
    print(f"dense bf16 matmul {peak / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s (read + written)")


def print_layer(shape: Shape, rounds: int) -> None:
    """Of one shape, in percent of what a dense product reaches."""
    device = torch.device("cuda")
    print(layer_table(shape, device, rounds, _matmul_flops(device, rounds)))


def print_rows(rounds: int) -> None:
    """Of one device, in percent of a copy."""
    device = torch.device("cuda")
    print(_rows_table(device, rounds, _copy_bytes(device, rounds)))


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


def layer_table(shape: Shape, device: torch.device, rounds: int, peak: float) -> str:
    """Whole layers in turns: router, cast of the weights to bf16, experts; what computes other values is left out."""
    generator = torch.Generator(device=device).manual_seed(1)
    x_TD, grad_TD = (
        torch.randn(shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16, generator=generator)
        for _ in range(2)
    )
    x_TD.requires_grad_()
    layers, left_out = layer_contenders(shape, device)

    def both(layer: Layer) -> list[Tensor]:
        y_TD = layer.forward(x_TD)
        return [y_TD.detach(), *layer.backward(y_TD, x_TD, grad_TD)[:2]]  # of x and of the router, alike for all

    checked = {name: partial(both, layer) for name, layer in layers.items() if layer.is_comparable}
    judge = f"values checked against {_JUDGE}"
    try:
        left_out |= disagreements(checked, both(layers[_JUDGE]), _MOST_ERROR)
    except Exception as error:  # the judge is a stranger's, too
        judge = f"values not checked, for {_JUDGE} said {reason(error)}"
    measures, sizes = {}, {}
    for name, layer in layers.items():
        if name in left_out:
            continue
        try:
            measures[name] = _passes(layer, x_TD, grad_TD)
            sizes[name] = _kept_mib(layer, x_TD), _host_syncs(partial(layer.forward, x_TD))
        except Exception as error:  # whatever a stranger's kernel raises
            left_out[name] = reason(error)
            measures.pop(name, None)
    ended = race(measures, rounds, warmup=5)
    rows = []
    for name, medians in ended.medians.items():
        cells: list[str] = []
        for what, flops in (("forward", shape.forward_flops), ("backward", 2 * shape.forward_flops)):
            rate = flops / medians[what]
            cells += [f"{medians[what] * 1e3:.2f}", f"{rate / 1e12:.0f}", f"{100 * rate / peak:.0f}"]
        kept_mib, syncs = sizes[name]
        rows.append((name, *cells, f"{kept_mib:.0f}", str(syncs)))
    headers = ("layer", "fwd ms", "TFLOP/s", "% of mm", "bwd ms", "TFLOP/s", "% of mm", "kept MiB", "host syncs")
    notes = [f"{shape.name}: {name} left out: {why}" for name, why in {**left_out, **ended.left_out}.items()]
    title = f"{shape.name}: {shape}, bf16, router and cast included; {judge}"
    return "\n".join([table(headers, rows, title), *notes])


def _passes(layer: Layer, x_TD: Tensor, grad_TD: Tensor) -> dict[str, Callable[[], float]]:
    """Seconds of a forward, and of the backward of another one."""

    def backward() -> float:
        y_TD = layer.forward(x_TD)
        return timed(lambda: layer.backward(y_TD, x_TD, grad_TD))

    return {"forward": lambda: timed(partial(layer.forward, x_TD)), "backward": backward}


def _kept_mib(layer: Layer, x_TD: Tensor) -> float:
    """What a forward keeps for its backward."""
    if x_TD.device.type != "cuda":
        return 0.0
    before = torch.cuda.memory_allocated()
    y_TD = layer.forward(x_TD)
    kept_mib = (torch.cuda.memory_allocated() - before) / 2**20
    del y_TD
    return kept_mib


def _host_syncs(function: Callable[[], object]) -> int:
    """How often a call makes the host wait for the device."""
    if not torch.cuda.is_available():
        return 0
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
        sort = ops.sort_by_expert(ids_TK, 64, num_rows=ids_TK.numel())
        rows_MD = ops.permute(x_TD, sort.order_M, sort.inverse_TK)
        moved = (x_TD.numel() + rows_MD.numel()) * 2
        calls = {
            "permute": partial(ops.permute, x_TD, sort.order_M, sort.inverse_TK),
            "unpermute": partial(ops.unpermute, rows_MD, sort.inverse_TK, sort.order_M, weights_TK),
        }
        for name, seconds in _seconds(calls, rounds).items():
            rate = moved / seconds
            cells = (tokens, top_k, width, f"{seconds * 1e3:.3f}", f"{rate / 1e9:.0f}", f"{100 * rate / bandwidth:.0f}")
            rows.append((name, *cells))
    return table(("rows", "T", "K", "D", "ms", "GB/s", "% of copy"), rows, "row movement, bf16")
