"""moe-bench compare: all contenders do the same work, wrong options are refused, and it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import compare
from benchmarks.compare_contenders import BASES, SAVINGS, TRAININGS, Contender, bytes_of_one
from benchmarks.compare_worker import warmup_steps
from benchmarks.measuring import medians_of
from benchmarks.peak_memory import PeakMemory
from moe_lightning.cli.short_training import on_ranks
from moe_lightning.errors import ConfigurationError
from tests.options import options_of

PIPELINE = "ours, pp, 4 micro-batches"
SMALL = "--rounds 1 --steps 4 --every 2 --batch 4 --context 16 --d-model 16 --d-expert 32 --layers 2 --experts 8"


def parse(*arguments: str) -> compare.Options:
    return options_of(compare.Options, *arguments)


def test_figures_are_those_of_the_slower_rank_and_of_the_middle_round() -> None:
    first = {"round": 0, "contender": "ours", "step_s": 1.0, "state_bytes": 8.0}
    second = first | {"step_s": 3.0, "state_bytes": 4.0}
    assert compare.slowest([first | {"disk_bytes": 5}, second]) == first | {"step_s": 3.0, "disk_bytes": 5}
    rounds = [first | {"round": index, "step_s": seconds} for index, seconds in enumerate([5.0, 1.0, 2.0])]
    assert medians_of(rounds, but=("round", "contender")) == {"step_s": 2.0, "state_bytes": 8.0}


def test_unequal_work_is_no_comparison() -> None:
    assert compare.loss_spread({"a": {"loss": 2.0}, "b": {"loss": 2.0005}}) == pytest.approx(5e-4)
    with pytest.raises(ConfigurationError, match=r"'b' ends at loss 2.10000, 'a' at 2.00000"):
        compare.loss_spread({"a": {"loss": 2.0}, "b": {"loss": 2.1}})
    with pytest.raises(ConfigurationError, match="the comparison is void"):
        compare.loss_spread({"a": {"loss": float("nan")}, "b": {"loss": 2.1}})


def test_every_way_to_save_has_a_training_to_compare_it_with() -> None:
    for contender in SAVINGS.values():
        base = TRAININGS[BASES[contender.strategy]]
        assert (base.strategy, base.loop, base.saving) == (contender.strategy, contender.loop, None)


def test_the_peak_is_of_what_came_after_the_restart() -> None:
    memory = PeakMemory()
    for size_mb in (160, 40):
        memory.restart()
        block = torch.ones(size_mb << 18)
        del block
    peak = memory.bytes()
    if peak is None:
        pytest.skip("this system tells no peaks")
    assert 30e6 < peak < 120e6


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_the_warm_up_ends_with_a_checkpoint(every: int) -> None:
    assert warmup_steps(every) % every == 0
    assert 3 <= warmup_steps(every) - every < 3 + every


def test_only_the_last_stock_checkpoint_counts(tmp_path: Path) -> None:
    for step, size in ((5, 70), (10, 30)):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "data").write_bytes(bytes(size))
    assert bytes_of_one(tmp_path, Contender(strategy="ddp", saving="dcp")) == 30
    (tmp_path / "step-15.ckpt").write_bytes(bytes(20))
    assert bytes_of_one(tmp_path, Contender(strategy="ddp", saving="file")) == 20


def test_tables_relate_each_row_to_its_base() -> None:
    training = {"step_s": 0.1, "mean_step_s": 0.2, "cpu_s": 0.1, "state_bytes": 2e6, "peak_bytes": 9e6}
    saving = {"mean_step_s": 0.3, "stall_s": 0.05, "disk_bytes": 4e6}
    medians = dict.fromkeys(TRAININGS, training) | dict.fromkeys(SAVINGS, saving)
    medians["ours"] = training | {"step_s": 0.05, "cpu_s": 0.08, "mean_step_s": 0.15}
    lines = f"{compare.training_table(medians, 1000)}\n{compare.saving_table(medians, 5)}".splitlines()
    rows = {name: line.removeprefix(name).split() for name in medians for line in lines if line.startswith(f"{name}  ")}
    assert rows["ours"] == ["50.0", "0.50", "80.0", "0.80", "20000", "2.0", "9.0"]
    assert rows["DDP, our layer"] == ["100.0", "1.00", "100.0", "1.00", "10000", "2.0", "9.0"]
    assert rows["DDP, dcp.async_save"] == ["5", "50.0", "300.0", "1.50", "4.0"]
    assert rows["ours, K = E/4, each step"] == ["1", "50.0", "300.0", "2.00", "4.0"]


@pytest.mark.slow
def test_contenders_do_the_same_work(tmp_path: Path) -> None:
    names = ["DDP, loop", "FSDP2, our layer", "ours", "DDP, dcp.async_save", "ours, K = E/4, each step", PIPELINE]
    options = asdict(parse(*SMALL.split())) | {"contenders": names, "folder": str(tmp_path)}
    function = "benchmarks.compare_worker:measure_all"
    rows = {row["contender"]: row for row in on_ranks(function, options, num_ranks=2, folder=tmp_path)[0]}
    assert set(rows) == set(names)
    assert compare.loss_spread(rows) < 1e-5
    looped, sharded, ours = (rows[name]["state_bytes"] for name in names[:3])
    assert sharded < 0.55 * looped
    assert sharded < ours < looped
    assert rows["ours, K = E/4, each step"]["disk_bytes"] < rows["DDP, dcp.async_save"]["disk_bytes"]
    assert all(rows[name]["stall_s"] > 0 for name in names[3:5])


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert compare.run(parse(*SMALL.split(), "--directory", str(tmp_path), "--json", str(path))) == 0
    assert {row["contender"] for row in json.loads(path.read_text())} == set(TRAININGS | SAVINGS)
    assert "all end at the same loss" in capfd.readouterr().out
    assert [found.name for found in tmp_path.iterdir()] == ["rows.json"]
