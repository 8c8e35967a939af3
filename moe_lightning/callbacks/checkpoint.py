"""Checkpoint callbacks: partial-experts checkpoints, Dynamic-K, full checkpoints.

Dynamic-K: save more experts as faults use up the budget of lost tokens (PEC 3.4; MoC-System 5.3).

Full checkpoints named after their step, the last one at the end of the run.

What is told of partial checkpoints as they are made.

What partial checkpoints may lose: the tokens that a restore lost are counted, and DynamicK, where that callback is
used, raises K so that they keep its budget.

Partial-experts checkpoints that do not stall training: the callback over `moe_lightning.checkpoint`.

After an optimizer step the state is copied into host memory while the next forward and backward run; a process of its
own writes it to storage and commits it (PEC 3.2; MoC-System 5). Of each layer's E experts a snapshot holds K_snapshot
and storage gets K_persist; the others stay at their last version, and the tokens that a restore loses are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.loggers import QuietWandbLogger
from moe_lightning.checkpoint.agent_handle import warnings_of
from moe_lightning.checkpoint.arena import fallback_directory
from moe_lightning.checkpoint.directory import checkpoints, enter_world, next_world, run_of
from moe_lightning.checkpoint.loader import CheckpointSource
from moe_lightning.checkpoint.memory import RecoverySources
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings, Order
from moe_lightning.checkpoint.selection import DynamicKRule, parse_scopes, worst_case_plt
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.checkpoint.snapshotter import CopyWindows, Window
from moe_lightning.checkpoint.storage import absolute, place_of, shared_place
from moe_lightning.checkpoint.storage.interface import URL
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.compat import private_lightning
from moe_lightning.config import Coefficient, PositiveInt, Seconds, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import moe_layers
from moe_lightning.parallel.context import World, any_says
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy, own_strategy
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import ExpertParallelCallback, FixedWorld


@validated
class DynamicK(Callback):
    """Raises K_persist of PartialExpertsCheckpoint so that the proportion of lost tokens stays below a threshold.

    It doubles K when the level's share of the budget is spent, or when one more fault could exceed the budget: the
    total stays below
    the threshold however the routing is skewed.

    Args:
        threshold: proportion of lost tokens (PLT) that the whole training may cost.

    Raises:
        ConfigurationError: the threshold is not between 0 and 1.
    """

    def __init__(self, threshold: float = 0.0375) -> None:
        if not 0 < threshold < 1:
            raise ConfigurationError(f"threshold={threshold} is a share of all tokens: use a value between 0 and 1")
        self.threshold = threshold
        self._rule: DynamicKRule | None = None
        self._saved: dict[str, Any] = {}

    def start(self, *, k0: int, num_experts: int, predicted_plt: Callable[[int], float]) -> int:
        """Begin with K experts a layer, or go on from where this run is: what was spent stays spent however often its
        world or its interval changes. Returns the K to use.

        Args:
            predicted_plt: K -> PLT that one more fault may cost at most.
        """
        known = self._rule.state_dict() if self._rule is not None else self._saved
        self._rule = DynamicKRule(k0=k0, num_experts=num_experts, predicted_plt=predicted_plt, threshold=self.threshold)
        if known:
            self._rule.load_state_dict(known)
        return self._rule.k

    def after_fault(self, plt: float) -> int:
        """Account for what a restore lost; returns the K to use from now on."""
        assert self._rule is not None
        return self._rule.after_fault(plt)

    def before_checkpoint(self, cost: Callable[[int], float]) -> int:
        """The K to use for the next checkpoint, from what a restore of it would cost at each K."""
        assert self._rule is not None
        return self._rule.before_checkpoint(cost)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict() if self._rule is not None else dict(self._saved)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved, self._rule = dict(state_dict), None


@validated
class LatestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint that keeps the newest `step-NNNNNNN.ckpt` files and also writes one when training
    ends.

    Args:
        dirpath: folder of the checkpoints.
        every_n_train_steps: optimizer steps between checkpoints.
        save_top_k: 1 keeps the newest checkpoint only, -1 all of them.
    """

    def __init__(
        self, dirpath: str | Path, *, every_n_train_steps: PositiveInt = 1000, save_top_k: Literal[1, -1] = 1
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename="step-{step:07d}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_train_steps,
            save_top_k=save_top_k,
            enable_version_counter=False,
        )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            private_lightning.save_as_last(self, trainer)


