"""Exceptions that leave the Trainer: whether all ranks raised one at the same place, and which rank raised one.

Hooks that follow an exception (`save_on_exception`, `OnExceptionCheckpoint`, a user's own) save checkpoints, which
takes all ranks. If only some have failed, the others wait in a step, and both would wait for each other until the
time-out. So every rank publishes its exception with the numbers of the collectives that it has begun; a collective may
follow only where all ranks have failed with equal numbers. The first decision that is made counts for all ranks.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import cached_property

from moe_lightning.compat import private_torch
from moe_lightning.elastic.faults import is_network_fault
from moe_lightning.parallel.context import World, common_store
from moe_lightning.user_errors import one_line

_PATIENCE_S, _LOOK_S = 5.0, 0.05
_TOGETHER, _APART = "together", "apart"


class Failure:
    """An exception that leaves the Trainer on this rank.

    Args:
        error: the exception.
        world: the ranks, connected.
        number: of exceptions before it, which all ranks had in common.

    Attributes:
        is_network_fault: the exception is a consequence of another rank's end.
    """

    def __init__(self, error: BaseException, world: World, number: int) -> None:
        self.is_network_fault = is_network_fault(error)
        self._rank, self._store = world.rank, common_store()
        self._name = f"failed in world {world.generation}, {number}"
        self._keys = [f"{self._name}/{rank}" for rank in range(world.size)]
        if not self.is_network_fault and self._store is not None:
            with suppress(RuntimeError):  # the store has ended: nobody is left to read it
                counts = [private_torch.num_collectives(group) for group in world.all_groups]
                report = [f"{type(error).__name__}: {one_line(error)}", counts]
                self._store.set(self._keys[self._rank], json.dumps(report))

    @cached_property
    def is_common(self) -> bool:
        """True if all ranks have failed at the same place, so that they can still save together. Waits some seconds for
        the others.
        """
        if self.is_network_fault or self._store is None:
            return False
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not self._store.check(self._keys) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            counts = [json.loads(self._store.get(k))[1] for k in self._keys] if self._store.check(self._keys) else []
            wish = _TOGETHER if counts and all(count == counts[0] for count in counts) else _APART
            return bytes(self._store.compare_set(f"{self._name}: decision", "", wish)).decode() == _TOGETHER
        except RuntimeError:  # as above
            return False

    def cause(self) -> str | None:
        """Return the exception of another rank, in words; None if none has published one."""
        with suppress(RuntimeError):
            for rank, key in enumerate(self._keys):
                if self._store is not None and rank != self._rank and self._store.check([key]):
                    return f"rank {rank} failed: {json.loads(self._store.get(key))[0]}"
        return None
