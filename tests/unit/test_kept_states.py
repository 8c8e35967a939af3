"""Optimizer states that one rank keeps for others, from worlds that cut layers to those that do not, and back."""

from __future__ import annotations

import torch

from moe_lightning.parallel.mesh import RowCut, TensorCut
from moe_lightning.strategies.dense_parameters import keepers_of_units, made_of, takers_of

WHOLE = {"exp_avg": torch.arange(8.0).view(4, 2), "step": torch.tensor(3.0)}
CUT = TensorCut(shape=(4, 2), sections=(4,))
OWNERS = {"w": 2, "norm": 1}
PARTED = RowCut.among(((0, 1), (2, 3)), 0, tensors=2)


def test_each_part_has_a_keeper() -> None:
    keepers = keepers_of_units(OWNERS, ["w"], PARTED)
    assert keepers.pop("norm") == 1
    assert list(keepers.values()) == [2, 3]
    assert keepers_of_units(OWNERS, [], RowCut.whole(3)) == OWNERS


def test_whole_states_are_taken_apart_and_put_together() -> None:
    whole, parts = keepers_of_units(OWNERS, [], RowCut.whole(3)), keepers_of_units(OWNERS, ["w"], PARTED)
    first, second = (unit for unit in parts if unit != "norm")
    assert takers_of("w", parts) == (2, 3)
    assert takers_of(first, whole) == takers_of(second, whole) == (2,)
    assert (takers_of(second, parts), takers_of("norm", parts)) == ((3,), (1,))
    apart = {unit: made_of({"w": WHOLE}, unit, CUT) for unit in (first, second)}
    assert torch.equal(apart[second]["exp_avg"], WHOLE["exp_avg"][2:])
    again = made_of(apart, "w", CUT)
    assert again.keys() == WHOLE.keys()
    assert all(torch.equal(again[scope], value) for scope, value in WHOLE.items())
    assert made_of(apart, first, CUT) is apart[first]
    assert made_of({first: apart[first]}, "w", CUT) == {}, "a part is lacking"
