"""Fault recovery: training continues when ranks die, hang, return or leave.

Survivors keep their process and their state. The state of a lost rank comes from live replicas, else from snapshots in
memory, else from storage; then the failed step runs again with the same samples (Lazarus 4.3, REFT 4.3). Recoveries
are logged as recoveries.csv beside a CSV logger's metrics, a table of W&B and text of TensorBoard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.protection import PROTECTIONS, ProtectionLayout, choose_protection, protected_by
from moe_lightning.compat import private_lightning
from moe_lightning.config import PositiveInt, validated
from moe_lightning.elastic.faults import MEMBERS_CHANGE, MembersChange
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import append_rows
from moe_lightning.strategies.checks import require_automatic_optimization
from moe_lightning.strategies.elastic_worlds import ElasticWorlds, RecoveryPolicy
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.worlds import ExpertParallelCallback, RecoveryReport

_MOST_FAULTS = 2
"""Checks that find damage in the memory of a rank, or wrong products of it, after which it leaves."""

COLUMNS = (
    "step",
    "began_at",
    "reason",
    "lost_ranks",
    "ranks_before",
    "ranks_after",
    "restored",
    "steps_lost",
    "stale_experts",
    "total_s",
)


def table_row(report: RecoveryReport) -> list[Any]:
    """The values of `COLUMNS`; the time in UTC, lost ranks with spaces between them."""
    values = vars(report) | {
        "began_at": datetime.fromtimestamp(report.began_at, UTC).isoformat(timespec="milliseconds"),
        "lost_ranks": " ".join(map(str, report.lost_ranks)),
        "total_s": round(report.seconds["total"], 3),
    }
    return [values[name] for name in COLUMNS]


def log_table(loggers: Iterable[Logger], reports: Sequence[RecoveryReport]) -> None:
    """Add the last of this process's recoveries to the table of each logger; on the logging rank only."""
    rows = [table_row(report) for report in reports]
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            append_rows(Path(logger.log_dir) / "recoveries.csv", COLUMNS, rows[-1:])
        elif isinstance(logger, WandbLogger):
            import wandb

            table: Any = wandb.Table(columns=list(COLUMNS), data=rows)
            logger.log_metrics({"recovery/table": table}, reports[-1].step)
        elif isinstance(logger, TensorBoardLogger):
            text = "  \n".join(f"**{name}** {value}" for name, value in zip(COLUMNS, rows[-1], strict=True))
            logger.experiment.add_text("recovery/table", text, reports[-1].step)


