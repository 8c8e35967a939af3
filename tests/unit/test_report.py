"""moe-bench report: a page that holds what the run recorded, needs nothing else, and opens in a browser."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from moe_lightning import MoELayer
from moe_lightning.callbacks.fault_recovery import COLUMNS
from moe_lightning.callbacks.telemetry import PlacementTable, placement_line
from moe_lightning.cli import report
from moe_lightning.cli.bench import main
from moe_lightning.cli.report import read_placements
from moe_lightning.cli.run_metrics import metrics_files, read_metrics
from moe_lightning.dispatch.placement import Placement
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import svg
from tests.unit.test_plots import recovery, write_metrics

EVIL = "<script>console.error('run')</script>\"'&\x00"
SECTIONS = ["training", "loads", "imbalance", "placements", "recoveries", "checkpoints", "configuration"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A made-up run whose every text wants to be a script."""
    rows: list[dict[str, float]] = [
        {
            "step": step,
            "train/loss": 5 - step / 20,
            f"loss of {EVIL!r}/loss".replace(",", ""): 1.0,
            "train/tokens_per_s": 1e4,
            "moe/layer00/rank_imbalance_ratio": 1.5,
            "moe/layer00/expert_imbalance_ratio": 2.0,
        }
        for step in range(20)
    ]
    saved = {"checkpoint/plt": 0.01, "checkpoint/persist_bytes": 2e6, "checkpoint/stall_ms": 0.25}
    write_metrics(tmp_path, 0, [*rows, {"step": 10, **saved}, recovery(12, 400.0)])
    (tmp_path / "expert_load.csv").write_text("step,layer,expert_0,expert_1\n10,0,0.5,0.5\n20,0,0.4,0.6\n")
    (tmp_path / "placement.csv").write_text("step,layer,ranks,expert_0,expert_1\n2,0,2,0,1 1\n12,0,1,0,0\n")
    with (tmp_path / "csv" / "version_0" / "recoveries.csv").open("w", newline="") as file:
        row = [12, "2026-01-01", EVIL, 1, 4, 3, EVIL, 0, 0, 0.4]
        csv.writer(file).writerows([COLUMNS, [str(cell).replace("\x00", "") for cell in row]])
    name = EVIL.replace("\x00", "").replace("'", "''")
    (tmp_path / "config.yaml").write_text(
        f"run_name: '{name}'\nranks: auto\ntrainer: {{devices: 2}}\nmodule: {{config: {{d_model: 8}}}}\n"
    )
    (tmp_path / "summary.json").write_text('{"steps": 20, "val_loss": 2.5}')
    damaged = tmp_path / "checkpoints" / "step-00000010"
    damaged.mkdir(parents=True)
    (damaged / "MANIFEST.json").write_text("<script>")
    return tmp_path


@pytest.fixture(autouse=True)
def _empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes most of a page's time."""
    monkeypatch.setattr(report, "svg", lambda _: "<svg />")


@pytest.fixture
def drawn(_empty_pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the pictures after all."""
    monkeypatch.setattr(report, "svg", svg)


class Names(HTMLParser):
    """Elements and attributes of a page, as a browser's parser finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


@pytest.mark.usefixtures("drawn")
def test_the_page_has_every_section_and_only_its_own_markup(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    text = (run / "report.html").read_text()
    assert [section.get("id") for section in ElementTree.fromstring(text).iter("section")] == SECTIONS
    found = Names()
    found.feed(text)
    assert not {"script", "iframe", "img", "object"} & set(found.tags)
    assert not any(name.startswith("on") for name, _ in found.attributes)
    links = [value for name, value in found.attributes if name in ("href", "src")]
    assert set(links) == {"data:,", *(f"#{name}" for name in SECTIONS)}
    labels = [value for name, value in found.attributes if name == "aria-label"]
    assert found.tags.count("svg") == found.attributes.count(("role", "img")) == len(labels) - 1  # the other: of nav
    words = " ".join(ElementTree.fromstring(text).itertext())
    for shown in ("2.5 nats", "<script>console.error('run')</script>", "damaged: ", "d_model", "1 replicas of one"):
        assert shown in words, shown


def test_a_link_in_the_run_is_replaced_and_not_followed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("home") / ".profile"
    own.write_text("own\n")
    (run / "report.html").symlink_to(own)
    assert main(["report", str(run)]) == 0
    assert own.read_text() == "own\n"
    assert not any(path.is_symlink() for path in run.rglob("*"))
    given = run / "page.html"
    given.symlink_to(own)
    assert main(["report", str(run), "--out", str(given)]) == 0
    assert own.read_text().startswith("<!DOCTYPE html>"), "the user gave that path"


def test_the_page_says_how_long_it_ran_and_where_ranks_were_lost(run: Path) -> None:
    # Lightning counts a validation after the last step further.
    write_metrics(run, 1, [{"step": 20, "val/loss": 2.5, "epoch": 0}, {"step": 12, "recovery/lost_rank": 1}])
    text = report.render(run)
    assert "a run of moe-lightning, 20 steps on 2 ranks" in text
    assert text.count("Dotted: ranks were lost and the others went on.") >= 2
    assert "callbacks=load_balancer places replicas by load" in text


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ("trainer: {devices: 1}", "20 steps on 1 rank<"),
        ("trainer: {devices: [0, 1], num_nodes: 1}\nelastic: {num_nodes: 2}", "20 steps on 4 ranks<"),
        ("trainer: {devices: auto}", "20 steps<"),
        ("trainer: x\nelastic: [x]", "20 steps<"),
    ],
)
def test_ranks_of_all_machines_count(run: Path, config: str, size: str) -> None:
    (run / "config.yaml").write_text(f"run_name: a\n{config}\n")
    assert size in report.render(run)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_file_that_is_nested_too_deeply_is_named(run: Path, name: str) -> None:
    (run / name).write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match=f"{name} cannot be read: move it away"):
        report.render(run)


