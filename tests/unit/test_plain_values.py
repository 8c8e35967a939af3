"""Values that become plain when they are saved, and objects that are named."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.files import PlainValues, load_plain
from moe_lightning.compat.private_lightning import plain_container
from moe_lightning.errors import ConfigurationError


class Color(Enum):
    RED = np.float32(1.5)


class Size(IntEnum):
    SMALL = 1


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.01), 0.01),
        (np.bool_(True), True),
        (np.int64(3), 3),
        (np.str_("a"), "a"),
        (np.longdouble(0.5), 0.5),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1, Path("x")], dtype=object), [1, "x"]),
        (Path("/tmp/x"), "/tmp/x"),
        (Color.RED, 1.5),
        (Size.SMALL, 1),
        (OmegaConf.create({"lr": 0.1, "same": "${lr}", "list": [1]}), {"lr": 0.1, "same": 0.1, "list": [1]}),
        (OmegaConf.create([1, {"a": None}]), [1, {"a": None}]),
        (type(OmegaConf.create({})), "DictConfig"),
        ({np.int64(1): (np.float32(2.0), {Size.SMALL})}, {1: (2.0, {1})}),
        (OrderedDict(a=[Path("x")]), OrderedDict(a=["x"])),
        (Counter("aab"), Counter("aab")),
        ([torch.bfloat16, torch.Size([1]), 1j, b"a", None], [torch.bfloat16, torch.Size([1]), 1j, b"a", None]),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    plain, found = PlainValues(plain_container).convert(value, "it")
    assert (plain, type(plain), found) == (expected, type(expected), {})
    assert load_plain(dump_object(plain), "it") == expected


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint32", ">f4", "complex64", "bool"])
def test_arrays_become_tensors(dtype: str) -> None:
    value = np.arange(6).reshape(2, 3).astype(dtype)
    plain, found = PlainValues(plain_container).convert({"a": value}, "it")
    read = load_plain(dump_object(plain), "it")["a"]
    assert not found
    np.testing.assert_array_equal(read.numpy(), value)


def test_the_random_state_of_numpy_can_be_set_again() -> None:
    generator = np.random.RandomState(0)
    plain, found = PlainValues(plain_container).convert(generator.get_state(), "it")
    other = np.random.RandomState(1)
    other.set_state(load_plain(dump_object(plain), "it"))
    assert not found
    assert other.rand() == generator.rand()


def test_the_runs_own_values_stay_as_they_are() -> None:
    weights = OrderedDict(a=torch.ones(1))
    weights._metadata = {"version": 1}  # type: ignore[attr-defined]
    itself: list[Any] = [1]
    itself.append(itself)
    value = {"state_dict": weights, "paths": [Path("x")], "itself": itself}
    plain, _ = PlainValues(plain_container).convert(value)
    assert plain["state_dict"] is weights
    assert plain["itself"] is itself
    assert value["paths"] == [Path("x")]


@pytest.mark.parametrize("value", [Own(), len, defaultdict(int), frozenset(), np.array(["2020"], "datetime64[D]")])
def test_objects_are_named_once(value: Any) -> None:
    values = PlainValues(plain_container)
    plain, found = values.convert({"callbacks": {"Keeps": [0, value]}})
    assert list(found) == ["callbacks['Keeps'][1]"]
    assert type(value).__qualname__ in found["callbacks['Keeps'][1]"]
    assert plain["callbacks"]["Keeps"][1] is value
    assert values.convert({"callbacks": {"Keeps": [0, value]}})[1] == {}
    assert list(values.convert({"callbacks": {"Keeps": [value]}})[1]) == ["callbacks['Keeps'][0]"]


def test_classes_that_are_declared_safe_are_no_objects() -> None:
    with torch.serialization.safe_globals([Own]):
        assert PlainValues(plain_container).convert([Own()], "it")[1] == {}


def test_what_cannot_be_saved_at_all_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"^loops\['x'\] is of class lock, which cannot be saved \(.*\): keep"):
        PlainValues(plain_container).convert({"loops": {"x": threading.Lock()}})
    with pytest.raises(ConfigurationError, match=r"^hyper_parameters\['c'\] cannot be saved \(.*\): resolve it"):
        PlainValues(plain_container).convert({"hyper_parameters": {"c": OmegaConf.create({"a": "${b}"})}})
