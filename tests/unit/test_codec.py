"""Objects as bytes: what may travel comes back as it was, everything else is refused, and no message runs code."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import Counter, OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributed.checkpoint.planner import SavePlan

from moe_lightning.errors import ConfigurationError, ForeignMessageError
from moe_lightning.parallel.collectives import MAX_DEPTH, decode, encode


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, nan equal to itself and -0.0 different from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and _bytes(a) == _bytes(b)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return repr(a) == repr(b) if isinstance(a, float | complex) else bool(a == b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


TENSOR_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip

ARRAY_DTYPES = ("?", "i1", "<i8", "<u4", "<f2", "<f8", "<c16", "<U3", "S4", "<M8[s]")

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.lists(st.integers(0, 9)).map(torch.Size),
    st.sampled_from(TENSOR_DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3)]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1).map(Path),
    st.tuples(st.sampled_from(TENSOR_DTYPES), st.lists(st.integers(0, 3), max_size=3)).map(
        lambda a: torch.randint(0, 2, a[1]).to(a[0])
    ),
    st.tuples(st.sampled_from(ARRAY_DTYPES), st.lists(st.integers(0, 3))).map(lambda a: np.zeros(a[1], dtype=a[0])),
    st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("é")]),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=40)
@given(value=objects)
def test_what_may_travel_comes_back_as_it_was(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_a_strided_trained_and_conjugate_tensor() -> None:
    trained = torch.randn(4, 6, requires_grad=True).T
    assert same(decode(encode(trained)), trained.detach())
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert same(decode(encode(conjugate)), conjugate.resolve_conj())


def test_tensors_of_one_memory_arrive_apart() -> None:
    tensor = torch.arange(6.0)
    first, second, part = decode(encode([tensor, tensor, tensor[2:4]]))
    first.zero_()
    assert (second.tolist(), part.tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0])


def test_what_is_read_belongs_to_the_reader() -> None:
    message = bytearray(encode([torch.zeros(3), np.zeros(3), b"abc"]))
    tensor, array, text = decode(message)
    message[:] = b"\xff" * len(message)
    tensor += 1
    array += 1
    assert (tensor.tolist(), array.tolist(), text) == ([1.0] * 3, [1.0] * 3, b"abc")


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int


class Word(str):
    __slots__ = ()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED = {
    "an object": object(),
    "a function": len,
    "a class": int,
    "an enum": Colour.RED,
    "a named tuple": Pair(1),
    "a subclass": {"word": Word("x")},
    "a module": [torch.nn.Linear(1, 1)],
    "a parameter": torch.nn.Parameter(torch.zeros(1)),
    "a sparse tensor": torch.zeros(2, 2).to_sparse(),
    "a meta tensor": torch.zeros(2, device="meta"),
    "an object array": np.array([object()]),
    "a structured array": np.zeros(2, dtype=[("a", "<i4")]),
    "a huge number": 10**5000,
    "too deep": nested(MAX_DEPTH + 1),
    "a generator": iter(()),
    "a plan to save": SavePlan([]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_travel_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be sent to other ranks") as raised:
        encode(REFUSED[name])
    assert "\n" not in str(raised.value)


def test_too_large_an_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_lightning.parallel.collectives.MAX_BYTES", 1000)
    encode(torch.zeros(200))
    with pytest.raises(ConfigurationError, match="send large data as tensors"):
        encode(torch.zeros(300))


# ---------------------------------------------------------------------- strangers


class Weapon:
    """What a stranger sends: unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.save(Weapon(tmp_path / "saved"), saved)
    pickled = pickle.dumps(Weapon(tmp_path / "made"))
    for message in (pickled, saved.getvalue(), forged(pickled), forged(b'{"bytes":["0",false,false]}', pickled)):
        with pytest.raises(ForeignMessageError, match=r"rank 0 is not one of moe-lightning's \(.*\): nothing of it"):
            decode(message, sender="rank 0")
    assert list(tmp_path.iterdir()) == []


