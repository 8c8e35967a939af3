"""Pictures hold what they are made from and are well-formed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_lightning.balancing.cost_model import BlockCosts, Timeline, predict_timeline
from moe_lightning.balancing.shadow_search import predict_plan, top_shadows
from moe_lightning.cli import pictures
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_loads
from moe_lightning.plots import heat_map, svg, time_line


def test_a_heat_map_has_a_cell_for_every_expert_and_sample() -> None:
    shares = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    axes, scale = heat_map(shares, [1, 11], "a < b").axes
    (image,) = axes.images
    np.testing.assert_allclose(np.asarray(image.get_array()), 100 * shares.T)
    assert image.get_clim() == (0, 70), "no load is the lightest"
    assert [mark.get_text() for mark in axes.get_xticklabels()] == ["1", "11"]
    assert scale.get_ylabel() == "% of the layer's assignments"


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


def test_nothing_to_draw() -> None:
    with pytest.raises(ConfigurationError, match="needs samples and a step for each"):
        heat_map(np.zeros((0, 3)), [], "x")
    with pytest.raises(ConfigurationError, match="without spans"):
        time_line(Timeline(spans=(), total_s=0.0, transfer_s=0.0, exposed_s=0.0), "x")


def test_pictures_of_a_run_and_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "expert_load.csv"
    table.write_text("step,layer,expert_0,expert_1\n10,0,0.5,0.5\n10,1,0.9,0.1\n20,0,0.4,0.6\n20,1,1.0,0.0\n")
    steps, shares = read_loads(table)
    assert steps == [10, 20]
    assert shares.tolist() == [[[0.5, 0.5], [0.4, 0.6]], [[0.9, 0.1], [1.0, 0.0]]]
    trace = tmp_path / "trace.npz"
    np.savez(trace, counts=np.array([[[[1, 3], [2, 2]]]]), iteration=np.array([1]))
    steps, shares = read_loads(trace)
    assert (steps, shares.tolist()) == ([1], [[[0.375, 0.625]]])
    assert pictures.run(pictures.Options(source=table, out=tmp_path / "out")) == 0
    assert "load of the experts of MoE layer 1" in (tmp_path / "out" / "layer01.svg").read_text()
    assert capsys.readouterr().out.count(".svg") == 2


@pytest.mark.parametrize("begun", ["2,0,0.5,0.5\n", "2,0,0.5,0.5\n2,1,0.", "2,0,0.5,0.5\n2,1"])
def test_a_step_that_is_not_whole_yet_is_left_out(tmp_path: Path, begun: str) -> None:
    path = tmp_path / "expert_load.csv"
    path.write_text("step,layer,expert_0,expert_1\n1,0,0.5,0.5\n1,1,0.25,0.75\n" + begun)
    steps, shares = read_loads(path)
    assert (steps, shares.tolist()) == ([1], [[[0.5, 0.5]], [[0.25, 0.75]]])


@pytest.mark.parametrize(
    "text",
    ["", "step,layer,share\n", "1,0,0.5\n1,2,0.5\n", "1,0,0.5\n1,1,0.5,0.5\n", "1,0,nan,0.5\n", "1,0,-1,2\n"],
)
def test_files_that_hold_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "expert_load.csv"
    path.write_text(text and "step,layer,expert_0,expert_1\n" + text)
    with pytest.raises(ConfigurationError, match="has no lines of step, layer, shares"):
        read_loads(path)
    path.write_text("1,0,0.5,0.5\n")  # without a head
    with pytest.raises(ConfigurationError, match="has no lines of step, layer, shares"):
        read_loads(path)
    with pytest.raises(ConfigurationError, match="is not a file"):
        read_loads(tmp_path / "absent.csv")
