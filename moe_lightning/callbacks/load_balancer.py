"""Load balancer: expert migration, shadow experts, and shares of tokens and samples by measured loads and speeds.

A rank plans for the MoE layers of its pipeline stages. What it goes on from, and saves, is the `State` of all layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning.pytorch as pl
import torch
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import AllocationPolicy, Cluster, balance_ratio, imbalance
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.planner import BalancePlanner, BalancePolicy, State, merged
from moe_lightning.callbacks.calibration import CostMeter
from moe_lightning.callbacks.speeds import OwnRates, SpeedFollower, SpeedPolicy
from moe_lightning.callbacks.telemetry import Metric, reduced
from moe_lightning.compat import private_lightning
from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.sampler import StepSlice
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.dispatch.shadow_exchange import StepShadowTransfers, TransferCosts
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import any_says
from moe_lightning.plots import svg, time_line
from moe_lightning.strategies.checks import require_automatic_optimization
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.placed_experts import MigrationReport
from moe_lightning.strategies.steps import Steps
from moe_lightning.strategies.worlds import ExpertParallelCallback


def balanced_ranks(strategy: ExpertParallelStrategy) -> Cluster:
    """Return the ranks that share the experts of a layer, in a pipeline those of this rank's stages.

    Raises:
        ConfigurationError: what cannot be balanced.
    """
    experts, stages = strategy.experts, strategy.state.stages
    sizes = {layer.num_experts for layer in stages.layers}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"LoadBalancer plans all MoE layers together, but they have {sorted(sizes)} experts: give them equally many"
        )
    if bare := stages.without_layers:
        raise ConfigurationError(
            f"LoadBalancer plans in every stage of mesh.pp, but the ranks of stages {bare} have no MoE layer: cut the "
            "model otherwise (mesh.pp, schedule, moe_every), or drop the callback"
        )
    slots = {layer.experts.num_slots for layer in experts.layers}
    if len(slots) > 1:
        raise ConfigurationError(
            f"LoadBalancer needs as many slots for every MoE layer, but layers have {sorted(slots)}: "
            f"set the strategy's slots, to {max(slots)} or more"
        )
    if len(experts.layers[0].dispatcher.groups) > 1:
        raise ConfigurationError("LoadBalancer needs one dispatch group: drop the strategy's ep_size")
    return Cluster(node_of=stages.nodes(strategy.world.nodes), slots_per_rank=slots.pop())


def min_replicas(strategy: ExpertParallelStrategy, wanted: int | None) -> int:
    """Nodes that hold each expert: what is wanted, but never less than what recovery relies on.

    Raises:
        ConfigurationError: less is wanted.
    """
    promised = strategy.placing.promised_replicas
    if wanted is not None and wanted < promised:
        raise ConfigurationError(
            f"LoadBalancer's min_replicas={wanted} would move experts away from nodes that FaultRecovery's "
            f"min_replicas={promised} relies on: leave it out (null), or use at least {promised}"
        )
    return promised if wanted is None else wanted


def plan_metrics(layers: Mapping[int, MoELayer], planner: BalancePlanner) -> Iterator[Metric]:
    """Evenness, shadows and forecasts of every layer that is planned, by its number."""
    for (number, layer), decision in zip(layers.items(), planner.decisions, strict=True):
        area = f"balance/layer{number:02d}"
        for name, value in _layer_numbers(layer).items():
            yield Metric(name=f"{area}/{name}", value=value)
        plan, error = decision.plan, decision.forecast_error
        yield Metric(name=f"{area}/shadows_count", value=float(plan.num_copies if plan is not None else 0))
        if error is not None:
            yield Metric(name=f"{area}/forecast_error_ratio", value=error)


def movement_metrics(reports: Sequence[MigrationReport], transfers: StepShadowTransfers | None) -> Iterator[Metric]:
    """Experts that moved since the last log, and shadow experts of the last step."""
    moved = sum(report.moved_states for report in reports)
    yield Metric(name="balance/migrated_states", value=float(moved))
    yield Metric(name="balance/migrated_bytes", value=float(sum(r.sent_bytes for r in reports)), over_ranks="sum")
    migration_ms = 1e3 * sum(report.migration_s for report in reports)
    yield Metric(name="balance/migration_ms", value=migration_ms, over_ranks="max")
    costs = transfers.costs if transfers else TransferCosts()
    yield Metric(name="balance/shadow_bytes", value=float(costs.sent_bytes), over_ranks="sum")
    yield Metric(name="balance/exposed_trans_ms", value=1e3 * costs.trans_waits.seconds, over_ranks="max")
    yield Metric(name="balance/exposed_agg_ms", value=1e3 * costs.agg_waits.seconds, over_ranks="max")


def _layer_numbers(layer: MoELayer) -> dict[str, float]:
    """Imbalance of the last batch on plain expert parallelism, and as balanced."""
    if layer.statistics is None or (loads := layer.statistics.rank_loads) is None:
        return {}
    tokens_E, speeds_N = layer.statistics.computed_NE.numpy().sum(axis=0), layer.dispatcher.speeds
    plain = uniform_placement(layer.num_experts, len(loads))
    before = balanced_quota(tokens_E, plain.replicas).sum(axis=0)
    numbers = {
        "imbalance_before_ratio": imbalance(before, speeds_N),
        "imbalance_after_ratio": imbalance(loads, speeds_N),
    }
    quotient = balance_ratio(before, loads)
    return numbers | ({"rb_ratio": quotient} if math.isfinite(quotient) else {})


class StepCounts:
    """Tokens of every layer and micro-batch of a step, as the forward passes find them.

    Args:
        layers: the MoE layers of this rank.
    """

    def __init__(self, layers: Sequence[MoELayer] = ()) -> None:
        self._layers = layers
        self._batch, self._is_last = 0, True
        self._begin()

    def watch(self, observe: Callable[[int, MoELayer], None]) -> None:
        """Call `observe` with index and layer while the tokens of a layer travel, until `close`."""
        for index, layer in enumerate(self._layers):
            layer.overlap_fn = partial(observe, index, layer)

    def close(self) -> None:
        """Call nothing any longer."""
        for layer in self._layers:
            layer.overlap_fn = None

    def _begin(self) -> None:
        self._counts: list[dict[tuple[int, int], IntArray]] = [{} for _ in self._layers]
        self._complete: set[int] = set()

    def begin_batch(self, batch_idx: int, *, is_last: bool) -> bool:
        """Begin a batch, and return True if it is the first one of a step.

        Args:
            is_last: no other one follows in the step.
        """
        begins = self._is_last
        self._batch, self._is_last = batch_idx, is_last
        if begins:
            self._begin()
        return begins

    def add(self, index: int, counts_EN: IntArray, piece: StepSlice | None) -> Sequence[IntArray]:
        """Add the counts of a layer, and return those of all micro-batches once they are complete; else nothing.

        Args:
            piece: part of the batch in a pipeline, which computes it in several micro-batches.
        """
        if index in self._complete:  # a recomputed pass comes again
            return ()
        micro, num_micros = (0, 1) if piece is None else (piece.micro, piece.num_micros)
        self._counts[index][self._batch, micro] = counts_EN
        if not self._is_last or micro < num_micros - 1:
            return ()
        self._complete.add(index)
        return tuple(self._counts[index].values())


@dataclass
class SinceLog:
    """Moves, steps and waits for plans since the last log.

    Attributes:
        reports: of experts that moved.
        steps: optimizer steps.
        plan_s: seconds that steps waited for plans.
    """

    reports: list[MigrationReport] = field(default_factory=list)
    steps: int = 0
    plan_s: float = 0.0

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Count the time inside as a wait for plans."""
        began = time.perf_counter()
        yield
        self.plan_s += time.perf_counter() - began


