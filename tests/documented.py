"""Commands and snippets that the documentation shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

PLUGINS = {"optuna": "hydra_plugins.hydra_optuna_sweeper", "submitit": "hydra_plugins.hydra_submitit_launcher"}
"""By recipe, the plugin of Hydra without which it does not compose."""


def lines(path: Path) -> list[str]:
    """Command lines of a page's code blocks and tables, or of a recipe's header, continued lines joined."""
    text = path.read_text()
    if path.suffix == ".yaml":
        found = [line[2:] for line in text.splitlines() if line.startswith("#  ")]
    else:
        found = [line for block in blocks(path, "bash|yaml") for line in block.splitlines()]
        found += re.findall(r"`(moe-[^`]+)`", text)
    return re.sub(r"\\\n\s*", " ", "\n".join(found)).splitlines()


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page in a language, which may be a regular expression."""
    return re.findall(rf"```(?:{language})\n(.*?)```", path.read_text(), re.DOTALL)


def commands(path: Path, program: str) -> list[list[str]]:
    """Arguments of each command line that runs a program; pipes, comments and what runs it go."""
    found = []
    for line in lines(path):
        match = re.search(rf"(?:^|[\s\"]){program}((?:\s.*)?)$", line)
        if match and f"pip install {program}" not in line:
            rest = match[1].rstrip().removesuffix('"') if match[1].count('"') % 2 else match[1]  # the end of --wrap "
            found.append(shlex.split(re.sub(r"\s&.*", "", rest), comments=True))
    return found
