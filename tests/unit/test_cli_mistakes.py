"""Mistakes that are found when training starts, or in files of the user: one sentence on stderr and exit code 2."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lightning.cli import train
from moe_lightning.cli.targets import ALLOW_VARIABLE
from moe_lightning.cli.train import main
from moe_lightning.user_errors import report, sentence_of, sentence_of_memory
from tests.commands import WORDS, write_words
from tests.parameters import slow
from tests.programs import exit_code

TINY = ("model=llama_moe_tiny", *WORDS, "logger=none", "ranks=1", "trainer.max_steps=1")

# What is typed, and what the sentence must name; more is in typical_mistakes.tsv, without a start of training.
STARTING = [
    (["+trainer.gradient_clip=1"], ["trainer.gradient_clip", "'gradient_clip_val'"]),
    (["task=validate"], ["checkpoint", "train first"]),
    slow(["strategy.ep_size=3"], ["ep_size=3", "1"]),
    slow(["strategy.replicas=5"], ["replicas=5"]),
    (["strategy.placement=no/table.json"], ["no/table.json"]),
    (["data.context_length=100000000"], ["data.context_length=100000000 is more than model.context_length=64"]),
    slow(
        ["model.context_length=5000"],
        ["data.context_length=5000", "tokens, and one part of source='words.txt' has", "model.context_length"],
    ),
    (
        ["data.source=https://host/words.txt"],
        ["error: data.source=https://host/words.txt is an address", "nothing is downloaded"],
    ),
    slow(["data.tokenizer=gpt2"], ["error: data.tokenizer='gpt2' is neither", "nor ORG/NAME of a model on the Hub"]),
    (
        ["model=huggingface", "model.pretrained=https://hf.co/x"],
        ["error: model.pretrained=https:/hf.co/x is an address", "or ORG/NAME of a model on the Hub"],
    ),
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(tmp_path, 500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def _sentence(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What the command says on stderr, after checking that it is one sentence and exits with 2."""
    assert exit_code(main, arguments) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("moe-train: error: ")
    return line


@pytest.mark.parametrize(("typed", "named"), STARTING, ids=" ".join)
def test_starting(typed: list[str], named: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    sentence = _sentence([*TINY, *typed], capfd)
    assert all(part in sentence for part in named), sentence


def test_relative_paths_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Path]()
    monkeypatch.setattr(train, "run_job", lambda composed, **options: seen.append(Path.cwd()))
    with pytest.raises(SystemExit):
        main(["hydra.job.chdir=true", *TINY])
    assert seen == [tmp_path]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_gpus_that_are_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert "trainer.accelerator=cpu" in _sentence(["trainer.accelerator=gpu"], capfd)


def test_recipe_that_is_no_yaml(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "recipes").mkdir(parents=True)
    (tmp_path / "mine" / "recipes" / "broken.yaml").write_text("# @package _global_\na: [1\n")
    assert "broken.yaml" in _sentence(["--config-dir", "mine", "recipes=broken"], capfd)


def test_recipe_that_is_no_utf8(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "latin.yaml").write_bytes(b"# caf\xe9\nseed: 2\n")
    said = _sentence(["--config-dir", str(tmp_path), "recipes=latin"], capfd)
    assert f"{tmp_path / 'recipes' / 'latin.yaml'} is not UTF-8 text (invalid continuation byte)" in said
    assert "codec" not in said


def test_a_defect_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faulty.py").write_text("def build(config, optimizer):\n    return undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ALLOW_VARIABLE, "faulty")
    assert exit_code(main, [*TINY, "module._target_=faulty.build"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert "NameError" in err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_path_without_room_is_one_sentence(number: int) -> None:
    sentence = sentence_of(OSError(number, os.strerror(number), "/home/x"))
    assert sentence == f"/home/x cannot be read or written ({os.strerror(number)}): give another path"


def out_of_memory(kind: str) -> object:
    """An allocation that fails."""
    if kind == "Python":
        raise MemoryError
    if kind == "NumPy":
        return np.empty(1 << 50)
    return torch.empty(1 << 50)


@pytest.mark.parametrize("kind", ["Python", "NumPy", "torch"])
def test_memory_that_does_not_suffice_is_one_sentence(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        out_of_memory(kind)
    assert report("moe-train", raised.value) == 2
    sentence = capfd.readouterr().err
    assert sentence.startswith("moe-train: error: this needs more memory than there is (")
    assert f"in out_of_memory, {__file__}:" in sentence
    assert sentence.count("\n") == 1
    assert sentence_of_memory(RuntimeError("the user's own words: out of memory")) is None