def log_checkpoint(trainer: pl.Trainer, session: CheckpointSession, plt: float) -> None:
    """Log the last snapshot, the last checkpoint that the agent has committed and the proportion of lost tokens; warn
    of what the agent complains of.
    """
    metrics: dict[str, float] = {
        "plt": plt,
        "k_snapshot": session.k_snapshot,
        "k_persist": session.k_persist,
        "predicted_bytes": session.predicted_bytes,
    }
    report, status = session.last_report, session.status()
    if report is not None:
        metrics |= {"snapshot_ms": 1e3 * report.copy_s, "snapshot_bytes": report.copied_bytes}
        copied = report.copied_by_window
        metrics |= {f"copied_{window.value}_bytes": size for window, size in copied.items()}
        if copied and report.copied_bytes:
            metrics["copied_in_bubbles"] = copied[Window.BUBBLE] / report.copied_bytes
    if status.committed_step is not None:
        metrics |= {"persist_ms": 1e3 * status.persist_s, "persist_bytes": status.persist_bytes}
    for warning in warnings_of(status):
        rank_zero_warn(warning)
    for logger in trainer.loggers:
        logger.log_metrics({f"checkpoint/{name}": value for name, value in metrics.items()}, trainer.global_step)
    log_committed(trainer, status.committed_path)


def log_committed(trainer: pl.Trainer, path: str | None) -> None:
    """Tell W&B's loggers of the newest whole checkpoint, where there is one."""
    for logger in trainer.loggers:
        if isinstance(logger, QuietWandbLogger) and path:
            logger.log_checkpoint(place_of(path))


class TokenCounts:
    """Assignments of each expert that the ledger has not recorded yet.

    Attributes:
        total: of whole steps, int64 [L, E]; None before the first.
    """

    def __init__(self, total: Tensor | None = None) -> None:
        self.total = total
        self._of_step: Tensor | None = None

    def add(self, module: nn.Module) -> None:
        """Those of the last micro-batch."""
        layers = moe_layers(module)
        counts = [layer.statistics.computed_NE.sum(dim=0) for layer in layers if layer.statistics is not None]
        if counts and len(counts) == len(layers):
            stacked = torch.stack(counts)
            self._of_step = stacked if self._of_step is None else self._of_step + stacked

    def end_step(self, *, is_skipped: bool) -> None:
        """Add those of the step, unless its update was left out."""
        added, self._of_step = self._of_step, None
        if added is not None and not is_skipped:
            self.total = added if self.total is None else self.total + added

    def record(self, checkpoint_ledger: CheckpointLedger | None) -> None:
        """Into the ledger, where there is one."""
        if self.total is not None and checkpoint_ledger is not None:
            checkpoint_ledger.ledger.record(self.total.cpu().numpy())
            self.total = None


class StateGrowth:
    """Detector of optimizer states that the session has no room for, such as those of a backbone that is trained from
    some epoch on.

    Optimizers of torch and of this library make the states of a parameter in its first update. So ranks ask each other
    only while a trained parameter lacks states, and once after a change that all ranks see alike: of parameter groups,
    of the parameters that are trained, of the experts' ranks. Another optimizer may make states in any update: ranks
    ask at every checkpoint.
    """

    def __init__(self) -> None:
        self._known: Collection[str] = ()
        self._seen: object = None
        self._may_grow = True

    def begin(self, state: TrainState) -> None:
        """Take the present states as those of a new session."""
        self._known, self._seen = state.training_state().moment_shapes().keys(), None

    def look_again(self) -> None:
        """Ask at the next checkpoint: experts have moved."""
        self._seen = None

    def found(self, state: TrainState, world: World) -> bool:
        """Return True on every rank if one of them has further states; collective where something can have grown."""
        seen = state.trained()
        if seen == self._seen and not self._may_grow:
            return False
        has_grown = state.training_state().moment_shapes().keys() != self._known
        has_grown, self._may_grow = any_says([has_grown, state.may_make_states()], world)
        self._seen = seen
        return has_grown


