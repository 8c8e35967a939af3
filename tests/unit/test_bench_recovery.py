"""moe-bench recovery: what was done twice is counted as lost, phases add up, wrong options are refused, and it runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import recovery
from benchmarks.measuring import goal
from benchmarks.recovery_runs import KILL_PHASES, DiaryReader, _phases
from benchmarks.recovery_trace import Replay, format_table, score
from benchmarks.recovery_worker import Task
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import phase_lines
from moe_lightning.simulate.failures import read_trace
from tests.options import options_of
from tests.traces import recorded

TASK = Task(folder="", ranks=2, batch=4)


def parse(*arguments: str) -> recovery.Options:
    return options_of(recovery.Options, *arguments)


def diary(attempts: list[tuple[int, int, bool]]) -> tuple[list[dict[str, Any]], int, int]:
    """Lines of two ranks; steps reached and lost. Every attempt goes back by some steps, in fresh processes or the
    same ones, and does some.
    """
    entries: list[dict[str, Any]] = []
    reached, executed, pid, time_s = 0, 0, 0, 0.0
    for back, done, fresh in [(0, 1, True), *attempts]:
        reached = max(0, reached - back)
        if fresh:
            pid += 2
            time_s += 1.0
            entries += [{"kind": "start", "pid": pid + rank, "time_s": time_s} for rank in range(2)]
        for _ in range(done):
            reached, executed, time_s = reached + 1, executed + 1, time_s + 1.0
            for rank in range(2):
                entries.append(
                    {
                        "kind": "step",
                        "pid": pid + rank,
                        "time_s": time_s + 0.1 * rank,
                        "step": reached,
                        "ranks": 2,
                        "step_s": 1.0,
                    }
                )
    return entries, reached, executed - reached


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.booleans()), max_size=6))
def test_what_was_done_twice_is_lost(attempts: list[tuple[int, int, bool]]) -> None:
    entries, reached, lost = diary(attempts)
    seconds = entries[-1]["time_s"]
    found = score(entries, 0.0, seconds, TASK)
    assert (found["steps"], found["steps_lost"]) == (reached, lost)
    assert found["samples_per_s"] == pytest.approx(reached * TASK.batch / seconds)
    ends_s = sorted({0.0, *(entry["time_s"] for entry in entries if entry["kind"] == "step")})
    gaps = [later - earlier for earlier, later in pairwise(ends_s)]
    assert found["longest_gap_s"] == pytest.approx(max(gaps))


def test_only_steps_within_the_time_count() -> None:
    entries, _, _ = diary([(0, 9, False)])
    assert score(entries, 0.0, 5.5, TASK)["steps"] == 4
    with pytest.raises(ConfigurationError, match=r"no step was done in 0.5 s"):
        score(entries, 0.0, 0.5, TASK)


def test_a_trace_becomes_absences_of_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n60000,remove,a\n180000,add,c\n")
    [first, second] = Replay(path=trace, start_s=30.0, speed=60.0, seconds=10.0).absences(2)
    assert [(a.from_s, a.to_s) for a in first] == [(0.5, 2.5)]
    assert second == ()


def test_the_spot_trace_fits_four_ranks() -> None:
    absences = Replay(path=recorded("spot_trace_p3.csv"), start_s=1980.0, speed=60.0, seconds=60.0).absences(4)
    lost = sorted(a.from_s for slot in absences for a in slot if a.from_s < 60.0)
    assert len(lost) >= 4
    assert lost[0] > 0, "all four ranks are there at first"


def test_phases_add_up_to_the_whole(tmp_path: Path) -> None:
    seconds = dict.fromkeys(KILL_PHASES[1:-1], 0.125) | {"total": 0.75}
    lines = [
        {"kind": "recovery", "time_s": 11.0, "began_at": 10.25, "seconds": seconds, "steps_lost": 1},
        {"kind": "step", "time_s": 11.5, "step": 3, "ranks": 2, "step_s": 1.0},
    ]
    (tmp_path / "diary-0-7.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    watch = DiaryReader(tmp_path)
    after = {7: [entry for entry in watch.read() if entry["kind"] == "step"]}
    found = _phases(watch, after, 10.0)
    assert found["detection"] == 0.25
    assert found["repeated step"] == pytest.approx(0.5)
    assert sum(found[name] for name in KILL_PHASES) == found["total"] == 1.5
    assert len(watch.read()) == 2, "a line that is being written waits"


def test_goals_and_tables_say_what_was_measured() -> None:
    assert goal("x", 0.5, 1.0, "{:.2f} s") == "met     x: 0.50 s, goal at most 1.00"
    assert goal("x", 1.5, 1.0, "{:.2f} s").startswith("missed  x: 1.50 s")
    row = {"steps": 10.0, "samples_per_s": 2.5, "steps_lost": 3.0, "longest_gap_s": 1.25}
    table = format_table({"ours": row, "DS-like": {**row, "samples_per_s": 0.5}}).splitlines()
    assert table[1].split() == ["ours", "10", "2.5", "5.0", "3", "1.2"]
    assert table[2].split() == ["DS-like", "10", "0.5", "1.0", "3", "1.2"]


def test_phases_are_drawn_to_scale() -> None:
    drawn = phase_lines({"a": {"one": 1.0, "two": 3.0}, "b": {"one": 8.0}}, "title", end_s=4.0)
    boxes = [(bar.get_x(), bar.get_width()) for bar in drawn.axes[0].patches if bar.get_width()]
    assert boxes == [(0, 1), (1, 3), (0, 4)], "a lane that is too long ends at the axis"
    assert " > 8.0 s" in {text.get_text() for text in drawn.axes[0].texts}
    with pytest.raises(ConfigurationError, match="has no phase that lasts"):
        phase_lines({"a": {}}, "title")


@pytest.mark.slow  # by default, tests/chaos kills ranks, and the tests above draw and print what was measured
def test_a_rank_is_killed_and_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results, drawn = tmp_path / "rows.json", tmp_path / "recovery.svg"
    small = "--quick --parts kill --ranks 2 --batch 4 --d-model 16 --d-expert 16"
    assert recovery.run(parse(*small.split(), "--json", str(results), "--svg", str(drawn))) == 0
    [row] = json.loads(results.read_text())["kill"]["in process"]
    assert row["total"] == pytest.approx(sum(row[name] for name in KILL_PHASES))
    assert all(row[name] >= 0 for name in KILL_PHASES)
    assert row["steps_lost"] == 0
    assert "in-process recovery" in capfd.readouterr().out
    assert ">in process</text>" in drawn.read_text()


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n120000,remove,a\n300000,add,c\n")
    results = tmp_path / "rows.json"
    small = "--quick --parts restart cost trace --ranks 2 --batch 4 --d-model 16 --d-expert 16 --trace-start 0"
    assert recovery.run(parse(*small.split(), "--trace", str(trace), "--json", str(results))) == 0
    found = json.loads(results.read_text())
    assert set(found["restart"]) == {"restart, memory", "restart, storage", "torchrun, DDP"}
    assert found["restart"]["restart, memory"][0]["steps_lost"] <= 1
    assert set(found["cost"]) == {"bare", "recovery", "+ snapshots", "+ ARC", "+ AEC"}
    assert set(found["trace"]) == {"ours", "DS(FT)-like", "DS-like"}
    assert found["trace"]["ours"]["steps"] > 0


def test_a_trace_without_a_node_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("9000000000000,add,a\n")
    with pytest.raises(
        ConfigurationError, match=r"trace.csv has no node in the 3600 s from --trace-start 1980 on: choose"
    ):
        recovery.run(parse("--parts", "kill", "trace", "--trace", str(trace)))


def test_an_unsorted_trace_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n9000000,add,b\n8000000,remove,a\n")
    with pytest.raises(
        ConfigurationError, match="line 3: time 8000000 ms is before 9000000 ms: sort the trace by time"
    ):
        recovery.run(parse("--parts", "kill", "trace", "--trace", str(trace)))
    with pytest.raises(ConfigurationError, match="sort the trace by time"):
        read_trace(trace, start_ms=3_600_000)
