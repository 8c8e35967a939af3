"""Values against annotations, the words in which a wrong one is told, and constructors that check theirs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Interval

from moe_lightning.config import (
    Fraction,
    PositiveInt,
    Probability,
    described,
    fits,
    hints_of,
    shown,
    validated,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.router import RouterConfig

if TYPE_CHECKING:
    from decimal import Decimal


@pytest.mark.parametrize(
    ("value", "hint", "does"),
    [
        (1, int, True),
        (True, int, False),
        (1.5, int, False),
        ("1", int, False),
        (1, float, True),
        (True, float, False),
        ("a", str, True),
        (1, str, False),
        (None, int | None, True),
        ("a", int | None, False),
        ("bf16", Literal["bf16", 32], True),
        (32, Literal["bf16", 32], True),
        (True, Literal[1], False),
        ([1, 2], Sequence[int], True),
        ([1, "b"], Sequence[int], False),
        ("ab", Sequence[str], False),
        ([0.9, 0.95], tuple[float, float], True),
        ([0.9], tuple[float, float], False),
        ([1, 2, 3], tuple[int, ...], True),
        ({"a": 1}, Mapping[str, int], True),
        ([], Mapping[str, int], False),
        ("a/b", Path, True),
        (3, Path, False),
        ({"_target_": "x.Y"}, int, True),
        (object(), Any, True),
        (math.nan, float, False),
        (math.inf, float, False),
        (-math.inf, float | None, False),
        (np.float32(0.5), float, True),
        (np.int64(3), int, True),
        ("", str, False),
        ("", Path, False),
        (0, PositiveInt, False),
        (math.nan, Annotated[float, Interval(le=1)], False),
        (1.0, Probability, False),
        (1, Fraction, True),
        (None, PositiveInt | None, True),
        ([0.5, math.nan], Sequence[float], False),
        ({"a": math.nan}, Mapping[str, float], False),
        ("ab", Iterable[str], False),
        (None, RouterConfig, False),
        ({"top_k": 1}, RouterConfig, True),
        (3, np.ndarray, False),
        (np.ones(2), Literal["a"], False),
        (np.ones(2), tuple[float, float], False),
        (np.array(1.0), float, False),
        (np.True_, float, False),
        (10**400, float, False),
        (["a", 1], frozenset[str], False),
        (["a"], frozenset[str], True),
        (60, timedelta, False),
        ("ab", Sequence[Any], False),
        ([{"_target_": "x.Y"}], Sequence[np.ndarray], True),
        ([{"top_k": 1}], Sequence[RouterConfig], True),
        ((RouterConfig(), 3), tuple[RouterConfig, RouterConfig], False),
    ],
)
def test_fits(value: object, hint: Any, does: bool) -> None:
    assert fits(value, hint) is does


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "an integer or null"),
        (float, "a finite number"),
        (PositiveInt, "an integer of at least 1"),
        (Fraction | None, "a number of at least 0 and at most 1 or null"),
        (tuple[float, float], "a list of 2, each a finite number"),
        (RouterConfig, "a mapping of RouterConfig's arguments"),
        (Literal["a", 3, True], "'a' or 3 or true"),
        (Sequence[int], "a list, each item an integer"),
        (Mapping[str, int], "a mapping"),
        (str | Path, "text or a path"),
    ],
)
def test_described(hint: Any, words: str) -> None:
    assert described(hint) == words


def test_shown_as_typed() -> None:
    assert [shown(value) for value in (None, True, "a", 1.5, [1])] == ["null", "true", "'a'", "1.5", "[1]"]


@validated
class Pump:
    """Something that checks what it is given."""

    def __init__(self, size: PositiveInt, *, factor: float = 1.0, name: str = "", price: Decimal | None = None) -> None:
        self.size, self.factor, self.name = size, factor, name


@validated
@dataclass(frozen=True)
class Pipe:
    """The same, frozen."""

    length: Annotated[float, Interval(gt=0)] = 1.0


def test_constructors_take_what_fits() -> None:
    pump = Pump(3, factor=2, name="")
    assert (pump.size, pump.factor, pump.name) == (3, 2, "")
    assert Pipe() == Pipe(1.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Pump("3"), "size='3' of Pump must be an integer of at least 1"),
        (lambda: Pump(size=0), "size=0 of Pump must be an integer of at least 1"),
        (lambda: Pump(1, factor=math.nan), "factor=nan of Pump must be a finite number"),
        (lambda: Pump(1, name=None), "name=null of Pump must be text"),
        (lambda: Pipe(-1), "length=-1 of Pipe must be a number above 0"),
    ],
)
def test_constructors_refuse_what_does_not(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value) == sentence


def test_python_says_which_arguments_are_missing_or_unknown() -> None:
    with pytest.raises(TypeError, match="size"):
        Pump()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        Pump(1, colour="red")  # type: ignore[call-arg]


def test_annotations_of_type_checkers_alone_are_left_out() -> None:
    assert set(hints_of(Pump)) == {"size", "factor", "name", "return"}
