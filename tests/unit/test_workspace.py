"""W&B's panels show metrics that are logged; what needs a login says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_lightning.bench import workspace
from moe_lightning.cli.bench import main

PACKAGE = Path(workspace.__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_every_metric_is_logged_somewhere() -> None:
    files = [path for room in ("callbacks", "models", "strategies") for path in (PACKAGE / room).rglob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    for panels in workspace.layout(2).values():
        for panel in panels:
            assert panel.metrics or panel.pattern
            for name in (*panel.metrics, *filter(None, [panel.pattern])):
                last = name.rpartition("/")[2].removeprefix(".*")
                for suffix in ("_ms", "_bytes"):  # names that are put together
                    last = last if last in source else last.removesuffix(suffix)
                assert re.search(rf"\b{last}\b|{last}[\"\']", source), name


def test_patterns_find_layers_and_nothing_else() -> None:
    patterns = [panel.pattern for panels in workspace.SECTIONS.values() for panel in panels if panel.pattern]
    assert any(re.fullmatch(pattern, "moe/layer07/rank_imbalance_ratio") for pattern in patterns)
    assert not any(re.fullmatch(pattern, "moe/rank_imbalance_ratio") for pattern in patterns)


def test_a_heat_map_for_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workspace", "moe-lightning", "--layers", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("load of the experts of MoE layer") == 3
    assert "moe/layer02/expert_load" in out
    with pytest.raises(SystemExit):
        main(["workspace", "moe-lightning", "--layers", "-1", "--dry-run"])


def test_without_a_login(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workspace", "moe-lightning"]) == 2
    assert capsys.readouterr().err == (
        "moe-bench: error: there is no login of W&B: run wandb login, or list the panels with --dry-run\n"
    )


def test_the_view_that_would_be_saved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    saved = []
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(workspaces.Workspace, "save", lambda view: saved.append(view))
    monkeypatch.setattr(workspaces.Workspace, "url", "https://example.org/view")
    assert main(["workspace", "books", "--entity", "me"]) == 0
    assert capsys.readouterr().out == "https://example.org/view\n"
    (view,) = saved
    text = view._to_model().model_dump_json()
    panels = [panel for panels in workspace.layout(4).values() for panel in panels]
    for panel in panels:
        assert all(name in text for name in (panel.title, *panel.metrics))
    assert [section.name for section in view.sections] == list(workspace.SECTIONS)
    assert len(re.findall("Run History Line Plot", text)) == len(panels)


def test_the_report_that_would_be_saved() -> None:
    pytest.importorskip("wandb_workspaces.reports.v2")
    report = workspace.report(workspace.layout(1), "me", "books")
    assert len(report.blocks) == 2 * len(workspace.SECTIONS)
    grids = report.blocks[1::2]
    assert [len(grid.panels) for grid in grids] == [len(panels) for panels in workspace.layout(1).values()]


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["workspace", "books", "--entity", "me"]) == 2
    assert 'pip install "moe-lightning[workspaces]"' in capsys.readouterr().err
