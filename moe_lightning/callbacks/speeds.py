"""Measured speeds of ranks, and the division of tokens and samples by them.

Times what a rank does alone in a step: the rows of its experts, and its samples between the MoE layers.

Hooks of the running model stamp the times; waits for other ranks lie inside the MoE layers but outside their experts,
and so in neither. On a GPU the stamps are events in the stream, read when the device has passed them: nothing ever
waits for it.

Lets tokens and samples follow the speed of the ranks: measures, agrees, cuts, and tells who stays behind.

Every rank tells what it has measured with the counts of the first MoE layer. What all have heard in a step decides,
after that step and in integers, so that all ranks change alike. In a pipeline the ranks of a stage share its rows, and
slices of the batch, which pass through all stages, follow the slowest. Which samples a step has does not change, and so
neither does the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.forecast import AgreedSpeeds, RateMeter, Reading, decode_readings, encode_readings
from moe_lightning.callbacks.telemetry import Metric
from moe_lightning.compat import private_lightning
from moe_lightning.config import validated
from moe_lightning.data.loader import StepLoader
from moe_lightning.dispatch.quota import ONE_SPEED, given_speeds, shares
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import ExchangeClock, stamp
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.stages import StageState


@dataclass(kw_only=True)
class _Step:
    """Intervals (began, ended) of one step, and how much was done in them."""

    experts: list[tuple[Any, Any]] = field(default_factory=list)
    between: list[tuple[Any, Any]] = field(default_factory=list)
    rows: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of a unit in one step; 0 where there was none.

    Attributes:
        row_s: of a row in forward and backward of the experts.
        sample_s: of a sample between the MoE layers, forward and backward, and in the head's backward.
    """

    row_s: float
    sample_s: float


