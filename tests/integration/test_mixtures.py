"""A mixture of text, records and a folder of tokens under moe-train: one order, whatever ranks and however resumed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from moe_lightning.cli import data
from tests.commands import TINY, moe_train, write_words


def losses(run: Path) -> dict[int, float]:
    rows = []
    for path in sorted(run.glob("csv/version_*/metrics.csv")):
        with path.open() as file:
            rows += [row for row in csv.DictReader(file) if row.get("train/loss")]
    return {int(row["step"]): float(row["train/loss"]) for row in rows}


@pytest.mark.slow
def test_a_mixture_resumes_on_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_words()
    Path("code.jsonl").write_text("".join(json.dumps({"body": f"x_{i} = {i * i}\n"}) + "\n" for i in range(400)))
    Path("more.txt").write_text("".join(f"{i} more lines of text\n" for i in range(300)))
    assert data.main(["tokenize", "more.txt", "--tokenizer=bytes", "--out=more", "--workers=1"]) == 0
    source = "[{path: words.txt, weight: 3}, {path: code.jsonl, weight: 2, text_field: body}, {path: more, weight: 1}]"
    options = (*TINY, f"data.source={source}", "trainer.log_every_n_steps=1", "optimizer.decay=constant")
    found = []
    for name, parts in (("whole", [(1, 6)]), ("cut", [(2, 3), (1, 6)])):
        for ranks, steps in parts:
            ran = moe_train(tmp_path, *options, f"run_name={name}", f"ranks={ranks}", f"trainer.max_steps={steps}")
            assert ran.returncode == 0, ran.stderr
        found.append(losses(tmp_path / "outputs" / name))
    assert found[0].keys() == found[1].keys()
    assert [found[1][step] for step in found[0]] == pytest.approx([*found[0].values()], abs=1e-5)
    changed = moe_train(tmp_path, *options, "run_name=cut", "ranks=1", "trainer.max_steps=7", "seed=1",
                        f"data.source={source.replace('3', '4')}")  # fmt: skip
    assert changed.returncode == 2
    assert "resume_overrides=true" in changed.stderr