@validated
class LoadBalancer(ExpertParallelCallback):
    """Spreads the work of skewed experts over the ranks without changing what the model learns.

    Every step each layer's counts are known on all ranks. From them all ranks make the same plans in a background
    thread, without communication (`BalancePlanner`): replicas of experts and their ranks (every few steps at first,
    then every `rebalance_every`; experts and their optimizer states move between steps), and shadow experts for one
    step. Ranks measure their speeds, and quotas, placements and slices of the batch follow (`SpeedFollower`). Give the
    strategy `slots` above what its placement needs, or there is no room for replicas. In a pipeline the ranks of each
    stage plan for its layers, and all stages move experts at the same steps.

    Logs, with the Trainer's logging steps: balance/layerNN/imbalance_before_ratio (busiest rank over mean under plain
    expert parallelism) and imbalance_after_ratio, rb_ratio (quotient of the standard deviations before and after),
    shadows_count, forecast_error_ratio; balance/migrated_states and balance/migration_ms since the last log,
    balance/migrated_bytes and balance/shadow_bytes (sum over ranks), balance/plan_ms (what a step waits for its plans,
    which are made in another thread while the step before runs; maximum),
    balance/exposed_trans_ms and balance/exposed_agg_ms of the last step (maximum), balance/rankNN/speed_ratio (speed
    over the median rank's) and balance/straggler_rank (the slowest below 0.8, else -1), and
    balance/model_error/OPERATION_ratio of the calibrated performance model. Where speeds differ, imbalances are the
    longest time over that of a perfect division.

    Args:
        rebalance_every, placement_rule, allocation, shadows: see `BalancePolicy`.
        min_replicas: distinct nodes that hold each expert, where slots allow; None: as many as FaultRecovery promises,
            1 without it.
        calibrate: time exchanges, experts and dense layers when training starts, about a second, where plans depend on
            them; without it plans come from the next two arguments and so are alike in every run.
        bytes_per_s, flops_per_s: nominal bandwidth of a rank and speed of its expert computation.
        speeds, max_samples_per_rank, stragglers: see `SpeedPolicy`.
        timeline_path: SVG of the last step as the performance model sees it, written when training ends;
            None: none. It needs the extra `plots`; without it a warning says so.

    Attributes:
        planner: what decides; None before training starts and in a world of one rank.
        follower: of the ranks' speeds; None before and after training, and in a world of one rank.
        last_shadow_transfers: the transfers of shadow experts in the last step; None without shadows.

    Raises:
        ConfigurationError: a value outside its range; when training starts: another strategy, layers with different
            numbers of experts, slots that differ between ranks, dispatch groups smaller than the world, ranks of a
            pipeline without an MoE layer, manual optimization, or shadows of experts in four bits or with hooks of
            their gradients.
    """

    def __init__(
        self,
        *,
        rebalance_every: NonNegativeInt = 200,
        placement_rule: str = "auto",
        allocation: AllocationPolicy = "waterfill",
        min_replicas: PositiveInt | None = None,
        shadows: str = "search",
        calibrate: bool = True,
        bytes_per_s: Annotated[float, Interval(gt=0, le=1e18)] = 10e9,
        flops_per_s: Annotated[float, Interval(gt=0, le=1e21)] = 1e12,
        speeds: Literal["measured", "even"] | Sequence[float] = "measured",
        max_samples_per_rank: PositiveInt | None = None,
        stragglers: Literal["adapt", "evict"] = "adapt",
        timeline_path: str | None = None,
    ) -> None:
        self._policy = BalancePolicy(
            rebalance_every=rebalance_every, placement_rule=placement_rule, allocation=allocation, shadows=shadows
        )
        self._speed_policy = SpeedPolicy(
            speeds=speeds, max_samples_per_rank=max_samples_per_rank, stragglers=stragglers
        )
        self._costs = CostMeter(
            measures=calibrate and (shadows != "none" or placement_rule == "auto"),
            bytes_per_s=bytes_per_s,
            flops_per_s=flops_per_s,
        )
        self._timeline_path = Path(timeline_path) if timeline_path else None
        self._min_replicas = min_replicas
        self.planner: BalancePlanner | None = None
        self.follower: SpeedFollower | None = None
        self.last_shadow_transfers: StepShadowTransfers | None = None
        self._known: State | None = None  # as last loaded or gathered; the planner's own layers have changed since
        self._rates, self._counts = OwnRates(), StepCounts()
        self._since_log = SinceLog()

    # ------------------------------------------------------------------ start and end

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # what was saved is loaded after this
            self._set_planner(None)
            self._known, self._costs.known = None, {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        self._set_planner(None)
        strategy = _strategy(trainer)
        layers, stages = strategy.experts.layers, strategy.state.stages
        if strategy.world.stage.size == 1 or not stages.layers:
            return  # nothing to balance
        require_automatic_optimization(pl_module, "LoadBalancer moves experts between steps", cure="drop the callback")
        if self._policy.shadows != "none":
            strategy.require_shadows_possible()
        cluster = balanced_ranks(strategy)
        policy = replace(self._policy, min_replicas=min_replicas(strategy, self._min_replicas))
        if strategy.worlds.is_elastic or len(set(strategy.world.nodes)) > 1:  # on one node no rule protects more
            policy.require_protection()
        numbered = dict(zip(stages.numbers, layers, strict=True))
        costs = self._costs.begin(numbered, strategy.world.stage, strategy.shadow_dtype)
        planner = BalancePlanner(
            policy,
            cluster,
            strategy.experts.placements,
            costs,
            timeout_s=strategy.options.timeout.total_seconds(),
            numbers=stages.numbers,
            num_layers=len(stages.layers),
        )
        self._set_planner(planner)
        if self._known is not None:
            planner.load_state_dict(self._known)
        self.follower = SpeedFollower(self._speed_policy, strategy, self._rates)
        self.follower.begin()
        planner.set_speeds(self.follower.experts.speeds)
        self._counts = StepCounts(layers)
        self._counts.watch(partial(self._observe, strategy.steps if stages.num_stages > 1 else None))

    def _stop(self) -> None:
        """Remove everything that watches the layers. The planner stays, since it has the state."""
        self._counts.close()
        follower, self.follower = self.follower, None
        if follower is not None:
            follower.close()

    def _set_planner(self, planner: BalancePlanner | None) -> None:
        """Plan with this one from here on; what the one before still plans is dropped."""
        if self.planner is not None:
            self.planner.close()
        self.planner = planner

    @override
    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let all ranks go on with the costs and the state of one, in a pipeline of one of each stage: those that
        joined know others than those that stayed, and ranks whose states differ would plan different moves. Hooks that
        a fault has left to run find no planner, since it is of the ranks and layers of the world before.
        """
        strategy, planner = _strategy(trainer), self.planner
        costs = self._costs.known if planner is None else dict(zip(planner.numbers, planner.costs, strict=True))
        listed = [[number, asdict(block.at(None))] for number, block in costs.items()]  # speeds are of this world
        gathered = all_gather_json([listed, self._planned_state(), self._known], strategy.world)
        self._stop()
        self._set_planner(None)
        known = {number: block for listed, *_ in reversed(gathered) for number, block in listed}
        self._costs.known = {number: BlockCosts(**block) for number, block in known.items()}
        self._known = merged([*(own for _, own, _ in gathered), *(known for *_, known in gathered)])

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        expected = self.planner.predicted_step() if self.planner is not None else None
        if self._timeline_path is not None and expected is not None and trainer.is_global_zero:
            try:
                picture = svg(time_line(expected, f"step {trainer.global_step}"))
            except ConfigurationError as error:
                rank_zero_warn(f"{self._timeline_path} is not drawn: {error}")
                return
            self._timeline_path.parent.mkdir(parents=True, exist_ok=True)
            self._timeline_path.write_text(picture)

    def _planned_state(self) -> State | None:
        """Return the state of the layers that this rank plans for; None if it plans for none."""
        return None if self.planner is None else self.planner.state_dict()

    @override
    def state_dict(self) -> State:
        return merged([self._planned_state(), self._known]) or {}

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Ranks of a pipeline know the loads of their own layers: those that write get those of all."""
        strategy = _strategy(trainer)
        stages = strategy.state.stages
        if self.planner is None or stages.num_stages == 1 or strategy.is_left_alone:
            return
        self._known = merged([*all_gather_json(self._planned_state(), stages.pipe), self._known])
        checkpoint["callbacks"][self.state_key] = self._known

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._known = state_dict or None

    # ------------------------------------------------------------------ one step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.planner is None:
            return
        if self._counts.begin_batch(batch_idx, is_last=not private_lightning.is_accumulating(trainer)):
            self._begin_step(_strategy(trainer), self.planner)

    def _begin_step(self, strategy: ExpertParallelStrategy, planner: BalancePlanner) -> None:
        replay = strategy.state.window_replay
        may_move = replay is None or replay.reaches_all  # else experts would lack what brings their state back
        with self._since_log.planning():
            placements = planner.due_placements() if may_move else None
        if placements is not None and _any_moves(strategy, placements):
            wanted = strategy.state.stages.placements_of_all(placements)
            self._since_log.reports.append(strategy.replace_experts(wanted))
            planner.moved(placements)
        with self._since_log.planning():
            plans = planner.step_plans()
            shares = None if plans is None else planner.early_shares()
        self.last_shadow_transfers = None
        if plans is not None:
            strategy.start_shadow_experts(plans, shares)
            self.last_shadow_transfers = strategy.experts.shadow_transfers

    def _observe(self, pipeline: Steps | None, index: int, layer: MoELayer) -> None:
        """While the last micro-batch's tokens travel: take the step's counts in and plan the next step's shadows.

        Args:
            pipeline: of stages, which compute a batch in several micro-batches; None: there are none.
        """
        assert layer.statistics is not None
        assert self.planner is not None
        counts_EN = layer.statistics.computed_NE.numpy().T
        if complete := self._counts.add(index, counts_EN, None if pipeline is None else pipeline.batch):
            with self._since_log.planning():
                self.planner.observe(index, *complete)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self.follower is not None:
            self.follower.turn()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.planner is None or self.follower is None:
            return
        self.follower.end_micro_batch()
        if private_lightning.is_accumulating(trainer):
            return
        self._since_log.steps += 1
        if self.follower.end_step():
            self.planner.set_speeds(self.follower.experts.speeds)
        if self._costs.measures and self.follower.dense_s:
            self.planner.set_dense_times(*self.follower.dense_s)
        if private_lightning.logs_now(trainer):
            _strategy(trainer).world.synchronize()  # a device counts a wait of this step once it has ended
            pl_module.log_dict(reduced(list(self._metrics(trainer, self.planner, self.follower)), trainer))

    # ------------------------------------------------------------------ metrics

    def _metrics(self, trainer: pl.Trainer, planner: BalancePlanner, follower: SpeedFollower) -> Iterator[Metric]:
        layers = zip(planner.numbers, _strategy(trainer).experts.layers, strict=True)
        yield from plan_metrics(dict(layers), planner)
        yield from movement_metrics(self._since_log.reports, self.last_shadow_transfers)
        yield from follower.metrics()
        plan_ms = 1e3 * self._since_log.plan_s / self._since_log.steps
        yield Metric(name="balance/plan_ms", value=plan_ms, over_ranks="max")
        for operation, error in self._costs.errors.items():
            yield Metric(name=f"balance/model_error/{operation}_ratio", value=error)
        self._since_log = SinceLog()


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    return own_strategy(trainer, "LoadBalancer")


def _any_moves(strategy: ExpertParallelStrategy, placements: Sequence[Placement]) -> bool:
    """True if any layer of any pipeline stage gets a new placement; collective over the stages."""
    moves = list(placements) != strategy.experts.placements
    return any_says([moves], strategy.state.stages.pipe)[0]
