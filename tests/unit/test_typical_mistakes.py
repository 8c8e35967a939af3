"""What people type wrongly or from the habits of other tools, on all four commands: read as what they mean and told, or
refused in one clear sentence. Nothing is trained, simulated or measured.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra

from moe_lightning.cli import bench, ckpt, sim, simulation, train, training
from moe_lightning.cli.composition import KEYS
from moe_lightning.cli.overrides import read_settings
from moe_lightning.errors import ConfigurationError
from tests.commands import write_words

MAIN: dict[str, Callable[[list[str]], Any]] = {
    "moe-train": train.main,
    "moe-train alone": train.main,
    "moe-sim": sim.main,
    "moe-bench": bench.main,
    "moe-ckpt": ckpt.main,
}
BASE = ("model=llama_moe_tiny", "data.source=words.txt", "data.cache_dir=cache", "trainer.max_steps=1")
"""A run that would be small, which moe-train not alone gets; what is typed replaces its parts."""

_OTHER_WORDS = re.compile(
    r"Traceback|Lexer|EOF|extraneous|mismatched|viable|hydra\.cc|defaults list|codec|GlobalHydra|NoneType|Errno"
    r"|has no attribute|object is not|<class|at 0x|Could not"
)
_CURE = re.compile(
    r"\bmust\b|--help|\b(use|give|set|choose|name|lower|write|drop|leave|create|run|start|add|did you mean|make|train|"
    r"put|takes|shows|says|has|ends|makes|counts|trains|simulates|prints|needs?|lists)\b"
)
_EVERY = 40  # of the table, in the default run
_ROWS = Path(__file__).with_name("typical_mistakes.tsv").read_text().splitlines()[1:]
MISTAKES = [(*row.split("\t"), "")[:4] for row in _ROWS]
"""Command, what is typed, what must be told ("is read as" where it is understood, "" where all is well, parts between
" … "), and "always" for the first mistake of a kind: it is tried in the default run."""


def test_the_table_is_long() -> None:
    assert len(MISTAKES) >= 380
    assert {command for command, *_ in MISTAKES} == set(MAIN)


def _answer(command: str, typed: str, capfd: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """The exit code, and what stands on stderr."""
    words = shlex.split(typed)
    if command == "moe-train":
        keys = {word.partition("=")[0] for word in words}
        words = [*(word for word in BASE if word.partition("=")[0] not in keys), *words]
    try:
        code = MAIN[command](words)
    except SystemExit as stop:
        code = stop.code
    lines = capfd.readouterr().err.splitlines()
    return code, [line for line in lines if not line.startswith(("💡", "`Trainer", "TPU", "Error executing job"))]


@pytest.fixture(autouse=True)
def _no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(directory: object, config: Any, elastic: object, *, external: bool) -> None:
        training.check(config)

    monkeypatch.setattr(train, "_launch", launch)
    composes = lambda config: int(not simulation.scenario_of(config, config["policy"]["name"]))  # noqa: E731
    monkeypatch.setattr(simulation, "_simulate", composes)
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # composes once more, for a key of no row
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path, 3000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "my.yaml").write_text("lr: 1\n")


@pytest.mark.parametrize(
    ("command", "typed", "expected"),
    [
        pytest.param(*row, id=f"{row[0]} {row[1]}", marks=[pytest.mark.slow] if index % _EVERY and not when else [])
        for index, (*row, when) in enumerate(MISTAKES)
    ],
)
def test_a_typical_mistake(command: str, typed: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = _answer(command, typed, capfd)
    told = "\n".join(lines)
    assert not _OTHER_WORDS.search(told), told
    assert [part for part in expected.split(" … ") if part not in told] == [], told
    assert len(max(lines, key=len, default="")) < 700
    if expected.startswith("is read as") or not expected:
        assert code == 0, told
        assert all(" is read as " in line or " share " in line for line in lines)
    else:
        assert code in (1, 2), told
        assert _CURE.search(lines[-1]), told
        assert all(" is read as " in line for line in lines[:-1])
        assert not Path("outputs").exists()  # nothing stays of what was refused


# ---------------------------------------------------------------------- reading alone

KNOWN = {
    *KEYS, "data.source", "data.global_batch_size", "optimizer.lr", "model.d_model", "trainer.max_steps",
    "trainer.max_epochs", "model.adapter", "model.context_length", "callbacks.x.source",
}  # fmt: skip
TOP = {*KEYS, "recipes", "hydra"}
OPTIONS = {"--config-dir": True, "-m": False, "--cfg": True}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("strategy.mesh.ep=2 bf16.enabled=true", ["strategy.ep_size=2", "trainer.precision=bf16-mixed"]),
        ("lr=1 hidden_size=64", ["optimizer.lr=1", "model.d_model=64"]),
        ("trainer.stop_on_nan=skip", ["strategy.stop_on_nan=skip"]),
        ("--lr=1 --lr 2 lr: 3 lr:4", [f"optimizer.lr={value}" for value in range(1, 5)]),
        ("epochs=2", ["trainer.max_steps=-1", "trainer.max_epochs=2"]),
        ("trainer.max_steps=9 epochs=2", ["trainer.max_steps=-1", "trainer.max_steps=9", "trainer.max_epochs=2"]),
        ("global_batch_size=8", ["data.global_batch_size=8"]),
        ("model.adapter.kind=lora", ["++model.adapter.kind=lora"]),
        ("model.adapter=lora", ["++model.adapter.kind=lora"]),
        ("--config-dir mine recipes=a -m seed=1,2 --cfg job", None),
        ("+width=3 ++a.b=c ~optimizer.lr optimizer.lr=1 data.source=s3://b/c", None),
        ("run_name=a:b", None),
        ("source=x", ["data.source=x"]),
        ("data.path=x data.file=y", ["data.source=x", "data.source=y"]),
        ("max_steps=3 trainer.max_epochs=2", ["trainer.max_steps=3", "trainer.max_epochs=2"]),
    ],
)
def test_reading(typed: str, read: list[str] | None) -> None:
    assert read_settings(typed.split(), OPTIONS, TOP, lambda: KNOWN) == (typed.split() if read is None else read)


@pytest.mark.parametrize(
    ("typed", "refusal"),
    [
        ("--evaluation_strategy steps", "no key 'evaluation_strategy' here: trainer.val_check_interval=N"),
        ("val_every=100", "no key 'val_every' here: trainer.val_check_interval=N validates every N micro-batches"),
        ("--group_by_length steps", "there is no option '--group_by_length'"),  # not: steps has no value
        ("mode=train", "task=train trains"),
        ("wandb.mode=offline", "logger.wandb.offline=true"),
    ],
)
def test_refusals_name_what_was_typed(typed: str, refusal: str) -> None:
    with pytest.raises(ConfigurationError, match=refusal):
        read_settings(typed.split(), OPTIONS, TOP, lambda: KNOWN)


@pytest.mark.parametrize("word", ["data.source=тексты", "--config-dir=рецепты", "data.source='\"a,тексты\"'"])
@pytest.mark.parametrize(
    ("encoding", "cure"), [("ascii", "set PYTHONUTF8=1, or LC_ALL to a locale of UTF-8"), ("utf-8", "rename it")]
)
def test_words_that_the_locale_cannot_decode(
    word: str, encoding: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = word.encode("utf-8" if encoding == "ascii" else "cp1251").decode(encoding, errors="surrogateescape")
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(ConfigurationError, match=f"is no text in {encoding}, the encoding of this locale: {cure}"):
        read_settings([typed], OPTIONS, TOP, lambda: KNOWN)


def test_a_path_may_have_a_name_that_stands_for_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(["resume=last"], OPTIONS, TOP, lambda: KNOWN) == ["resume=true"]
    (tmp_path / "last").mkdir()
    assert read_settings(["resume=last"], OPTIONS, TOP, lambda: KNOWN) == ["resume=last"]


def test_names_of_the_users_own_recipe_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(["lr=1"], OPTIONS, TOP, lambda: {*KNOWN, "lr"}) == ["lr=1"]


def test_only_one_rank_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert read_settings(["lr=1"], OPTIONS, TOP, lambda: KNOWN) == ["optimizer.lr=1"]
    assert capsys.readouterr().err == ""