def forged(header: bytes, file: bytes = save({})) -> bytes:
    return len(header).to_bytes(8, "little") + header + file


def table(entry: str, data: bytes = b"") -> bytes:
    """A file of safetensors that declares one tensor."""
    listed = f'{{"0":{{{entry}}}}}'.encode()
    return len(listed).to_bytes(8, "little") + listed + data


TENSOR = b'{"tensor":["0",false,false]}'
STORED = save({"0": torch.zeros(2, dtype=torch.uint8)})
FORGED = {
    "empty": b"",
    "half a head": b"\1",
    "a header beyond the end": (1 << 62).to_bytes(8, "little") + b"[]",
    "no header": forged(b""),
    "no tensors": forged(b"1", b""),
    "no JSON": forged(b"[1,"),
    "deep nesting": forged(b"[" * 200_000 + b"]" * 200_000),
    "as deep as JSON goes": forged(b"[" * 900 + b"]" * 900),
    "deep tags": forged(b'{"set":' * 900 + b"[]" + b"}" * 900),
    "an unknown node": forged(b'{"eval":"1"}'),
    "two tags": forged(b'{"set":[],"dict":[]}'),
    "no tag": forged(b"{}"),
    "a number for bytes": forged(b'{"bytes":8000000000}'),
    "a shape for bytes": forged(b'{"bytearray":{"size":[8000000000]}}'),
    "tensors left": forged(b"1", STORED),
    "a tensor twice": forged(b"[" + TENSOR + b"," + TENSOR + b"]", STORED),
    "a tensor that is not there": forged(TENSOR),
    "a tensor without a name": forged(b'{"tensor":[["0"],false,false]}', STORED),
    "no complex numbers": forged(b'{"tensor":["0",false,true]}', STORED),
    "a key that cannot be one": forged(b'{"dict":[[1],2]}'),
    "a key without a value": forged(b'{"dict":[1]}'),
    "a dict of text": forged(b'{"dict":"ab"}'),
    "an unknown dtype": forged(TENSOR, table('"dtype":"load","shape":[1],"data_offsets":[0,1]', b"1")),
    "a large shape": forged(TENSOR, table('"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]')),
    "a negative shape": forged(TENSOR, table('"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]', b"1")),
    "a short tensor": forged(TENSOR, table('"dtype":"F32","shape":[2],"data_offsets":[0,4]', b"1234")),
    "a tensor beyond the end": forged(TENSOR, table('"dtype":"U8","shape":[9],"data_offsets":[0,9]', b"12345678")),
    "bytes left": forged(TENSOR, table('"dtype":"U8","shape":[1],"data_offsets":[0,1]', b"12")),
    "an array of a number of bytes": forged(b'{"array":["|u1",[8000000000],8000000000]}'),
    "an object array": forged(b'{"array":["|O8",[1],""]}'),
    "a structured array": forged(b'{"array":["i4,O",[1],""]}'),
    "an array of nothing": forged(b'{"array":["|S0",[1],{"bytes":' + TENSOR + b"}]}", STORED),
    "a short array": forged(b'{"array":["<i8",[1],{"bytes":' + TENSOR + b"}]}", STORED),
    "an array of another shape": forged(b'{"array":["|u1",[1073741824,4],{"bytes":' + TENSOR + b"}]}", STORED),
    "a huge number": forged(b"1" * 5000),
    "no device": forged(b'{"device":"nowhere"}'),
    "no constant": forged(b'{"constant":"torch.load"}'),
    "a strange size": forged(b'{"size":["a"]}'),
    "no encoding": forged(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_message_is_one_sentence(name: str) -> None:
    with pytest.raises(
        ForeignMessageError, match=r"^a message of another rank is not one of moe-lightning's"
    ) as raised:
        decode(FORGED[name])
    assert "\n" not in str(raised.value)


@settings(deadline=None, max_examples=150)
@given(value=objects, data=st.data())
def test_damage_is_an_error_or_another_value_but_nothing_else(value: Any, data: st.DataObject) -> None:
    message = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ForeignMessageError):  # any other error is the failure
        decode(message)
