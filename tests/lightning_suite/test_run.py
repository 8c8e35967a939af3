"""The command that runs Lightning's own tests, on a small tree of tests with the same layout; and, where a checkout of
Lightning lies in LIGHTNING_SOURCE, on that.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.lightning_suite.run import Difference, Outcomes, main, report

OWN = """
    import os
    import pytest
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torch.utils.data import DataLoader

    def trainer(path, **options):
        quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
        return Trainer(default_root_dir=path, max_steps=2, **quiet, **options)

    def data():
        return DataLoader(RandomDataset(32, 8), batch_size=4)

    def test_fit(tmp_path):
        trained = trainer(tmp_path, limit_val_batches=0)
        trained.fit(BoringModel(), data())
        assert trained.global_step == 2

    def test_named_strategy(tmp_path):
        trained = trainer(tmp_path, strategy="ddp", accelerator="cpu", devices=1, limit_val_batches=0)
        trained.fit(BoringModel(), data())
        assert trained.num_training_batches in (1, 2)

    def test_wrong_everywhere():
        assert False, "wrong on both"

    def test_of_stock(tmp_path):
        name = type(trainer(tmp_path).strategy).__name__
        assert name != "ExpertParallelStrategy", "another strategy"

    @pytest.mark.skip(reason="not here")
    def test_left_out():
        pass

    def test_without_trainer():
        assert torch.ones(1).item() == 1
"""
KNOWN = """
    [[difference]]
    tests = "*::test_of_stock"
    error = "another strategy"
    reason = "it looks at the name"

    [[difference]]
    tests = "*::test_fit"
    reason = "mended long ago"
"""


def tree(folder: Path, **files: str) -> list[str]:
    """Arguments of the command for a tree of tests."""
    tests = folder / "tests" / "tests_pytorch"
    (tests / "trainer").mkdir(parents=True)
    for name, text in files.items():
        (tests / "trainer" / f"test_{name}.py").write_text(textwrap.dedent(text))
    (folder / "expected.toml").write_text(textwrap.dedent(KNOWN))
    log = ["--log", str(folder / "log")]
    return ["--source", str(folder), "--expected", str(folder / "expected.toml"), *log]


def counts(shown: str) -> dict[str, int]:
    rows = [line.rpartition(" ") for line in shown.splitlines() if line[-1:].isdigit() and ":" not in line]
    return {name.strip(): int(number) for name, _, number in rows}


def test_a_failure_is_one_of_stock_or_expected_or_unknown() -> None:
    stock, ours = Outcomes(), Outcomes()
    for test in ("both", "known", "other"):
        stock.add(test, "failed" if test == "both" else "passed", "x")
        ours.add(test, "passed")
        ours.add(test, "failed", "the\n reason is known")
    known = Difference(tests="k*", error="reason is", reason="so it is")
    stale, of_two = Difference(tests="gone", reason="not any more"), Difference(tests="gone", reason="", ranks=2)
    lines, is_good = report(stock, ours, [known, stale, of_two], ranks=1)
    assert not is_good
    assert lines[-3:] == [
        "expected: known: so it is",
        "stale: gone '': no failure meets it: not any more",
        "UNKNOWN: other: the reason is known",
    ]
    assert report(stock, ours, [known, Difference(tests="other", reason="too")], ranks=1)[1]


@pytest.mark.slow
def test_outcomes_are_compared_with_those_of_stock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tree(tmp_path, own=OWN)) == 0
    shown = capsys.readouterr().out
    assert counts(shown) == {
        "passed": 3, "skipped": 1, "failed on stock, too": 1, "expected differences": 1, "unknown failures": 0,
        "passed on ours only": 0, "stale expectations": 1,
    }  # fmt: skip
    assert "expected: tests_pytorch/trainer/test_own.py::test_of_stock: it looks at the name" in shown
    assert "stale: *::test_fit" in shown


def test_a_missing_checkout_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", str(tmp_path)]) == 2
    assert "has no tests/tests_pytorch: give a checkout of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_lightnings_own_tests(ranks: str, tmp_path: Path) -> None:
    source = os.environ.get("LIGHTNING_SOURCE")
    if source is None:
        pytest.skip("set LIGHTNING_SOURCE to a checkout of Lightning's repository at the installed version")
    assert main(["--source", source, "--ranks", ranks, "--log", str(tmp_path / "log")]) == 0
