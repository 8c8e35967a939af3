"""Configuration files cannot run code: what they may name, and what the user has to name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch import nn

from moe_lightning.cli.composition import _check_urls, build_object, check_config
from moe_lightning.cli.targets import ALLOW_VARIABLE, located, without_storage
from moe_lightning.cli.train import elastic_options, main
from moe_lightning.errors import ConfigurationError
from tests.commands import WORDS, write_words
from tests.parameters import slow
from tests.programs import exit_code

QUICK = ("model=llama_moe_tiny", *WORDS, "logger=none", "ranks=1", "trainer.max_steps=1")
EXECUTORS = [
    "os.system",
    "subprocess.Popen",
    "builtins.exec",
    "moe_lightning.cli.train.os.system",
    "moe_lightning.callbacks.console.sys.exit",
    "lightning.pytorch.trainer.trainer.os.system",
    "lightning.pytorch.cli.LightningCLI",
    "torch.hub.load",
    "torch.load",
    "torch.nn.modules.module.torch.load",
    "torch.utils.cpp_extension.load_inline",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.SubprocessHandler",
    "moe_lightning.checkpoint.agent_handle.start_agent",
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher",
]


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Writes a recipe, and returns the words that choose it; `ran` is created by code of its folder."""
    write_words(tmp_path, 500)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\n\n\ndef code(*args, **options):\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

    def write(text: str) -> list[str]:
        path = tmp_path / "own" / "recipes" / "mine.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}\n")
        return ["--config-dir", "own", "recipes=mine", *QUICK]

    return write


def _error(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert exit_code(main, words) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize("target", EXECUTORS)
def test_what_executes_is_refused(target: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a class that a configuration may name"):
        located(target, "module")
    with pytest.raises(ConfigurationError, match="is not a class that a configuration may name"):
        build_object({"_target_": target}, "module")


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("reference://::file:///tmp/templates.json", "reference"),
        ("reference::/tmp/templates.json", "reference"),
        ("Reference://x", "reference"),
        ("memory://x::simplecache::s3://bucket/x", "simplecache"),
        ("zip://model.ckpt::s3://bucket/x.zip", "zip"),
        ("dask://x", "dask"),
        *(
            (text, None)
            for text in ("s3://bucket/x", "gs://b", "file:///x", "sqlite:///x.db", "[::1]:29510", "zip", "a::b")
        ),
    ],
)
def test_protocols_that_are_no_storage(text: str, protocol: str | None) -> None:
    assert without_storage(text) == protocol
    assert not protocol or protocol in fsspec.available_protocols(), "a name that fsspec knows"


