"""`moe-train` as a function, for notebooks and scripts: the same recipes, keys and checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from hydra.core.override_parser.types import Quote, QuotedString

from moe_lightning.cli.composition import with_home
from moe_lightning.cli.train import run_command
from moe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from moe_lightning.cli.settings import Settings

_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf|none)$)[a-z][\w-]*", re.IGNORECASE)
"""Words that the grammar of overrides reads as texts, such as names of choices."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """Run directory of a training, and the last value of every logged metric."""

    directory: Path
    metrics: Mapping[str, float]


def train(
    recipe: str | None = None, /, *, config_dir: str | PathLike[str] | None = None, **settings: Unpack[Settings]
) -> TrainedRun:
    """Train as `moe-train recipes=RECIPE key=value ...` does, and return when the run has ended.

    A run of one rank trains in this process, several in processes of their own, as from the command line, so this also
    works in notebooks. A run that is there already goes on, as with the command.

    Args:
        recipe: its name; None: quickstart.
        config_dir: folder with recipes of your own, `--config-dir` of the command.
        settings: keys of the configuration, as `generated/options` lists them: `ranks=2`, `model="gpt"`, and for the
            keys below one a dictionary, such as `trainer={"max_steps": 20}` or `strategy={"mesh": {"tp": 2}}`. Editors
            complete names and check types.

    Raises:
        ConfigurationError, CheckpointError: a mistake, in one sentence.
        RanksFailed: a rank of a run of several ended with an error.
    """
    chosen = [] if recipe is None else [f"recipes={recipe}"]
    folder = [] if config_dir is None else ["--config-dir", fspath(config_dir)]
    directory, metrics = run_command([*chosen, *overrides(settings), *folder])
    return TrainedRun(directory=directory, metrics=metrics)


def overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield settings as words of the command line.

    Raises:
        ConfigurationError: a value that no configuration has.
    """
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from overrides(value, f"{key}.")
        else:
            yield f"{key}={_literal(value, key)}"


def _literal(value: Any, key: str) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | PathLike):
        text = with_home(key, fspath(value))
        return text if _PLAIN.fullmatch(text) else QuotedString(text, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_literal(one, key)}" for name, one in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(_literal(one, key) for one in value) + "]"
    raise ConfigurationError(
        f"{key} is of type {type(value).__name__}, which no configuration holds: give numbers, texts, lists and "
        "dictionaries, or train objects of your own with Lightning's Trainer and ExpertParallelStrategy"
    )
