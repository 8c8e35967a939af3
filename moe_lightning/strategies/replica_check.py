"""Comparison of replicas between steps, and their repair."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_lightning.errors import ReplicasDifferError
from moe_lightning.state.replicas import Difference, Replica, differing, overwrite, replicas_of
from moe_lightning.strategies.checks import identical_buffers
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds, expert_parallel_callbacks

logger = logging.getLogger(__name__)


class ReplicaCheck:
    """Compares what several ranks hold alike, every so many steps.

    One that differs from a majority is overwritten if a callback repairs replicas, unless the comparison before did so
    too: the cause is then more than a flipped bit.

    Args:
        worlds: the present world.
        state: of this rank.
        every: steps between comparisons; 0: none is made.
    """

    def __init__(self, worlds: Worlds, state: TrainState, *, every: int) -> None:
        self._worlds, self._state, self._every = worlds, state, every
        self._compared = -1, 0  # generation of the world, step
        self._repaired_in: int | None = None  # world whose last comparison has repaired: newcomers do not know

    def before_step(self, step: int) -> None:
        """Compare before a step whose number is a multiple of `every`; collective then.

        Raises:
            ReplicasDifferError: on every rank.
        """
        world = self._worlds.present
        here = world.generation, step  # after a recovery all compare again: newcomers have not
        if not self._every or step % self._every or not step or here == self._compared or world.size == 1:
            return
        self._compared = here
        replicas = self._replicas()
        found = differing(replicas, world)
        may_repair = self._repaired_in != world.generation and all(difference.healthy for difference in found)
        self._repaired_in = None
        if found and may_repair and any(c.repairs_replicas for c in expert_parallel_callbacks(self._state.module)):
            overwrite(found, replicas, world)
            self._repaired_in = world.generation
            for difference in found if world.rank == 0 else ():
                logger.warning(
                    "after step %d %s on ranks %s differed from its other replicas, and was overwritten with that of "
                    "rank %d: look at the memory of these ranks",
                    *(step, difference.name, list(difference.damaged), difference.healthy[0]),
                )
            found = differing(self._replicas(), world)
        if found:
            raise _error(step, found)

    def _replicas(self) -> list[Replica]:
        return replicas_of(self._state.training_state(), set(identical_buffers(self._state.module)))


def _error(step: int, found: Sequence[Difference]) -> ReplicasDifferError:
    ranks = " and ".join(f"ranks {list(group)}" for group in found[0].groups)
    more = f" (and those of {len(found) - 1} others)" if len(found) > 1 else ""
    return ReplicasDifferError(
        f"after step {step} the replicas of {found[0].name} differ between {ranks}{more}: something updates them "
        "otherwise on some ranks (a hook, an optimizer, memory); look for it and resume from the last checkpoint"
    )