class RankClock:
    """Stamps the layers of a model from its construction to `close`.

    Where a forward pass is computed again in the backward pass, only what can still be told apart is counted, on all
    ranks alike.

    Args:
        layers: the MoE layers in the order of the forward pass.
        device: where they compute.
        bubbles: of a pipeline, whose passes of several micro-batches alternate: what lies in them is in no interval.
    """

    def __init__(self, layers: Sequence[MoELayer], device: torch.device, bubbles: ExchangeClock | None = None) -> None:
        self._device, self._bubbles = device, bubbles
        self._step = _Step()
        self._done: deque[_Step] = deque()
        self._left_at: Any = None  # when the pass left a layer
        self._is_backward = False
        self._handles: list[RemovableHandle] = []
        for layer in layers:
            self._watch(layer, self._before_layer, self._after_layer)
            self._watch(layer.experts, self._before_experts, self._after_experts)
        if bubbles is not None:
            bubbles.listener = self._in_bubble

    def _watch(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        began: list[Any] = []

        # Functions and not methods: a copy of the model shares them, and is not listened to.
        def enter(entered: nn.Module, inputs: tuple[Any, ...]) -> None:
            if entered is module and module.training and torch.is_grad_enabled():
                began[:] = [before(inputs[0])]

        def leave(left: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
            if began:
                after(began.pop(), inputs[0], out)

        self._handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._bubbles is not None:
            self._bubbles.listener = None

    # ------------------------------------------------------------------ the passes

    def turn(self) -> None:
        """The forward pass has ended and the backward pass begins."""
        self._is_backward, self._left_at = True, stamp(self._device)

    def end_micro_batch(self, samples: int) -> None:
        """Both passes have ended, over so many samples."""
        self._is_backward, self._left_at = False, None
        self._step.samples += samples

    def end_step(self) -> None:
        """All micro-batches of the step have ended."""
        self._done.append(self._step)
        self._step = _Step()

    def rates(self) -> Iterator[Rates]:
        """Yield the rates of ended steps not yet reported, as far as the device has come."""
        while self._done and all(_is_past(ended) for _, ended in (*self._done[0].experts, *self._done[0].between)):
            step = self._done.popleft()
            yield Rates(
                row_s=sum(map(_seconds, step.experts)) / step.rows if step.rows else 0.0,
                sample_s=sum(map(_seconds, step.between)) / step.samples if step.samples else 0.0,
            )

    # ------------------------------------------------------------------ stamps

    def _before_layer(self, x: Tensor) -> None:
        if self._is_backward:
            self._left_at = None  # a forward pass that is computed again, with its exchanges
            return
        self._arrive()
        if x.requires_grad:
            x.register_hook(lambda _: self._leave())  # type: ignore[no-untyped-call]

    def _after_layer(self, _: None, x: Tensor, out: Tensor) -> None:
        if self._is_backward:
            return
        self._leave()
        if out.requires_grad:
            out.register_hook(lambda _: self._arrive())  # type: ignore[no-untyped-call]

    def _in_bubble(self, begins: bool) -> None:
        """A pass through a stage has ended, or begins."""
        if not torch.is_grad_enabled():
            return
        if begins:
            self._arrive()
        else:
            self._leave()

    def _arrive(self) -> None:
        """A pass has come to a layer."""
        if self._left_at is not None:
            self._step.between.append((self._left_at, stamp(self._device)))
        self._left_at = None

    def _leave(self) -> None:
        """A pass has gone through a layer."""
        self._left_at = stamp(self._device)

    def _before_experts(self, x: Tensor) -> Any:
        return stamp(self._device)

    def _after_experts(self, began: Any, x: Tensor, out: Tensor) -> None:
        self._step.experts.append((began, stamp(self._device)))
        if not self._is_backward:
            self._step.rows += len(x)
        if not (x.requires_grad and out.requires_grad):
            return
        backward: list[Any] = []
        out.register_hook(lambda _: backward.append(stamp(self._device)))  # type: ignore[no-untyped-call]

        def end(_: Tensor) -> None:
            if backward:
                self._step.experts.append((backward.pop(), stamp(self._device)))

        x.register_hook(end)  # type: ignore[no-untyped-call]


def _is_past(stamp: Any) -> bool:
    return isinstance(stamp, float) or bool(stamp.query())


def _seconds(interval: tuple[Any, Any]) -> float:
    began, ended = interval
    return ended - began if isinstance(began, float) else float(began.elapsed_time(ended)) / 1e3


_SLOW, _SLOW_STEPS = 0.8, 20
"""Of the median's speed, and how long a rank must stay below it to be told of."""

_WORTH = 1.02
"""Slices change where the longest time then falls by this factor."""

_TOLD_RANKS = 64
"""Metrics of single ranks, at most."""


@validated
@dataclass(frozen=True, kw_only=True)
class SpeedPolicy:
    """Treatment of ranks of unlike speed.

    Attributes:
        speeds: "measured", "even" (all ranks count as equally fast), or relative speeds of all ranks.
        speeds_every: steps between two points at which tokens and slices may change.
        max_samples_per_rank: of a micro-batch, for ranks with little memory; None: twice the even share.
        stragglers: "adapt", or "expel": in an elastic run a rank that stays below 0.8 of the median's speed hands over
            and leaves, unless fewer than `min_ranks` would be left.

    Raises:
        ConfigurationError: a speed that is not positive and finite.
    """

    speeds: Literal["measured", "even"] | Sequence[float] = "measured"
    speeds_every: int = 8
    max_samples_per_rank: int | None = None
    stragglers: Literal["adapt", "expel"] = "adapt"

    def __post_init__(self) -> None:
        if not isinstance(self.speeds, str):
            given_speeds(self.speeds, len(self.speeds))


class SpeedFollower:
    """Follows the speeds of the ranks of one world.

    Args:
        policy: how.
        strategy: whose ranks.
        before: of the world before, whose measurements of this rank are taken over; None: nothing is known.

    Attributes:
        experts, samples: what the ranks agree on: quotas, placements and shadows follow the first, slices the second.

    Raises:
        ConfigurationError: speeds that do not fit the world, slices that cannot hold a batch, or ranks that may not
            leave.
    """

    def __init__(
        self, policy: SpeedPolicy, strategy: ExpertParallelStrategy, before: SpeedFollower | None = None
    ) -> None:
        self._policy, self._strategy = policy, strategy
        self._check()
        self._row_s: RateMeter = RateMeter() if before is None else before._row_s
        self._sample_s: RateMeter = RateMeter() if before is None else before._sample_s
        self._clock: RankClock | None = None
        self._steps = 0
        if before is not None:  # an earlier fit, or an earlier world
            strategy.experts.take_speeds(None)
            strategy.share_samples(None)
        self._stages, self._world = strategy.state.stages, strategy.world.stage
        nodes: Sequence[int] = strategy.node_of if self._stages is None else self._stages.nodes(strategy.node_of)
        self.experts = AgreedSpeeds(nodes)
        self.samples = AgreedSpeeds(nodes if self._stages is None else range(self._world.size))
        self._slow_for = np.zeros(self._world.size, dtype=np.int64)
        self._cut: IntArray | None = None
        if policy.speeds == "measured":
            bubbles = None if self._stages is None else self._world.bubbles
            self._clock = RankClock(strategy.experts.layers, strategy.root_device, bubbles)
        elif not isinstance(policy.speeds, str):
            given = given_speeds(policy.speeds, strategy.world.size, "load_balancer.speeds")
            self.experts.speeds = self.samples.speeds = given
            if self._stages is not None:
                self.experts.speeds = given[list(self._stages.own_ranks)]
                self.samples.speeds = np.array([given[list(ranks)] for ranks in self._stages.ranks]).min(axis=0)
            strategy.experts.take_speeds(self.experts.speeds)
            self._share_samples()

    def _check(self) -> None:
        policy, size, elastic = self._policy, self._strategy.world.shape.dp, self._strategy.elastic
        if policy.stragglers == "expel" and elastic is None:
            raise ConfigurationError(
                "stragglers=expel lets slow ranks leave, which only elastic runs can go on from: set elastic.enabled="
                "true, or stragglers=adapt"
            )
        if elastic is not None and not isinstance(policy.speeds, str):
            raise ConfigurationError(
                "speeds lists fixed ranks, but those of an elastic run come and go: use speeds=measured or even"
            )
        if policy.stragglers == "expel" and self._strategy.state.stages is not None:
            raise ConfigurationError(
                "stragglers=expel takes a rank away from one stage of mesh.pp, and ranks of all others would wait for "
                "another: use stragglers=adapt"
            )
        most, total = policy.max_samples_per_rank, self._micro_total
        if most is not None and elastic is None and most * size < total:
            raise ConfigurationError(
                f"max_samples_per_rank={most} on {size} ranks cannot hold a micro-batch of {total} samples: use at "
                f"least {-(-total // size)}, or more micro-batches"
            )

    @property
    def _micro_total(self) -> int:
        """Samples of a whole micro-batch, in a pipeline of each that it computes; 0 where the loader does not know."""
        loaders = private_lightning.tree_leaves(self._strategy.state.trainer.train_dataloader)
        samplers = [loader.step_sampler for loader in loaders if isinstance(loader, StepLoader)]
        if not samplers:
            return 0
        return -(-samplers[0].global_batch_size // (samplers[0].num_micros * samplers[0].pieces))

    def close(self) -> None:
        """Measure no longer."""
        if self._clock is not None:
            self._clock.close()

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """Experts have moved, if they had to: what is known is told with the step's counts."""
        if self._clock is not None:
            dispatcher = self._strategy.experts.layers[0].dispatcher
            dispatcher.local_word = encode_readings(self._row_s.reading, self._sample_s.reading)

    def turn(self) -> None:
        """The backward pass begins."""
        if self._clock is not None:
            self._clock.turn()

    def end_micro_batch(self) -> None:
        """Both passes of a micro-batch have ended."""
        if self._clock is not None:
            self._clock.end_micro_batch(self._strategy.steps.stream.num_samples)

    def end_step(self) -> bool:
        """Take the step's measurements in; whether the speeds that experts follow are others from now on."""
        if self._clock is None:
            return False
        self._clock.end_step()
        for rates in self._clock.rates():
            self._row_s.add(rates.row_s)
            self._sample_s.add(rates.sample_s)
        self._steps += 1
        has_changed = False
        if (self._steps - 1) % self._policy.speeds_every == 0:
            experts, samples = decode_readings(self._strategy.experts.layers[0].dispatcher.gathered_words)
            has_changed = self.experts.take(experts)
            if self._stages is not None:
                has_changed, samples = self._over_stages(self._stages, has_changed, samples)
            if has_changed:
                self._strategy.experts.take_speeds(self.experts.speeds)
            if self.samples.take(samples):
                self._share_samples()
        self._look_after_stragglers()
        return has_changed

    @staticmethod
    def _over_stages(stages: StageState, has_changed: bool, samples: Sequence[Reading]) -> tuple[bool, list[Reading]]:
        """Combine the stages: True if any has other speeds, so that all plan placements after the same step, and of
        each slice the slowest reading, since its samples pass through all. Collective.
        """
        told = all_gather_json([has_changed, [reading.bits for reading in samples]], stages.pipe)
        slowest = zip(*([Reading.of(bits) for bits in readings] for _, readings in told), strict=True)
        return any(changed for changed, _ in told), [max(of, key=lambda one: one.femtoseconds) for of in slowest]

    def _share_samples(self) -> None:
        """Cut batches by the agreed speeds, where that pays."""
        most = self._policy.max_samples_per_rank
        speeds = self._strategy.world.speeds_of_slices(self.samples.speeds)
        total = self._micro_total
        before = shares(total, np.full(len(speeds), ONE_SPEED) if self._cut is None else self._cut, most)
        after = shares(total, speeds, most)
        if (before / speeds).max() > _WORTH * (after / speeds).max():
            self._cut = speeds
            self._strategy.share_samples(speeds, most)

    # ------------------------------------------------------------------ who stays behind

    @property
    def ratios(self) -> list[float]:
        """Speed of each rank over the median's: the mean of experts and of everything else."""
        both = self.experts.speeds / np.median(self.experts.speeds) + self.samples.speeds / np.median(
            self.samples.speeds
        )
        return [float(ratio) for ratio in both / 2]

    def _look_after_stragglers(self) -> None:
        ratios = np.array(self.ratios)
        self._slow_for = np.where(ratios < _SLOW, self._slow_for + 1, 0)
        for rank in np.flatnonzero(self._slow_for == _SLOW_STEPS).tolist():
            leaves = self._policy.stragglers == "expel" and self._expel(rank, ratios)
            rank_zero_info(
                f"LoadBalancer: rank {rank} has had {ratios[rank]:.2f} of the median rank's speed for {_SLOW_STEPS} "
                + ("steps: it hands over and leaves" if leaves else "steps: it gets fewer samples and tokens")
            )

    def _expel(self, rank: int, ratios: np.ndarray) -> bool:
        """Let a rank leave, if it is the slowest and enough others are left."""
        elastic, size = self._strategy.elastic, self._strategy.world.size
        if elastic is None or size - 1 < max(1, elastic.engine.settings.min_ranks) or rank != int(ratios.argmin()):
            return False
        if rank == self._strategy.world.rank:
            share = f"{ratios[rank]:.2f} of the median rank's speed"
            elastic.parting = f"it had {share} for {_SLOW_STEPS} steps (stragglers=expel)"
        return True

    # ------------------------------------------------------------------ metrics

    def metrics(self) -> Iterator[Metric]:
        """balance/rankNN/speed_ratio and balance/straggler_rank."""
        ratios = self.ratios
        for rank, ratio in enumerate(ratios[:_TOLD_RANKS]):
            yield Metric(name=f"balance/rank{rank:02d}/speed_ratio", value=ratio)
        slowest = int(np.argmin(ratios))
        yield Metric(name="balance/straggler_rank", value=float(slowest if ratios[slowest] < _SLOW else -1))
