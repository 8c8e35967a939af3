"""The documentation names what exists: pages, recipes, keys, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hydra import compose, initialize_config_dir

from moe_lightning.cli.bench import BENCHMARKS
from moe_lightning.cli.composition import CONFIG_DIR, with_quotes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def _lines(path: Path) -> list[str]:
    """Command lines of a page's code blocks and tables, or of a recipe's header, continued lines joined."""
    text = path.read_text()
    if path.suffix == ".yaml":
        found = [line[2:] for line in text.splitlines() if line.startswith("#  ")]
    else:
        blocks = re.findall(r"```(?:bash|yaml)\n(.*?)```", text, re.DOTALL)
        found = [line for block in blocks for line in block.splitlines()]
        found += re.findall(r"`(moe-[^`]+)`", text)
    return re.sub(r"\\\n\s*", " ", "\n".join(found)).splitlines()


def _commands(path: Path, program: str) -> list[list[str]]:
    """Arguments of each command line that runs a program; pipes, comments and what runs it go."""
    found = []
    for line in _lines(path):
        match = re.search(rf"(?:^|[\s\"]){program}((?:\s.*)?)$", line)
        if match and f"pip install {program}" not in line:
            rest = match[1].rstrip().removesuffix('"') if match[1].count('"') % 2 else match[1]  # the end of --wrap "
            found.append(shlex.split(re.sub(r"\s&.*", "", rest), comments=True))
    return found


TRAINING = [
    pytest.param(arguments, id=f"{path.name}: {' '.join(arguments)}"[:100])
    for path in (*PAGES, *RECIPES)
    for arguments in _commands(path, "moe-train")
    if not any(argument.startswith(("--", "-sc")) for argument in arguments)
]


def test_commands_are_found() -> None:
    assert len(TRAINING) > 30
    assert len([c for page in PAGES for c in _commands(page, "moe-bench")]) > 15


@pytest.mark.parametrize("arguments", TRAINING)
def test_training_commands_compose(arguments: list[str]) -> None:
    overrides = [with_quotes(argument) for argument in arguments if argument != "-m"]
    swept = [override for override in overrides if re.fullmatch(r"[\w.]+=[\w.${}-]+(,[\w.${}-]+)+", override)]
    first = [re.sub(r",.*", "", override) if override in swept else override for override in overrides]
    assert swept or "-m" not in arguments
    with initialize_config_dir(str(CONFIG_DIR.absolute()), version_base="1.3"):
        compose("train", first)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_benchmarks_and_links_exist(page: Path) -> None:
    assert {command[0] for command in _commands(page, "moe-bench") if command} - {"NAME"} <= set(BENCHMARKS)
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(f"({page.name})" in index for page in PAGES if page.name != "README.md")


def test_every_recipe_is_described() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"`{recipe.stem}`" in page for recipe in RECIPES)


def test_the_picture_is_well_formed() -> None:
    assert ElementTree.parse(ROOT / "docs" / "recovery.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
