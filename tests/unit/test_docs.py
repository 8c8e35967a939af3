"""The documentation names what exists: pages, recipes, keys, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hydra import compose

import moe_lightning
from benchmarks import BENCHMARKS
from moe_lightning import arguments
from moe_lightning.cli import data, evaluate, generate
from moe_lightning.cli.bench import COMMANDS
from moe_lightning.cli.composition import CONFIG_DIR, config_folder, with_quotes
from tests.documented import PAGES, PLUGINS, RECIPES, ROOT, commands, lines

TRAINING = {
    tuple(arguments)
    for path in (*PAGES, *RECIPES)
    for arguments in commands(path, "moe-train")
    if not any(argument.startswith(("--", "-sc")) for argument in arguments)
}
GROUPS = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}


def choices_of(arguments: tuple[str, ...]) -> str:
    """Arguments that choose, add or remove, or are Hydra's own: all but values of keys that are there."""
    return " ".join(
        argument
        for argument in arguments
        if argument[0] in "+~-" or argument.partition("=")[0] in GROUPS or argument.startswith("hydra")
    )


TOGETHER = {
    choice: pytest.param([list(one) for one in same], id=choice or "values alone")
    for choice, same in groupby(sorted(TRAINING, key=lambda one: (choices_of(one), one)), key=choices_of)
}
"""Commands that make the same choices: a composition with the values of all has what each of them has."""

GENERATED = [
    f"{folder}generated/{name}.md"
    for folder in ("", "docs/")
    for name in ("options", "metrics", "errors", "api", *(f"api/{name}" for name in moe_lightning.__all__))
]
"""Pages that docs/generated.py writes when the site is built."""

FORMER = [
    *("how-it-works", r"moe_lightning[./](algorithms|comm|modules)\b", r"\bseams\b", "ExpertEdits", "edit_experts"),
    *("schedule_free", "schedulefree", r"elastic\.membership\.\w+_"),
]
"""Names of modules, features and keys that are gone."""


def test_commands_are_found() -> None:
    assert len(TRAINING) > 30
    assert len([c for page in PAGES for c in commands(page, "moe-bench")]) > 15


@pytest.fixture(scope="module")
def _configuration() -> Iterator[None]:
    with config_folder():
        yield


STRATEGIES = ROOT / "moe_lightning" / "strategies"


@pytest.mark.usefixtures("_configuration")
@pytest.mark.parametrize("together", TOGETHER.values())
def test_training_commands_compose(together: list[list[str]]) -> None:
    words = dict[str, None]()
    for given in together:
        overrides = [with_quotes(argument) for argument in given if argument != "-m"]
        swept = [override for override in overrides if re.fullmatch(r"[\w.]+=[\w.${}-]+(,[\w.${}-]+)+", override)]
        first = [re.sub(r",.*", "", override) if override in swept else override for override in overrides]
        plugins = [plugin for recipe, plugin in PLUGINS.items() if f"recipes={recipe}" in given]
        for plugin in plugins:  # proposes what is swept
            pytest.importorskip(plugin)
        assert swept or plugins or "-m" not in given
        words |= dict.fromkeys(first)
    assert compose("train", [*words])


