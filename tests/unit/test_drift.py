"""Synthetic drifting popularity: zipf shares whose order turns into another one, little by little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 500), st.integers(1, 60), st.integers(0, 3))
def test_drift_is_a_popularity_that_moves_slowly(step: int, period: int, layer: int) -> None:
    popularity = Popularity(ForcedRouting(kind="drift", exponent=1.5, period=period), 8, layer)
    now, soon = popularity.at(step), popularity.at(step + 1)
    assert now.sum() == pytest.approx(1)
    assert (now > 0).all()
    assert np.abs(soon - now).sum() <= 2 / period + 1e-12, "total variation of at most 1/period in a step"
    again = Popularity(ForcedRouting(kind="drift", exponent=1.5, period=period), 8, layer).at(step)
    assert np.array_equal(now, again), "a function of the step, so that every rank and a resumed run agree"


def test_every_turn_has_the_zipf_shares_in_another_order() -> None:
    expected = np.sort((1.0 + np.arange(8)) ** -2)
    expected /= expected.sum()
    turns = [
        [Popularity(ForcedRouting(kind="drift", exponent=2.0, period=7), 8, layer).at(7 * turn) for turn in range(4)]
        for layer in range(2)
    ]
    for turn in [shares for layer in turns for shares in layer]:
        np.testing.assert_allclose(np.sort(turn), expected)
    assert len({tuple(shares) for layer in turns for shares in layer}) > 4


def test_a_period_below_a_step() -> None:
    with pytest.raises(ConfigurationError, match="period=0 of ForcedRouting must be an integer of at least 1"):
        ForcedRouting(kind="drift", period=0)
