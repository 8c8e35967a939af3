"""State of a committed step after each of its calls, and after those of a recovery."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import MagicMock

import pytest

from moe_lightning.strategies.committed_step import CommittedStep

Found = tuple[int, bool, bool]
"""Version, whether an update is prepared, and whether values are torn."""


def found(step: CommittedStep) -> Found:
    return step.version, step.prepared is not None, step.is_torn


def step_after(*calls: str, is_sharded: bool) -> CommittedStep:
    """A rank's step after step 4 and these calls; optimizers may be sharded."""
    state = MagicMock()
    state.shards.shares_optimizers, state.trainer.global_step = is_sharded, 4
    step = CommittedStep(state)
    step.begin_fit()
    step.prepare(lambda: None)
    for call in calls:
        getattr(step, call)()
    return step


@pytest.mark.parametrize("is_sharded", [False, True])
def test_calls_of_a_step(is_sharded: bool) -> None:
    after: Callable[..., Found] = lambda *calls: found(step_after(*calls, is_sharded=is_sharded))  # noqa: E731
    assert after() == (4, True, False)
    assert after("begin_update") == (4, True, is_sharded)
    assert after("begin_update", "commit") == (5, False, False)


@pytest.mark.parametrize(
    ("calls", "is_sharded", "state"),
    [
        (("apply_prepared",), False, (5, False, False)),
        (("apply_prepared", "apply_prepared", "forget_prepared"), False, (5, False, False)),
        (("forget_prepared",), False, (4, False, False)),
        (("begin_update", "forget_prepared"), True, (4, False, True)),
        (("begin_update", "forget_prepared", "begin_overwriting", "end_overwriting"), True, (4, False, False)),
    ],
)
def test_calls_of_a_recovery(calls: tuple[str, ...], is_sharded: bool, state: Found) -> None:
    assert found(step_after(*calls, is_sharded=is_sharded)) == state
