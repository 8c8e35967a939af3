"""Measures the constants of the performance model on the machine that trains.

Exchanges and experts are timed at a few sizes and fitted by lines; what a line misses is its error, and beyond 10
percent the balancer says so. The dense layers are timed in the first steps, by the clock that measures speeds.
Of exchanges the slowest rank's times count, as they do in a step; of experts the median's, whose speed is the others'
unit. All ranks take the lines that rank 0 fits through them: least squares end in other bits on other processors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from moe_lightning.balancing.cost_model import BlockCosts, Line, fit_line, mean_relative_error
from moe_lightning.checkpoint.training_state import preserved_generators
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object
from moe_lightning.parallel.context import World
from moe_lightning.parallel.exchange import PendingExchange, all_gather_counts, exchange_rows

_EXCHANGE_BYTES = [1 << shift for shift in range(14, 24, 2)]
_EXPERT_ROWS = [64, 128, 256, 512, 1024, 2048]
_LONG_S = 0.05
"""More rows are not tried once a forward pass takes this long."""

_REPEATS = 9
_EXCHANGE_REPEATS = 25
"""Exchanges are short, and their latency varies more than any computation's time."""


@dataclass(frozen=True, kw_only=True)
class ExpertTimes:
    """Seconds of one expert.

    Attributes:
        forward: fixed part and part per row.
        backward_ratio: backward over forward.
        backward_error: mean relative error of forward * ratio on the measured backward passes.
    """

    forward: Line
    backward_ratio: float
    backward_error: float


def calibrate(
    layers: Sequence[MoELayer], world: World, weight_dtype: torch.dtype
) -> tuple[list[BlockCosts], dict[str, float]]:
    """Time exchanges and experts; return the constants of each MoE block, dense layers still 0, and the mean relative
    error of the model on each operation: exchange, experts_forward, experts_backward, trans, agg. All ranks get the
    same; collective, about a second.

    Args:
        layers: of the model; experts of equal shape are timed once.
        world: the ranks.
        weight_dtype: what experts compute in, and what rows and shadows travel in.
    """
    exchange = measure_exchange(world)
    by_shape: dict[tuple[torch.Size, ...], ExpertTimes] = {}
    errors = {"exchange": exchange.mean_error}
    costs = []
    for layer in layers:
        stacks = layer.experts.stacked_parameters()
        shape = tuple(stack.shape[1:] for stack in stacks.values())
        if shape not in by_shape:
            with preserved_generators(world.device):  # of the model, and restored by now where a run resumes
                by_shape[shape] = measure_experts(layer.experts, world, weight_dtype)
        costs.append(_block_costs(layer, exchange, by_shape[shape], weight_dtype))
    errors["experts_forward"] = max(times.forward.mean_error for times in by_shape.values())
    errors["experts_backward"] = max(times.backward_error for times in by_shape.values())
    sizes = [(block.weight_bytes, block.gradient_bytes) for block in costs]
    copy = measure_copy(world, sorted({num_bytes for pair in sizes for num_bytes in pair if num_bytes}))
    errors |= {"trans": copy.mean_error, "agg": copy.mean_error}
    fitted = [asdict(_with_copies(block, exchange, copy)) for block in costs]
    fitted, errors = broadcast_object([fitted, errors], 0, world)
    return [BlockCosts(**block) for block in fitted], errors


def assumed_costs(
    layers: Sequence[MoELayer], weight_dtype: torch.dtype, *, bytes_per_s: float, flops_per_s: float
) -> list[BlockCosts]:
    """Constants from nominal rates, the same in every run: for runs that must plan alike."""
    link = Line(fixed_s=0.0, per_unit_s=1 / bytes_per_s, mean_error=0.0)
    result = []
    for layer in layers:
        stacks = layer.experts.stacked_parameters()
        flops = 2 * sum(stack.shape[1:].numel() for name, stack in stacks.items() if name.startswith("w_"))
        forward = Line(fixed_s=0.0, per_unit_s=flops / flops_per_s, mean_error=0.0)
        times = ExpertTimes(forward=forward, backward_ratio=2.0, backward_error=0.0)
        result.append(_block_costs(layer, link, times, weight_dtype))
    return result


