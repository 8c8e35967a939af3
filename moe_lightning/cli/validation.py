"""What a composed configuration must be before anything is built from it or moved for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval

from moe_lightning.cli.instantiation import check_arguments
from moe_lightning.config import TARGET, require, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import suggestion

_GROUPS = ("model", "optimizer", "data", "strategy", "trainer", "module")
COLLECTIONS = ("callbacks", "logger", "elastic")
"""Groups of which a run may have nothing."""
_PLAIN: dict[str, Any] = {
    "run_dir": str,
    "ranks": Annotated[int, Interval(ge=-1)] | Literal["auto", "-1"] | list[int],
    "seed": Annotated[int, Interval(ge=0, le=2**32 - 1)],
    "resume": bool | str,
    "resume_overrides": bool,
    "task": Literal["train", "validate"],
    "objective": str | None,
    "doctor": bool,
}
KEYS = ("run_name", *_PLAIN, *_GROUPS, *COLLECTIONS)
"""Top-level keys of moe-train."""

_LONGEST_UNKNOWN_NAME = 200  # bytes of a folder's name; file systems allow 255, and moe-train appends .1, .2, ...
_REFERENCE = re.compile(r"\$\{\.*([A-Za-z_]\w*)")


def check_recipe(raw: Mapping[str, Any]) -> None:
    """Refuse top-level keys that nobody reads: neither moe-train nor an interpolation.

    Args:
        raw: the configuration before interpolations are resolved.

    Raises:
        ConfigurationError: a recipe without its package line, or such a key.
    """
    if "recipes" in raw:
        raise ConfigurationError(
            "the recipe's keys stand below 'recipes' and would change nothing: "
            "begin its file with the line '# @package _global_'"
        )
    referred = set(_REFERENCE.findall(str(raw)))
    for key in raw:
        if key not in KEYS and key not in referred:
            raise ConfigurationError(
                f"{key} is no key of moe-train and nothing refers to ${{{key}}}{suggestion(str(key), KEYS)}: "
                f"use one of {', '.join(KEYS)}"
            )


def check_top_level(config: Mapping[str, Any]) -> None:
    """Check the keys that no constructor will see.

    Raises:
        ConfigurationError: one of them has a value it cannot have.
    """
    check_run_name(config["run_name"])
    for name, hint in _PLAIN.items():
        require(config[name], hint, name)
    check_groups(config)
    for name in _GROUPS:
        if TARGET not in config[name]:
            raise ConfigurationError(f"{name} names no class: choose a {name} of the group, or give {name}.{TARGET}")


def check_groups(config: Mapping[str, Any]) -> None:
    """Refuse plain values in place of groups, before interpolations look into them.

    Raises:
        ConfigurationError: the group.
    """
    for name in (*_GROUPS, *COLLECTIONS):
        if name not in config:
            raise ConfigurationError(f"a run needs a {name}: choose one, {name}=NAME, or leave it as it is")
        value = config[name]
        if not isinstance(value, Mapping) and not _REFERENCE.search(str(value)):
            raise ConfigurationError(f"{name}={shown(value)} must be a group's choice or a mapping, not a plain value")


def check_run_name(name: object) -> None:
    """Refuse names that are no folder of their own below outputs.

    Raises:
        ConfigurationError: no text, an empty part, a part that leads elsewhere, or one that no file system takes.
    """
    for part in name.split("/") if isinstance(name, str) else [""]:
        if part.strip() in ("", ".", "..") or part.startswith(("-", "~")):
            raise ConfigurationError(
                f"run_name={shown(name)} is no name of a folder below outputs: use words such as run_name=first_try, "
                "or hydra.run.dir=FOLDER for another place"
            )
        if not part.isprintable() or len(part.encode()) > _LONGEST_UNKNOWN_NAME:
            raise ConfigurationError(
                f"run_name={shown(name)} cannot name a folder: use at most {_LONGEST_UNKNOWN_NAME} printable characters"
            )


def check_config(config: Mapping[str, Any]) -> None:
    """Check every name and value against the constructors, in the order in which users think of them.

    Raises:
        ConfigurationError: one sentence about the first thing that is wrong.
    """
    for name in (*_GROUPS, *COLLECTIONS):
        check_arguments(config[name], name)
    trainer = config["trainer"]
    if trainer.get("max_steps", -1) == -1 and trainer.get("max_epochs") == -1 and trainer.get("max_time") is None:
        raise ConfigurationError(
            "trainer.max_steps=-1 with trainer.max_epochs=-1 would train without an end: give one of them, "
            "or trainer.max_time=DD:HH:MM:SS"
        )
    check_group(config, "callbacks")
    check_group(config, "logger")


def check_group(config: Mapping[str, Any], group: str) -> None:
    """Refuse entries of a group of named objects that name no class.

    Raises:
        ConfigurationError: a key was set of an entry that the chosen group does not have.
    """
    for name, node in config[group].items():
        if node is None:
            continue
        if not isinstance(node, Mapping):
            raise ConfigurationError(f"{group}.{name}={shown(node)} must be a mapping, or null to leave it out")
        if TARGET not in node:
            raise ConfigurationError(
                f"{group}.{name} has {', '.join(map(str, node)) or 'no keys'} but no {TARGET}: the chosen {group} do "
                f"not include it{suggestion(name, config[group])}, drop the key or give {group}.{name}.{TARGET}"
            )
