"""Tokens that restores of partial checkpoints lose, and the number of experts to save that keeps them in a budget.

Every expert that comes back older than the rest has lost the updates of the tokens in between; their proportion of all
tokens is PLT (PEC 3.4; MoC-System 5.3, eq. 7). `DynamicK`, where that callback is used, raises K as faults use up the
budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint.contents import SnapshotContents
from moe_lightning.checkpoint.loader import CheckpointSource
from moe_lightning.checkpoint.policy import CheckpointLedger, CheckpointSettings
from moe_lightning.checkpoint.selection import DynamicKRule, parse_scopes
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.compat import private_lightning
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object
from moe_lightning.parallel.context import World, maximum_
from moe_lightning.strategies.stages import StageMap


@validated
class DynamicK(Callback):
    """Raises K_persist of PartialExpertsCheckpoint so that the proportion of lost tokens stays below a threshold.

    It doubles K when the level's share of the budget is spent, and before a checkpoint whose restore would exceed the
    budget: the total stays below the threshold however the routing is skewed.

    Args:
        threshold: proportion of lost tokens (PLT) that the whole training may cost.

    Attributes:
        rule: chooses K; None before the first `start`.

    Raises:
        ConfigurationError: the threshold is not between 0 and 1.
    """

    def __init__(self, threshold: float = 0.0375) -> None:
        if not 0 < threshold < 1:
            raise ConfigurationError(f"threshold={threshold} is a share of all tokens: use a value between 0 and 1")
        self.threshold = threshold
        self.rule: DynamicKRule | None = None
        self._saved: dict[str, Any] = {}

    def start(self, *, k0: int, num_experts: int) -> DynamicKRule:
        """Begin with K experts a layer, or go on from where this run is: what was spent stays spent however often its
        world or its interval changes. Returns `rule`.
        """
        known = self.rule.state_dict() if self.rule is not None else self._saved
        self.rule = DynamicKRule(k0=k0, num_experts=num_experts, threshold=self.threshold)
        if known:
            self.rule.load_state_dict(known)
        return self.rule

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:  # what was saved is loaded after this
            self._saved, self.rule = {}, None

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict() if self.rule is not None else dict(self._saved)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved, self.rule = dict(state_dict), None


class TokenCounts:
    """Assignments of each expert that the ledger has not recorded yet.

    Attributes:
        total: of whole steps, int64 [L, E] of all layers; a rank counts those of its pipeline stages. None before the
            first.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._of_step: Tensor | None = None

    def add(self, stages: StageMap) -> None:
        """Those of the last micro-batch."""
        layers = stages.layers
        own = [(number, layers[number].statistics) for number in stages.numbers]
        counts = {number: found.computed_NE.sum(dim=0) for number, found in own if found is not None}
        if not counts:
            return
        if self._of_step is None:
            some = next(iter(counts.values()))
            self._of_step = some.new_zeros(len(layers), len(some))
        for number, count in counts.items():
            self._of_step[number] += count

    def end_step(self, *, is_skipped: bool) -> None:
        """Add those of the step, unless its update was left out."""
        added, self._of_step = self._of_step, None
        if added is not None and not is_skipped:
            self.total = added if self.total is None else self.total + added

    def join_stages(self, stages: StageMap) -> None:
        """Take those of other pipeline stages from their ranks; collective there."""
        own = None
        if self.total is not None:
            own = self.total[torch.tensor(stages.numbers, dtype=torch.int64, device=self.total.device)]
        self.total = stages.counts_of_all(own)

    def enter_world(self, recorded: IntArray | None, stages: StageMap, world: World) -> None:
        """Drop those of a step that is repeated, and take those that other ranks have seen: this one may have joined,
        computed other layers, or missed the end of the last step. Collective.

        Args:
            recorded: what the ledger of this rank holds, int64 [L, E]; None: nothing.
        """
        self._of_step = None
        layers = stages.layers
        own = torch.zeros(len(layers), max((layer.num_experts for layer in layers), default=0), dtype=torch.int64)
        own += 0 if recorded is None else torch.as_tensor(recorded)
        own = own.to(world.device)
        seen = own.clone() if self.total is None else own + self.total
        maximum_(seen, world)
        missing = seen - own
        self.total = missing if bool(missing.any()) else None


