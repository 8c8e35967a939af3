"""moe-bench plot: what a run logged is what its pictures show."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from moe_lightning.cli import plot
from moe_lightning.cli.bench import main
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import svg

SVG = "{http://www.w3.org/2000/svg}"
ALL = {
    "checkpoint_mb",
    "checkpoint_ms",
    "expert_load_layer00",
    "expert_load_layer01",
    "imbalance",
    "k",
    "plt",
    "recovery",
}


def write_metrics(directory: Path, version: int, rows: list[dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    folder = directory / "csv" / f"version_{version}"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def recovery(step: int, total_ms: float) -> dict[str, float]:
    phases = {"leaving": 20, "rendezvous": 200, "groups": 10, "plan": 1, "movement": 40, "settling": 90}
    logged = {f"recovery/{phase}_ms": value for phase, value in phases.items()}
    return {"step": step, **logged, "recovery/total_ms": total_ms, "recovery/ranks": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A made-up run of two starts: the second repeats step 20."""
    layers = {"moe/layer00/rank_imbalance_ratio": 1.0, "moe/layer01/rank_imbalance_ratio": 2.0}
    saved = {"checkpoint/plt": 0.01, "checkpoint/k_snapshot": 4, "checkpoint/k_persist": 1}
    written = {"checkpoint/snapshot_bytes": 5e6, "checkpoint/persist_bytes": 2e6, "checkpoint/snapshot_ms": 7}
    write_metrics(
        tmp_path,
        2,
        [{"step": 10, **layers}, {"step": 20, **layers, **saved, **written}, {"step": 20, "checkpoint/stall_ms": 0.25}],
    )
    repeated = {"step": 20, **layers, "moe/layer00/rank_imbalance_ratio": 4.0, "checkpoint/stall_ms": 0.75}
    write_metrics(tmp_path, 10, [repeated, recovery(25, 400.0), recovery(31, 361.0), {"step": 30, "val/loss": 2.0}])
    (tmp_path / "expert_load.csv").write_text(
        "step,layer,expert_0,expert_1\n10,0,0.5,0.5\n10,1,0.9,0.1\n20,0,0.4,0.6\n20,1,1.0,0.0\n"
    )
    return tmp_path


def words(picture: Figure) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg(picture)).iter(f"{SVG}text")]


def test_every_picture_is_drawn_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run)]) == 0
    files = {path.stem: path.read_text() for path in (run / "pictures").iterdir()}
    assert set(files) == ALL
    assert all(ElementTree.fromstring(text).tag == f"{SVG}svg" for text in files.values())
    assert {Path(line).stem for line in capsys.readouterr().out.splitlines()} == ALL


def test_the_later_start_counts_where_steps_were_repeated(run: Path) -> None:
    metrics = plot.read_metrics([run / "csv" / f"version_{version}" / "metrics.csv" for version in (2, 10)])
    assert metrics["moe/layer00/rank_imbalance_ratio"] == {11: 1.0, 21: 4.0}
    assert metrics["checkpoint/stall_ms"] == {20: 0.75}
    assert metrics["val/loss"] == {31: 2.0}
    assert "step" not in metrics


def test_all_pictures_count_the_steps_that_were_made(tmp_path: Path) -> None:
    """Lightning writes the metrics of the tenth step into row 9; checkpoints and loads of experts say 10."""
    row = {"moe/layer00/rank_imbalance_ratio": 1.0, "moe/layer00/expert_imbalance_ratio": 2.0}
    write_metrics(tmp_path, 0, [{"step": 9, **row}, {"step": 10, "checkpoint/plt": 0.5}])
    metrics = plot.read_metrics([tmp_path / "csv" / "version_0" / "metrics.csv"])
    assert set(metrics["moe/layer00/rank_imbalance_ratio"]) == set(metrics["checkpoint/plt"]) == {10}


def test_the_starts_are_taken_in_the_order_of_their_numbers(run: Path) -> None:
    (bars,) = dict(plot.draw(run))["checkpoint_ms"].axes
    assert bars.patches[0].get_height() == 0.75, "version 10 comes after version 2"


def test_bars_of_a_recovery_are_its_phases(run: Path) -> None:
    picture = dict(plot.draw(run))["recovery"]
    bars = [bar for bar in picture.axes[0].patches if bar.get_width() > 0]
    first = [bar.get_width() for bar in bars if bar.get_y() < 0]
    assert first == pytest.approx([0.02, 0.2, 0.01, 0.001, 0.04, 0.09, 0.039]), "the last: what no phase accounts for"
    assert len(bars) == 7 + 6
    assert {"step 25, 3 ranks", "step 31, 3 ranks", "400 ms", "361 ms", "other"} <= {w.strip() for w in words(picture)}


def test_only_what_was_logged_is_drawn(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, [{"step": 5, "checkpoint/plt": 0.0}, {"step": 9, "checkpoint/plt": float("nan")}])
    assert [name for name, _ in plot.draw(tmp_path)] == ["plt"]


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "give a run directory" in capsys.readouterr().err
    write_metrics(tmp_path, 0, [{"step": 5, "val/loss": 2.0}])
    assert main(["plot", str(tmp_path)]) == 2
    assert "logged nothing to draw" in capsys.readouterr().err
    (tmp_path / "csv" / "version_0" / "metrics.csv").write_text("step,val/loss\n1,much\n")
    with pytest.raises(ConfigurationError, match=r"metrics\.csv is not a table of metrics"):
        list(plot.draw(tmp_path))
