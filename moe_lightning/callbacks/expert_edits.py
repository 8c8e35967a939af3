"""Prunes, merges and duplicates experts of a running training, and says what that did to the loss."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from moe_lightning.algorithms.expert_edits import ExpertEdit, ScheduledEdit, edit_tables, layer_edits
from moe_lightning.callbacks.console import Console
from moe_lightning.callbacks.fault_recovery import FaultRecovery
from moe_lightning.callbacks.own_strategy import own_strategy
from moe_lightning.callbacks.parity_doctor import ParityDoctor
from moe_lightning.callbacks.routing_recorder import RoutingRecorder
from moe_lightning.callbacks.routing_replay import RoutingReplay
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.config import build_config, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.huggingface.module import HuggingFaceModule
from moe_lightning.modules.moe_layer import MoELayer
from moe_lightning.modules.router import Router
from moe_lightning.strategies.expert_editing import EditListener
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


@dataclass(frozen=True, kw_only=True)
class LiveEditReport:
    """What an edit did.

    Attributes:
        step: optimizer steps made before it.
        experts: of a layer, before and after.
        losses: of the batch that is trained on next, without dropout and auxiliary losses, before and after.
    """

    step: int
    experts: tuple[int, int]
    losses: tuple[float, float]


@validated
class ExpertEdits(Callback, EditListener):
    """Edits experts between two steps, on any number of ranks with the same result: what `moe-ckpt edit` would make of
    a checkpoint of that step. Which edits a run has had stands in its checkpoints, so a resumed run makes each once.

    Logs experts/loss_before, experts/loss_after and experts/count, and prints one line.

    Args:
        edits: each a `ScheduledEdit`, or its keyword arguments; those of one step make one edit. Merged experts count
            by their tokens since the run began, or since the edit before.

    Attributes:
        reports: of the edits that this process made.

    Raises:
        ConfigurationError: a value that is none; when training starts: another strategy, experts that cannot be edited,
            edits that leave layers unequal or too small, or one that the resumed run should have had.
    """

    def __init__(self, edits: Sequence[Any]) -> None:
        found = [build_config(ScheduledEdit, edit, key="edits") for edit in edits]
        for edit in found:
            if edit.changes_nothing:
                raise ConfigurationError(
                    f"the edit after step {edit.step} changes no expert: give it prune, merge, duplicate, prune_least, "
                    "merge_similar or duplicate_most, of one layer at least"
                )
        self._edits = {step: list(of) for step, of in groupby(sorted(found, key=_step), _step)}
        self.reports: list[LiveEditReport] = []
        self._counts_LE: Tensor | None = None
        self._fresh: dict[tuple[int, int], Tensor] = {}  # of micro-batches, by step: one that fails is made again
        self._before: tuple[int, float] | None = None  # experts and loss before the edit that is to be reported

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy(trainer)
        strategy.require_editable()
        _require_followers(trainer, pl_module)
        history = strategy.editing.history
        made = () if history is None else history.steps
        shape = len(strategy.experts.layers), strategy.editing.num_experts
        for step, edits in self._edits.items():
            if step in made:
                continue
            if step < trainer.global_step:
                raise ConfigurationError(
                    f"the run goes on from step {trainer.global_step}, and its experts were not edited after step "
                    f"{step}: drop that edit, or name a later step"
                )
            nothing_LE = np.zeros(shape, dtype=np.int64)
            tables = edit_tables(layer_edits(edits, nothing_LE, np.zeros((*shape, shape[1]))), shape[1], nothing_LE)
            shape = shape[0], len(tables[0])
            strategy.editing.check_size(shape[1])
        last = trainer.max_steps if trainer.max_steps > 0 else sys.maxsize
        self._tell_missed(last, f"trainer.max_steps={last}", self._edits)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        history, step = _strategy(trainer).editing.history, trainer.global_step
        made = () if history is None else history.steps
        foreseen = trainer.max_steps if trainer.max_steps > 0 else sys.maxsize
        self._tell_missed(step, f"step {step}", [s for s in self._edits if s < foreseen and s not in made])

    @staticmethod
    def _tell_missed(last: int, end: str, steps: Iterable[int]) -> None:
        """An edit comes before a next step, and this run has none."""
        missed = ", ".join(str(step) for step in steps if step >= last)
        if missed:
            rank_zero_warn(
                f"the run ends at {end}, so the edits of experts after step {missed} are not made: "
                "name earlier steps, or train longer"
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy, step = _strategy(trainer), trainer.global_step
        self._count(step)
        history = strategy.editing.history
        if step not in self._edits:
            return
        if history is None or step not in history.steps:
            layers, num_experts = strategy.experts.layers, strategy.editing.num_experts
            loads_LE = np.zeros((len(layers), num_experts), np.int64)
            if self._counts_LE is not None:
                loads_LE += self._counts_LE.cpu().numpy()
            own = layer_edits(self._edits[step], loads_LE, _similarities(layers))
            told = all_gather_json([asdict(edit) for edit in own], strategy.world)[0]  # cosines may differ in a bit
            self._before = num_experts, strategy.loss_of(batch, batch_idx)
            strategy.edit_experts([_edit(edit) for edit in told], loads_LE)
        if any(all_gather_json(self._before is not None, strategy.world)):  # in a recovered world not all may know
            loss = strategy.loss_of(batch, batch_idx)
            if self._before is not None:
                self._report(trainer, self._before, loss)
            self._before = None

    def _report(self, trainer: pl.Trainer, before: tuple[int, float], loss: float) -> None:
        step, after, losses = trainer.global_step, _strategy(trainer).editing.num_experts, (before[1], loss)
        self.reports.append(LiveEditReport(step=step, experts=(before[0], after), losses=losses))
        change = f"{losses[0]:.4f} -> {losses[1]:.4f}"
        line = f"step {step}  {before[0]} -> {after} experts a layer, loss of the next batch {change}"
        console = next((c for c in trainer.callbacks if isinstance(c, Console)), None)  # type: ignore[attr-defined]
        (rank_zero_info if console is None else console.tell)(line)
        metrics = {"experts/loss_before": losses[0], "experts/loss_after": losses[1], "experts/count": float(after)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counts = [
            layer.statistics.computed_NE.sum(dim=0) for layer in _strategy(trainer).experts.layers if layer.statistics
        ]
        if counts:
            self._fresh[trainer.global_step, trainer.fit_loop.batch_idx] = torch.stack(counts)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._count(trainer.global_step)

    def _count(self, step: int) -> None:
        """Take over the counts of the steps up to this one, which are committed."""
        for at in sorted(at for at in self._fresh if at[0] < step):
            counts_LE = self._fresh.pop(at)
            self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    @override
    def forget_experts(self, trainer: pl.Trainer) -> None:
        self._counts_LE, self._fresh = None, {}

    @override
    def state_dict(self) -> dict[str, Any]:
        fresh = [[*at, counts_LE] for at, counts_LE in self._fresh.items()]
        return {"counts": self._counts_LE, "fresh": fresh, "before": self._before and list(self._before)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._counts_LE = state_dict["counts"]
        self._fresh = {(step, batch): counts_LE for step, batch, counts_LE in state_dict.get("fresh", [])}
        before = state_dict.get("before")
        self._before = before and (before[0], before[1])


def _require_followers(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Refuse what keeps to the number of experts that it began with."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = [type(c).__name__ for c in callbacks if isinstance(c, RoutingRecorder | RoutingReplay | ParityDoctor)]
    if any(isinstance(c, FaultRecovery) and c.replays for c in callbacks):
        found.append("optimizer_replay")
    if isinstance(pl_module, HuggingFaceModule):
        found.append("a model from Hugging Face")
    if found:
        raise ConfigurationError(
            f"{found[0]} keeps to the number of experts that a run begins with: drop it, or ExpertEdits"
        )


def _step(edit: ScheduledEdit) -> int:
    return edit.step


def _edit(told: dict[str, Any]) -> ExpertEdit:
    """As it was before it was told."""
    merge = tuple(tuple(group) for group in told["merge"])
    return ExpertEdit(prune=tuple(told["prune"]), merge=merge, duplicate=tuple(told["duplicate"]))


def _similarities(layers: Sequence[MoELayer]) -> NDArray[np.float64]:
    """Cosines between the router rows of every two experts, [L, E, E]."""
    routers = [layer.router for layer in layers if isinstance(layer.router, Router)]
    rows_LED = torch.stack([router.weight.detach().double() for router in routers])
    unit_LED = torch.nn.functional.normalize(rows_LED, dim=-1)
    found: NDArray[np.float64] = (unit_LED @ unit_LED.mT).cpu().numpy()
    return found


def _strategy(trainer: pl.Trainer) -> ExpertParallelStrategy:
    return own_strategy(trainer, "ExpertEdits")
