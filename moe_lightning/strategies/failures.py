"""Exceptions that leave the Trainer: whether all ranks raised one at the same place, and which rank raised one.

Hooks that follow an exception (`save_on_exception`, `OnExceptionCheckpoint`, a user's own) save checkpoints, which
takes all ranks. If only some have failed, the others wait in a step, and both would wait for each other until the
time-out. So every rank publishes its exception with the numbers of the collectives that it has begun; a collective may
follow only where all ranks have failed with equal numbers. The first decision that is made counts for all ranks.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from functools import cached_property
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from moe_lightning.compat import private_torch
from moe_lightning.elastic.faults import explain, is_network_fault
from moe_lightning.elastic.worker import PeerFailed
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World, common_store, without_waiting_for
from moe_lightning.strategies.worlds import FixedWorld, Worlds
from moe_lightning.user_errors import one_line

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from moe_lightning.strategies.elastic_worlds import ElasticWorlds

logger = logging.getLogger(__name__)

_PATIENCE_S, _LOOK_S = 5.0, 0.05
_TOGETHER, _APART = "together", "apart"


class Failure:
    """An exception that leaves the Trainer on this rank.

    Args:
        error: the exception.
        world: the ranks, connected.
        number: of exceptions before it, which all ranks had in common.

    Attributes:
        number: as given.
        is_network_fault: the exception is a consequence of another rank's end.
    """

    def __init__(self, error: BaseException, world: World, number: int) -> None:
        self.number, self.is_network_fault = number, is_network_fault(error)
        self._rank, self._store = world.rank, common_store()
        self._name = f"failed in world {world.generation}, {number}"
        self._keys = [f"{self._name}/{rank}" for rank in range(world.size)]

    def publish(self, error: BaseException, world: World) -> None:
        """Publish the exception to the other ranks, unless it is a consequence of another rank's end."""
        if self.is_network_fault or self._store is None:
            return
        with suppress(RuntimeError), without_waiting_for(self._store):  # it has ended: nobody is left to read it
            counts = [private_torch.num_collectives(group) for group in world.all_groups]
            message = f"failed: {type(error).__name__}: {one_line(error)}; see its traceback"
            if isinstance(error, SIGTERMException):
                message = "got SIGTERM"
            self._store.set(self._keys[self._rank], json.dumps([message, counts]))

    @cached_property
    def is_common(self) -> bool:
        """True if all ranks have failed at the same place, so that they can still save together. Waits some seconds for
        the others.
        """
        if self.is_network_fault or self._store is None:
            return False
        try:
            with without_waiting_for(self._store):
                return self._decision(self._store) == _TOGETHER
        except RuntimeError:  # as above
            return False

    def _decision(self, store: Store) -> str:
        deadline = time.monotonic() + _PATIENCE_S
        while not store.check(self._keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        counts = [json.loads(store.get(key))[1] for key in self._keys] if store.check(self._keys) else []
        proposal = _TOGETHER if counts and all(count == counts[0] for count in counts) else _APART
        return bytes(store.compare_set(f"{self._name}: decision", "", proposal)).decode()

    def savers(self, trainer: pl.Trainer) -> list[Any]:
        """Return the callbacks that would save a checkpoint on this exception, but not all ranks can."""
        savers = [saver for saver in trainer.checkpoint_callbacks if getattr(saver, "save_on_exception", False)]
        if not savers or self.is_common:
            return []
        self.warn_of_no_checkpoint()
        return savers

    def warn_of_no_checkpoint(self) -> None:
        """Warn that the exception leaves no checkpoint, on the rank that raised it."""
        if not self.is_network_fault:
            logger.warning("no checkpoint is saved now: not every rank has failed here, and it takes all of them")

    def explained(self, error: Exception) -> Exception:
        """Return the exception that another rank has raised, in the place of its consequence here."""
        if not self.is_network_fault or self._store is None:
            return error
        with suppress(RuntimeError), without_waiting_for(self._store):
            for rank, key in enumerate(self._keys):
                if rank != self._rank and self._store.check([key]):
                    return PeerFailed(f"rank {rank} {json.loads(self._store.get(key))[0]}")
        return error


class TrainerFailures:
    """Exceptions that have left the Trainer on this rank, of which the last one counts.

    Args:
        worlds: the present world.

    Attributes:
        last: as said; None before the first.
    """

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self.last: Failure | None = None
        self._stopped: list[Any] = []

    def publish(self, error: BaseException, trainer: pl.Trainer | None) -> None:
        """Publish an exception to the other ranks, where there are any."""
        worlds = self._worlds
        if not (worlds.is_joined and worlds.present.is_connected and dist.is_initialized()):
            return
        self.last = Failure(error, worlds.present, 0 if self.last is None else self.last.number + 1)
        self.last.publish(error, worlds.present)
        for saver in self.last.savers(trainer) if trainer is not None else ():
            saver.save_on_exception = False  # it would report a file that is not there
            self._stopped.append(saver)

    def restore_savers(self) -> None:
        """Let callbacks save on the exceptions of another fit."""
        for saver in self._stopped:
            saver.save_on_exception = True
        self._stopped = []

    def explained(self, error: Exception, elastic: ElasticWorlds | FixedWorld) -> Exception:
        """Return the exception to raise instead of one that leaves the Trainer."""
        error = explained(error)
        if elastic.engine is not None:
            return explain(error, elastic.engine)
        return error if self.last is None else self.last.explained(error)


def explained(error: Exception) -> Exception:
    """Return the exception to raise instead of an error of torch or Lightning, with its cure."""
    text, functions = str(error), {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    if "grad_norm" in functions and any(words in text for words in ("torch.Tensor and DTensor", "not allocated yet")):
        return ConfigurationError(
            "grad_norm cannot read gradients of which every rank holds rows: use moe_lightning.gradient_norms(module)"
        )
    if "Expected to have finished reduction in the prior iteration" in text:
        return ConfigurationError(
            "the module has parameters that the loss of a training_step does not depend on: if that is meant, use "
            "ExpertParallelStrategy(find_unused_parameters=True)"
        )
    if "mixed torch.Tensor and DTensor" in text:
        error.add_note(
            "dense=fsdp and hsdp gather the weights of an element of a ModuleList while it is called: call it, not "
            "its parts, and use its weights nowhere else, or use dense=zero1"
        )
    return error
