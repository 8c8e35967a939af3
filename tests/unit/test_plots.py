"""Charts: every value is drawn, where it belongs, impossible ones are refused, and equal input gives equal bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from moe_lightning.balancing.cost_model import BlockCosts, Timeline, predict_timeline
from moe_lightning.balancing.shadow_search import predict_plan, top_shadows
from moe_lightning.cli.run_metrics import metrics_files, read_metrics
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_loads
from moe_lightning.plots import bar_chart, heat_map, line_chart, phase_lines, svg, time_line

SVG = "{http://www.w3.org/2000/svg}"


def words(figure: Figure) -> set[str]:
    return {element.text or "" for element in ElementTree.fromstring(svg(figure)).iter(f"{SVG}text")}


def test_lines_go_through_their_points() -> None:
    figure = line_chart({"a & b": [(0.0, 0.0), (10.0, 4.0)], "$flat$": [(0.0, 2.0), (10.0, 2.0)]}, "t", "x", "y")
    rising, flat = figure.axes[0].lines
    assert rising.get_xydata().tolist() == [[0, 0], [10, 4]]
    assert flat.get_xydata().tolist() == [[0, 2], [10, 2]]
    assert {"a & b", "$flat$", "t", "x", "y"} <= words(figure)


def test_steps_hold_until_the_next_point() -> None:
    (line,) = line_chart({"a": [(0.0, 1.0), (1.0, 2.0)]}, "t", "x", "y", steps=True).axes[0].lines
    assert line.get_drawstyle() == "steps-post"


def test_a_line_through_one_point_is_a_mark() -> None:
    one, _ = line_chart({"a": [(3.0, 1.0)], "b": [(0.0, 1.0), (1.0, 2.0)]}, "t", "x", "y").axes[0].lines
    assert one.get_marker() == "o"


def test_steps_are_whole_numbers_on_an_axis() -> None:
    figure = line_chart({"a": [(1, 0.0), (2, 10.0)]}, "t", "x", "y")
    assert not {"1.2", "1.4", "1.5"} & words(figure)


def test_bars_are_as_high_as_their_values() -> None:
    figure = bar_chart({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 4.0}}, "t", "ms")
    bars = {round(bar.get_x() + bar.get_width() / 2, 6): bar.get_height() for bar in figure.axes[0].patches}
    assert bars == {-0.2: 1.0, 0.2: 2.0, 0.8: 4.0}
    assert {"one", "two", "a", "b", "ms"} <= words(figure)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("extreme", [1e308, -1e308, 1.79e308, 5e-324, -3.0])
def test_every_finite_number_lies_in_the_picture(extreme: float) -> None:
    figure = line_chart({"a": [(0.0, 2.0), (1.0, extreme)], "b": [(0.0, -extreme), (1.0, 0.0)]}, "t", "x", "y")
    low, high = figure.axes[0].get_ylim()
    assert all(low <= y <= high for line in figure.axes[0].lines for y in line.get_ydata())
    assert not {"inf", "nan"} & words(figure)
    assert "nan" not in svg(bar_chart({"a": {"b": abs(extreme), "c": 1.0}}, "t", "y"))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite points"):
        line_chart({"a": [(0.0, float("nan"))]}, "t", "x", "y")
    with pytest.raises(ConfigurationError, match="finite values"):
        bar_chart({"a": {"b": -1.0}}, "t", "y")
    with pytest.raises(ConfigurationError, match="no phase that lasts"):
        phase_lines({"a": {"b": 0.0}}, "t")
    with pytest.raises(ConfigurationError, match="has no values"):
        heat_map(np.zeros((0, 2)), "t", "layer", "expert", "steps")
    with pytest.raises(ConfigurationError, match="without spans"):
        time_line(Timeline(spans=(), total_s=0.0, transfer_s=0.0, exposed_s=0.0), "x")


def test_few_bars_carry_their_values() -> None:
    assert {"0.0162", "3,590"} <= words(bar_chart({"one": {"a": 0.0162, "b": 3590.0}}, "t", "ms"))
    assert "1.23" not in words(bar_chart({str(i): {"a": 1.234} for i in range(40)}, "t", "ms"))


def test_lanes_that_last_longer_than_the_axis_say_so() -> None:
    figure = phase_lines({"short": {"a": 0.2, "b": 0.1}, "long": {"b": 4.0}}, "t", end_s=1.0)
    assert {" 300 ms", " > 4.0 s", "200 ms"} <= {text.get_text() for text in figure.axes[0].texts}
    assert max(bar.get_x() + bar.get_width() for bar in figure.axes[0].patches) == 1.0


def test_names_keep_out_of_the_axes_and_of_each_other() -> None:
    lines = {f"moe/layer{layer:02d}/dropped_fraction": [(0.0, 1.0), (9.0, 2.0 + layer)] for layer in range(9)}
    figure = line_chart(lines, "a title that is much longer than the picture is wide, so that it breaks", "step", "y")
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    assert figure.bbox.x1 >= axes.title.get_window_extent().x1
    assert axes.get_window_extent().height > 0.5 * 3.4 * figure.dpi, "the picture grows with its legend"


def test_equal_input_gives_equal_bytes_whatever_the_user_set() -> None:
    def text() -> str:
        return svg(heat_map(np.array([[0.5, 0.5], [0.1, 0.9]]), "loads", "layer", "expert", "steps"))

    expected = text()
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert text() == expected
    assert expected.startswith("<svg")
    assert "<metadata" not in expected
    assert not re.search(r' id="\w+_\d+"', expected), "two pictures in one page would share it"
    assert '<g class="paper">' in expected


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r'pip install "moe-lightning\[plots\]"$'):
        line_chart({"a": [(0.0, 1.0)]}, "t", "x", "y")


# ----------------------------------------------------------------------
# What a run logged, read back.


def write_metrics(directory: Path, version: int, rows: list[dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    folder = directory / "csv" / f"version_{version}"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def recovery(step: int, total_ms: float) -> dict[str, float]:
    phases = {"leaving": 20, "rendezvous": 200, "groups": 10, "plan": 1, "movement": 40, "resume": 90}
    logged = {f"recovery/{phase}_ms": value for phase, value in phases.items()}
    return {"step": step, **logged, "recovery/total_ms": total_ms, "recovery/ranks": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A made-up run of two starts: the second repeats step 20."""
    layer = {"moe/layer00/rank_imbalance_ratio": 1.0}
    write_metrics(
        tmp_path, 2, [{"step": 10, **layer}, {"step": 20, **layer}, {"step": 20, "checkpoint/stall_ms": 0.25}]
    )
    repeated = {"step": 20, "moe/layer00/rank_imbalance_ratio": 4.0, "checkpoint/stall_ms": 0.75}
    write_metrics(tmp_path, 10, [repeated, {"step": 30, "val/loss": 2.0}])
    return tmp_path


