"""Parts by name: registered in the process, or brought by an installed package; each mistake is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from moe_lightning.errors import ConfigurationError
from moe_lightning.registry import Registry
from tests.plugins import install


class Greeting(Protocol):
    text: str

    def said(self) -> str: ...


class Greeter(Protocol):
    def __call__(self, name: str, /, *, loud: bool) -> Greeting: ...


class Hello:
    def __init__(self, name: str, *, loud: bool) -> None:
        self.text = f"Hello {name}{'!' if loud else ''}"

    def said(self) -> str:
        return self.text


@pytest.fixture
def greeters() -> Registry[Callable[..., Any]]:
    return Registry("greeter", Greeter, {"hello": Hello, "good_day": Hello}, makes=Greeting)


def test_parts_are_found_by_name(greeters: Registry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greeters.register("again")(Hello)
    install(tmp_path, monkeypatch, {"greeter": {"outside": "outside:Outside"}}, outside=OUTSIDE)
    assert list(greeters) == ["hello", "good_day"]
    assert greeters["hello"] is greeters["again"] is Hello
    assert greeters.make("again", "you", loud=True).said() == "Hello you!"
    assert greeters.make("outside", "you", loud=True).said() == "hi"


OUTSIDE = """
class Outside:
    text = "hi"
    def __init__(self, name, loud=False): pass
    def said(self): return self.text

class Silent:
    def __init__(self, name, loud): pass

def old(name): return None

number = 3
"""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "helo",
            None,
            r"^greeter='helo' is not a known greeter \(did you mean 'hello'\?\): use one of hello, good_day, o",
        ),
        ("xyz", None, "^greeter='xyz' is not a known greeter: use one of hello, good_day, other$"),
        (
            "lost",
            "lost_module:part",
            r"cannot be imported from lost_module:part \(ModuleNotFoundError: No module",
        ),
        ("lost", "outside:Inside", r"cannot be imported from outside:Inside \(AttributeError: .*mend the package"),
        ("old", "outside:old", r"^greeter='old', outside:old, has other arguments .*it must take \(name, loud=\)$"),
        ("number", "outside:number", r"^greeter='number', outside:number, cannot be called: it must take \(name, loud"),
        ("silent", "outside:Silent", "makes a Silent, which lacks said, text: give it all that Greeting names"),
    ],
)
def test_mistakes_are_sentences(
    name: str, value: str | None, message: str, greeters: Registry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"other": "outside:Outside"} | ({name: value} if value else {})
    install(tmp_path, monkeypatch, {"greeter": entries}, outside=OUTSIDE)
    with pytest.raises(ConfigurationError, match=message):
        greeters.make(name, "you", loud=True)


def test_a_name_means_one_part(greeters: Registry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="'hello' comes with moe_lightning: use another name"):
        greeters.register("hello")
    install(tmp_path / "a", monkeypatch, {"greeter": {"twice": "outside:Outside"}}, outside=OUTSIDE)
    install(tmp_path / "b", monkeypatch, {"greeter": {"twice": "outside:Silent"}})
    with pytest.raises(ConfigurationError, match="means outside:Outside and outside:Silent: uninstall"):
        greeters.find("twice")


def test_own_names_need_no_look_around(greeters: Registry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    assert greeters["hello"] is Hello
