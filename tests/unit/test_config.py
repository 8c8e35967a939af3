"""Configurations from plain mappings, values against annotations, and constructors that check theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import pytest
import torch
from annotated_types import Interval

from moe_lightning.config import (
    Fraction,
    PositiveInt,
    Probability,
    build_config,
    described,
    fits,
    hints_of,
    shown,
    validated,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.models.gpt_module import OptimizerConfig
from moe_lightning.moe.forced_routing import ForcedRouting
from moe_lightning.moe.router import RouterConfig

if TYPE_CHECKING:
    from decimal import Decimal


def test_instances_mappings_and_nothing() -> None:
    config = RouterConfig(top_k=3)
    assert build_config(RouterConfig, config) is config
    assert build_config(RouterConfig, {"top_k": 3}) == config
    assert build_config(RouterConfig, None) == RouterConfig()


def test_nested_mappings_become_configurations() -> None:
    config = build_config(GPTConfig, {"router": {"top_k": 1, "forced": {"kind": "zipf"}}})
    assert config.router == RouterConfig(top_k=1, forced=ForcedRouting(kind="zipf"))


def test_values_that_yaml_writes_in_another_way() -> None:
    config = build_config(OptimizerConfig, {"lr": 1, "betas": [0.8, 0.9]})
    assert config.lr == 1
    assert config.betas == (0.8, 0.9)


class Unchecked(Protocol):
    def run(self) -> None: ...


NAN = float("nan")
FITTING: list[tuple[Any, list[Any], list[Any]]] = [
    (bool, [True], [1, None, np.bool_(True), "true"]),
    (int, [1, np.int64(3), 10**400, {"_target_": "x.Y"}], [True, 3.0, "3", np.float32(3)]),
    (int | None, [None], ["a"]),
    (float, [3, 0.5, np.float32(0.5)], [True, NAN, float("inf"), 10**400, "3", np.array(1.0), np.True_]),
    (float | None, [None], [-float("inf")]),
    (str, ["x"], ["", b"x", 1]),
    (Path, ["x/y", Path("x")], ["", b"x", 1]),
    (Annotated[int, Interval(gt=0, le=2)], [1, 2], [0, 3, 1.5]),
    (Annotated[float, Interval(le=1)], [0.5], [NAN]),
    (Probability, [0.0], [1.0]),
    (Fraction, [1], [2]),
    (PositiveInt | Literal["auto"] | None, [1, "auto", None], [0, "off", False]),
    (Literal[1, -1], [1], [True, 1.0, "1"]),
    (Literal["bf16", 32], ["bf16", 32], [np.ones(2), "fp7"]),
    (tuple[float, float], [[0, 0.5], (1, 2)], [[1], [1, 2, 3], [1, "x"], "ab", {0: 1, 1: 2}, np.ones(2)]),
    (tuple[PositiveInt, ...], [[], [1, 2]], [[0], 1]),
    (tuple[RouterConfig, RouterConfig], [], [(RouterConfig(), 3)]),
    (Sequence[int], [[1], range(3)], [b"x", bytearray(b"x"), {1: 1}, {1}, [1, "b"]]),
    (Sequence[float], [[0.5]], [[0.5, NAN]]),
    (Sequence[str], [["ab"]], ["ab"]),
    (Sequence[Any], [[1]], ["ab"]),
    (Sequence[RouterConfig], [[{"top_k": 1}]], []),
    (Sequence[np.ndarray], [[{"_target_": "x.Y"}]], []),
    (set[str], [["x"], {"x"}], [["x", 1], "x"]),
    (frozenset[str], [["x"]], [["x", 1]]),
    (Mapping[str, float], [{}, {"x": 1}], [{"x": "1"}, [1], [], {"x": NAN}]),
    (Iterable[str], [["x"], iter("ab")], ["ab", {"x": 1}, 7]),
    (Callable[[int], str], [len, str], [1, "len"]),
    (RouterConfig, [RouterConfig(), {"top_k": 1}], [7, "RouterConfig", None]),
    (torch.Tensor, [torch.zeros(1), {"_target_": "torch.zeros"}], [0.0, [1.0], {"target": "x"}]),
    (np.ndarray, [np.ones(1)], [3]),
    (timedelta, [timedelta(seconds=1)], [60]),
    (Unchecked, [7, "x"], []),
    (Any, [7, "", None, object()], []),
]


@pytest.mark.parametrize(("hint", "right", "wrong"), FITTING)
def test_values_fit_annotations_without_conversion(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not fits(value, hint)] == []
    assert [value for value in wrong if fits(value, hint)] == []


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
        (lambda: Pump(1, factor=NAN), "factor=nan of Pump must be a finite number"),
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