def test_a_run_that_goes_on_is_not_described_by_the_summary_of_its_former_start(run: Path) -> None:
    write_metrics(run, 1, [{"step": 29, "val/loss": 1.25}])
    words = " ".join(ElementTree.fromstring(report.render(run)).itertext())
    assert "30 steps on 2 ranks" in words
    assert "1.25 nats" in words
    assert "2.5 nats" not in words


def test_ranks_that_join_are_no_recovery(run: Path) -> None:
    assert "Dotted:" not in report.render(run), "no rank was lost"
    write_metrics(run, 1, [{**recovery(14, 200.0), "recovery/lost_rank": 2}, recovery(16, 100.0)])
    assert "Dotted:" in report.render(run)


def test_recoveries_at_one_step_are_counted_one_by_one(run: Path) -> None:
    """A rank that joins is none."""
    with (run / "csv" / "version_0" / "recoveries.csv").open("a", newline="") as file:
        csv.writer(file).writerows(
            [12, "2026-01-01", "", lost, 3, 2, "", 0, 0, seconds] for lost, seconds in ((2, 0.5), ("", 9.0))
        )
    words = " ".join(" ".join(ElementTree.fromstring(report.render(run)).itertext()).split())
    assert "recoveries from lost ranks 2 " in words


def test_a_table_without_a_head_is_refused(run: Path) -> None:
    (run / "placement.csv").write_text("2,0,2,0,1 1\n")
    with pytest.raises(ConfigurationError, match="no lines of step, layer, ranks, holders"):
        report.render(run)


def test_the_last_placements_are_read(run: Path) -> None:
    ((layer, (step, replicas)),) = read_placements(run / "placement.csv").items()
    assert (layer, step) == (0, 12)
    np.testing.assert_array_equal(replicas, [[1], [1]])