def computed_in(strategy: ExpertParallelStrategy) -> torch.dtype | None:
    """Return the dtype experts compute in if it is narrower than their weights'; else None."""
    layers = strategy.experts.layers
    is_less = bool(layers) and strategy.shadow_dtype.itemsize < layers[0].experts.dtype.itemsize
    return strategy.shadow_dtype if is_less else None


def count_losses(checkpoint_ledger: CheckpointLedger, restored: CheckpointSource) -> float:
    """Account for experts that came back older than the checkpoint; the PLT that this restore cost."""
    saved = restored.read_object("ledger")
    lost = checkpoint_ledger.restore(saved, restored.first_step, restored.expert_versions())
    if lost.any():
        stale = int((lost > 0).sum())
        rank_zero_warn(
            f"{stale} experts were restored from older versions: {int(lost.sum())} assignments lost, "
            f"PLT {100 * checkpoint_ledger.ledger.plt:.3f} percent so far"
        )
    return checkpoint_ledger.ledger.plt_of(lost.sum(axis=1))


def count_stale(checkpoint_ledger: CheckpointLedger, versions: Mapping[tuple[int, int], int]) -> float:
    """Account for experts of the live state that came back older, given by (layer, expert); the PLT that it cost."""
    lost = checkpoint_ledger.lose(versions)
    rank_zero_warn(
        f"{len(versions)} experts came back older: {int(lost.sum())} assignments lost, "
        f"PLT {100 * checkpoint_ledger.ledger.plt:.3f} percent so far"
    )
    return checkpoint_ledger.ledger.plt_of(lost.sum(axis=1))


def new_ledger(
    trainer: pl.Trainer, state: TrainingState, settings: CheckpointSettings, counts: Tensor, steps: int
) -> CheckpointLedger:
    """Return the ledger of a new run, from the assignments of its first steps, int64 [L, E]."""
    per_step: IntArray = counts.sum(dim=1).cpu().numpy() // max(1, steps)
    planned = (per_step * planned_steps(trainer)).clip(min=1)
    return state.checkpoint_ledger(planned, scopes=parse_scopes(settings.scopes), order=settings.order)


def choose_k(
    trainer: pl.Trainer, session: CheckpointSession, settings: CheckpointSettings, *, interval: int, lost: float = 0.0
) -> None:
    """Let DynamicK raise K for this interval, and after a restore that lost tokens; where none are lost, leave it.

    Args:
        interval: steps between checkpoints.
        lost: PLT that faults have cost since K was chosen last.
    """
    dynamic = _dynamic_k(trainer)
    if dynamic is None or settings.lossless:
        return
    total_steps = planned_steps(trainer)

    def predicted_plt(k: int) -> float:
        if settings.order != "sequential":
            return 0.0  # there is no bound: `bound_cost` looks at every checkpoint
        copied = max(k, session.k_snapshot)
        return worst_case_plt(
            num_experts=session.num_experts, k=k, k_snapshot=copied, interval=interval, total_steps=total_steps
        )

    k = dynamic.start(k0=session.k_persist, num_experts=session.num_experts, predicted_plt=predicted_plt)
    if lost:
        k = dynamic.after_fault(lost)
    if k > session.k_persist:
        rank_zero_warn(
            f"DynamicK writes {k} experts of each layer instead of {session.k_persist}: with fewer, the next "
            f"fault could bring the lost tokens above {100 * dynamic.threshold:.2f} percent"
        )
    session.raise_k(k)


