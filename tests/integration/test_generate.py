"""A trained run is talked to and measured: moe-train, then moe-generate and moe-eval in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_lightning.cli import evaluate, generate
from moe_lightning.cli.composition import build_object
from moe_lightning.cli.resume import config_of
from moe_lightning.data.tokenizer import load_tokenizer
from tests.commands import SMALL_MODEL, TINY, moe_train, write_words
from tests.parameters import slow

RUNS = {
    "bpe": ["callbacks=[default,partial_experts]", "ranks=2", "data.tokenizer=bpe:300"],
    "bytes": ["ranks=1"],
    "packed": ["ranks=1", "data.packing=true", "data.global_batch_size=4"],
}


@pytest.mark.parametrize("kind", ["bpe", slow("bytes"), slow("packed")])
def test_a_run_is_talked_to_and_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the held-out text is the one that training logged."""
    if kind == "bpe":
        pytest.importorskip("tokenizers", reason="the extra `bpe` is not installed")
    write_words(tmp_path)
    sizes = [*SMALL_MODEL, "model.num_kv_heads=null", "model.vocab_size=auto", "data.val_fraction=0.3"]
    options = ["trainer.max_steps=2", "data.val_samples=null", *RUNS[kind]]
    result = moe_train(tmp_path, *TINY, *sizes, *options)
    assert result.returncode == 0, result.stderr
    assert '\nnext   moe-generate outputs/tiny "The "' in result.stdout
    monkeypatch.chdir(tmp_path)

    assert generate.main(["outputs/tiny", "The ", "--max-new-tokens", "30", "--temperature", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("The ")
    assert len(text) > len("The \n")

    run = Path("outputs/tiny")
    config = config_of(run / "checkpoints" / "x")
    data = build_object(config["data"], "data")
    trained = run / "tokenizer.json"
    tokenizer = load_tokenizer(str(trained) if trained.is_file() else "bytes")
    Path("held_out.txt").write_text(tokenizer.decode(data.corpora[0].val.open().tolist()))
    assert evaluate.main(["outputs/tiny", "held_out.txt", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    logged = json.loads((run / "ranks" / "metrics.json").read_text())["val/loss"]
    assert measured["loss"] == pytest.approx(logged, abs=2e-6)
    assert measured["tokens"] > 100
