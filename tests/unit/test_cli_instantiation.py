"""Names and types of a configuration against constructors, and the words in which a wrong one is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from moe_lightning.cli.composition import build_object, check_arguments, config_folder
from moe_lightning.cli.training import with_one_checkpoint
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import nearest, one_line

HERE = "tests.unit.test_cli_instantiation"


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LIGHTNING_ALLOW", f"no_such_package, {HERE}")


class Engine:
    """Something to build."""

    def __init__(self, size: int, *, factor: float = 1.0, parts: Sequence[str] = (), name: str | None = None) -> None:
        if size < 0:
            raise ValueError(f"size={size} is negative")
        self.size, self.factor, self.parts, self.name = size, factor, parts, name


def broken(size: int) -> int:
    return size + undefined  # type: ignore[name-defined]  # noqa: F821


def test_build() -> None:
    built = build_object({"_target_": f"{HERE}.Engine", "size": 3, "parts": ["a"]}, "engine", name="x")
    assert isinstance(built, Engine)
    assert (built.size, built.parts, built.name) == (3, ["a"], "x")


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({"size": "big"}, "car.engine.size='big' must be an integer"),
        ({"size": 1, "factr": 2.0}, "car.engine.factr is not an argument of Engine (did you mean 'factor'?): "),
        ({"size": 1, "parts": ["a", 2]}, "car.engine.parts=['a', 2] must be a list, each item text"),
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
    with pytest.raises(ConfigurationError, match=r"^engine cannot be built: size=-1 is negative"):
        build_object({"_target_": f"{HERE}.Engine", "size": -1}, "engine")


def test_a_defect_in_the_constructor_is_not() -> None:
    with pytest.raises(NameError):
        build_object({"_target_": f"{HERE}.broken", "size": 1}, "engine")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("modle.num_layers", "model.num_layers"),
        ("lr", "optimizer.lr"),
        ("modl", "model"),
        ("model.num_expert", "model.num_experts"),
        ("zzz", None),
        ("optimiser.lr", "optimizer.lr"),
        ("optimzer.Lr", "optimizer.lr"),
        ("model.lr", None),
        ("foo.lr", None),
        ("trainer.maxsteps", "trainer.max_steps"),
        ("strategy.mesh.ep", None),  # optimizer.eps is another section's
        ("ep", None),
        ("fp16.enabled", None),
        ("moe.enabled", None),
        ("zero_optimization.offload.device", None),
        ("model.layers", None),
        ("wandb.mode", None),
    ],
)
def test_nearest(typed: str, meant: str | None) -> None:
    known = ["optimizer", "optimizer.lr", "optimizer.eps", "model", "model.num_experts", "model.num_layers"]
    known += ["trainer.max_steps", "trainer.devices", "strategy.mesh.tp", "elastic.enabled", "strategy.mesh"]
    assert nearest(typed, known) == meant


def test_one_line_takes_the_first_paragraph() -> None:
    assert one_line("a\n  b\n\nc") == "a b"


def test_partial_checkpoints_replace_full_ones_whatever_stands_beside_them(tmp_path: Path) -> None:
    for choices in ("[partial_experts,routing_recorder]", "[routing_recorder,partial_experts]", "fault_recovery"):
        with config_folder():
            composed = compose("train", [f"callbacks={choices}", "run_name=x", f"run_dir={tmp_path}"])
        callbacks = OmegaConf.to_container(composed.callbacks, resolve=True)
        kept = with_one_checkpoint(callbacks)  # type: ignore[arg-type]
        assert kept["checkpoint"] is None, choices
        assert kept["partial_experts_checkpoint"]["dirpath"] == str(tmp_path / "checkpoints")
    elsewhere = {"checkpoint": {"dirpath": "a"}, "partial_experts_checkpoint": {"dirpath": "b"}}
    assert with_one_checkpoint(elsewhere) == elsewhere
