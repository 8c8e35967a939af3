"""Check of arithmetic: in some steps ranks compute elements of each other's matrix products again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import all_reduce_
from moe_lightning.state.transfer import transfer
from moe_lightning.strategies.products import Element, Products
from moe_lightning.strategies.state_check import CheckInterval, CheckSchedule
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

_MOST_STEPS = 1000
_UNCHECKED = 10
"""First steps without a check under "auto": they allocate and compile, which would be taken for the time of steps."""

_MOST_REPEATS = 3
"""Repetitions of one step, after which it is used as it is: a rank that FaultRecovery lets go has left by then."""

logger = logging.getLogger(__name__)


class Dispute(NamedTuple):
    """An element that two ranks have computed differently, or one of them twice.

    Attributes:
        suspect, judge: the ranks.
        element: of a product of the suspect.
        judged: the judge's result.
    """

    suspect: int
    judge: int
    element: Element
    judged: float

    def wrong_ranks(self, votes: Sequence[float]) -> tuple[int, ...]:
        """Return the ranks that have computed wrong: other than most ranks now do, or, where no result has a majority,
        other than they do themselves; none where that does not decide.

        Args:
            votes: result of each rank, once more.
        """
        results = [[vote] for vote in votes]
        results[self.suspect] += [self.element.value, self.element.again]
        results[self.judge].append(self.judged)
        truth = self.truth(votes)
        return tuple(
            rank
            for rank, own in enumerate(results)
            if any(self.element.differ(result, own[0] if truth is None else truth) for result in own)
        )

    def truth(self, votes: Sequence[float]) -> float | None:
        """Return the result of most ranks; None if no majority has the same."""
        counts = [sum(not self.element.differ(vote, other) for other in votes) for vote in votes]
        most = max(range(len(votes)), key=counts.__getitem__)
        return votes[most] if 2 * counts[most] > len(votes) else None

    def describe(self, votes: Sequence[float]) -> str:
        """Describe what was found, in words."""
        element, wrong, truth = self.element, self.wrong_ranks(votes), self.truth(votes)
        if not wrong:
            return (
                f"rank {self.suspect} has computed {element.value:.6g} in {element.place} and rank {self.judge} "
                f"{self.judged:.6g}, and there is no third one to decide"
            )
        who = f"rank {wrong[0]} has" if len(wrong) == 1 else f"ranks {list(wrong)} have"
        results = [element.value, element.again] if self.suspect in wrong else [self.judged, *votes]
        right = self.judged if truth is None else truth
        result = max(results, key=lambda result: abs(result - right))
        return f"{who} computed {result:.6g} instead of {right:.6g} in {element.place}"


class _Way(NamedTuple):
    source: int
    target: int


class ArithmeticCheck:
    """Compares products of matrices between ranks, in some steps.

    In a step that is checked all products are screened, see `Products`. Before the update each rank sends the element
    that rounding explains least to the next one, which computes it again. If they differ all ranks compute it.

    Args:
        worlds: the present world.
        state: of this rank.
        every: steps between checks; 0: none is made; "auto": as few as cost 0.5 % of the steps' time, at most 1000.

    Attributes:
        schedule: of the checks.
        products: of the running step, if it is checked: a context for its forward and backward passes.
        times_wrong: checks that have found this rank to compute wrong.
    """

    def __init__(self, worlds: Worlds, state: TrainState, *, every: CheckInterval) -> None:
        self._worlds, self._state = worlds, state
        self.schedule = CheckSchedule(worlds, every, most_steps=_MOST_STEPS, unchecked=_UNCHECKED)
        self._repeats = -1, 0  # last step with an error, and how often it was left
        self.products: Products | None = None
        self.times_wrong = 0

    def before_step(self, step: int) -> None:
        """Begin to screen products, if that is due. Not collective."""
        if self.schedule.begins(step):
            self.products = Products(seed=step) if self.schedule.is_due(step) else None

    def before_update(self) -> str:
        """Compare products of the running step, which is checked; collective.

        Returns:
            What was found, in words: the gradients are not to be used. Empty: nothing, or in a step that was repeated
            in vain.
        """
        products, self.products = self.products, None
        assert products is not None, "the step is checked"
        world, step = self._worlds.present, self.schedule.at[1]
        with self.schedule:
            judged = self._exchanged(products.worst)
            result = judged.computed
        is_disputed = judged.differ(judged.value, result) or judged.differ(judged.again, result)
        measured = self.schedule.measured(self.schedule.spent_s + products.seconds)
        repeats = self._repeats[1] if self._repeats[0] == step else 0
        flags = torch.tensor([is_disputed, repeats >= _MOST_REPEATS])
        found = torch.cat([flags, measured]).to(world.device)
        all_reduce_(found, world)
        found = world.read(found)
        self.schedule.plan(found[2:])
        if not found[0]:
            return ""
        dispute = Dispute((world.rank - 1) % world.size, world.rank, judged, result)
        words = self._decided(dispute if is_disputed else None)
        self._repeats = step, repeats + 1
        if not found[1]:
            return f"{words} in the step after step {step}: look at its processor"
        if world.rank == 0:
            logger.warning("%s in the step after step %d, again: training continues", words, step)
        return ""

    def _exchanged(self, own: Element) -> Element:
        """Return the element of the rank before this one; collective."""
        world = self._worlds.present
        before = (world.rank - 1) % world.size
        header, length = all_gather_json([own.header, own.terms.shape[1]], world)[before]
        terms = torch.empty(2, length, dtype=torch.float64)
        ways = [_Way(source, (source + 1) % world.size) for source in sorted({before, world.rank})]
        transfer(ways, lambda way: [own.terms], lambda way: [terms], world)
        return Element(**header, terms=terms)

    def _decided(self, own: Dispute | None) -> str:
        """Ask all ranks for their results, and return the findings in words; collective."""
        world = self._worlds.present
        row = None if own is None else [own.judged, own.element.header, own.element.terms.tolist()]
        disputes = []
        for judge, listed in enumerate(all_gather_json(row, world)):
            if listed is not None:
                judged, header, terms = listed
                element = Element(**header, terms=torch.tensor(terms, dtype=torch.float64))
                disputes.append(Dispute((judge - 1) % world.size, judge, element, judged))
        votes = all_gather_json([dispute.element.computed for dispute in disputes], world)
        words, wrong = [], set[int]()
        for number, dispute in enumerate(disputes):
            of_this = [own[number] for own in votes]
            words.append(dispute.describe(of_this))
            wrong |= {*dispute.wrong_ranks(of_this)}
        self.times_wrong += world.rank in wrong
        return " and ".join(dict.fromkeys(words))
