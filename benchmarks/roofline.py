"""moe-bench roofline: how fast an MoE layer would be on a GPU, kernel by kernel, by a model and without any GPU.

Shapes: T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from benchmarks import roofline_model as roofline
from benchmarks.published_rates import PUBLISHED
from benchmarks.roofline_layer import (
    DESIGNS,
    Design,
    backward_kernels,
    forward_kernels,
    share_of_peak,
    total_seconds,
)
from benchmarks.roofline_model import DEVICES, Device
from benchmarks.roofline_router import Kernel, LayerShape
from moe_lightning.arguments import Count, option
from moe_lightning.text_table import table

SHAPES = (
    LayerShape(tokens=16384, d_model=1536, d_expert=512, experts=64, top_k=4),
    LayerShape(tokens=32768, d_model=2048, d_expert=1024, experts=128, top_k=8),
    LayerShape(tokens=32768, d_model=4096, d_expert=1536, experts=128, top_k=8),
    LayerShape(tokens=32768, d_model=4096, d_expert=512, experts=256, top_k=16),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    device: Literal["a100", "h100", "h200", "b200", "rtx5090"] = option("of the layer, kernel by kernel", "h100")
    design: Literal["separate", "rows", "fused"] = option("of its kernels", "fused")
    tokens: Count = option("tokens T", SHAPES[0].tokens)
    d_model: Count = option("width D", SHAPES[0].d_model)
    d_expert: Count = option("expert width F", SHAPES[0].d_expert)
    experts: Count = option("experts E", SHAPES[0].experts)
    top_k: Count = option("choices K", SHAPES[0].top_k)
    casts_weights: bool = option("parameters in fp32, rounded to bf16 in every forward", False)


def run(options: Options) -> int:
    """Print the model's assumptions, the chosen layer by kernels, the reference shapes on all devices, the errors."""
    device = DEVICES[options.device]
    shape = LayerShape(**{each.name: getattr(options, each.name) for each in fields(LayerShape)})
    design = replace(DESIGNS[options.design], casts_weights=options.casts_weights)
    print("All figures below are modelled: nothing here has run on a GPU.\n")
    print(_assumptions())
    print(f"\n{_layer_table(options.device, device, shape, design, options.design)}")
    print(f"\n{_shapes_table(options.casts_weights)}")
    print(f"\n{_published_table()}")
    return 0


def _assumptions() -> str:
    headers = ("device", "bf16 TFLOP/s", "sustained", "SMs", "memory TB/s", "cache TB/s", "shared KB", "prologue us")
    rows = [
        (
            name,
            f"{device.flops / 1e12:.0f}",
            f"{device.sustained:.2f}",
            device.multiprocessors,
            f"{device.memory / 1e12:.2f}",
            f"{device.cache / 1e12:.1f}",
            device.shared >> 10,
            f"{device.prologue_s * 1e6:.1f}",
        )
        for name, device in DEVICES.items()
    ]
    constants = (
        f"A tile ends in {roofline.EPILOGUE_S * 1e6:.1f} us and its bytes at {roofline.STORE_BYTES / 1e9:.0f} GB/s; a "
        f"persistent one begins in {roofline.HANDOVER_S * 1e6:.2f} us, with gathered rows in "
        f"{roofline.GATHERED_PROLOGUE:.0%} of the prologue.\nPlain sums of a persistent tile leave under the next one; "
        f"an epilogue that reads waits {roofline.READ_S * 1e6:.1f} us, and computes at the fp32 rate.\n"
        f"Kernels of rows reach {roofline.MEMORY_SHARE:.0%} of the "
        f"memory's rate, fp32 matmuls {roofline.FP32_SHARE:.0%} of theirs; a launch costs "
        f"{roofline.LAUNCH_S * 1e6:.1f} us.\n"
        "Rows lie evenly on the experts; nothing overlaps; the host is ahead."
    )
    return f"{table(headers, rows, 'assumptions')}\n{constants}"


def _layer_table(name: str, device: Device, shape: LayerShape, design: Design, kind: str) -> str:
    rows: list[tuple[object, ...]] = []
    for title, kernels in (
        ("forward", forward_kernels(shape, design, device)),
        ("backward", backward_kernels(shape, design, device)),
    ):
        rows += [(kernel.name, *_cells(kernel, device), kernel.cost.bound) for kernel in kernels]
        share = f"{share_of_peak(kernels, device):.0%}"
        rows.append((title.upper(), f"{total_seconds(kernels) * 1e6:.0f}", share, ""))
    return table(("kernel", "us", "of peak", "bound by"), rows, f"{name}, {kind} kernels, {_words(shape)}, bf16")


def _cells(kernel: Kernel, device: Device) -> tuple[str, str]:
    seconds = kernel.cost.seconds
    return f"{seconds * 1e6:.0f}", f"{kernel.flops / seconds / device.flops:.0%}" if kernel.flops else "-"


def _shapes_table(casts_weights: bool) -> str:
    rows = []
    for shape in SHAPES:
        for kind, design in DESIGNS.items():
            made = replace(design, casts_weights=casts_weights)
            shares = [
                "/".join(
                    f"{100 * share_of_peak(kernels(shape, made, device), device):.0f}"
                    for kernels in (forward_kernels, backward_kernels)
                )
                for device in DEVICES.values()
            ]
            rows.append((_words(shape), kind, *shares))
    return table(("layer", "kernels", *DEVICES), rows, "layer, forward/backward, percent of peak")


def _published_table() -> str:
    rows = [
        (
            published.source,
            published.device,
            f"{published.tflops:.0f}",
            f"{published.modelled_tflops:.0f}",
            f"{100 * (published.modelled_tflops / published.tflops - 1):+.0f}",
            "fitted" if published.is_fitted else "held out",
        )
        for published in PUBLISHED
    ]
    return table(
        ("published", "device", "TFLOP/s", "modelled", "error %", "use"), rows, "the model and published figures"
    )


def _words(shape: LayerShape) -> str:
    sizes = f"{shape.d_model}/{shape.d_expert}/{shape.experts}/{shape.top_k}"
    return f"D/F/E/K {sizes}, {shape.tokens} tokens"
