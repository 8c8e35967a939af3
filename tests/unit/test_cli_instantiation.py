"""Names and types of a configuration against constructors, and the words in which a wrong one is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.cli.instantiation import build_object, check_arguments, described, matches, shown
from moe_lightning.cli.mistakes import nearest, one_line
from moe_lightning.cli.worker import with_one_checkpoint
from moe_lightning.errors import ConfigurationError

HERE = "tests.unit.test_cli_instantiation"


class Engine:
    """Something to build."""

    def __init__(self, size: int, *, factor: float = 1.0, parts: Sequence[str] = (), name: str | None = None) -> None:
        if size < 0:
            raise ValueError(f"size={size} is negative")
        self.size, self.factor, self.parts, self.name = size, factor, parts, name


def broken(size: int) -> int:
    return size + undefined  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
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
    ],
)
def test_matches(value: object, hint: Any, fits: bool) -> None:
    assert matches(value, hint) is fits


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "an integer or null"),
        (float, "a number"),
        (Literal["a", 3, True], "'a' or 3 or true"),
        (Sequence[int], "a list"),
        (Mapping[str, int], "a mapping"),
        (str | Path, "text or a path"),
    ],
)
def test_described(hint: Any, words: str) -> None:
    assert described(hint) == words


def test_shown_as_typed() -> None:
    assert [shown(value) for value in (None, True, "a", 1.5, [1])] == ["null", "true", "'a'", "1.5", "[1]"]


def test_build() -> None:
    built = build_object({"_target_": f"{HERE}.Engine", "size": 3, "parts": ["a"]}, "engine", name="x")
    assert isinstance(built, Engine)
    assert (built.size, built.parts, built.name) == (3, ["a"], "x")


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({"size": "big"}, "car.engine.size='big' has the wrong type: use an integer"),
        ({"size": 1, "factr": 2.0}, "car.engine.factr is not an argument of Engine (did you mean 'factor'?): "),
        ({"size": 1, "parts": ["a", 2]}, "car.engine.parts=['a', 2] has the wrong type: use a list"),
    ],
)
def test_wrong_arguments(node: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_arguments({"car": {"engine": {"_target_": f"{HERE}.Engine", **node}}})
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_package.Thing", "cannot be imported"),
        (f"{HERE}.Motor", "has no Motor"),
        (f"{HERE}.HERE", "is not a class or function"),
    ],
)
def test_wrong_targets(target: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_arguments([{"_target_": target}])


def test_a_refusal_of_the_constructor_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match="engine cannot be built: size=-1 is negative"):
        build_object({"_target_": f"{HERE}.Engine", "size": -1}, "engine")


def test_a_defect_in_the_constructor_is_not() -> None:
    with pytest.raises(NameError):
        build_object({"_target_": f"{HERE}.broken", "size": 1}, "engine")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("modl", "model"),
        ("num_expert", "model.num_experts"),
        ("zzz", None),
    ],
)
def test_nearest(typed: str, meant: str | None) -> None:
    known = ["optimizer", "optimizer.lr", "model", "model.num_experts", "trainer.max_steps"]
    assert nearest(typed, known) == meant


def test_one_line_takes_the_first_paragraph() -> None:
    assert one_line("a\n  b\n\nc") == "a b"


def test_partial_checkpoints_replace_full_ones_whatever_stands_beside_them(tmp_path: Path) -> None:
    for choices in ("[partial_experts,routing_recorder]", "[routing_recorder,partial_experts]", "fault_recovery"):
        with initialize_config_dir(str(CONFIG_DIR.absolute()), version_base="1.3"):
            composed = compose("train", [f"callbacks={choices}", "run_name=x", f"run_dir={tmp_path}"])
        callbacks = OmegaConf.to_container(composed.callbacks, resolve=True)
        kept = with_one_checkpoint(callbacks)  # type: ignore[arg-type]
        assert kept["checkpoint"] is None, choices
        assert kept["partial_experts_checkpoint"]["dirpath"] == str(tmp_path / "checkpoints")
    elsewhere = {"checkpoint": {"dirpath": "a"}, "partial_experts_checkpoint": {"dirpath": "b"}}
    assert with_one_checkpoint(elsewhere) == elsewhere
