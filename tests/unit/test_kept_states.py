"""Optimizer states that one rank keeps for others, from worlds that cut layers to those that do not, and back."""

from __future__ import annotations

import torch

from moe_lightning.parallel.mesh import RowCut, TensorCut
from moe_lightning.strategies.dense_parameters import holders_of_units, new_holders_of, unit_state

WHOLE = {"exp_avg": torch.arange(8.0).view(4, 2), "step": torch.tensor(3.0)}
CUT = TensorCut(shape=(4, 2), sections=(4,))
OWNERS = {"w": 2, "norm": 1}
PARTED = RowCut.among(((0, 1), (2, 3)), 0, tensors=2)


def test_each_part_has_a_holder() -> None:
    holders = holders_of_units(OWNERS, ["w"], PARTED)
    assert holders.pop("norm") == 1
    assert list(holders.values()) == [2, 3]
    assert holders_of_units(OWNERS, [], RowCut.whole(3)) == OWNERS


def test_whole_states_are_taken_apart_and_put_together() -> None:
    whole, parts = holders_of_units(OWNERS, [], RowCut.whole(3)), holders_of_units(OWNERS, ["w"], PARTED)
    first, second = (unit for unit in parts if unit != "norm")
    assert new_holders_of("w", parts) == (2, 3)
    assert new_holders_of(first, whole) == new_holders_of(second, whole) == (2,)
    assert (new_holders_of(second, parts), new_holders_of("norm", parts)) == ((3,), (1,))
    apart = {unit: unit_state({"w": WHOLE}, unit, CUT) for unit in (first, second)}
    assert torch.equal(apart[second]["exp_avg"], WHOLE["exp_avg"][2:])
    again = unit_state(apart, "w", CUT)
    assert again.keys() == WHOLE.keys()
    assert all(torch.equal(again[scope], value) for scope, value in WHOLE.items())
    assert unit_state(apart, first, CUT) is apart[first]
    assert unit_state({first: apart[first]}, "w", CUT) == {}, "a part is lacking"