class LostTokens:
    """Tokens of each expert in a run and in its checkpoints, those that restores have lost, and the choice of K.

    Args:
        settings: how to save.

    Attributes:
        checkpoint_ledger: tokens in the live state and in memory; None before the run's first checkpoint, and of
            a dense model.
        counts: assignments that the ledger has not recorded yet.
    """

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self.checkpoint_ledger: CheckpointLedger | None = None
        self.counts = TokenCounts()
        self._lost_plt = 0.0  # by faults that the choice of K does not know yet

    @property
    def plt(self) -> float:
        """Proportion of lost tokens so far (MoC eq. 7)."""
        return self.checkpoint_ledger.plt if self.checkpoint_ledger is not None else 0.0

    def state_dict(self) -> dict[str, Any]:
        """For a rank that joins a running world."""
        ledger = None if self.checkpoint_ledger is None else self.checkpoint_ledger.state_dict()
        return {"checkpoint_ledger": ledger, "lost_plt": self._lost_plt}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Drop all counts, and count on from the state of another rank."""
        self.checkpoint_ledger, saved = None, state_dict.get("checkpoint_ledger")
        if saved is not None:
            self.checkpoint_ledger = self._new_ledger(saved["planned"].numpy(), saved["processed"].shape[1])
            self.checkpoint_ledger.load_state_dict(saved)
        self.counts, self._lost_plt = TokenCounts(), state_dict.get("lost_plt", 0.0)

    def _new_ledger(self, planned: IntArray, num_experts: int) -> CheckpointLedger:
        """Return an empty one; `begin` sets the ranks that write the experts."""
        return CheckpointLedger(
            num_layers=len(planned),
            num_experts=num_experts,
            planned_assignments=planned,
            owners=np.zeros((len(planned), num_experts), dtype=np.int64),
            num_ranks=1,
            scopes=parse_scopes(self._settings.scopes),
            order=self._settings.order,
        )

    def enter_world(self, stages: StageMap, world: World, *, has_rolled_back: bool) -> None:
        """Go on in another world, where all ranks have the same counts; collective.

        Args:
            has_rolled_back: the run has gone back to saved state, which has its own counts: drop all.
        """
        if has_rolled_back:
            self.load_state_dict({})
        recorded = None if self.checkpoint_ledger is None else self.checkpoint_ledger.processed
        self.counts.enter_world(recorded, stages, world)

    def begin(self, trainer: pl.Trainer, state: TrainingState, steps: int) -> None:
        """Count for the experts as they are written now.

        Args:
            steps: over which new counts were made.
        """
        if self.checkpoint_ledger is None and state.num_experts and self.counts.total is not None:
            per_step = self.counts.total.sum(dim=1).cpu().numpy() // max(1, steps)
            planned: IntArray = np.maximum(per_step * planned_steps(trainer), 1)
            self.checkpoint_ledger = self._new_ledger(planned, state.num_experts)
        if self.checkpoint_ledger is not None:
            self.checkpoint_ledger.reassign(state.owners(), state.world_size)

    def record(self) -> None:
        """Enter the counts of whole steps into the ledger, if there is one."""
        if self.counts.total is not None and self.checkpoint_ledger is not None:
            self.checkpoint_ledger.record(self.counts.total.cpu().numpy())
            self.counts.total = None

    def reassign(self, owners: IntArray, num_ranks: int) -> None:
        """Experts have moved: other ranks of the world write them, int64 [L, E]."""
        if self.checkpoint_ledger is not None:
            self.checkpoint_ledger.reassign(owners, num_ranks)

    def restore(self, restored: CheckpointSource | None, world: World) -> None:
        """Account for experts that the checkpoint has in older versions; collective. Ranks that joined later receive
        the ledger of one that restored the checkpoint.

        Args:
            restored: the checkpoint that the state came from; None: from other ranks.
        """
        saved: dict[str, Any] | None = None
        if restored is not None and restored.keys("ledger"):
            versions = torch.from_numpy(restored.expert_versions())
            saved = {"ledger": restored.read_object("ledger"), "step": restored.first_step, "versions": versions}
        found = all_gather_json(saved is not None, world)
        if any(found) and not all(found):
            saved = broadcast_object(saved, found.index(True), world)
        if self.checkpoint_ledger is None or saved is None:
            return
        lost = self.checkpoint_ledger.restore(saved["ledger"], saved["step"], saved["versions"].numpy())
        if lost.any():
            self._warn(f"{int((lost > 0).sum())} experts were restored from older versions", lost)
        self._lost_plt += self.checkpoint_ledger.plt_of(lost.sum(axis=1))

    def lose(self, versions: Mapping[tuple[int, int], int], stages: StageMap, world: World) -> None:
        """Account for experts of the live state that came back older, given by (layer, expert); collective. A rank may
        lack tokens that others have counted, as `TokenCounts.enter_world` says.
        """
        self.enter_world(stages, world, has_rolled_back=False)
        self.record()
        if self.checkpoint_ledger is not None:
            lost = self.checkpoint_ledger.lose(versions)
            self._warn(f"{len(versions)} experts came back older", lost)
            self._lost_plt += self.checkpoint_ledger.plt_of(lost.sum(axis=1))

    def _warn(self, event: str, lost: IntArray) -> None:
        rank_zero_warn(f"{event}: {int(lost.sum())} assignments lost, PLT {100 * self.plt:.3f} percent so far")

    # ------------------------------------------------------------------ the choice of K

    def choose_k(self, trainer: pl.Trainer, contents: SnapshotContents) -> None:
        """Let DynamicK raise K after a restore that lost tokens; where none are lost, leave it."""
        dynamic = private_lightning.callback_of(trainer, DynamicK)
        if self.checkpoint_ledger is None or dynamic is None or self._settings.lossless:
            return
        rule = dynamic.start(k0=contents.k_persist, num_experts=contents.num_experts)
        lost, self._lost_plt = self._lost_plt, 0.0
        if lost:
            rule.after_fault(lost)
        self._raise_k(rule, contents)

    def bound_cost(self, trainer: pl.Trainer, contents: SnapshotContents) -> None:
        """Let DynamicK raise K until a restore of the next checkpoint keeps the budget."""
        dynamic, ledger = private_lightning.callback_of(trainer, DynamicK), self.checkpoint_ledger
        if ledger is not None and dynamic is not None and dynamic.rule is not None:
            dynamic.rule.before_checkpoint(lambda k: ledger.cost(ledger.plan(max(k, contents.k_snapshot), k)))
            self._raise_k(dynamic.rule, contents)

    def _raise_k(self, rule: DynamicKRule, contents: SnapshotContents) -> None:
        if rule.k > contents.k_persist:
            rank_zero_warn(
                f"DynamicK writes {rule.k} experts of each layer instead of {contents.k_persist}: with fewer, the next "
                f"fault could bring the lost tokens above {100 * rule.threshold:.2f} percent"
            )
        contents.raise_k(rule.k)


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