def test_the_later_start_counts_where_steps_were_repeated(run: Path) -> None:
    metrics = read_metrics(metrics_files(run))  # version 10 comes after version 2
    assert metrics["moe/layer00/rank_imbalance_ratio"] == {11: 1.0, 21: 4.0}
    assert metrics["checkpoint/stall_ms"] == {20: 0.75}
    assert metrics["val/loss"] == {31: 2.0}
    assert "step" not in metrics


def test_all_pictures_count_the_steps_that_were_made(tmp_path: Path) -> None:
    """Lightning writes the metrics of the tenth step into row 9; checkpoints and loads of experts say 10."""
    row = {"moe/layer00/rank_imbalance_ratio": 1.0, "moe/layer00/expert_imbalance_ratio": 2.0}
    write_metrics(tmp_path, 0, [{"step": 9, **row}, {"step": 10, "checkpoint/plt": 0.5}])
    metrics = read_metrics(metrics_files(tmp_path))
    assert set(metrics["moe/layer00/rank_imbalance_ratio"]) == set(metrics["checkpoint/plt"]) == {10}


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, [{"step": 5, "val/loss": 2.0}])
    (tmp_path / "csv" / "version_0" / "metrics.csv").write_text("step,val/loss\n1,much\n")
    with pytest.raises(ConfigurationError, match=r"metrics\.csv is not a table of metrics"):
        read_metrics(metrics_files(tmp_path))


