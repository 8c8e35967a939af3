"""What balancers of several stages know together of all layers."""

from __future__ import annotations

import pytest

from moe_lightning.callbacks.load_balancer import OwnLayers, together
from moe_lightning.errors import ConfigurationError

FIRST, SECOND = OwnLayers(numbers=(0, 2), total=4), OwnLayers(numbers=(1, 3), total=4)


def of(*loads: int) -> dict[str, object]:
    return {"loads": [[load] for load in loads], "averages": [None] * len(loads), "interval": 8}


def test_of_each_layer_those_who_plan_for_it_are_believed() -> None:
    first, second = FIRST.whole(of(10, 12), of(1, 2, 3, 4)), SECOND.whole(of(11, 13), None)
    assert first == of(10, 2, 12, 4)
    assert second == of(0, 11, 0, 13)
    newcomer: tuple[tuple[int, ...], None] = ((), None)
    known = together([newcomer, (FIRST.numbers, first), (SECOND.numbers, second)], 4)
    assert known == of(10, 11, 12, 13)
    assert known is not None
    assert SECOND.part(known) == of(11, 13)
    assert together([newcomer, ((), first)], 4) == first
    assert together([newcomer], 4) is None


def test_the_state_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="of 2 MoE layers, but the model has 4"):
        FIRST.part(of(1, 2))
