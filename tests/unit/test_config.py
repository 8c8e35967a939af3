"""Configurations from plain mappings, as YAML files hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import pytest
import torch
from annotated_types import Interval

from moe_lightning.config import PositiveInt, build_config, fits
from moe_lightning.models.gpt import GPTConfig
from moe_lightning.models.gpt_module import OptimizerConfig
from moe_lightning.moe.forced_routing import ForcedRouting
from moe_lightning.moe.router import RouterConfig


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


FITTING: list[tuple[Any, list[Any], list[Any]]] = [
    (bool, [True], [1, None, np.bool_(True), "true"]),
    (int, [3, np.int64(3), 10**400], [True, 3.0, "3", np.float32(3)]),
    (float, [3, 0.5, np.float32(0.5)], [True, float("nan"), float("inf"), 10**400, "3"]),
    (str, ["x"], ["", b"x", 1]),
    (Path, ["x", Path("x")], ["", b"x", 1]),
    (Annotated[int, Interval(gt=0, le=2)], [1, 2], [0, 3, 1.5]),
    (PositiveInt | Literal["auto"] | None, [1, "auto", None], [0, "off", False]),
    (Literal[1, -1], [1], [True, 1.0, "1"]),
    (tuple[float, float], [[0, 0.5], (1, 2)], [[1], [1, 2, 3], [1, "x"], "ab", {0: 1, 1: 2}]),
    (tuple[PositiveInt, ...], [[], [1, 2]], [[0], 1]),
    (Sequence[int], [[1], range(3)], [b"x", bytearray(b"x"), {1: 1}, {1}]),
    (set[str], [["x"], {"x"}], [["x", 1], "x"]),
    (Mapping[str, float], [{}, {"x": 1}], [{"x": "1"}, [1]]),
    (Iterable[str], [["x"], iter("ab")], ["ab", {"x": 1}, 7]),
    (Callable[[int], str], [len, str], [1, "len"]),
    (RouterConfig, [RouterConfig(), {"top_k": 1}], [7, "RouterConfig"]),
    (torch.Tensor, [torch.zeros(1), {"_target_": "torch.zeros"}], [0.0, [1.0], {"target": "x"}]),
    (Unchecked, [7, "x"], []),
    (Any, [7, "", None], []),
]


@pytest.mark.parametrize(("hint", "right", "wrong"), FITTING)
def test_values_fit_annotations_without_conversion(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not fits(value, hint)] == []
    assert [value for value in wrong if fits(value, hint)] == []
