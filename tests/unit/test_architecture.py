"""The page of the architecture against the code: packages and their imports, and the files of each walk as traced."""

from __future__ import annotations

import re

import pytest

from moe_lightning.strategies.committed_step import CommittedStep
from moe_lightning.strategies.train_state import StateTransfer
from tests.documented import ROOT
from tests.test_layers import MAY_IMPORT
from tests.walks import NOT_ON_THE_WAY, ORDERS, WALKS, fault_walks

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ROWS = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", SECTIONS["The packages"], re.MULTILINE)
PACKAGES = {name for name in MAY_IMPORT if (ROOT / "moe_lightning" / name / "__init__.py").is_file()} - {"conf"}

MOST_FILES = {"A token": 14, "A gradient": 25, "A snapshot and its restore": 54, "A fault": 52}
"""Files of each walk as measured; a change may lower them. Goals: 10, 12, 28, 28."""


def test_every_package_has_a_row() -> None:
    assert len(ROWS) == len(PACKAGES)
    assert {name for name, _ in ROWS} == PACKAGES


@pytest.mark.parametrize(("package", "imports"), ROWS)
def test_a_package_imports_what_its_row_says(package: str, imports: str) -> None:
    names = [name for name, _ in ROWS]
    above, allowed = set(names[: names.index(package)]), MAY_IMPORT[package] & PACKAGES
    said = set(re.findall(r"`(\w+)`", imports))
    if imports.startswith("those of"):
        said |= MAY_IMPORT["strategies"] & PACKAGES
    assert said <= above, "a row comes after those that it imports"
    assert allowed - {package} == said if imports != "all above" else above <= allowed


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_the_files_that_are_entered(walk: str) -> None:
    named = re.findall(r"^\d+\. `([^`]+)`: \S", SECTIONS[walk], re.MULTILINE)
    entered = WALKS[walk]()
    assert len(set(named)) == len(named)
    assert [name for name in entered if name not in named] == [], "docs/architecture.md lacks these files"
    assert [name for name in named if name not in entered] == [], "no call enters these files of docs/architecture.md"
    assert len(entered) <= MOST_FILES[walk], "a longer walk: can the new file be left out?"


@pytest.mark.parametrize("title", ORDERS)
def test_functions_are_named_in_the_order_of_their_calls(title: str) -> None:
    named = re.findall(r"^\d+\. `([^`]+)`: \S", SECTIONS[title], re.MULTILINE)
    assert len(named) > 10
    assert named == [name for name in ORDERS[title]() if name in named]


def test_values_are_of_the_new_world_from_calls_in_their_order() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.search(r"^\| value \| is of the new world from \|\n.*?\n\n", guide, re.MULTILINE | re.DOTALL)
    assert rows is not None
    named = re.findall(r"\| `([\w.]+)` \|$", rows.group(), re.MULTILINE)
    assert len(named) == len(rows.group().splitlines()) - 3
    assert named == [name for name in fault_walks()["recovery"] if name in named]


def test_a_transfer_names_its_calls_in_their_order() -> None:
    order = re.search(r"in this\s+order: ([^.]+)\.", StateTransfer.__doc__ or "")
    assert order is not None
    named = [f"StateTransfer.{name}" for name in re.findall(r"`(\w+)`", order.group(1))]
    after_fault = calls_of(StateTransfer)[calls_of(StateTransfer).index("StateTransfer.begin") + 1 :]
    assert list(dict.fromkeys(after_fault)) == named


def test_a_committed_step_names_its_calls_in_their_order() -> None:
    step, recovery = (
        [f"CommittedStep.{name}" for name in re.findall(r"^ {8}(\w+) .* (?:ElasticWorlds|\w+Recovery) ", table, re.M)]
        for table in (CommittedStep.__doc__ or "").split("A recovery then")
    )
    calls = calls_of(CommittedStep)
    of_steps = [name for name in calls if name in step]
    assert of_steps == step * (len(of_steps) // len(step))
    fault = calls.index(recovery[0])
    of_recovery = calls[fault : calls.index(step[0], fault)]
    assert [name for name in of_recovery if name in recovery] == [name for name in recovery if name in of_recovery]
    assert set(recovery) - set(of_recovery) == {"CommittedStep.apply_prepared", "CommittedStep.begin_overwriting"}


def calls_of(owner: type) -> list[str]:
    return [name for name in fault_walks()["calls"] if name.startswith(owner.__name__)]


def test_every_walk_is_looked_at() -> None:
    assert list(SECTIONS) == [*ORDERS, "The packages", *WALKS]


def test_files_that_no_walk_counts_are_there() -> None:
    assert all((ROOT / name).is_file() and reason for name, reason in NOT_ON_THE_WAY.items())