def bound_cost(
    trainer: pl.Trainer, session: CheckpointSession, checkpoint_ledger: CheckpointLedger, *, order: Order
) -> None:
    """Under the load-aware orders: let DynamicK raise K until a restore of the next checkpoint keeps the budget."""
    dynamic = _dynamic_k(trainer)
    if dynamic is not None and order != "sequential":
        cost = lambda k: checkpoint_ledger.cost(checkpoint_ledger.plan(max(k, session.k_snapshot), k))  # noqa: E731
        session.raise_k(dynamic.before_checkpoint(cost))


def planned_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole training.

    Raises:
        ConfigurationError: nobody knows.
    """
    steps = private_lightning.steps_of_training(trainer)
    if steps is None:
        raise ConfigurationError(
            "the proportion of lost tokens needs the length of the training: give the Trainer max_steps"
        )
    return steps


def _dynamic_k(trainer: pl.Trainer) -> DynamicK | None:
    return next((c for c in trainer.callbacks if isinstance(c, DynamicK)), None)  # type: ignore[attr-defined]


@validated
class PartialExpertsCheckpoint(private_lightning.ResumableFrom, ExpertParallelCallback):
    """Saves directories `step-...` under `dirpath`, whole or not at all; resume with `ckpt_path=` such a directory,
    `dirpath` or "last".

    It is a ModelCheckpoint only so that Lightning's `ckpt_path="last"` finds it; that class's saving is not used.

    Args:
        dirpath: directory of the checkpoints of this run, or its URL in a store, such as s3://BUCKET/NAME.
        every_n_steps: optimizer steps between checkpoints; "auto" after the first one takes the interval that costs
            least (MoC 5.3), never shorter than writing takes.
        k_snapshot, k_persist, order, scopes, keep_last, failures_per_hour, windows, lossless: see CheckpointSettings.
            Of a lossless window the first step counts.
        save_on_train_end: save every expert when training ends, so that a resume loses nothing.
        timeout_s: longest wait for the last checkpoint to be written.

    Logs checkpoint/stall_ms (every step), and for each snapshot checkpoint/snapshot_ms, snapshot_bytes,
    predicted_bytes, k_snapshot, k_persist, persist_ms, persist_bytes, plt; with scheduled windows also
    copied_{bubble,idle,compute,communication}_bytes and copied_in_bubbles, the first one's share.

    Raises:
        ConfigurationError: a value outside its range, another strategy, or steps that lossless=True cannot run again.
    """

    def __init__(
        self,
        dirpath: str,
        *,
        every_n_steps: PositiveInt | Literal["auto"] = 100,
        k_snapshot: PositiveInt | Literal["auto"] | None = None,
        k_persist: PositiveInt | None = None,
        order: Order = "sequential",
        scopes: str | Iterable[str] = "full",
        keep_last: PositiveInt = 2,
        failures_per_hour: Coefficient = 0.0,
        windows: Literal["any", "scheduled"] = "any",
        lossless: bool = False,
        save_on_train_end: bool = True,
        timeout_s: Seconds = 600.0,
    ) -> None:
        self._root = shared_place(dirpath)
        # Of a URL Lightning would ask fsspec, which need not know the scheme.
        super().__init__(dirpath=None if isinstance(self._root, URL) else dirpath, save_top_k=0, save_last=False)
        self.settings = CheckpointSettings(
            k_snapshot=k_snapshot,
            k_persist=k_persist,
            order=order,
            scopes=scopes if isinstance(scopes, str) else tuple(scopes),
            keep_last=keep_last,
            failures_per_hour=failures_per_hour,
            windows=windows,
            lossless=lossless,
        )
        self._every_n_steps, self._save_on_train_end, self._timeout_s = every_n_steps, save_on_train_end, timeout_s
        self.session: CheckpointSession | None = None
        self.checkpoint_ledger: CheckpointLedger | None = None
        self._strategy: ExpertParallelStrategy | None = None
        self._growth = StateGrowth()
        self._received_ledger: dict[str, Any] | None = None
        self._is_interrupted = self._is_saving = self._experts_moved = False
        self._counts = TokenCounts()
        self._lost_plt = 0.0  # by faults that the choice of K does not know yet
        self._saved_at = -1  # the step of the last checkpoint, at which its window began
        self._world_number = 0  # of this start of a run in which worlds do not change, once it has one
        self._batch_began = self._step_ended = self._overlap_s = self._step_s = 0.0

    # ------------------------------------------------------------------ resuming

    @override
    def last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        strategy = trainer.strategy
        if not isinstance(strategy, ExpertParallelStrategy):
            return set()  # `setup` says that it needs another one

        def look() -> bool:
            if trainer.state.fn == "fit":
                self.enter_root(strategy)
            return bool(checkpoints(self._root))

        return {str(self._root)} if strategy.decide(look) else set()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = own_strategy(trainer, "PartialExpertsCheckpoint", "use ModelCheckpoint")
        if stage == "fit":  # rank 0 looks for what all load, and does so after this hook
            self.enter_root(strategy)

    def enter_root(self, strategy: ExpertParallelStrategy) -> None:
        """This world may resume from what is in the directory: older ones commit nothing there from now on. Rank 0
        says so for all; who waits to join a running world does not."""
        elastic = strategy.elastic
        is_waiting = elastic.is_newcomer or (strategy.worlds.is_elastic and elastic.members is None)
        if not is_waiting and strategy.is_global_zero and run_of(self._root) is not None:
            number = strategy.world.generation or self._world_number or next_world(self._root)
            enter_world(self._root, number)
            self._world_number = 0 if strategy.worlds.is_elastic else number

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._saved_at = trainer.global_step
        self._step_ended = time.perf_counter()
        assert isinstance(trainer.strategy, ExpertParallelStrategy)
        self._strategy = trainer.strategy
        if self.settings.lossless:
            self._strategy.state.require_replayable()
        if self._strategy.worlds.is_elastic:  # a rank that joined for the end saves with those that were there
            self._is_interrupted = self.session is None

    @override
    def on_before_experts_move(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the copy of the experts' rows. Others may write them from now on."""
        if self.session is not None:
            self.session.wait_before_update()
            self._experts_moved = True

    @override
    def on_before_weights_swap(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finish the copy of the weights."""
        if self.session is not None:
            self.session.wait_before_update()

    # ------------------------------------------------------------------ another world

    def recovery_sources(self, strategy: ExpertParallelStrategy) -> RecoverySources:
        """Sources of saved state for a recovery."""
        return RecoverySources(
            root=absolute(self._root),
            name=self._run_name,
            node=strategy.elastic.node,
            fallback=fallback_directory(absolute(self._root)),
            report=rank_zero_warn,
            enter=lambda: self.enter_root(strategy),
        )

    @override
    def on_before_recovery(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.session is not None:
            self.session.finish_copy()

    @override
    def on_stale_experts(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, versions: Mapping[tuple[int, int], int]
    ) -> None:
        self._counts.record(self.checkpoint_ledger)
        if self.checkpoint_ledger is not None:
            self._lost_plt += count_stale(self.checkpoint_ledger, versions)

    @property
    def _run_name(self) -> str:
        return absolute(self._root).parent.name or "run"

    @override
    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Other ranks write from now on: the session ends where it is, and the next checkpoint opens another."""
        self._close(wait=False)
        self._experts_moved = False
        self._is_interrupted = True
        if own_strategy(trainer, "PartialExpertsCheckpoint").elastic.has_rolled_back:
            self.checkpoint_ledger, self._counts, self._lost_plt = None, TokenCounts(), 0.0

    @override
    def state_dict(self) -> dict[str, Any]:
        """The ledger, for a rank that joins a running world; checkpoints hold it in a place of their own."""
        is_elastic = self._strategy is not None and self._strategy.worlds.is_elastic
        if not is_elastic or self._is_saving or self.checkpoint_ledger is None:
            return {}
        ledger = self.checkpoint_ledger.state_dict()
        return {"checkpoint_ledger": ledger, "counts": self._counts.total, "lost_plt": self._lost_plt}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._received_ledger = state_dict.get("checkpoint_ledger")
        self._counts, self._lost_plt = TokenCounts(state_dict.get("counts")), state_dict.get("lost_plt", 0.0)

    @property
    def plt(self) -> float:
        """Proportion of lost tokens so far (MoC eq. 7)."""
        return self.checkpoint_ledger.ledger.plt if self.checkpoint_ledger is not None else 0.0

    # ------------------------------------------------------------------ steps

    @property
    def _windows(self) -> CopyWindows | None:
        return self.session.windows if self.session is not None else None

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._batch_began = time.perf_counter()
        if self._windows is not None:
            self._windows.begin_batch()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._overlap_s = time.perf_counter() - self._batch_began
        if self._windows is not None:
            self._windows.before_update()
        stall_s = self.session.wait_before_update() if self.session is not None else 0.0
        pl_module.log("checkpoint/stall_ms", 1e3 * stall_s)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._counts.add(pl_module)
        is_update = not private_lightning.is_accumulating(trainer)
        if is_update:
            self._counts.end_step(is_skipped=self._strategy is not None and self._strategy.update_is_skipped)
        if self._windows is not None:
            (self._windows.updated if is_update else self._windows.end_batch)()
        if trainer.global_step == self._saved_at or not is_update or self._keeps_nothing(trainer):
            return
        now = time.perf_counter()
        self._step_s, self._step_ended = now - self._step_ended, now
        if self.session is not None:
            self.session.protect()
        if self.session is not None and self.session.in_window and not self._experts_moved:
            self.session.save_more(trainer.global_step)
            log_checkpoint(trainer, self.session, self.plt)
        elif self.session is None or self.session.in_window or trainer.global_step - self._saved_at >= self._interval():
            self.save(trainer, pl_module)

    def _keeps_nothing(self, trainer: pl.Trainer) -> bool:
        """True if the state is not complete yet after a restore, or Lightning only runs a sanity check."""
        is_replaying = self._strategy is not None and self._strategy.state.window_replay is not None
        return is_replaying or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]

    def _interval(self) -> int:
        if self._every_n_steps != "auto":
            return self._every_n_steps
        adapted = self.session.adapted if self.session is not None else None
        return adapted.interval_steps if adapted is not None else 1

    def save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *, full: bool = False) -> None:
        """Begin a checkpoint now, between two steps; every rank must call it."""
        strategy = trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        self._counts.total = strategy.state.stages.counts_of_all(self._counts.total)
        if self._experts_moved:
            self._experts_moved = False
            self._reassign(strategy)
        if self.session is not None and self._growth.found(strategy.state, strategy.world):
            self._close(wait=True)
        if self.session is None:
            self._open(trainer, strategy)
        self._counts.record(self.checkpoint_ledger)
        self._adapt(trainer, strategy)
        assert self.session is not None
        if self.checkpoint_ledger is not None:
            bound_cost(trainer, self.session, self.checkpoint_ledger, order=self.settings.order)
        self._is_interrupted = False
        self.session.save(trainer.global_step, self.checkpoint_ledger, self._objects(strategy), full=full)
        self._saved_at = trainer.global_step
        log_checkpoint(trainer, self.session, self.plt)

    def _reassign(self, strategy: ExpertParallelStrategy) -> None:
        """Experts have moved: the session goes on with other writers, or ends where their snapshots lack room."""
        self._growth.look_again()
        if self.session is not None:
            if self.session.in_window:
                self.session.give_window_up()
            owners = self.session.reassign(strategy.state.training_state())
            if owners is None:
                self._close(wait=True)
            elif self.checkpoint_ledger is not None:
                self.checkpoint_ledger.reassign(owners)

    def _objects(self, strategy: ExpertParallelStrategy, *, is_first: bool = False) -> dict[str, Any]:
        """Return the saved objects that are not tensors; collective."""
        self._is_saving = True
        try:
            return strategy.checkpoints.training_objects(is_first=is_first)
        finally:
            self._is_saving = False

    def _open(self, trainer: pl.Trainer, strategy: ExpertParallelStrategy) -> None:
        state = strategy.state.training_state()
        restored = strategy.state.restored if self.checkpoint_ledger is None and self._received_ledger is None else None
        if self.checkpoint_ledger is not None:
            self.checkpoint_ledger.reassign(state.owners())
        elif state.num_experts and self._counts.total is not None:
            steps = trainer.global_step - max(0, self._saved_at)
            self.checkpoint_ledger = new_ledger(trainer, state, self.settings, self._counts.total, steps)
            if self._received_ledger is not None:
                self.checkpoint_ledger.load_state_dict(self._received_ledger)
        self._received_ledger = None
        self.session = CheckpointSession(
            state,
            strategy.world,
            self._root,
            self._run_name,
            self.settings,
            objects=self._objects(strategy, is_first=True),
            ledger_bytes=self.checkpoint_ledger.largest_dump_bytes if self.checkpoint_ledger is not None else 0,
            node_peers=strategy.world.node_peers,
            node=strategy.elastic.node,
            layout=strategy.elastic.protection(),
            computed_in=computed_in(strategy),
            experts_move=any(isinstance(c, LoadBalancer) for c in trainer.callbacks),  # type: ignore[attr-defined]
            world_number=strategy.world.generation or self._world_number,
        )
        if not strategy.worlds.is_elastic:
            self._world_number = self.session.world_number
        if self.checkpoint_ledger is not None:
            if restored is not None and restored.keys("ledger"):
                self._lost_plt += count_losses(self.checkpoint_ledger, restored)
            choose_k(trainer, self.session, self.settings, interval=self._interval(), lost=self._lost_plt)
            self._lost_plt = 0.0
        strategy.checkpoints.release()
        self._growth.begin(strategy.state)

    def _adapt(self, trainer: pl.Trainer, strategy: ExpertParallelStrategy) -> None:
        session = self.session
        assert session is not None
        wanted = self.settings.adapts_k or self._every_n_steps == "auto"
        if not wanted or session.adapted is not None or self.checkpoint_ledger is None or not session.has_saved:
            return
        if session.adapt(overlap_s=self._overlap_s, step_s=self._step_s):
            choose_k(trainer, session, self.settings, interval=self._interval())
            rank_zero_info(
                f"checkpoints from now on: K_snapshot={session.k_snapshot}, K_persist={session.k_persist}, "
                f"every {self._interval()} steps (copies hide under {1e3 * self._overlap_s:.0f} ms)"
            )
            if self.settings.lossless:  # another session has room for windows of this length
                self._every_n_steps = self._interval()
                self.settings = replace(self.settings, k_snapshot=session.k_snapshot)
                self._close(wait=False)
                self._open(trainer, strategy)

    # ------------------------------------------------------------------ the end

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (self.session is None and not self._is_interrupted) or self._keeps_nothing(trainer):
            return
        was_partial = self.session is None or self.session.was_partial
        if self._save_on_train_end and (trainer.global_step != self._saved_at or was_partial):
            if self.session is not None:
                self.session.finish_copy()  # a window that ends here is the newest snapshot on all ranks or on none
                if trainer.global_step in (self._saved_at, self.session.newest_step):
                    self._close(wait=False)  # a session saves a step once
            self.save(trainer, pl_module, full=True)
        self._close(wait=True)
        log_committed(trainer, str(self.last_model_path))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave copied state to the agent, which outlives this process and still writes it."""
        self._close(wait=False)

    def _close(self, *, wait: bool) -> None:
        session, self.session = self.session, None
        if session is not None:
            elastic = FixedWorld() if self._strategy is None else self._strategy.elastic
            status = session.close(timeout_s=self._timeout_s, wait=wait, is_broken=lambda: elastic.is_broken)
            self.best_model_path = self.last_model_path = status.committed_path or ""
