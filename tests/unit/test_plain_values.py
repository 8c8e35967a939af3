"""Values that become plain when they are saved, and objects that are named."""

from __future__ import annotations

import io
import threading
from collections import Counter, OrderedDict, defaultdict
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from moe_lightning.checkpoint.commit import dump_object
from moe_lightning.checkpoint.files import PlainValues, load_plain
from moe_lightning.compat.containers import AS_CONTAINERS, Rebuilt
from moe_lightning.errors import CheckpointError, ConfigurationError


class Color(Enum):
    RED = np.float32(1.5)


class Size(IntEnum):
    SMALL = 1


Many = Enum("Many", {"TWO": [1, 2]})


class Own:
    pass


class OwnTensor(torch.Tensor):
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
        ((2**127, -(2**2039)), (2**127, -(2**2039))),
        ({np.int64(1): (np.float32(2.0), {Size.SMALL})}, {1: (2.0, {1})}),
        (OrderedDict(a=[Path("x")]), OrderedDict(a=["x"])),
        (Counter("aab"), Counter("aab")),
        ([torch.bfloat16, torch.Size([1]), 1j, b"a", None], [torch.bfloat16, torch.Size([1]), 1j, b"a", None]),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    plain, found = PlainValues(AS_CONTAINERS).convert(value, "it")
    assert (plain, type(plain), found) == (expected, type(expected), {})
    assert load_plain(dump_object(plain), "it") == expected


def reread(value: Any, *, weights_only: bool = True) -> Any:
    """A value that has been saved and loaded, without our reader."""
    plain, found = PlainValues(AS_CONTAINERS).convert(value, "it")
    assert not found
    return torch.load(io.BytesIO(dump_object(plain)), weights_only=weights_only)


@pytest.mark.parametrize("weights_only", [True, False])
def test_containers_load_as_containers_with_their_values(*, weights_only: bool) -> None:
    config = OmegaConf.create(
        {"model": {"dim": 8, "same": "${.dim}"}, "files": [Path("x"), Size.SMALL], "text": r"\${a}", "none": None}
    )
    loaded = reread({"alone": config.model, "both": [config, config]}, weights_only=weights_only)
    assert isinstance(loaded["alone"], DictConfig)
    assert (loaded["alone"].dim, loaded["alone"].same) == (8, 8)
    both = loaded["both"]
    assert both[0] == both[1]
    assert isinstance(both[0].files, ListConfig)
    assert (both[0].files, both[0].text, both[0].none) == (["x", 1], "${a}", None)
    assert OmegaConf.is_interpolation(both[0].model, "same") is False


def test_a_container_of_an_untrusted_file_looks_nothing_up() -> None:
    def called() -> None:
        raise AssertionError("a resolver was called")

    OmegaConf.register_new_resolver("called", called, replace=True)
    data = dump_object({"a": Rebuilt(DictConfig, {"x": "${called:}", "y": [r"\${called:}"]})})
    loaded = load_plain(data, "it")["a"]
    assert (loaded.x, loaded.y[0]) == ("${called:}", "${called:}")
    hostile = dump_object(OmegaConf.create({"x": "${called:}"}))  # as OmegaConf itself would be saved
    with pytest.raises(CheckpointError, match=r"^it holds more than tensors and plain values \(omegaconf"):
        load_plain(hostile, "it")


@pytest.mark.parametrize("value", [torch.ones(2), torch.nn.Parameter(torch.ones(2))], ids=["tensor", "parameter"])
def test_an_object_on_a_tensor_is_named(value: Any) -> None:
    value.note = 1.5
    assert reread({"a": value})["a"].note == 1.5
    value.note = Own()
    assert list(PlainValues().convert({"a": value})[1]) == ["a"]


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_value_that_holds_itself_is_one_sentence(kind: type) -> None:
    inner: list[Any] = []
    inner.append({"x": inner} if kind is dict else kind([inner]))
    with pytest.raises(ConfigurationError, match=r"^it\[0\]\[.*\] is a part of itself, .*: keep a copy"):
        PlainValues().convert(inner, "it")


