"""The performance model: the paper's formulas at neutral constants, its generalisations, the fit of its constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_rates import PUBLISHED
from benchmarks.roofline import SHAPES
from benchmarks.roofline_layer import (
    DESIGNS,
    backward_kernels,
    forward_kernels,
    share_of_peak,
    total_seconds,
)
from benchmarks.roofline_model import DEVICES, LAUNCH_S, Matmul, Tile, matmul_cost, tile_for
from benchmarks.roofline_router import router_backward
from moe_lightning.balancing.cost_model import (
    ONE_COPY,
    BlockCosts,
    BlockTimes,
    fit_line,
    mean_relative_error,
    predict_block,
    predict_timeline,
    share_under_experts,
    total_copies,
    total_volumes,
)
from moe_lightning.cli.bench import main
from moe_lightning.errors import ConfigurationError
from tests.unit.planning_references import copy_volumes, row_volumes


def costs(**changes: object) -> BlockCosts:
    neutral: dict[str, object] = {
        "row_bytes": 10.0,
        "weight_bytes": 1000.0,
        "gradient_bytes": 500.0,
        "bytes_per_s": 100.0,
        "rows_per_s": 20.0,
        "transfer": "average",
    }
    return BlockCosts(**(neutral | changes))  # type: ignore[arg-type]


TOKENS = np.array([[3, 0, 0], [2, 1, 0], [0, 1, 2]])  # expert e, rank n; loads 3, 3, 3 at home: 3, 3, 3
QUOTA = np.diag([3, 3, 3])


def test_volumes_by_hand() -> None:
    volumes = row_volumes(TOKENS, QUOTA).sum(axis=0)
    assert volumes.tolist() == [[3, 3, 3], [2, 1, 0], [0, 2, 1], [1, 1, 1]]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), method=st.sampled_from(["direct", "average"]))
def test_totals_are_sums_over_experts(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, (5, 4)) * (rng.random((5, 4)) < 0.7)
    quota = rng.permuted(tokens, axis=1)
    assert (total_volumes(tokens, quota) == row_volumes(tokens, quota).sum(axis=0)).all()
    homes, shadows = rng.integers(0, 4, 5), rng.random((5, 4)) < 0.3
    shadows[np.arange(5), homes] = False
    copies = copy_volumes(shadows, homes, method)  # type: ignore[arg-type]
    assert (total_copies(shadows, homes, method) == copies.sum(axis=0)).all()  # type: ignore[arg-type]


def test_equations_1_to_6_without_scheduler() -> None:
    shadows = np.array([[False, True, True], [False] * 3, [False] * 3])
    copies = copy_volumes(shadows, np.arange(3), "average").sum(axis=0)
    times = predict_block(row_volumes(TOKENS, QUOTA).sum(axis=0), copies, costs(scheduled=False))
    assert times.exchange_s == pytest.approx(2 * 10 / 100)  # eq. 1: most received rows
    assert times.forward_s == pytest.approx(3 / 20)
    assert times.backward_s == pytest.approx(2 * 3 / 20)
    assert times.trans_s == pytest.approx(1 * (3 - 0) * 1000 / (3 * 100))  # eq. 4 with s=1, D=3, n=0
    assert times.agg_s == pytest.approx(5.0)
    assert times.total_s == pytest.approx(4 * 0.2 + 3 * 0.15 + 10.0 + 5.0)


def test_scheduler_hides_transfers_under_experts_and_dense_layers() -> None:
    shadows = np.array([[False, True, True], [False] * 3, [False] * 3])
    copies = copy_volumes(shadows, np.arange(3), "average").sum(axis=0)
    volumes = row_volumes(TOKENS, QUOTA).sum(axis=0)
    times = predict_block(volumes, copies, costs(dense_forward_s=4.0, dense_backward_s=9.0))
    assert times.exposed_trans_s == pytest.approx(10.0 - 0.15 - 4.0)
    assert times.exposed_agg_s == 0.0
    assert times.total_s == pytest.approx(0.8 + 0.45 + times.exposed_trans_s)


def test_the_home_sends_a_copy_to_each_target() -> None:
    shadows = np.array([[False] + [True] * 8])
    copies = copy_volumes(shadows, np.array([0]), "direct").sum(axis=0)
    assert predict_block(np.zeros((4, 9), dtype=np.int64), copies, costs()).trans_s == pytest.approx(80.0)


def test_slow_ranks_latency_and_the_cost_of_an_expert() -> None:
    volumes = row_volumes(TOKENS, QUOTA).sum(axis=0)
    none = np.zeros((2, 3), dtype=np.int64)
    uneven = costs(rows_per_s=np.array([20.0, 20.0, 1.0]))
    assert predict_block(volumes, none, uneven).forward_s == pytest.approx(3.0)
    fixed = predict_block(volumes, none, costs(exchange_s=7.0, expert_s=0.5))
    assert fixed.exchange_s == pytest.approx(7.2)
    assert fixed.forward_s == pytest.approx(0.65)
    assert fixed.trans_s == 0.0  # nothing to send costs no latency


def test_many_plans_at_once_equal_one_by_one() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 50, (5, 3, 4))
    quota = rng.permuted(tokens, axis=2)
    volumes, copies = row_volumes(tokens, quota).sum(axis=1), rng.integers(0, 5 * ONE_COPY, (5, 2, 4))
    together = predict_block(volumes, copies, costs(exchange_s=0.1)).total_s
    for index in range(5):
        assert predict_block(volumes[index], copies[index], costs(exchange_s=0.1)).total_s == together[index]


@settings(deadline=None, max_examples=60)
@given(fixed=st.floats(0, 1e-2), per_unit=st.floats(1e-9, 1e-6))
def test_fit_recovers_a_line(fixed: float, per_unit: float) -> None:
    amounts = [1e3, 1e4, 1e5, 1e6]
    line = fit_line(amounts, [fixed + per_unit * amount for amount in amounts])
    assert line.predict_s(5e4) == pytest.approx(fixed + per_unit * 5e4, rel=1e-4)
    assert line.mean_error < 1e-4


def test_fit_never_predicts_negative_parts_and_reports_its_error() -> None:
    steep = fit_line([1, 2, 3], [1.0, 3.0, 5.0])
    assert steep.fixed_s == 0.0
    assert steep.mean_error > 0.1
    falling = fit_line([1, 2, 3], [5.0, 3.0, 1.0])
    assert falling.per_unit_s == 0.0
    assert falling.fixed_s > 0
    assert mean_relative_error(np.array([1.0, 3.0]), np.array([2.0, 2.0])) == pytest.approx(0.5)


def test_wrong_measurements_are_one_sentence() -> None:
    for amounts, seconds in (
        ([1.0, 1.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, 0.0]),
        ([1.0, 2.0], [1.0]),
        ([1.0, np.inf], [1.0, 2.0]),
    ):
        with pytest.raises(ConfigurationError, match="do not determine a line"):
            fit_line(amounts, seconds)


# ----------------------------------------------------------------------
# The block-wise schedule: order, completeness, the split of transfers, and agreement with the closed form of the
# model.


@settings(deadline=None, max_examples=100)
@given(transfer_s=st.floats(0, 10), dense_s=st.floats(0, 10))
def test_a_transfer_fills_dense_layers_first(transfer_s: float, dense_s: float) -> None:
    share = share_under_experts(transfer_s, dense_s)
    assert share == pytest.approx(max(0.0, 1 - dense_s / transfer_s) if transfer_s else 0.0, abs=1e-6)
    assert 0 <= share <= 1


def block(copies: float, **changes: float) -> tuple[BlockTimes, BlockCosts]:
    settings_ = {"dense_forward_s": 1.0, "dense_backward_s": 2.0, "gradient_bytes": 5.0} | changes
    costs = BlockCosts(row_bytes=1, weight_bytes=5, bytes_per_s=1, rows_per_s=4, **settings_)  # type: ignore[arg-type]
    volumes = np.array([[4, 4], [1, 0], [0, 1], [1, 1]])
    return predict_block(volumes, np.full((2, 2), round(copies * ONE_COPY)), costs), costs


@settings(deadline=None, max_examples=60)
@given(copies=st.integers(0, 30).map(lambda tenths: tenths / 10), num_blocks=st.integers(1, 4))
def test_the_time_line_agrees_with_the_closed_form(copies: float, num_blocks: int) -> None:
    times, costs = block(copies)
    line = predict_timeline([times] * num_blocks, [costs] * num_blocks)
    hidden_blocks = num_blocks - 1
    first = float(times.trans_s + times.agg_s)
    exposed = first + hidden_blocks * float(times.exposed_trans_s + times.exposed_agg_s)
    assert line.exposed_s == pytest.approx(exposed)
    assert line.transfer_s == pytest.approx(num_blocks * first)
    idle = num_blocks * float(4 * times.exchange_s + times.forward_s + times.backward_s + 1.0 + 2.0)
    assert line.total_s == pytest.approx(idle + exposed)
    assert line.transfer_s == pytest.approx(num_blocks * first)
    assert all(span.end_s > span.start_s for span in line.spans)
    assert max(span.end_s for span in line.spans) == pytest.approx(line.total_s)


def test_the_operations_of_two_blocks_are_in_the_order_of_the_schedule() -> None:
    times, costs = block(0.6)  # transfers are longer than dense layers
    spans = predict_timeline([times] * 2, [costs] * 2).spans
    assert [(span.operation, span.block) for span in spans] == [
        ("trans", 0),
        ("exchange", 0),
        ("experts", 0),
        ("trans", 1),
        ("exchange", 0),
        ("dense", 0),
        ("trans", 1),
        ("exchange", 1),
        ("experts", 1),
        ("exchange", 1),
        ("dense", 1),
        ("dense", 1),
        ("exchange", 1),
        ("experts", 1),
        ("exchange", 1),
        ("dense", 0),
        ("agg", 1),
        ("exchange", 0),
        ("experts", 0),
        ("agg", 1),
        ("exchange", 0),
        ("agg", 0),
    ]


def test_many_blocks_hide_small_copies() -> None:
    times, costs = block(0.2)
    line = predict_timeline([times] * 12, [costs] * 12)
    assert line.exposed_s < 0.1 * line.transfer_s


# ----------------------------------------------------------------------
# The model of kernels on GPUs: near published figures, and moved in the right direction by what it is told.


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


@pytest.mark.parametrize("device", DEVICES)
def test_the_command_prints_every_part(device, capsys) -> None:
    assert main(["roofline", "--device", device, "--casts-weights"]) == 0
    told = capsys.readouterr().out
    for part in ("modelled: nothing here has run", "assumptions", "cast of weights", "FORWARD", "BACKWARD", "error %"):
        assert part in told
