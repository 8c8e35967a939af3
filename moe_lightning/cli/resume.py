"""Differences between a command and the run that it resumes: allowed, on request, or refused.

A checkpoint holds the optimizer's own values, so other ones in the command would be recorded but not used; and other
data than before would break the order in which every sample comes once.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import AliasEvent, YAMLError

from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.cli.targets import located
from moe_lightning.config import TARGET, is_below, is_resumable, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import open_text
from moe_lightning.hub import TOKENIZER

_UNCHANGEABLE = ("model", "data.tokenizer", "data._target_", "optimizer._target_", "module._target_")
_ORIGINAL = "model.pretrained"
_ON_REQUEST = ("optimizer", "data", "seed", _ORIGINAL)
_FREE_OF_DATA = tuple(
    f"data.{name}"
    for name in ("num_workers", "cache_dir", "val_samples", "seed", "context_length")  # the last two are set elsewhere
)
_UNLISTED = (
    "run_name",
    "run_dir",
    "resume",
    "resume_overrides",
    "task",
    "objective",
    "strategy.resume_overrides",
    "module.config",
    "module.optimizer",
)
_MOST_LISTED = 4
_MOST_BYTES = 1 << 24  # of a configuration
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables that count how often torchrun or SLURM have repeated a command."""


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A key whose value is another one than the run was trained with.

    Attributes:
        key, former, given: the key with both values.
        is_possible: the checkpoint fits both values.
    """

    key: str
    former: Any
    given: Any
    is_possible: bool = True

    @property
    def is_on_request(self) -> bool:
        """True if the checkpoint would silently keep the former value, or the run would see other samples."""
        return is_below(self.key, _ON_REQUEST) and not is_below(self.key, _FREE_OF_DATA)

    def __str__(self) -> str:
        return f"{self.key} {shown(self.former)} -> {shown(self.given)}"


def changes(former: Mapping[str, Any], given: Mapping[str, Any]) -> list[SettingChange]:
    """Keys that both configurations have, with different values, in the order of the given one; paths below the run
    directory are the same wherever it lies.
    """
    places = str(former.get("run_dir")), str(given.get("run_dir"))
    tokenizers = _original_tokenizer(former), _original_tokenizer(given)
    return [
        SettingChange(key=key, former=before, given=value, is_possible=_is_possible(key, before, value, given))
        for key, before, value in _in_both(former, given)
        if not is_below(key, _UNLISTED)
        and _moved(before, *places) != value
        and not (key == "data.tokenizer" and (before, value) == tokenizers)  # listed as the model's
    ]


def _original_tokenizer(config: Mapping[str, Any]) -> str:
    """The tokenizer of the original model, as recipes name it."""
    return f"{(config.get('model') or {}).get('pretrained')}/{TOKENIZER}"


def _is_possible(key: str, before: Any, value: Any, given: Mapping[str, Any]) -> bool:
    """True if a checkpoint fits both values of the key."""
    if not is_below(key, _UNCHANGEABLE):
        return True
    if key == _ORIGINAL:  # may have moved: its weights are in the checkpoint, or compared with their digest
        return None not in (before, value)
    group, *path = key.split(".")
    model = given.get("model", {})
    return group == "model" and TARGET in model and is_resumable(located(model[TARGET], "model"), path)  # type: ignore[arg-type]


def check_changes(found: list[SettingChange], *, overrides: bool, is_named: bool = False) -> None:
    """Refuse to go on where the command would not do what it says.

    Args:
        found: see `changes`.
        overrides: the command asks for what is on request.
        is_named: of a checkpoint that the command names or only measures, which is the same for every run.

    Raises:
        ConfigurationError: what differs, and what to do about it.
    """
    impossible = [change for change in found if not change.is_possible]
    if impossible:
        of_run, cure = " of this run", "give this run another run_name, or start over with resume=false"
        if is_named:
            of_run, cure = "", "or name another checkpoint"
        raise ConfigurationError(
            f"the checkpoint{of_run} has another shape or meaning: {_listed(impossible)}; leave it as it was, {cure}"
        )
    asked = [change for change in found if change.is_on_request]
    if asked and not overrides:
        raise ConfigurationError(
            f"this run was trained with other settings: {_listed(asked)}; give resume_overrides=true to go on with the "
            "new ones, leave them as they were, or start over with resume=false"
        )


def goes_on(config: Mapping[str, Any]) -> bool:
    """True if a training prefers the run's own checkpoints: `resume` says so, or it says how the run began. A named
    checkpoint is only the beginning of a run; so is resume=false where torchrun or SLURM repeat the command.

    Args:
        config: as composed.

    Raises:
        ConfigurationError: the run has checkpoints, and did not begin at the one that `resume` names. Those of another
            beginning may have higher steps, and commands would take them for its newest ones.
    """
    resume, directory = config["resume"], RunDirectory(Path(config["run_dir"]))
    if resume is True or config["task"] != "train":
        return resume is True
    if resume is False and all(os.environ.get(name, "0") == "0" for name in _RESTARTS):
        return False
    commands = filter(None, map(_recorded, directory.path.glob("config*.yaml")))
    began_so = any(command.get("resume") == resume for command in commands)
    if resume is False:
        return began_so and not directory.passed_over.exists()
    newest = directory.newest_checkpoint()
    if not began_so and newest is not None:
        check_start(resume)
        if Path(resume).resolve() not in (newest.path.resolve(), newest.path.parent.resolve()):
            raise ConfigurationError(
                f"{directory} has {newest.path.name}, and did not begin at resume={resume}: leave that out to go on "
                "from its own checkpoint, or give another run_name to begin at the named one"
            )
    return began_so


def may_be_repeated() -> bool:
    """True if torchrun or SLURM may start this command again, see `goes_on`."""
    return not os.environ.keys().isdisjoint(("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID"))


def check_start(resume: str) -> None:
    """Refuse a `resume` that is not a checkpoint, without reading what may be large.

    Raises:
        ConfigurationError, CheckpointError: one sentence about it.
    """
    from moe_lightning.checkpoint.directory import directories, has_manifest  # imports torch
    from moe_lightning.checkpoint.files import check_end
    from moe_lightning.checkpoint.storage import place_of, storage_of

    place = place_of(resume)
    is_directory = storage_of(place).is_dir(place)
    if not is_directory and not (isinstance(place, Path) and place.exists()):
        raise ConfigurationError(f"resume={resume} does not exist: give a checkpoint's path, true or false")
    if is_directory and not has_manifest(place) and not directories(place):
        raise ConfigurationError(
            f"resume={resume} holds no checkpoint: give a .ckpt file, or a directory of step-... directories"
        )
    if not is_directory:
        check_end(Path(place))


def effect(found: list[SettingChange]) -> str:
    """Return the changes that take effect, for the headline; "" for none."""
    return f"; changed: {_listed(found)}" if found else ""


def config_of(checkpoint: str | Path) -> dict[str, Any] | None:
    """The configuration that a checkpoint was trained with, from its run directory; None where it has none of ours, or
    lies in a store."""
    if "://" in str(checkpoint):
        return None
    folders = list(Path(checkpoint).absolute().parents)[:2]
    return next(filter(None, (_recorded(folder / "config.yaml") for folder in folders)), None)


def _recorded(path: Path) -> dict[str, Any] | None:
    """The configuration of a training in a file; None where it is none of ours."""
    if not path.is_file():
        return None
    try:
        with open_text(path, most_bytes=_MOST_BYTES) as file:
            text = file.read()
        if any(isinstance(event, AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            if not re.search(r"^run_dir:", text, re.MULTILINE):
                return None
            raise ValueError("aliases")  # moe-train writes none, and few may stand for any number of values
        loaded = OmegaConf.load(io.StringIO(text))
        config = OmegaConf.to_container(loaded)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or "no plain YAML"
        raise ConfigurationError(
            f"{path} cannot be read ({reason}): fix it, or remove it to continue without this check"
        ) from error
    if not isinstance(config, dict) or "run_dir" not in config:  # others also name their files so
        return None
    return {str(name): value for name, value in config.items()}


def _listed(found: list[SettingChange]) -> str:
    rest = f" and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return ", ".join(map(str, found[:_MOST_LISTED])) + rest


def _in_both(former: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that both configurations have, with both values; below one whose value is empty or null in either,
    there is none.
    """
    for name, value in given.items():
        if name not in former:
            continue
        before, key = former[name], f"{prefix}{name}"
        if isinstance(before, Mapping) and isinstance(value, Mapping) and before and value:
            yield from _in_both(before, value, f"{key}.")
        else:
            yield key, before, value


def _moved(value: Any, former: str, given: str) -> Any:
    return value.replace(former, given, 1) if isinstance(value, str) and value.startswith(former) else value
