"""Workflows, templates of reports, and the citation agree with the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import moe_lightning
from tests.documented import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_no_more_rights_than_it_needs(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    rights = [name for name, job in workflow["jobs"].items() if "permissions" in job]
    assert rights == (["publish"] if path.name == "release.yml" else [])
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action) for action in used), "a tag can be moved"


def test_every_release_was_tested() -> None:
    build = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["build"]
    runs = [step.get("run", "") for step in build["steps"]]
    assert runs.index(".ci/run") < next(index for index, run in enumerate(runs) if "-m build" in run)


def test_reports_are_made_by_a_command_that_exists() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= set(yaml.safe_load(path.read_text()))
    assert "moe-train --version --report" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "fault.yml").read_text()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == moe_lightning.__version__
    assert citation["title"] == "moe-lightning"
