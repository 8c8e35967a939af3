"""The papers' figures, recomputed: values that need no cluster agree, and every other one says why it differs."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import paper
from benchmarks.paper_lazarus import shrunk
from benchmarks.paper_table import PaperTable, Row, Sources
from moe_lightning.arguments import add_options
from moe_lightning.cli.bench import main
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import svg
from moe_lightning.simulate.failures import Event
from tests.traces import recorded
from tests.unit.simulated import require_possible

WITHOUT_TRACES = (
    "pec-sizes",
    "lazarus-sizes",
    "moc-sizes",
    "moc-sharding",
    "moc-scaling",
    "moc-tensor",
    "moc-plt",
    "reft-survival",
    "reft-measured",
    "prophet-arithmetic",
)
QUICK = ("lazarus-transfers", "prophet-components", "prophet-layers")
SLOW = tuple(sorted(set(paper.PAPERS) - set(WITHOUT_TRACES) - set(QUICK)))


def _traces() -> Sources:
    return Sources(routing=recorded(), spot=recorded("spot_trace_p3.csv"))


NOT_REPRODUCED = {
    "the same by eq. 6 literally",
    "sharding below baseline, K = 1, most",
    "AN below EN at K = 1, least",
    "AN below EN at K = 1, most",
    "a800: least GPUs that hide base-async",
    "a800: least GPUs that hide MoC",
    "least GPUs that hide base-async with TP 4",
    "GPT-L step 200, 4 lost: states moved",
    "RB over FasterMoE's, largest",
    "top-2 MoE-GPT-DS, 16 GPUs: Pro-Prophet",
}


def _check(table: PaperTable) -> None:
    assert table.rows
    for row in table.rows:
        is_missed = not row.agrees and not row.is_explained
        assert is_missed == (row.what in NOT_REPRODUCED), f"{row.what}: {row.ours} beside {row.printed}"
    text = table.text()
    assert all(row.what in text for row in table.rows)
    assert table.chart is None or svg(table.chart()).startswith("<svg")


@pytest.mark.parametrize("name", WITHOUT_TRACES)
def test_recomputed(name: str) -> None:
    _check(paper.PAPERS[name](Sources()))


@pytest.mark.parametrize("name", QUICK)
def test_recomputed_on_the_recorded_routing(name: str) -> None:
    _check(paper.PAPERS[name](_traces()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_recomputed_by_simulation(name: str) -> None:
    _check(paper.PAPERS[name](_traces()))


EXACT = {
    "Fig. 5: fatal of 10 sets, groups 2 and 3": 4,
    "nodes that DS uses of 10, GPT-L": 8,
    "replicas promised on 5 nodes, GPT-L": 1,
    "parameters, tied": 322.82,
    "size saved at K = 1": 54.25,
    "full over dense": 2.1858,
    "baseline's rank saved at K = 1": 14.822,
    "busiest rank saved by ADPS": 76.925,
    "parameters": 1.7377,
    "Fig. 2: expert weights": 12.339,
    "Fig. 2: other weights": 1.9469,
    "Fig. 2: expert optimizer": 74.033,
    "Fig. 2: other optimizer": 11.682,
    "Table 3: size with W, K = 1": 0.88432,
    "Table 3: size with O, K = 1": 0.5373,
    "Table 3: size with WO, K = 1": 0.42162,
    "the same by eq. 6 literally": 80.973,
    "sharding below baseline, full, least": 11.897,
    "sharding below baseline, full, most": 28.499,
}
"""Ours, where the paper's printed digits leave no room for another way to count."""


def test_what_must_be_exact_is() -> None:
    tables = (paper.PAPERS[name](Sources()) for name in ("lazarus-sizes", "pec-sizes", "moc-sizes", "moc-sharding"))
    ours = {row.what: row.ours for table in tables for row in table.rows}
    assert {what: ours[what] for what in EXACT} == pytest.approx(EXACT, rel=1e-4)


def test_a_reason_accounts_for_so_much_and_no_more() -> None:
    near, far = (Row(what="x", printed=2.0, ours=ours, why="because", explains=(0.8, 1.25)) for ours in (2.4, 2.6))
    assert (near.is_explained, far.is_explained) == (True, False)
    assert near.remark == "because"
    assert far.remark == "NOT REPRODUCED (because)"
    assert Row(what="x", printed=2.0, ours=2.0, why="because").remark == ""
    last = PaperTable(title="t", rows=(near, far)).text().splitlines()[-1]
    assert last == "of 2 printed values 0 agree within 5 %, 1 differ for the reason given, 1 are not reproduced"


def test_all_leaves_out_what_needs_a_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paper, "PAPERS", {name: paper.PAPERS[name] for name in ("reft-measured", "lazarus-transfers")})
    assert main(["paper", "all"]) == 0
    out = capsys.readouterr().out
    assert "== reft-measured" in out
    assert "left out for want of a recorded trace (--routing, --spot): lazarus-transfers" in out


def test_a_row_that_differs_shows_it() -> None:
    row = Row(what="x", printed=2.0, ours=3.0, why="because")
    assert (row.ratio, row.agrees) == (1.5, False)
    assert Row(what="x", printed=None, ours=3.0).agrees
    assert "1.500" in PaperTable(title="t", rows=(row,)).text()


def test_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "reft-survival", "--plots", str(tmp_path)]) == 0
    assert "16.22" in capsys.readouterr().out
    assert (tmp_path / "reft-survival.svg").read_text().startswith("<svg")


def test_an_absent_trace_is_named() -> None:
    with pytest.raises(ConfigurationError, match="--spot"):
        Sources(routing=Path(__file__)).spot_path()


@pytest.mark.parametrize("option", ["--spot", "--routing"])
def test_a_damaged_trace_is_refused_also_where_it_is_not_needed(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "trace"
    damaged.write_text("these are words\n")
    assert main(["paper", "pec-sizes", option, str(damaged)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert str(damaged) in err


def test_a_large_trace_on_a_small_cluster() -> None:
    events = [
        Event(time_ns=0, joined=tuple(range(32))),
        Event(time_ns=1, failed=(1, 2, 3, 4)),
        Event(time_ns=2, failed=(5, 6, 7)),
        Event(time_ns=3, joined=(1, 2)),
    ]
    small = shrunk(events, 10, least=5)
    require_possible(small)
    assert [(len(event.failed), len(event.joined)) for event in small] == [(0, 10), (4, 0), (1, 0), (0, 2)]


def test_every_reproduction_has_a_test() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, paper.Options)
    assert set(paper.PAPERS) == {*WITHOUT_TRACES, *QUICK, *SLOW}
    assert all(name in parser.format_help().replace("\n", "").replace(" ", "") for name in ("pec-sizes", "all"))