def test_a_recipe_gives_no_path_that_may_run_code(
    recipe: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "reference::/tmp/evil.json"
    assert f"run_dir='{evil}' is read with reference, which is no storage" in _error(recipe(f"run_dir: {evil}"), capfd)
    for key, config in {
        "model.pretrained": {"model": {"pretrained": evil}},
        "callbacks.checkpoint.dirpath": {"callbacks": {"checkpoint": {"dirpath": evil}}},
    }.items():
        with pytest.raises(ConfigurationError, match=f"^{key}='{evil}' is read with reference, which is no storage"):
            _check_urls(config)


def test_a_text_may_speak_of_such_protocols() -> None:
    _check_urls({"notes": ["C++ std::dir::", "see git://somewhere and reference://"]})


@pytest.mark.parametrize("part", ["strategy", "callbacks", "logger", "plugins"])
def test_a_recipe_gives_the_trainer_no_part_that_moe_train_makes(part: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^trainer.{part} is given by moe-train itself"):
        check_config({"trainer": {part: None}})


def test_parts_of_a_training_need_no_permission() -> None:
    assert located("torch.nn.Linear", "x") is nn.Linear
    assert build_object({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}, "x").weight.shape == (
        3,
        2,
    )


@pytest.mark.parametrize(("allowed", "is_found"), [("os", True), ("os.system", True), ("o, os", True), ("o", False)])
def test_the_environment_allows(allowed: str, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, allowed)
    if is_found:
        assert located("os.system", "x") is os.system
    else:
        with pytest.raises(ConfigurationError, match=f"set {ALLOW_VARIABLE}=os "):
            located("os.system", "x")


def test_a_recipe_of_somebody_else_does_not_even_import(
    recipe: Callable[..., list[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = recipe("callbacks:\n  mine:\n    _target_: evil.code")
    said = _error(words, capfd)
    assert said.startswith("moe-train: error: callbacks.mine._target_=evil.code is not a class that a configuration")
    assert said.endswith(f"set {ALLOW_VARIABLE}=evil in the environment")
    assert not Path("ran").exists()
    monkeypatch.setenv(ALLOW_VARIABLE, "evil")
    assert "callbacks.mine._target_ makes a NoneType" in _error(words, capfd)
    assert Path("ran").exists()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("hydra:\n  job:\n    env_set:\n      PYTHONSTARTUP: evil.py", "job.env_set.PYTHONSTARTUP"),
        ("hydra:\n  callbacks:\n    mine:\n      _target_: evil.code", "callbacks.mine._target_"),
        (
            "hydra:\n  job_logging:\n    version: 1\n    handlers:\n      mine:\n        (): evil.code",
            "job_logging.handlers.mine.()",
        ),
        ("hydra:\n  sweeper:\n    _target_: evil.code", "sweeper._target_"),
        ("hydra:\n  sweeper:\n    params:\n      +hydra.job.env_set.X: 1", "sweeper.params.+hydra.job.env_set.X"),
        ("hydra:\n  overrides:\n    hydra: [+hydra.job.env_set.X=1]", "overrides.hydra"),
    ],
)
def test_settings_of_hydra_are_the_commands(
    text: str, key: str, recipe: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    words = recipe(text)
    said = _error([*words, *(["-m", "seed=1,2"] if "sweeper" in key else [])], capfd)
    assert said.startswith(f"moe-train: error: hydra.{key}, which can run code, comes from a file of --config-dir")
    assert not Path("ran").exists()


def test_no_file_takes_the_place_of_hydras(recipe: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    words = recipe("seed: 3")
    own = Path("own/hydra/sweeper/basic.yaml")
    own.parent.mkdir(parents=True)
    own.write_text("_target_: evil.code\n")
    assert "own/hydra would take the place of Hydra's own settings" in _error([*words, "-m", "seed=1,2"], capfd)
    assert not Path("ran").exists()


def test_texts_do_not_become_nodes() -> None:
    text = '${oc.create:"{_target_: os.system, command: touch ran}"}'
    built = build_object({"_target_": "torch.nn.ParameterDict", "parameters": {"x": text}}, "module")
    assert built["x"] == text


@pytest.mark.parametrize("name", ["_partial_", "_args_", "_recursive_"])
def test_hydras_other_words_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"x.{name} has no effect here"):
        build_object({"_target_": "torch.nn.Identity", name: True}, "x")


@pytest.mark.parametrize("name", ["module", "program", "num_ranks", "log_dir"])
def test_a_recipe_does_not_choose_the_program_of_workers(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^elastic.{name} is not a setting"):
        elastic_options({"elastic": {name: "doctest"}}, external=False)


def test_own_recipes_can_be_swept(recipe: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr("moe_lightning.cli.train.run_job", lambda composed, **options: seeds.append(composed.seed))
    assert exit_code(main, [*recipe("log_every: 3"), "-m", "seed=1,2", "+hydra.job.env_set.GREETING=hello"]) == 0
    assert seeds == [1, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hydra:\n  run:\n    dir: elsewhere", []),
        slow("seed: 3", ["+hydra.job.env_set.GREETING=hello"]),
        ("hydra:\n  job:\n    env_set:\n      GREETING: hello", ["allowed"]),
    ],
)
def test_what_hydra_may_be_told(
    text: str, words: list[str], recipe: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr("moe_lightning.cli.train.run_job", lambda composed, **options: found.update(os.environ))
    if "allowed" in words:
        monkeypatch.setenv(ALLOW_VARIABLE, "hydra")
    assert exit_code(main, [*recipe(text), *(word for word in words if word != "allowed")]) == 0
    assert found.get("GREETING", "hello") == "hello"
    assert ("GREETING" in found) == ("GREETING" in text + "".join(words))