def test_the_table_of_placements_grows_where_one_changes(tmp_path: Path) -> None:
    layers = [MoELayer(8, 8, num_experts=3), MoELayer(8, 8, num_experts=3)]
    written = PlacementTable(tmp_path / "placement.csv")
    for step in (10, 20):
        written.write(step, dict(enumerate(map(placement_line, layers))))
    layers[1].dispatcher.placement = Placement(replicas=np.array([[1, 1], [0, 2], [1, 0]]))
    written.write(30, dict(enumerate(map(placement_line, layers))))
    lines = (tmp_path / "placement.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [["10", "0"], ["10", "1"], ["30", "1"]]
    last = read_placements(tmp_path / "placement.csv")
    assert {layer: step for layer, (step, _) in last.items()} == {0: 10, 1: 30}
    np.testing.assert_array_equal(last[1][1], [[1, 1], [0, 2], [1, 0]])


@pytest.mark.usefixtures("drawn")
@pytest.mark.slow
def test_pages_of_large_models_stay_small(tmp_path: Path) -> None:
    """60 layers of 256 experts, 40 samples, 128 ranks: 0.6 and 2 million cells are too many to open."""
    shares = ",".join(["0.00391"] * 256)
    lines = (f"{step},{layer},{shares}\n" for step in range(40) for layer in range(60))
    (tmp_path / "expert_load.csv").write_text("".join(["step,layer,experts\n", *lines]))
    held = ",".join(str(expert % 128) for expert in range(256))
    (tmp_path / "placement.csv").write_text(
        "".join(["step,layer,ranks,experts\n", *(f"1,{layer},128,{held}\n" for layer in range(60))])
    )
    (tmp_path / "config.yaml").write_text("run_name: large\n")
    text = report.render(tmp_path)
    assert len(text) < 20e6
    assert "16 of 60 MoE layers are shown" in text


def test_a_section_without_data_says_what_to_turn_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_name: bare\n")
    page = ElementTree.fromstring(report.render(tmp_path))
    silent = {
        section.get("id"): "".join(note.itertext())
        for section in page.iter("section")
        for note in section.findall("p[@class='missing']")
    }
    assert list(silent) == SECTIONS[:-1]
    assert all("callbacks" in note for note in silent.values())


def test_what_is_no_run(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "give a run directory" in capsys.readouterr().err
    for name, text in (
        ("config.yaml", "a: ["),
        ("summary.json", "[]"),
        ("placement.csv", "step,layer,ranks\n1,x\n"),
        ("placement.csv", ""),
    ):
        kept = (run / name).read_text()
        (run / name).write_text(text)
        with pytest.raises(ConfigurationError, match=rf"{name}.* move it away"):
            report.render(run)
        (run / name).write_text(kept)


def test_losses_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, [{"step": step, "train/loss": math.nan if step > 6 else 3.0} for step in range(9)])
    text = report.render(tmp_path)
    assert "train/loss was NaN or infinite 2 times, first at step 8." in text
    assert "No losses were logged" not in text


@pytest.mark.usefixtures("drawn")
def test_losses_that_end_in_overflow_stay_in_the_picture(tmp_path: Path) -> None:
    losses = [3.0, 1.5e308, -1.5e308, math.inf, math.nan, 2.0]
    rows: list[dict[str, float]] = [{"step": step, "train/loss": losses[step % 6]} for step in range(2000)]
    write_metrics(tmp_path, 0, rows)
    text = report.render(tmp_path)
    assert "was NaN or infinite 666 times" in text
    points = re.findall(r' d="([^"]*)"', text)
    assert points
    assert not re.search("inf|nan", " ".join(points))


@pytest.mark.parametrize("config", ["module: {config: 5}", "module: {config: null}", "module: 5"])
def test_a_module_of_the_users_own_has_other_settings(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(f"run_name: own\n{config}\n")
    assert "run_name" in report.render(tmp_path)


def test_folders_and_lines_that_no_logger_wrote(run: Path) -> None:
    shutil.copytree(run / "csv" / "version_0", run / "csv" / "version_old")
    assert "Loss and speed" in report.render(run)
    with (run / "csv" / "version_0" / "metrics.csv").open("a") as file:
        file.write("x,y,z\n")
    with pytest.raises(ConfigurationError, match=r"metrics.csv is not a table of metrics by step \(see line 24\)"):
        report.render(run)


@pytest.mark.usefixtures("drawn")
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed here")
def test_a_browser_shows_every_section(run: Path, tmp_path: Path) -> None:
    """In the smallest headless browser; a forbidden or failing part of the page would be in its log."""
    assert BROWSER is not None
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-breakpad"]
    options += ["--enable-logging=stderr", "--log-level=0", "--window-size=400,900", "--dump-dom"]
    folders = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'page.png'}"]
    command = [BROWSER, *options, *folders, (tmp_path / "page.html").as_uri()]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{BROWSER} does not run here: {error}")
    assert ":CONSOLE" not in shown.stderr
    assert all(f'<section id="{name}">' in shown.stdout for name in SECTIONS)
    assert "<script" not in shown.stdout
    assert (tmp_path / "page.png").stat().st_size > 5000


def test_bars_of_a_recovery_are_its_phases(tmp_path: Path) -> None:
    write_metrics(tmp_path, 0, [recovery(25, 400.0), recovery(31, 361.0)])
    first, second = report._recovery_lanes(read_metrics(metrics_files(tmp_path))).items()
    assert (first[0], second[0]) == ("step 25, 3 ranks", "step 31, 3 ranks")
    assert list(first[1].values()) == pytest.approx([0.02, 0.2, 0.01, 0.001, 0.04, 0.09, 0.039])
    assert second[1]["other"] == pytest.approx(0), "what no phase accounts for"


def test_a_validation_after_the_last_step_is_seen_at_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning logs it one step later than the others, and a line through one point is none."""
    rows = [{"step": step, "train/loss": 5 - step / 20} for step in range(50)]
    write_metrics(tmp_path, 0, [*rows, {"step": 50, "val/loss": 2.5}])
    (tmp_path / "summary.json").write_text('{"steps": 50, "val_loss": 2.5}')
    shown: dict[str, list[tuple[float, float]]] = {}
    monkeypatch.setattr(report, "line_chart", lambda lines, *_, **__: shown.update(lines))
    assert "a run of moe-lightning, 50 steps" in report.render(tmp_path)
    assert shown["val/loss"] == [(50.0, 2.5)]
    assert shown["train/loss"][-1] == (50.0, 5 - 49 / 20)


@pytest.mark.usefixtures("drawn")
@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_the_page_fits_a_phone(run: Path) -> None:
    page = run / "report.html"
    page.write_text(report.render(run))
    (run / "phone.html").write_text(
        f'<iframe id="page" src="{page.name}" style="width: 390px; height: 800px"></iframe><script>onload = () => '
        '{ const root = document.getElementById("page").contentDocument.documentElement; '
        "document.title = `${root.scrollWidth} of ${root.clientWidth}`; "
        'for (const wide of root.querySelectorAll(".wide, figure")) '
        "if (wide.scrollWidth > wide.clientWidth) document.title += ` cut: ${wide.innerHTML.slice(0, 80)}`; }</script>"
    )
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command = [BROWSER, *options, (run / "phone.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"<title>(\d+) of (\d+)(.*)</title>", shown.stdout)
    assert found is not None, shown.stdout + shown.stderr
    assert int(found[1]) <= int(found[2])
    assert not found[3]