def _with_copies(costs: BlockCosts, exchange: Line, copy: Line) -> BlockCosts:
    """Copies go one way on another group, so a byte of theirs takes another time than one of a token exchange. The
    model knows one bandwidth, so they are given as the bytes that an exchange would carry in their time.
    """
    per_byte = max(exchange.per_unit_s, 1e-15)

    def equal_bytes(num_bytes: float) -> float:
        # At least one byte: a copy in less than an exchange's latency still takes that latency in the model.
        return max(1.0, (copy.predict_s(num_bytes) - exchange.fixed_s) / per_byte) if num_bytes else 0.0

    return replace(
        costs, weight_bytes=equal_bytes(costs.weight_bytes), gradient_bytes=equal_bytes(costs.gradient_bytes)
    )


def _block_costs(layer: MoELayer, link: Line, times: ExpertTimes, weight_dtype: torch.dtype) -> BlockCosts:
    stacks = layer.experts.stacked_parameters().values()
    numbers = sum(stack.shape[1:].numel() for stack in stacks)
    trained_bytes = sum(s.shape[1:].numel() * s.element_size() for s in stacks if s.requires_grad)
    return BlockCosts(
        row_bytes=layer.experts.width * weight_dtype.itemsize,
        weight_bytes=numbers * weight_dtype.itemsize,
        gradient_bytes=trained_bytes,
        bytes_per_s=1 / max(link.per_unit_s, 1e-15),
        rows_per_s=1 / max(times.forward.per_unit_s, 1e-15),
        exchange_s=link.fixed_s,
        expert_s=times.forward.fixed_s,
        backward_ratio=times.backward_ratio,
        transfer="direct",
    )


# ---------------------------------------------------------------------- single operations