# ----------------------------------------------------------------------
# Pictures hold what they are made from and are well-formed.


def test_a_heat_map_has_a_cell_for_every_expert_and_sample() -> None:
    shares = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    axes, scale = heat_map(100 * shares.T, "a < b", "expert", "step", "%", names=["1", "11"]).axes
    (image,) = axes.images
    np.testing.assert_allclose(np.asarray(image.get_array()), 100 * shares.T)
    assert image.get_clim() == (0, 70), "no load is the lightest"
    assert [mark.get_text() for mark in axes.get_xticklabels()] == ["1", "11"]
    assert scale.get_ylabel() == "%"


def test_a_time_line_has_a_bar_for_every_span_in_its_place() -> None:
    tokens = np.array([[30, 40], [10, 0]])
    placement = uniform_placement(2, 2)
    costs = BlockCosts(row_bytes=4, weight_bytes=100, gradient_bytes=100, bytes_per_s=1e3, rows_per_s=1e3)
    times = predict_plan(tokens, placement, top_shadows(tokens, placement, 1), costs)
    line = predict_timeline([times] * 2, [costs] * 2)
    picture = time_line(line, "step 3")
    bars = [path.get_extents() for lane in picture.axes[0].collections for path in lane.get_paths()]
    drawn = sorted((bar.x0, bar.x1) for bar in bars)
    assert np.allclose(drawn, sorted((1e3 * span.start_s, 1e3 * span.end_s) for span in line.spans))
    assert "step 3" in svg(picture)


def test_loads_of_a_run_are_read(tmp_path: Path) -> None:
    table = tmp_path / "expert_load.csv"
    table.write_text("step,layer,expert_0,expert_1\n10,0,0.5,0.5\n10,1,0.9,0.1\n20,0,0.4,0.6\n20,1,1.0,0.0\n")
    steps, shares = read_loads(table)
    assert steps == [10, 20]
    assert shares.tolist() == [[[0.5, 0.5], [0.4, 0.6]], [[0.9, 0.1], [1.0, 0.0]]]


@pytest.mark.parametrize("begun", ["2,0,0.5,0.5\n", "2,0,0.5,0.5\n2,1,0.", "2,0,0.5,0.5\n2,1"])
def test_a_step_that_is_not_whole_yet_is_left_out(tmp_path: Path, begun: str) -> None:
    path = tmp_path / "expert_load.csv"
    path.write_text("step,layer,expert_0,expert_1\n1,0,0.5,0.5\n1,1,0.25,0.75\n" + begun)
    steps, shares = read_loads(path)
    assert (steps, shares.tolist()) == ([1], [[[0.5, 0.5]], [[0.25, 0.75]]])


HEAD = "step,layer,expert_0,expert_1\n"


@pytest.mark.parametrize(
    "text",
    ["", "1,0,0.5,0.5\n", *(HEAD + rows for rows in (HEAD, "1,0,0.5\n1,2,0.5\n", "1,0,0.5\n1,1,0.5,0.5\n",
                                                   "1,0,nan,0.5\n", "1,0,-1,2\n"))],
)  # fmt: skip
def test_files_that_hold_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "expert_load.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="has no lines of step, layer, shares"):
        read_loads(path)
    with pytest.raises(ConfigurationError, match="is not a file"):
        read_loads(tmp_path / "absent.csv")
