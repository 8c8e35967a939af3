"""Shares of tokens and samples that follow the measured speed of the ranks.

Every few steps all ranks send each other their measurements, and decide alike, in integers, from what all of them
received. A step has the same samples whatever the slices, and so the same loss. In a pipeline all ranks count as
equally fast.

`slow_ranks` compares whole steps, for people. Shares need the time of one row and of one sample, known to all ranks at
the same step: the whole step of a rank that has got fewer is no longer slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.forecast import AgreedSpeeds, RateMeter, Reading
from moe_lightning.callbacks.rank_clock import RankClock
from moe_lightning.callbacks.telemetry import Metric
from moe_lightning.config import validated
from moe_lightning.data.sampler import StepCut
from moe_lightning.dispatch.quota import ONE_SPEED, given_speeds, shares
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.step_data import first_sampler

_SLOW, _SLOW_STEPS = 0.8, 20
"""Share of the median's speed, and the steps that a rank must stay below it to be reported."""

_AGREE_EVERY = 8
"""Steps between two points at which tokens and slices may change."""

_WORTH = 1.02
"""Slices change where the longest time then falls by this factor."""

_SHOWN_RANKS = 64
"""Metrics of single ranks, at most."""


@validated
@dataclass(frozen=True, kw_only=True)
class SpeedPolicy:
    """Treatment of ranks of unlike speed.

    Attributes:
        speeds: "measured" (in a pipeline as "even"), "even" (all ranks count as equally fast), or relative speeds of
            all ranks.
        max_samples_per_rank: of a micro-batch, for ranks with little memory; None: twice the even share.
        stragglers: "adapt", or "evict": in an elastic run a rank that stays below 0.8 of the median's speed hands over
            and leaves, unless fewer than `min_ranks` would be left.

    Raises:
        ConfigurationError: a speed that is not positive and finite.
    """

    speeds: Literal["measured", "even"] | Sequence[float] = "measured"
    max_samples_per_rank: int | None = None
    stragglers: Literal["adapt", "evict"] = "adapt"

    def __post_init__(self) -> None:
        if not isinstance(self.speeds, str):
            given_speeds(self.speeds, len(self.speeds))


@dataclass(frozen=True, kw_only=True)
class OwnRates:
    """Measurements of this rank in all worlds: seconds of a row and of a sample."""

    row_s: RateMeter = field(default_factory=RateMeter)
    sample_s: RateMeter = field(default_factory=RateMeter)