def measure_exchange(world: World) -> Line:
    """Seconds of a token exchange over the bytes that its busiest rank sends; collective."""
    amounts, times = [], []
    for num_bytes in _EXCHANGE_BYTES:
        rows = max(1, num_bytes // max(1, world.size - 1) // 1024)
        payload = torch.zeros(rows * world.size, 256, device=world.device)
        counts = [rows] * world.size
        amounts.append(1024.0 * rows * (world.size - 1))
        times.append(_fastest_s(partial(exchange_rows, payload, counts, counts, world), world, _EXCHANGE_REPEATS))
    return fit_line(amounts, times)


def measure_copy(world: World, sizes: Sequence[float]) -> Line:
    """Seconds in which rank 0 sends so many bytes to rank 1 on the background group, up to twice each; collective."""
    amounts = sorted({factor * num_bytes for num_bytes in sizes for factor in (0.5, 1.0, 2.0)})
    times = []
    for num_bytes in amounts:
        numbers = max(1, int(num_bytes) // 4)
        send, recv = [0] * world.size, [0] * world.size
        if world.rank == 0:
            send[1] = numbers
        if world.rank == 1:
            recv[0] = numbers
        payload = torch.zeros(sum(send), device=world.device)
        times.append(_fastest_s(partial(_copy, payload, send, recv, world), world, _EXCHANGE_REPEATS))
    return fit_line(amounts, times)


def _copy(payload: Tensor, send: list[int], recv: list[int], world: World) -> None:
    PendingExchange(payload, send, recv, world).wait()


def measure_experts(experts: Experts, world: World, dtype: torch.dtype) -> ExpertTimes:
    """Seconds of one expert over the rows that it computes; collective, for the median rank counts."""
    parameters = experts.stacked_parameters()
    stacks = {
        name: torch.randn(1, *stack.shape[1:], dtype=dtype, device=world.device).mul_(0.02)
        if stack.is_floating_point()
        else stack.new_zeros(1, *stack.shape[1:])
        for name, stack in parameters.items()
    }
    trained = [stacks[name].requires_grad_() for name, parameter in parameters.items() if parameter.requires_grad]
    rows_tried: list[float] = []
    forward_s: list[float] = []
    backward_s: list[float] = []
    for rows in _EXPERT_ROWS:
        if len(rows_tried) > 2 and forward_s[-1] > _LONG_S:
            break
        x = torch.randn(rows, experts.width, dtype=dtype, device=world.device, requires_grad=True)
        counts = torch.tensor([rows], device=world.device)
        out = experts(x, counts, stacks)
        grad = partial(torch.autograd.grad, out, [x, *trained], torch.ones_like(out), retain_graph=True)
        rows_tried.append(float(rows))
        forward_s.append(_fastest_s(partial(experts, x, counts, stacks), world, over_ranks=statistics.median))
        backward_s.append(_fastest_s(grad, world, over_ranks=statistics.median))
    line = fit_line(rows_tried, forward_s)
    ratio = statistics.median(b / f for f, b in zip(forward_s, backward_s, strict=True))
    predicted = np.array([ratio * line.predict_s(rows) for rows in rows_tried])
    error = mean_relative_error(predicted, np.array(backward_s))
    return ExpertTimes(forward=line, backward_ratio=ratio, backward_error=error)


def _fastest_s(
    operation: Callable[[], object],
    world: World,
    repeats: int = _REPEATS,
    over_ranks: Callable[[Sequence[float]], float] = max,
) -> float:
    """Least of the repeats, each as slow as its slowest rank or as `over_ranks` says; ranks start a repeat together.
    Collective.

    The least, because other work on the machine only ever adds to a time.
    """
    durations = []
    flag = torch.zeros(1, dtype=torch.int64, device=world.device)
    for _ in range(repeats):
        all_gather_counts(flag, world)
        began = time.perf_counter()
        operation()
        _synchronize(world.device)
        durations.append(time.perf_counter() - began)
    return min(over_ranks(ranks) for ranks in zip(*all_gather_json(durations[1:], world), strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class CostMeter:
    """Constants of each layer's block: nominal, or measured at the start of training.

    Args:
        measures: True: plans depend on them, and they need not be the same in every run.
        bytes_per_s, flops_per_s: nominal rates.

    Attributes:
        errors: mean relative error of the model on each measured operation.
        known: constants to go on with in another world, by the layer's number.
    """

    def __init__(self, *, measures: bool, bytes_per_s: float, flops_per_s: float) -> None:
        self.measures = measures
        self._rates = {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}
        self.errors: dict[str, float] = {}
        self.known: Mapping[int, BlockCosts] = {}

    def begin(self, layers: Mapping[int, MoELayer], world: World, weight_dtype: torch.dtype) -> list[BlockCosts]:
        """Return the constants as far as they are known before the first step; collective.

        Args:
            layers: by their numbers.
            world, weight_dtype: see `calibrate`.
        """
        modules = list(layers.values())
        if not self.measures:
            return assumed_costs(modules, weight_dtype, **self._rates)
        if layers.keys() <= self.known.keys():
            return [self.known[number] for number in layers]
        costs, self.errors = calibrate(modules, world, weight_dtype)
        _report_errors(self.errors)
        return costs


_TOLERATED_ERROR = 0.1


def _report_errors(errors: Mapping[str, float]) -> None:
    """Report where the performance model misses what was measured."""
    bad = {name: error for name, error in errors.items() if error > _TOLERATED_ERROR}
    if bad:
        listed = ", ".join(f"{name} {100 * error:.0f} %" for name, error in bad.items())
        rank_zero_info(
            f"LoadBalancer: the performance model misses measured times by more than 10 % ({listed}), so shadows may "
            "be planned where they do not pay: calibrate on an idle machine, or use shadows=none"
        )
