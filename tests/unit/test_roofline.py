"""The model of kernels on GPUs: near published figures, and moved in the right direction by what it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_rates import PUBLISHED
from benchmarks.roofline import SHAPES
from benchmarks.roofline_layer import (
    DESIGNS,
    backward_kernels,
    forward_kernels,
    share_of_peak,
    total_seconds,
)
from benchmarks.roofline_model import DEVICES, LAUNCH_S, Matmul, Tile, matmul_cost, shared_bytes, tile_for
from benchmarks.roofline_router import router_backward
from moe_lightning.cli.bench import main

H100 = DEVICES["h100"]
SQUARE = Matmul(rows=8192, width=8192, inner=4096, tile=Tile(m=128, n=256, k=64))


def test_published_figures_are_near() -> None:
    errors = sorted(abs(figure.modelled_tflops / figure.tflops - 1) for figure in PUBLISHED)
    assert sum(not figure.is_fitted for figure in PUBLISHED) >= 5
    assert errors[len(errors) // 2] < 0.06
    assert sum(error < 0.11 for error in errors) >= 7
    assert errors[-1] < 0.40


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_no_matmul_is_faster_than_the_device(device) -> None:
    tile = tile_for(device, 8192)
    cost = matmul_cost(replace(SQUARE, tile=tile, is_persistent=True), device)
    assert 0.3 * device.flops < SQUARE.flops / cost.seconds < device.sustained * device.flops


def test_what_helps_helps() -> None:
    plain = matmul_cost(SQUARE, H100).seconds
    persistent = matmul_cost(replace(SQUARE, is_persistent=True), H100).seconds
    ahead = matmul_cost(replace(SQUARE, is_persistent=True, stores_ahead=True), H100).seconds
    hidden = matmul_cost(replace(SQUARE, is_persistent=True, hides_epilogue=True), H100).seconds
    assert hidden < ahead < persistent < plain


def test_what_an_epilogue_does_costs() -> None:
    plain = matmul_cost(replace(SQUARE, inner=512), H100).seconds
    reading = matmul_cost(replace(SQUARE, inner=512, input_factor=1.0), H100).seconds
    prefetched = matmul_cost(replace(SQUARE, inner=512, input_factor=1.0, reads_ahead=True), H100).seconds
    computing = matmul_cost(replace(SQUARE, inner=512, steps=34), H100).seconds
    assert plain < prefetched < reading
    assert plain < computing


def test_what_gathers_begins_later() -> None:
    persistent = matmul_cost(replace(SQUARE, is_persistent=True), H100).seconds
    assert matmul_cost(replace(SQUARE, is_persistent=True, gathers=True), H100).seconds > persistent


def test_bounds_are_named() -> None:
    shallow = replace(SQUARE, inner=64, is_persistent=True)
    assert matmul_cost(shallow, H100).bound == "memory"
    assert matmul_cost(replace(SQUARE, inner=256), DEVICES["h200"]).bound == "prologue and epilogue"
    assert matmul_cost(replace(SQUARE, tile=Tile(m=64, n=64, k=64)), H100).bound == "second-level cache"
    assert matmul_cost(replace(SQUARE, shares_loads=True), H100).bound == "tensor cores"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_gains_from_fusion(shape) -> None:
    for kernels, factor in ((forward_kernels, 1), (backward_kernels, 2)):
        separate, rows, fused = (kernels(shape, DESIGNS[kind], H100) for kind in ("separate", "rows", "fused"))
        assert total_seconds(fused) < total_seconds(rows)
        # Where the tensor cores bound it, the narrower tile of the fused gradient takes back what fusing saves.
        assert total_seconds(rows) < 1.02 * total_seconds(separate)
        assert sum(kernel.flops for kernel in fused) == pytest.approx(factor * shape.forward_flops)
        assert 0 < share_of_peak(separate, H100) < share_of_peak(fused, H100) < H100.sustained


def test_a_program_that_computes_all_columns_of_its_rows_is_rounded_up_whole() -> None:
    device = replace(H100, memory=4 * H100.memory)  # so that it bounds neither

    def seconds(tokens: int) -> float:
        kernels = router_backward(replace(SHAPES[0], tokens=tokens), device, is_fused=True)
        return next(kernel.cost.seconds for kernel in kernels if kernel.name == "gradient of router's input") - LAUNCH_S

    full = 128 * H100.multiprocessors
    assert seconds(full + 1) == pytest.approx(2 * seconds(full), rel=0.02)


def test_shared_memory_of_a_tile() -> None:
    assert shared_bytes(Tile(m=128, n=256, k=64), stages=4) == 192 << 10


@pytest.mark.parametrize("device", DEVICES)
def test_the_command_prints_every_part(device, capsys) -> None:
    assert main(["roofline", "--device", device, "--casts-weights"]) == 0
    told = capsys.readouterr().out
    for part in ("modelled: nothing here has run", "assumptions", "cast of weights", "FORWARD", "BACKWARD", "error %"):
        assert part in told