@validated
class FaultRecovery(ExpertParallelCallback):
    """Recovers from lost ranks inside the running fit.

    Needs ranks that an elastic launcher started (`moe-train` with elastic.enabled=true, or
    `python -m moe_lightning.elastic.run`); under any other launcher a fault ends the run, and the same command resumes
    it from the last checkpoint.

    Logs at every recovery: recovery/total_ms, recovery/PHASE_ms (rendezvous, groups, plan, movement, resume),
    recovery/steps_lost, recovery/stale_experts, recovery/ranks, recovery/lost_rank (the lowest where several are), and
    a row of a table with the reason (`recovery_table`).

    Args:
        min_replicas: nodes that hold each expert where slots allow, or ranks where there are fewer nodes; any smaller
            number of them may be lost at once without a snapshot. On one machine every rank counts as a node
            (`elastic.ranks_are_nodes`). Unless the strategy names copies or a placement, it starts with so many.
        protection: how snapshots of a PartialExpertsCheckpoint outlive their node: "arc" (copies), "aec" (parities),
            "none", another name in `checkpoint.protection.PROTECTIONS`, or "auto": none where every expert is on more
            than `failures` nodes, else the cheapest that survives so many lost nodes.
        failures: nodes that may be lost at once without falling back to storage.
        optimizer_replay: under the strategy's dense="zero1", let every rank repeat the AdamW updates of the next rank's
            shard on the host (REFT's AOR), so that a lost shard costs no step.
        verify_replay_every: steps between two comparisons of the repeated shards with their owners.
        max_recoveries: recoveries from faults after which the run gives up; ranks may join and leave without limit.

    Attributes:
        reports: of the recoveries of this process.
        replays: whether ranks repeat each other's updates.

    Raises:
        ConfigurationError: a value outside its range, another strategy, dispatch groups, manual optimization,
            loaders that are made anew every n epochs, or optimizer_replay where dense parameters are cut.
    """

    repairs_replicas = True

    def __init__(
        self,
        *,
        min_replicas: PositiveInt = 2,
        protection: str = "auto",
        failures: PositiveInt = 1,
        optimizer_replay: bool = False,
        verify_replay_every: PositiveInt = 100,
        max_recoveries: PositiveInt = 100,
    ) -> None:
        if protection != "auto":
            PROTECTIONS.find(protection)
        self._min_replicas = min_replicas
        self._protection, self._failures = protection, failures
        self.replays, self._verify_every = optimizer_replay, verify_replay_every
        self._max_recoveries = max_recoveries
        self.reports: list[RecoveryReport] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = _strategy(trainer)
        if stage != "fit":
            return
        strategy.promise_replicas(self._min_replicas)
        if not strategy.worlds.is_elastic:
            rank_zero_warn(
                "FaultRecovery: no elastic launcher started these ranks, so a fault ends the run; "
                "the same command resumes it"
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy(trainer)
        elastic = strategy.elastic
        if not isinstance(elastic, ElasticWorlds):
            return
        require_automatic_optimization(pl_module, "FaultRecovery repeats steps", cure="drop the callback")
        if reload_every := getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
            raise ConfigurationError(
                f"reload_dataloaders_every_n_epochs={reload_every} makes loaders anew at "
                "epochs that a rank which joins later does not count: set it to 0, or leave FaultRecovery out"
            )
        checkpoint = private_lightning.callback_of(trainer, PartialExpertsCheckpoint)
        policy = RecoveryPolicy(
            min_replicas=self._min_replicas,
            max_recoveries=self._max_recoveries,
            sources=None if checkpoint is None else checkpoint.recovery_sources(strategy),
            protection=partial(self._layout, strategy),
        )
        batch = elastic.step.batch
        private_lightning.run_fit_by(trainer, partial(elastic.run, policy), batch.record_meeting)
        private_lightning.watch_batch_ends(trainer, lambda: batch.running)

    def _layout(self, strategy: ExpertParallelStrategy) -> ProtectionLayout:
        """Protection of snapshots in the present world: the ranks that protect each other's."""
        nodes = strategy.world.nodes
        if self._protection != "auto":
            return protected_by(PROTECTIONS[self._protection], nodes, self._failures)
        stacks = strategy.state.training_state().stacks
        holders = [stack.placement.holders(e) for stack in stacks for e in range(stack.num_experts)]
        holders += strategy.state.stages.dense_holders
        replicated = all(len({nodes[rank] for rank in ranks}) > self._failures for ranks in holders)
        failures = min(self._failures, len(set(nodes)) - 1)
        return choose_protection(
            nodes, replicated=replicated and not strategy.state.shards.shares_optimizers, failures=failures
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy(trainer)
        if step := strategy.elastic.step:
            step.begin_loop()
        if self.replays and strategy.worlds.is_elastic:
            self._replay_next_rank(trainer)

    def _replay_next_rank(self, trainer: pl.Trainer) -> None:
        """Begin to repeat the updates of the next rank's shard, from its present state; collective."""
        strategy = _strategy(trainer)
        if strategy.state.shards.shares_weights:
            sizes = {"mesh.pp": strategy.worlds.axes.pp, "mesh.tp": strategy.worlds.axes.tp}
            cut = next((f"{axis}={size}" for axis, size in sizes.items() if size > 1), "dense=fsdp or hsdp")
            raise ConfigurationError(
                f"optimizer_replay repeats a peer's updates, and with {cut} not every rank has its gradients: "
                "use optimizer_replay=false, and for what only one rank keeps protection=arc, which copies snapshots, "
                "or dense=hsdp, which has copies anyway"
            )
        if strategy.state.shards.shares_optimizers:
            strategy.state.shards.replay_peer((strategy.world.rank + 1) % strategy.world.size)
            strategy.state.shards.verify_replay()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = _strategy(trainer)
        if step := strategy.elastic.step:
            step.begin_batch()
        if strategy.elastic.change_is_due:
            raise MembersChange(MEMBERS_CHANGE)
        faults = {
            "its memory was damaged": strategy.update.state_check.times_damaged,
            "it computed wrong": strategy.update.arithmetic_check.times_wrong,
        }
        for fault, times in faults.items():
            if times >= _MOST_FAULTS:
                strategy.elastic.request_departure(strategy.world.rank, f"{fault} {times} times")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = _strategy(trainer)
        step = strategy.elastic.step
        if (
            step is not None
            and step.end_batch(outputs, batch, batch_idx)
            and self.replays
            and trainer.global_step % self._verify_every == 0
        ):
            pl_module.log("recovery/replay_corrections", float(strategy.state.shards.verify_replay()))

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if step := _strategy(trainer).elastic.step:
            step.batch.record_meeting()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if step := _strategy(trainer).elastic.step:
            step.begin_validation()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if step := _strategy(trainer).elastic.step:
            step.end_epoch()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if step := _strategy(trainer).elastic.step:
            step.begin_epoch()

    @override
    def on_recovered(self, trainer: pl.Trainer, pl_module: pl.LightningModule, report: RecoveryReport) -> None:
        self.reports.append(report)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, CSVLogger):
                private_lightning.forget_version(logger)
        if trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            (print if bar is None else bar.print)(_sentence(report))
        metrics: dict[str, float] = {f"{phase}_ms": 1e3 * seconds for phase, seconds in report.seconds.items()}
        metrics |= {"steps_lost": report.steps_lost, "stale_experts": report.stale_experts, "ranks": report.ranks_after}
        if report.lost_ranks:
            metrics["lost_rank"] = report.lost_ranks[0]
        for logger in trainer.loggers:
            logger.log_metrics({f"recovery/{name}": value for name, value in metrics.items()}, report.step)
        if trainer.is_global_zero:  # last: a CSVLogger that opens a folder warns of files in it
            log_table(trainer.loggers, self.reports)


def _sentence(report: RecoveryReport) -> str:
    repeated = f", {report.steps_lost} steps are repeated" if report.steps_lost else ""
    left = "1 rank continues" if report.ranks_after == 1 else f"{report.ranks_after} ranks continue"
    return (
        f"{report.reason} at step {report.step}: {left}, {report.restored}{repeated}; {report.seconds['total']:.2f} s"
    )


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    return own_strategy(trainer, "FaultRecovery")
