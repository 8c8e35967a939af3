"""The tokenizer that a run has trained belongs to it: without the cache it goes on, is measured and is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moe_lightning.checkpoint.inspect import checkpoint_values, trained_tokenizer
from moe_lightning.cli.ckpt import main
from tests.commands import TINY, moe_train, write_words

pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")

BPE = (*TINY, "ranks=1", "data.tokenizer=bpe:300", "model.vocab_size=auto")


def lose_the_cache(folder: Path) -> None:
    """And bring a text on which another tokenizer would be trained."""
    shutil.rmtree(folder / "cache")
    text = folder / "words.txt"
    text.write_text(text.read_text().replace("words", "pages").replace("line", "verse"))


@pytest.mark.slow
@pytest.mark.parametrize("callbacks", ["default", "[default,partial_experts]"])
def test_a_run_keeps_its_tokenizer(tmp_path: Path, callbacks: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_words(tmp_path)
    command = (*BPE, f"callbacks={callbacks}")
    result = moe_train(tmp_path, *command, "trainer.max_steps=2")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "outputs" / "tiny"
    kept = (run / "tokenizer.json").read_text()
    newest = max((run / "checkpoints").glob("step-*"))
    assert json.loads(kept)["model"]["type"] == "BPE"
    assert trained_tokenizer(checkpoint_values(newest)) == kept

    lose_the_cache(tmp_path)
    measured = moe_train(tmp_path, *command, "trainer.max_steps=2", "task=validate")
    assert measured.returncode == 0, measured.stderr
    result = moe_train(tmp_path, *command, "trainer.max_steps=3", "run_name=other", f"resume={newest}",
                       "resume_overrides=true")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "outputs" / "other" / "tokenizer.json").read_text() == kept

    assert main(["export", str(newest), str(tmp_path / "model.safetensors")]) == 0
    assert (tmp_path / "model.tokenizer.json").read_text() == kept
    assert "its tokenizer in" in " ".join(capsys.readouterr().out.split())