def test_generation_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments.os.path, "isfile", lambda path: True)
    monkeypatch.setattr(arguments.os, "access", lambda path, mode: True)
    names = ("moe-generate", "moe-eval", "moe-data")
    shown = [(given, name) for page in PAGES for name in names for given in commands(page, name)]
    assert len([name for given, name in shown if given]) > 7
    for given, name in shown:
        if given and "--help" not in given and given != ["tokenize"]:
            if name == "moe-data":
                assert data.parser().parse_args(given)
            else:
                parser = evaluate.parser() if name == "moe-eval" else generate.parser()
                assert parser.parse_intermixed_args(given)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_benchmarks_and_links_exist(page: Path) -> None:
    assert {command[0] for command in commands(page, "moe-bench") if command} - {"NAME"} <= {*COMMANDS, *BENCHMARKS}
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists() or target in GENERATED, target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_modules_and_files_exist(page: Path) -> None:
    """In backticks, import lines and link texts; `benchmarks` and `tests` lie in the checkout."""
    text = page.read_text()
    roots = "moe_lightning|kernels|benchmarks|tests|recipes"
    names = re.findall(rf"`((?:{roots})/[\w./-]+)`", text)
    dotted = re.findall(r"`(moe_lightning(?:\.\w+)+)`|(?:from|python -m) (moe_lightning[\w.]*)", text)
    modules = [(first or second).replace(".", "/") for first, second in dotted]
    gone = [name for name in names if not (ROOT / name).exists()]
    gone += [m for m in modules if not any((ROOT / p).exists() for p in (m, f"{m}.py", str(Path(m).parent) + ".py"))]
    assert [name for name in gone if not name.endswith("KIND")] == []


@pytest.mark.parametrize("page", [ROOT / "CHANGELOG.md", *PAGES], ids=lambda path: path.name)
def test_no_former_name_is_left(page: Path) -> None:
    former = ["how-it-works"] if page.name == "CHANGELOG.md" else FORMER
    assert [word for word in former if re.search(word, page.read_text())] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.*")), ids=lambda path: path.name)
def test_installs_from_the_checkout(path: Path) -> None:
    """No package of this name is published."""
    assert re.findall(r"pip install .{0,3}moe-lightning", path.read_text()) == []


SITE = [page for page in PAGES if page.parent == ROOT / "docs"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_with_a_tokenizer_name_its_extra(page: Path) -> None:
    if any("=bpe:" in line or "tokenizer.json" in line for line in lines(page)):
        assert re.search(r"pip install -e \"\.\[(bpe|hf)\]", page.read_text())


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(f"{page.name})" in index and f"\n{page.stem}\n" in index for page in SITE if page.stem != "index")


@pytest.mark.parametrize("page", SITE, ids=lambda path: path.name)
def test_every_page_has_a_next_step(page: Path) -> None:
    included = page.stem in ("contributing", "changelog", "security")
    assert included or page.stem == "index" or re.search(r"^Next: .*\]\(", page.read_text(), re.MULTILINE)


def test_the_readme_is_short_and_its_figures_are_those_that_were_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    measured = (ROOT / "docs" / "measured.md").read_text()
    assert len(readme.splitlines()) <= 120
    rows = re.findall(r"^\| (?!what|---)(.*?) \| (.*?) \|$", readme, re.MULTILINE)
    figures = [figure for _, cell in rows for figure in re.findall(r"\d+\.\d+", cell)]
    assert len(figures) > 5
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", measured)] == []


def test_every_recipe_is_described() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"`{recipe.stem}`" in page for recipe in RECIPES)


def test_the_picture_is_well_formed() -> None:
    assert ElementTree.parse(ROOT / "docs" / "recovery.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_what_is_refused_is_listed() -> None:
    """With words of its message, which the code still has; a new refusal in these files needs a row."""
    refused = (ROOT / "docs" / "limits.md").read_text().partition("### Refused")[2].partition("## GPUs")[0]
    rows = [line.strip("| ").split(" | ") for line in refused.splitlines() if line.startswith("| ")][1:]
    trees = [ast.parse((STRATEGIES / f"{name}.py").read_text()) for name in ("checks", "optimizer_checks", "averaging")]
    strings = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for feature, words, _ in rows:
        assert any(words in text for text in strings if isinstance(text, str)), feature
    raised = [node.exc for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    messages = [error.args[0] for error in raised if isinstance(error, ast.Call)]
    texts = [ast.unparse(message) for message in messages if isinstance(message, ast.JoinedStr | ast.Constant)]
    assert len(texts) > 10
    assert [t for t in texts if not any(words in t for _, words, _ in rows) and "micro_batches=" not in t] == []