def test_shared_tensors_stay_shared_and_containers_become_copies() -> None:
    shared = [torch.ones(1)]
    loaded = reread({"a": shared, "b": (shared, shared)})
    assert loaded["a"] is not loaded["b"][0]
    assert loaded["a"][0] is loaded["b"][1][0]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({Size.SMALL: 1, Path("a"): 2, "a": 3}, r"it has keys that would be saved as \[1, 'a', 'a'\], .*: keep one"),
        ({"x": {Color.RED: 1, 1.5: 2}}, r"it\['x'\] has keys that would be saved as \[1.5, 1.5\], which could not"),
        ({Path("a"), "a"}, r"it has members that would be saved as \['a', 'a'\], which could not be its members"),
        ({Many.TWO: 1}, r"it has keys that would be saved as \[\[1, 2\]\], which could not be its keys: keep one"),
    ],
)
def test_keys_that_become_the_same_are_told(value: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{sentence}"):
        PlainValues().convert(value, "it")


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint32", ">f4", "complex64", "bool"])
def test_arrays_become_tensors(dtype: str) -> None:
    value = np.arange(6).reshape(2, 3).astype(dtype)
    plain, found = PlainValues(AS_CONTAINERS).convert({"a": value}, "it")
    read = load_plain(dump_object(plain), "it")["a"]
    assert not found
    np.testing.assert_array_equal(read.numpy(), value)


def test_the_random_state_of_numpy_can_be_set_again() -> None:
    generator = np.random.RandomState(0)
    plain, found = PlainValues(AS_CONTAINERS).convert(generator.get_state(), "it")
    other = np.random.RandomState(1)
    other.set_state(load_plain(dump_object(plain), "it"))
    assert not found
    assert other.rand() == generator.rand()


def test_the_runs_own_values_stay_as_they_are() -> None:
    weights = OrderedDict(a=torch.ones(1))
    weights._metadata = {"version": 1}  # type: ignore[attr-defined]
    value = {"state_dict": weights, "paths": [Path("x")]}
    plain, _ = PlainValues(AS_CONTAINERS).convert(value)
    assert plain["state_dict"]["a"] is weights["a"]
    assert plain["state_dict"]._metadata == {"version": 1}
    assert value["paths"] == [Path("x")]


@pytest.mark.parametrize(
    "value",
    [
        *(Own(), len, defaultdict(int), frozenset(), np.array(["2020"], "datetime64[D]")),
        *(2**3000, -(2**3000), torch.ones(2).as_subclass(OwnTensor)),
        *(np.datetime64("2020-01-01", "ns"), np.datetime64("NaT"), np.timedelta64(5, "ns"), np.timedelta64(5, "D")),
        np.zeros(1, dtype=[("a", "i4")])[0],
    ],
)
def test_objects_are_named_once(value: Any) -> None:
    values = PlainValues(AS_CONTAINERS)
    plain, found = values.convert({"callbacks": {"Keeps": [0, value]}})
    assert list(found) == ["callbacks['Keeps'][1]"]
    assert type(value).__qualname__ in found["callbacks['Keeps'][1]"]
    assert plain["callbacks"]["Keeps"][1] is value
    assert values.convert({"callbacks": {"Keeps": [0, value]}})[1] == {}
    assert list(values.convert({"callbacks": {"Keeps": [value]}})[1]) == ["callbacks['Keeps'][0]"]


def test_classes_that_are_declared_safe_are_no_objects() -> None:
    with torch.serialization.safe_globals([Own]):
        assert PlainValues(AS_CONTAINERS).convert([Own()], "it")[1] == {}


def test_what_cannot_be_saved_at_all_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"^loops\['x'\] is of class lock, which cannot be saved \(.*\): keep"):
        PlainValues(AS_CONTAINERS).convert({"loops": {"x": threading.Lock()}})
    with pytest.raises(ConfigurationError, match=r"^hyper_parameters\['c'\] cannot be saved \(.*\): resolve it"):
        PlainValues(AS_CONTAINERS).convert({"hyper_parameters": {"c": OmegaConf.create({"a": "${b}"})}})
