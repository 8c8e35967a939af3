"""Check of the state in memory: against other ranks, and against what this rank's last update has left."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch.optim import Optimizer

from moe_lightning.config import NonNegativeInt
from moe_lightning.errors import ConfigurationError, StateDamagedError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.state.averages import AVERAGE
from moe_lightning.state.sums import (
    GRADIENT,
    Damage,
    StateUnit,
    Sums,
    differing,
    gradient_units,
    overwrite,
    state_units,
)
from moe_lightning.strategies.checks import identical_buffers
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds, expert_parallel_callbacks

CheckInterval = NonNegativeInt | Literal["auto"]

_SHARE = 0.005
"""Part of a step's time that checks may take on average."""

_SUMS = 3
"""Sums of all state in a step that is checked."""

_MOST_STEPS = 100
_UNCHECKED = 2
"""First steps in a world without a check under "auto": in the second one DDP names parameters that the loss does not
use, which leave replicas different after the first.
"""

_MOST_SHOWN = 3

_OTHER = "the buffer "
"""Beginning of the names of buffers that may differ between ranks; a rank of a pipeline lacks those of other stages."""

logger = logging.getLogger(__name__)


class CheckSchedule:
    """Steps that a check is made in: every so many, or as few as cost 0.5 % of the time. A context around its work.

    Args:
        worlds: the present world.
        every: steps between checks; 0: none is made; "auto": by their cost.
        most_steps: between two of them under "auto".
        unchecked: first steps in a world without a check under "auto".

    Attributes:
        first: step that may be checked first in the present world under "auto".
        at: generation of the world, and step.
        is_new_world: the running step is the first one of its world.
        spent_s: of the running step, on the check.
        is_stopped: no step is checked.
    """

    def __init__(self, worlds: Worlds, every: CheckInterval, *, most_steps: int, unchecked: int) -> None:
        self._worlds, self._every, self.is_stopped = worlds, every, every == 0
        self._most_steps, self._unchecked = most_steps, unchecked
        self.first = self._next = 0
        self._asked: int | None = None  # step that is checked whatever the interval
        self._began: float | None = None
        self._entered = self._step_s = self.spent_s = 0.0
        self.at, self.is_new_world = (-1, -1), True

    def begin_training(self) -> None:
        """Begin as in a new world: nothing is known of the state that a training starts from."""
        self.at = (-1, -1)

    def begins(self, step: int) -> bool:
        """Return True when a step begins in the present world, and not again for its other micro-batches."""
        generation = self._worlds.present.generation
        if (generation, step) == self.at:
            return False
        self.is_new_world = generation != self.at[0]
        if self.is_new_world:  # after a recovery all begin again: newcomers have not checked
            self.first = step + self._unchecked
            self._next = self.first if self._every == "auto" else self._multiple(max(1, step))
            self._asked = None
        self.at = generation, step
        now = time.perf_counter()
        if self._began is not None:
            self._step_s = now - self._began - self.spent_s
        self._began, self.spent_s = now, 0.0
        return True

    @property
    def has_begun(self) -> bool:
        """True if a step has begun in the present world."""
        return self.at[0] == self._worlds.present.generation

    def is_due(self, step: int) -> bool:
        """Return True if a step is checked, on all ranks."""
        if self._worlds.present.size == 1 or step < 1 or self.is_stopped:
            return False
        return step >= self._next or step == self._asked

    def check_next(self) -> None:
        """Let the next step in this world be checked; on all ranks."""
        self._asked = self.at[1] + 1

    def stop(self) -> None:
        """Let no further step be checked until `resume`."""
        self.is_stopped = True

    def resume(self) -> None:
        """Let steps be checked again."""
        self.is_stopped = self._every == 0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent_s += time.perf_counter() - self._entered

    def measured(self, check_s: float) -> torch.Tensor:
        """int64 [2]: microseconds of a check, and of the last step without it."""
        return torch.tensor([round(1e6 * check_s), round(1e6 * self._step_s)])

    def plan(self, measured: torch.Tensor) -> None:
        """Choose the next step that is checked.

        Args:
            measured: summed over the ranks.
        """
        if self._every != "auto":
            self._next = self._multiple(self.at[1] + 1)
            return
        check, step = measured.tolist()
        wait = math.ceil(check / (_SHARE * max(1, step))) if step else 1
        self._next = self.at[1] + min(self._most_steps, max(1, wait))

    def _multiple(self, step: int) -> int:
        """Return the first multiple of the interval from a step on. The steps of two optimizers may pass over it: then
        the next batch is checked.
        """
        assert self._every != "auto"
        return -(-step // self._every) * self._every if self._every else step


class StateCheck:
    """Compares the state every so many steps, with other ranks that hold the same and with itself a moment ago.

    In a step that is checked all state is summed by its bits after the update before it, before the step uses it, and
    before the next update; gradients that several ranks hold are compared there, too. What differs is overwritten from
    a healthy rank if a callback repairs replicas. Before a checkpoint begins ranks compare once more.

    Buffers of other modules than those of this library are compared as long as they are alike on the ranks that hold
    them. From the first check that finds them different, as running statistics are, they are left out in this world.

    Args:
        worlds: the present world.
        state: of this rank.
        every: steps between checks; 0: none is made; "auto": as few as cost 0.5 % of the steps' time, at most 100.

    Attributes:
        schedule: of the checks.
        times_damaged: checks that have found damage on this rank.
        verified: last step whose snapshots no check has found damage after.
    """

    def __init__(self, worlds: Worlds, state: TrainState, *, every: CheckInterval) -> None:
        self._worlds, self._state = worlds, state
        self.schedule = CheckSchedule(worlds, every, most_steps=_MOST_STEPS, unchecked=_UNCHECKED)
        self._own: Sums | None = None  # after the last update or check
        self._counts_writes = True
        self._varying: set[str] = set()  # buffers that are left out in this world, on all ranks that hold them
        self._repaired_in: int | None = None  # world whose last check has repaired by majority: newcomers do not know
        self.times_damaged = 0
        self.verified = -1

    def after_update(self) -> None:
        """Sum the state that the next step will check. Not collective."""
        is_due = self.schedule.is_due(self._state.trainer.global_step + 1)
        self._own = self._sums() if is_due else None

    def before_step(self, step: int) -> None:
        """Check the state before a step uses it, if that is due; collective then.

        Raises:
            StateDamagedError: on every rank, damage that no rank can repair.
        """
        if not self.schedule.begins(step):
            return
        if self.schedule.is_new_world:
            self._own, self.verified, self._counts_writes = None, step - 1, True  # newcomers have seen no writes
            self._varying.clear()
        if not self.schedule.is_due(step):
            return
        sums = self._sums()
        measured = self.schedule.measured(_SUMS * self.schedule.spent_s)
        found = self._damage(sums, measured)
        self.schedule.plan(measured)
        if found:
            self._repair(found, step)
            sums = self._sums()
        else:
            self._repaired_in = None
        self._own, self.verified = sums, step - 1

    def before_save(self, step: int) -> None:
        """Compare the state after a step with other ranks, and with what the update has left if that was summed,
        before it is saved; collective.

        Raises:
            StateDamagedError: as `before_step`.
        """
        if self.schedule.is_stopped or self._worlds.present.size == 1:
            return
        if not self.schedule.has_begun:  # training has ended: what is known is of other worlds, on some ranks only
            self._own = None
            self._varying.clear()
        elif step < self.schedule.first:
            return
        if found := self._damage(self._sums()):
            self._repair(found, step)
            self._own = None if self._own is None else self._sums()
        self.verified = step

    def before_update(self, optimizer: Optimizer) -> str:
        """Check the state and the gradients before an update, in a step that `before_step` has checked; collective
        then.

        Returns:
            What was found and repaired, in words: the gradients are not to be used. Empty: nothing.

        Raises:
            StateDamagedError: as `before_step`.
        """
        if self._own is None:
            return ""
        step, parameters = self.schedule.at[1], set(self._state.parameters_of(optimizer))
        gradients = gradient_units(self._state.training_state(), parameters)
        found, self._own = self._damage(self._sums(gradients)), None
        if found:
            self.verified = step - 1  # a snapshot of this state was copied during the step
            self._repair(found, step)
            word = "was damaged on" if found[0].healthy else "differed between"
            return f"{found[0].name} {word} {found[0].place} in the step after step {step}"
        self.verified = step
        return ""

    # ------------------------------------------------------------------ sums

    def units(self) -> list[StateUnit]:
        """Return what is compared or summed here; names tell the buffers that ranks need not hold alike."""
        module, rank = self._state.module, self._worlds.present.rank
        alike = set(identical_buffers(module))
        names = {name for name, buffer in module.named_buffers() if buffer.layout is torch.strided} - alike
        others = {unit for name in names for unit in (name, f"{name} ({AVERAGE})")}
        units = state_units(self._state.training_state(), (alike | others) - self._varying)
        return [
            replace(unit, name=f"{_OTHER}{unit.name}") if unit.name in others else unit
            for unit in units
            if unit.name not in others or (len(unit.holders) > 1 and rank in unit.holders)
        ]

    def _sums(self, others: Sequence[StateUnit] = ()) -> Sums:
        self._state.before_reading()
        with self.schedule:
            return Sums([*self.units(), *others], self._worlds.present)

    def _damage(self, sums: Sums, measured: torch.Tensor | None = None) -> list[Damage]:
        """Return what differs between ranks or has changed; collective."""
        changed = sums.changed(self._own) if self._own is not None and self._counts_writes else None
        found = self._without_varying(differing(sums, self._worlds.present, changed, measured))
        writers = sorted({rank for damage in found for rank in damage.changed})
        if len(writers) < 2:  # memory fails on one rank at a time
            return found
        self._counts_writes = False
        if self._worlds.present.rank == 0:
            logger.warning(
                "ranks %s have written %s through tensor.data since their last update, so memory that changes is only "
                "found where several ranks hold it: write with tensor.copy_ under torch.no_grad() instead",
                *(writers, next(damage.name for damage in found if damage.changed)),
            )
        return [Damage(name=damage.name, groups=damage.groups) for damage in found if len(damage.groups) > 1]

    def _without_varying(self, found: list[Damage]) -> list[Damage]:
        """Leave out other buffers that differ, unless memory has changed: on one rank, without being written."""
        varying = {damage.name for damage in found if damage.name.startswith(_OTHER) and len(damage.changed) != 1}
        self._varying |= {name.removeprefix(_OTHER).removesuffix(f" ({AVERAGE})") for name in varying}
        return [damage for damage in found if damage.name not in varying]

    # ------------------------------------------------------------------ damage

    def _repair(self, found: Sequence[Damage], step: int) -> None:
        """Overwrite what is damaged, where callbacks repair replicas; gradients are left to a repetition of the step.
        Collective.

        Raises:
            StateDamagedError: on every rank.
            ConfigurationError: on every rank, learning rates differ.
        """
        world = self._worlds.present
        self._require_same_rates()
        of_state = [damage for damage in found if not damage.name.startswith(GRADIENT)]
        by_comparison = any(not damage.changed for damage in found)
        repeats = by_comparison and self._repaired_in == world.generation
        self.times_damaged += any(world.rank in (d.changed or (d.damaged if d.healthy else ())) for d in found)
        repairs = any(c.repairs_replicas for c in expert_parallel_callbacks(self._state.module))
        if repeats or not repairs or not all(damage.healthy for damage in of_state):
            raise self._error(found, step)
        self._repaired_in = world.generation if by_comparison else None
        if not of_state:
            return
        overwrite(of_state, self.units(), world)
        for damage in of_state[:_MOST_SHOWN] if world.rank == 0 else ():
            logger.warning(
                "after step %d %s on ranks %s %s, and was overwritten with that of rank %d: look at the memory of "
                "these ranks",
                *(step, damage.name, list(damage.damaged)),
                "had changed in memory" if damage.changed else "differed from its other replicas",
                damage.healthy[0],
            )
        if left := differing(self._sums(), world):
            raise self._error(left, step)

    def _require_same_rates(self) -> None:
        """Compare the learning rates of the ranks, whose difference is no damage. Collective.

        Raises:
            ConfigurationError: on every rank, they differ.
        """
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        own = [None if (rate := group.get("lr")) is None else float(rate) for group in groups]
        rates = all_gather_json(own, self._worlds.present)
        if other := next((rank for rank, each in enumerate(rates) if each != rates[0]), None):
            raise ConfigurationError(
                f"the learning rate is {rates[0]} on rank 0 and {rates[other]} on rank {other}, so their replicas "
                "differ: a scheduler follows a value that each rank has by itself; log that with sync_dist=True"
            )

    def _error(self, found: Sequence[Damage], step: int) -> StateDamagedError:
        first = next((damage for damage in found if not damage.healthy), found[0])
        more = f" (and of {len(found) - 1} others)" if len(found) > 1 else ""
        if first.changed:
            reason = f"{first.name} has changed in the memory of rank {first.changed[0]} without being written{more}"
            cure = "look at that memory, or for writes through tensor.data"
        else:
            reason = f"the replicas of {first.name} differ between {first.place}{more}"
            cure = "something updates them otherwise on some ranks (a hook, an optimizer, memory): look for it"
        reason = f"after step {step} {reason}"
        return StateDamagedError(
            f"{reason}; {cure}, and resume from a checkpoint of step {max(0, self.verified)} or before: later ones may "
            "hold the damage",
            reason=reason,
            is_here=any(self._worlds.present.rank in (damage.changed or damage.damaged) for damage in found),
            last_good=self.verified,
        )
