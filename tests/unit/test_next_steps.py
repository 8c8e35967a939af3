"""Next steps after a training: each is one that works with what the run has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_lightning.cli.next_steps import next_steps
from moe_lightning.cli.run_directory import RunDirectory

CONFIG: dict[str, Any] = {
    "task": "train",
    "trainer": {"max_steps": 4},
    "callbacks": {},
    "module": {"config": {"_target_": "moe_lightning.models.gpt.GPTConfig"}},
}
PRETRAINED = {
    "config": {"_target_": "moe_lightning.models.huggingface.module.HuggingFaceConfig", "pretrained": "olmoe"},
}


ALWAYS = "the same command with trainer.max_steps=8"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that has trained four steps, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/my run/checkpoints").mkdir(parents=True)
    (tmp_path / "outputs/my run/checkpoints/step-0000004.ckpt").touch()
    (tmp_path / "outputs/my run/config.yaml").touch()
    return RunDirectory(Path("outputs/my run"))


def steps(directory: RunDirectory, **changes: Any) -> list[str]:
    """Steps without their purposes."""
    lines = next_steps(directory, CONFIG | changes).splitlines()
    assert all(line.startswith(f"{'' if index else 'next':<7}") for index, line in enumerate(lines))
    return [line[7:].split("#")[0].strip() for line in lines]


def test_a_finished_run_leads_on(directory: RunDirectory) -> None:
    assert steps(directory) == [
        ALWAYS,
        "moe-bench report 'outputs/my run'",
        "moe-ckpt export 'outputs/my run' model.safetensors",
    ]


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        ({"_target_": "moe_lightning.data.text.TextData", "source": "stdlib"}, ' "def "'),
        ({"_target_": "moe_lightning.data.text.TextData", "source": "books"}, ' "The "'),
        ({"_target_": "moe_lightning.data.text.TextData", "source": "t.bin"}, None),
        ({"_target_": "moe_lightning.data.text.TextData", "source": ["a.npy", {"path": "T.BIN"}]}, None),
        ({"_target_": "moe_lightning.data.text.TextData", "source": "t.bin", "tokenizer": "t.json"}, ' "The "'),
        ({"_target_": "moe_lightning.data.instructions.InstructionData"}, " --chat"),
        ({"_target_": "moe_lightning.data.images.ImageData"}, None),
        ({"_target_": "own.Data"}, None),
    ],
)
def test_a_language_model_is_talked_to(data: dict[str, Any], arguments: str | None, directory: RunDirectory) -> None:
    first = steps(directory, data=data)[0]
    assert first == (f"moe-generate 'outputs/my run'{arguments}" if arguments else ALWAYS)
    purpose = next_steps(directory, CONFIG | {"data": data}).splitlines()[0].rpartition("# ")[2]
    assert purpose == {None: "train on", " --chat": "talk to the model"}.get(arguments, "continue a text")
    (directory.path / "checkpoints/step-0000004.ckpt").unlink()
    assert not any("moe-generate" in step for step in steps(directory, data=data))


def test_curves_are_uploaded_only_where_they_are(directory: RunDirectory) -> None:
    (directory.path / "wandb/offline-run-1-a").mkdir(parents=True)
    assert steps(directory)[-1] == "wandb sync 'outputs/my run'/wandb/offline-run-*"


def test_a_run_without_an_end_in_steps_is_not_trained_on(directory: RunDirectory) -> None:
    assert steps(directory, trainer={"max_steps": -1, "max_epochs": 1})[0].startswith("moe-bench report")
    assert steps(directory, trainer={"max_steps": 100})[0].startswith("moe-bench report")


def test_a_run_that_started_over_is_not_started_over_again(directory: RunDirectory) -> None:
    assert [steps(directory, resume=resume)[0] for resume in (True, "a.ckpt")] == [ALWAYS, ALWAYS]
    assert steps(directory, resume=False)[0] == f"{ALWAYS} resume=true"


def test_a_report_needs_what_draws_it(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install \"moe-lightning[plots]\" && moe-bench report 'outputs/my run'" in steps(directory)


def test_upcycled_models_have_no_class_in_transformers(directory: RunDirectory) -> None:
    upcycled = {"config": PRETRAINED["config"] | {"upcycling": {"num_experts": 8}}}
    assert "moe-ckpt export 'outputs/my run' model.safetensors" in steps(directory, module=upcycled)


def test_a_run_that_left_nothing_leads_nowhere(tmp_path: Path) -> None:
    assert next_steps(RunDirectory(tmp_path), CONFIG) == ""