class SpeedFollower:
    """Follows the speeds of the ranks of one world, from `begin` to `close`.

    Args:
        policy: how.
        strategy: whose ranks.
        rates: of this rank so far.

    Attributes:
        experts, samples: what the ranks agree on: quotas, placements and shadows follow the first, slices the second.
        dense_s: forward and backward seconds of the dense layers behind each MoE layer on the slowest rank, where the
            ranks have agreed on them in the last step; else empty.

    Raises:
        ConfigurationError: speeds that do not fit the world, slices that cannot hold a batch, or ranks that may not
            leave.
    """

    def __init__(self, policy: SpeedPolicy, strategy: ExpertParallelStrategy, rates: OwnRates) -> None:
        self._policy, self._strategy, self._rates = policy, strategy, rates
        self._check()
        self._clock: RankClock | None = None
        self._steps = 0
        given, nodes = self._given(), strategy.state.stages.nodes(strategy.world.nodes)
        self.experts, self.samples = AgreedSpeeds(nodes, given), AgreedSpeeds(nodes, given)
        self._slow_for = np.zeros(len(nodes), dtype=np.int64)
        self.dense_s: list[list[float]] = []

    def begin(self) -> None:
        """Measure the ranks, or share tokens and samples by the given speeds."""
        strategy = self._strategy
        if self._policy.speeds == "measured":
            if not self._is_pipeline:
                self._clock = RankClock(strategy.experts.layers, strategy.root_device)
        elif self._policy.speeds != "even":
            strategy.experts.set_speeds(self.experts.speeds)
            self._share_samples()

    @property
    def _is_pipeline(self) -> bool:
        return self._strategy.state.stages.num_stages > 1

    def _given(self) -> IntArray | None:
        """Return the speeds that the user gives to all ranks; None: they are measured, or equal."""
        if isinstance(self._policy.speeds, str):
            return None
        return given_speeds(self._policy.speeds, self._strategy.world.size, "load_balancer.speeds")

    def _check(self) -> None:
        policy, size = self._policy, self._strategy.world.shape.dp
        is_elastic = self._strategy.worlds.is_elastic
        if policy.stragglers == "evict" and not is_elastic:
            raise ConfigurationError(
                "stragglers=evict lets slow ranks leave, which only elastic runs can go on from: set elastic.enabled="
                "true, or stragglers=adapt"
            )
        if is_elastic and not isinstance(policy.speeds, str):
            raise ConfigurationError(
                "speeds lists fixed ranks, but those of an elastic run come and go: use speeds=measured or even"
            )
        if self._is_pipeline and (policy.stragglers == "evict" or not isinstance(policy.speeds, str)):
            raise ConfigurationError(
                "the ranks of a pipeline (mesh.pp) count as equally fast: use stragglers=adapt and speeds=even"
            )
        most, cut = policy.max_samples_per_rank, self._cut
        total = 0 if cut is None else _micro_total(cut)
        if most is not None and not is_elastic and most * size < total:
            raise ConfigurationError(
                f"max_samples_per_rank={most} on {size} ranks cannot hold a micro-batch of {total} samples: use at "
                f"least {-(-total // size)}, or more micro-batches"
            )

    @property
    def _cut(self) -> StepCut | None:
        """Cut of the training batches; None where the loader has none."""
        sampler = first_sampler(self._strategy.state.trainer.train_dataloader)
        return None if sampler is None else sampler.cut

    def close(self) -> None:
        """Measure no longer, and share tokens and samples evenly again."""
        if self._clock is not None:
            self._clock.close()
        self._strategy.experts.set_speeds(None)
        self._strategy.share_samples(None)

    # ------------------------------------------------------------------ a step

    def turn(self) -> None:
        """The backward pass begins."""
        if self._clock is not None:
            self._clock.turn()

    def end_micro_batch(self) -> None:
        """Both passes of a micro-batch have ended."""
        if self._clock is not None:
            self._clock.end_micro_batch(self._strategy.steps.stream.num_samples)

    def end_step(self) -> bool:
        """Add the step's measurements, and return True if the speeds that experts follow have changed."""
        self.dense_s = []
        if self._clock is None:
            return False
        self._clock.end_step()
        for row_s, sample_s in self._clock.rates():
            self._rates.row_s.add(row_s)
            self._rates.sample_s.add(sample_s)
        self._steps += 1
        has_changed = (self._steps - 1) % _AGREE_EVERY == 0 and self._agree()
        self._look_after_stragglers()
        return has_changed

    def _agree(self) -> bool:
        """Follow what all ranks have measured, and return True if the speeds of experts change. Collective."""
        assert self._clock is not None
        # The times of dense layers are those of the first steps, so they are sent once.
        sends_dense = self._steps == 1 + _AGREE_EVERY
        dense_s = self._clock.dense_times() if sends_dense else ()
        own = [self._rates.row_s.reading, self._rates.sample_s.reading, dense_s]
        *rates, dense = zip(*all_gather_json(own, self._strategy.world), strict=True)
        experts, samples = ([Reading(*reading) for reading in of_ranks] for of_ranks in rates)
        if sends_dense:
            self.dense_s = np.max(dense, axis=0).tolist()
        has_changed = self.experts.update(experts)
        if has_changed:
            self._strategy.experts.set_speeds(self.experts.speeds)
        if self.samples.update(samples):
            self._share_samples()
        return has_changed

    def _share_samples(self) -> None:
        """Cut batches by the agreed speeds, where that pays."""
        cut, most = self._cut, self._policy.max_samples_per_rank
        if cut is None:
            return
        speeds = self._strategy.world.speeds_of_slices(self.samples.speeds)
        present = np.full(len(speeds), ONE_SPEED) if cut.speeds is None else cut.speeds
        before, after = (shares(_micro_total(cut), each, most) for each in (present, speeds))
        if (before / speeds).max() > _WORTH * (after / speeds).max():
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
        is_due = (self._slow_for > 0) & (self._slow_for % _SLOW_STEPS == 0)
        for rank in np.flatnonzero(is_due).tolist():
            steps = int(self._slow_for[rank])
            leaves = self._policy.stragglers == "evict" and self._evict(rank, ratios, steps)
            if leaves or steps == _SLOW_STEPS:
                rank_zero_info(
                    f"LoadBalancer: rank {rank} has had {ratios[rank]:.2f} of the median rank's speed for {steps} "
                    + ("steps: it hands over and leaves" if leaves else "steps: it gets fewer samples and tokens")
                )

    def _evict(self, rank: int, ratios: np.ndarray, steps: int) -> bool:
        """Let a rank leave, if it is the slowest and enough others are left."""
        share = f"{ratios[rank]:.2f} of the median rank's speed"
        reason = f"it had {share} for {steps} steps (stragglers=evict)"
        return rank == int(ratios.argmin()) and self._strategy.elastic.request_departure(rank, reason)

    # ------------------------------------------------------------------ metrics

    def metrics(self) -> Iterator[Metric]:
        """balance/rankNN/speed_ratio and balance/straggler_rank."""
        ratios = self.ratios
        for rank, ratio in enumerate(ratios[:_SHOWN_RANKS]):
            yield Metric(name=f"balance/rank{rank:02d}/speed_ratio", value=ratio)
        slowest = int(np.argmin(ratios))
        yield Metric(name="balance/straggler_rank", value=float(slowest if ratios[slowest] < _SLOW else -1))


def _micro_total(cut: StepCut) -> int:
    """Samples of a whole micro-batch."""
    return -(-cut.global_batch_size // cut.num_pieces)
