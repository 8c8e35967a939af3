"""Composition and validation of configurations, with one-line errors.

Every argument in a composed configuration is checked against the annotations of the constructor that it names before
anything is built.
Hydra would answer a misspelled argument or a wrong type with a traceback from deep inside a constructor; here it is one
sentence with the key as the user typed it, the nearest key or the possible choices.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from annotated_types import Interval
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from moe_lightning.cli.targets import ALLOW_VARIABLE, is_allowed, located, without_storage
from moe_lightning.compat.private_hydra import Compose, full_key
from moe_lightning.config import (
    TARGET,
    Coefficient,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    hints_of,
    is_below,
    pretrained_options,
    require,
    shown,
    with_key,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text
from moe_lightning.user_errors import one_line, suggestion

_Limit = Annotated[int, Interval(ge=-1)]  # -1: none
_Share = NonNegativeInt | Fraction

_TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
_TRAINER_LIMITS: dict[str, Any] = {
    "accumulate_grad_batches": PositiveInt,
    "check_val_every_n_epoch": PositiveInt | None,
    "fast_dev_run": bool | NonNegativeInt,
    "gradient_clip_val": Coefficient | None,
    "limit_predict_batches": _Share | None,
    "limit_test_batches": _Share | None,
    "limit_train_batches": _Share | None,
    "limit_val_batches": _Share | None,
    "log_every_n_steps": NonNegativeInt | None,
    "max_epochs": _Limit | None,
    "max_steps": _Limit,
    "min_epochs": NonNegativeInt | None,
    "min_steps": NonNegativeInt | None,
    "num_nodes": PositiveInt,
    "num_sanity_val_steps": _Limit | None,
    "overfit_batches": _Share,
    "reload_dataloaders_every_n_epochs": NonNegativeInt,
    "val_check_interval": PositiveInt | Annotated[float, Interval(gt=0, le=1)] | str | None,
}
"""Ranges of its arguments, whose own annotations give types only."""

_REFUSALS = (ValueError, TypeError, LookupError, OSError, ModuleNotFoundError, ArithmeticError)
_FILLED_LATER = {"vocab_size": "auto", "num_classes": "auto"}  # decided by the data

_TYPED = {"module.config": "model", "module.optimizer": "optimizer", "trainer.devices": "ranks"}
"""Keys of the composed configuration that take what users type elsewhere."""


def build_object(node: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    """Call what a node of the configuration names, the nested ones before it. Hydra's `instantiate` would resolve
    interpolations once more, in which a text becomes a node that nobody has checked.

    Args:
        node: with `_target_`.
        key: where the node is, for messages.
        arguments: objects passed beside the node's own values.

    Raises:
        ConfigurationError: the configuration may not name the class, or its constructor refuses the arguments.
    """
    build = located(node[TARGET], key)
    built = {name: _built(child, _child(key, name)) for name, child in _arguments(node)}
    if others := sorted(set(map(str, node)) - {TARGET, *built}):
        raise ConfigurationError(f"{typed(_child(key, others[0]))} has no effect here: give arguments by their names")
    try:
        return build(**built, **arguments)
    except Exception as error:
        # Only here: launchers use this module, and importing Lightning would take them seconds.
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        if isinstance(error, ConfigurationError):
            raise ConfigurationError(typed(with_key(str(error), node, key))) from error
        if isinstance(error, (*_REFUSALS, MisconfigurationException)):
            raise ConfigurationError(f"{typed(key)} cannot be built: {one_line(error)}") from error
        raise


def _built(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return build_object(value, key)
        return {name: _built(child, _child(key, name)) for name, child in value.items()}
    if isinstance(value, list):
        return [_built(child, f"{key}[{index}]") for index, child in enumerate(value)]
    return value


def typed(key: str) -> str:
    """The key as users type it."""
    for composed, name in _TYPED.items():
        if key == composed or key.startswith((f"{composed}.", f"{composed}[", f"{composed}=")):
            return name + key[len(composed) :]
    return key


def check_arguments(node: Any, key: str = "") -> None:
    """Check the names and values of all arguments below a node against the constructors' annotations.

    Raises:
        ConfigurationError: a class that cannot be imported, an argument it lacks, or a value that does not fit.
    """
    for inner, found in walk(node, key):
        if isinstance(found, Mapping) and TARGET in found:
            _check_call(found, inner)


def walk(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and value of a node of a configuration and of all below it, each before what it holds."""
    yield key, node
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from walk(child, _child(key, name))
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for index, child in enumerate(node):
            yield from walk(child, f"{key}[{index}]")


def _child(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _check_call(node: Mapping[str, Any], key: str) -> None:
    function = located(node[TARGET], key)
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    is_trainer = f"{function.__module__}.{function.__qualname__}" == _TRAINER
    hints = hints_of(function) | (_TRAINER_LIMITS if is_trainer else {})
    for name, value in _arguments(node):
        if name not in parameters and not open_ended:
            raise ConfigurationError(
                f"{typed(_child(key, name))} is not an argument of {function.__name__}{suggestion(name, parameters)}: "
                f"it takes {', '.join(parameters)}"
            )
        if (name in _FILLED_LATER and value == _FILLED_LATER[name]) or _is_default(value, parameters.get(name)):
            continue
        if name in hints:
            require(value, hints[name], typed(_child(key, name)))


def _arguments(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of the call; `_target_` and its like are Hydra's."""
    return ((name, value) for name, value in node.items() if not (name.startswith("_") and name.endswith("_")))


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    """True if the value is the constructor's default, which not every library's annotations allow."""
    return parameter is not None and type(value) is type(parameter.default) and value == parameter.default


_GROUPS = ("model", "optimizer", "data", "strategy", "trainer", "module")
COLLECTIONS = ("callbacks", "logger", "elastic")
"""Groups of which a run may have nothing."""
PLAIN: dict[str, Any] = {
    "run_dir": str,
    "seed": Annotated[int, Interval(ge=0, le=2**32 - 1)],
    "resume": bool | str,
    "resume_overrides": bool,
    "task": Literal["train", "validate"],
    "objective": str | None,
    "doctor": bool,
    "check_memory": bool,
    "depth": int | None,  # its rules check its range
}
"""Types of the top-level keys that are no groups."""

KEYS = ("run_name", "ranks", *PLAIN, *_GROUPS, *COLLECTIONS)
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
                f"{key} is not a key of moe-train and nothing refers to ${{{key}}}{suggestion(str(key), KEYS)}: "
                f"use one of {', '.join(KEYS)}"
            )


def check_top_level(config: Mapping[str, Any]) -> None:
    """Check the keys that no constructor will see.

    Raises:
        ConfigurationError: one of them has a value it cannot have.
    """
    check_run_name(config["run_name"])
    for name, hint in PLAIN.items():
        require(config[name], hint, name)
    check_groups(config)
    for name in _GROUPS:
        if TARGET not in config[name]:
            raise ConfigurationError(f"{name} names no class: choose a {name} of the group, or give {name}.{TARGET}")
    for name in ("callbacks", "logger"):
        _check_entries(config[name], name)


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
        leads_elsewhere = part.strip() in ("", ".", "..") or part.startswith(("-", "~"))
        if leads_elsewhere or not part.isprintable() or len(part.encode()) > _LONGEST_UNKNOWN_NAME:
            raise ConfigurationError(
                f"run_name={shown(name)} is not a valid name for a folder in outputs: use words such as "
                f"run_name=first_try, at most {_LONGEST_UNKNOWN_NAME} printable characters, or hydra.run.dir=FOLDER "
                "for another place"
            )


def check_config(config: Mapping[str, Any]) -> None:
    """Check every name and value against the constructors, in the order in which users think of them.

    Raises:
        ConfigurationError: one sentence about the first thing that is wrong.
    """
    _check_urls(config)
    trainer = config["trainer"]
    for name in ("strategy", "callbacks", "logger", "plugins"):
        if name in trainer:
            raise ConfigurationError(f"trainer.{name} is given by moe-train itself: leave it out of trainer")
    for name in (*_GROUPS, *COLLECTIONS):
        check_arguments(config[name], name)
    max_time = trainer.get("max_time")
    if isinstance(max_time, str) and not re.match(r"\s*\d+:\d\d:\d\d:\d\d", max_time):
        raise ConfigurationError(f"trainer.max_time={shown(max_time)} must be DD:HH:MM:SS, such as 00:12:00:00")
    if trainer.get("max_steps", -1) == -1 and trainer.get("max_epochs") == -1 and max_time is None:
        raise ConfigurationError(
            "trainer.max_steps=-1 with trainer.max_epochs=-1 would train without an end: give one of them, "
            "or trainer.max_time=DD:HH:MM:SS"
        )
    _check_resumes(config)


def _check_resumes(config: Mapping[str, Any]) -> None:
    """Refuse full checkpoints where the next command does not find them: it would start over and replace them."""
    given, own = (config["callbacks"].get("checkpoint") or {}).get("dirpath"), Path(config["run_dir"], "checkpoints")
    if config["task"] != "train" or given is None or os.path.realpath(given) == os.path.realpath(own):
        return
    cure = "hydra.run.dir=FOLDER to have the whole run elsewhere, and leave dirpath out"
    if "://" in str(given):
        cure = f"callbacks=partial_experts callbacks.partial_experts_checkpoint.dirpath={given}, and leave "
        cure += "callbacks.checkpoint out"
    raise ConfigurationError(
        f"callbacks.checkpoint.dirpath={given} is not {own}, where the same command looks for checkpoints to resume: "
        f"give {cure}"
    )


def _check_urls(node: Any, key: str = "") -> None:
    for inner, found in walk(node, key):
        if isinstance(found, str) and not re.search(r"\s", found) and (protocol := without_storage(found)) is not None:
            raise ConfigurationError(
                f"{typed(inner)}={shown(found)} is read with {protocol}, which is no storage and may run code of what "
                "it reads: give a path, or the URL of a store such as s3://BUCKET/NAME"
            )


def _check_entries(entries: Mapping[str, Any], group: str) -> None:
    """Refuse entries of a group of named objects that name no class, as those that the chosen group does not have."""
    for name, node in entries.items():
        if node is None:
            continue
        if not isinstance(node, Mapping):
            raise ConfigurationError(f"{group}.{name}={shown(node)} must be a mapping, or null to leave it out")
        if TARGET not in node:
            raise ConfigurationError(
                f"{group}.{name} has {', '.join(map(str, node)) or 'no keys'} but no {TARGET}: the chosen {group} do "
                f"not include it{suggestion(name, entries)}, drop the key or give {group}.{name}.{TARGET}"
            )


CONFIG_DIR = Path(__file__).parent.parent / "conf"
CONFIG_NAME = "train"
_LONGEST_NAME = 120  # characters; file systems allow 255 bytes

_EXTRAS = {
    "hydra/sweeper=optuna": "optuna",
    "hydra/launcher=submitit_slurm": "submitit",
    "hydra/launcher=submitit_local": "submitit",
}
"""Choices that a plugin of Hydra brings, by the extra of ours that installs it."""

_NAMED_VALUES = re.compile(r"([^=]+)=(\w+=[^'\"{}\[\]()]+)")
_HOME = re.compile(r"([^=]+)=(~[^'\"{}\[\](),]*)")
_BY_A_RESOLVER = "ConfigurationError raised while resolving interpolation: "
_UNMERGEABLE = re.compile(r"Error merging override (.+)")
_THERE_ALREADY = re.compile(r"An item is already at '([^']+)'")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*)'$", re.MULTILINE)
_NOT_LOADED = re.compile(r"Could not load '([^'/]+)/([^']+)'")
_UNKNOWN_KEY = re.compile(r"Could not (?:override|append to config\.|delete from config)[^']*'([^']+)'")


def as_folder_name(text: str) -> str:
    """The overrides of a multirun's job as the name of its folder: no slashes, and short, yet one for each text, by a
    checksum in names that leave something of it out.
    """
    name = text.replace("/", "_").replace(" ", "")
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{zlib.crc32(text.encode()):08x}"


def with_home(key: str, value: str) -> str:
    """A value with the home folder for its tilde, which most shells leave as it is behind `=`. Data and models find it
    themselves, since a resume compares their paths as they were given.
    """
    key = key.lstrip("+")
    return value if key == "run_name" or key.startswith(("data.", "model.")) else os.path.expanduser(value)


def with_quotes(override: str) -> str:
    """An override whose value itself reads name=value,..., or begins with a tilde: the shell took its quotes away, and
    Hydra reads no such value without them.
    """
    if match := _HOME.fullmatch(override):
        return f'{match[1]}="{with_home(match[1], match[2])}"'
    match = _NAMED_VALUES.fullmatch(override)
    return f'{match[1]}="{match[2]}"' if match else override


def fixed_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that a multirun does not sweep: they are the same for all its jobs, so no name of a job needs them."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.key_or_group for override in parsed if not override.is_sweep_override()]


def refuse_missing(*, _node_: Node) -> NoReturn:
    """`${needed:}` in a recipe, in place of a group's default: `???` would not replace it."""
    raise ConfigurationError(_missing(full_key(_node_)))


def _missing(key: str) -> str:
    return f"{key} is needed here: give {key}=VALUE"


def node_of(config: Any) -> dict[str, Any]:
    """Return the node of a configuration that builds this dataclass instance."""
    node: dict[str, Any] = {TARGET: f"{type(config).__module__}.{type(config).__qualname__}"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        node[field.name] = node_of(value) if dataclasses.is_dataclass(value) else value
    return node


def register_model_bases() -> None:
    """Add the bases of conf/model to Hydra's ConfigStore: every option of the dataclasses with its default.

    A model file begins with `defaults: [_gpt, _self_]` and states what differs. Values are plain, so that `auto` and
    interpolations fit everywhere, and constructors check them. Their modules import torch, so this waits for the first
    composition.
    """
    from moe_lightning.models.gpt import GPTConfig
    from moe_lightning.moe.router import RouterConfig

    bases = {
        "_gpt": node_of(GPTConfig()),
        "_router": node_of(RouterConfig()),
        "_pretrained_router": dict.fromkeys(pretrained_options(RouterConfig)),  # null: as in the checkpoint
    }
    for name, node in bases.items():
        ConfigStore.instance().store(group="model", name=name, node=node)


def config_folder() -> initialize_config_dir:
    """Return the context in which Hydra composes from our conf folder."""
    register_model_bases()
    return initialize_config_dir(str(CONFIG_DIR.absolute()), version_base="1.3")


def own_recipes(config_dir: str | None) -> list[str]:
    """Return the overrides with which Hydra finds recipes in the user's own folder too."""
    return [f'hydra.searchpath=["file://{Path(config_dir).absolute()}"]'] if config_dir else []


OmegaConf.register_new_resolver("as_folder_name", as_folder_name, replace=True)


def as_run_name(name: object) -> str:
    """A run's name as a folder's, before Hydra makes that folder.

    Raises:
        ConfigurationError: it cannot be one.
    """
    check_run_name(str(name) if type(name) is int else name)
    return str(name)


OmegaConf.register_new_resolver("as_run_name", as_run_name, replace=True)
OmegaConf.register_new_resolver("needed", refuse_missing, replace=True)


_HARMLESS = (
    *("run", "sweep", "output_subdir", "verbose", "runtime", "overrides.task"),
    *("job.name", "job.config", "job.config_name", "job.override_dirname"),
)
"""Keys below `hydra` that name folders and what is composed."""


def check_hydra_settings(
    composed: DictConfig, overrides: Sequence[str], composed_from: Compose, *, words: Sequence[str]
) -> None:
    """Refuse what files of the user's own set below `hydra`: it names objects, commands, environment variables, and
    settings that would count as the command's.

    Args:
        composed: from the overrides.
        composed_from: composes from others.
        words: of the command.

    Raises:
        ConfigurationError: a key that neither the command nor a recipe of ours has set, or a file in place of Hydra's.
    """
    if is_allowed("hydra"):
        return
    for source in composed.hydra.runtime.config_sources:
        if source.schema == "file" and source.provider != "main" and Path(source.path, "hydra").exists():
            raise ConfigurationError(
                f"{source.path}/hydra would take the place of Hydra's own settings, which can run code: {_TRUST}"
            )
    typed_words = {word for word in words if word.lstrip("+~").startswith("hydra")}
    own = [
        override
        for override in overrides  # Hydra adds the mode that the first composition has
        if override in typed_words or override.startswith("hydra.mode=") or _is_our_recipe(*override.partition("="))
    ]
    try:
        expected = composed_from(own)
    except HydraException:  # a key that only those files have
        expected = composed_from([])
    known = dict(_leaves(OmegaConf.to_container(expected.hydra, resolve=False)))
    for key, value in _leaves(OmegaConf.to_container(composed.hydra, resolve=False)):
        if not is_below(key, _HARMLESS) and (key not in known or known[key] != value):
            raise ConfigurationError(
                f"hydra.{key}, which can run code, comes from a file of --config-dir or what it begins with: give it "
                f"on the command line, or {_TRUST}"
            )


_TRUST = f"set {ALLOW_VARIABLE}=hydra in the environment if you trust that folder"


def _is_our_recipe(key: str, _: str, name: str) -> bool:
    return key == "recipes" and name in choices("recipes")


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, child in node.items():
            yield from _leaves(child, _child(prefix, name))
    else:
        yield prefix, node


@contextmanager
def composition_errors(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> Iterator[None]:
    """Turns what Hydra and OmegaConf raise inside into ConfigurationError; nothing but composing may happen there.

    Args:
        overrides: of the command line.
        config_name: moe-train's or moe-sim's.

    Hydra also lets plain ValueErrors and errors of the YAML parser through.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except RecursionError as error:
        raise ConfigurationError(
            "two values of the configuration are taken from each other (${...}): give one of them as it is"
        ) from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigurationError(_sentence(error, overrides, config_name)) from error


def _not_utf8(arguments: Sequence[str]) -> Path | None:
    """The file of --config-dir that does not decode: the error itself does not name it."""
    pairs = itertools.pairwise(arguments)
    folders = [value for option, value in pairs if option in ("--config-dir", "-cd")]
    folders += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config-dir=")]
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.yaml")):
        try:
            read_text(path)
        except (OSError, ValueError):
            return path
    return None


def _sentence(error: Exception, overrides: Sequence[str], config_name: str) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        is_recipe = str(error.filename).endswith(".yaml")
        cure = "make it readable" if is_recipe else "start from a folder of yours, or give hydra.run.dir=FOLDER"
        return f"{one_line(error.filename)} cannot be used ({error.strerror}): {cure}"
    if isinstance(error, MissingConfigException):
        return _about_choice(error)
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override))
    if isinstance(error, UnicodeDecodeError):
        return f"{_not_utf8(overrides) or 'a configuration file'} is not UTF-8 text ({error.reason}): save it as UTF-8"
    if isinstance(error, YAMLError):
        return f"a configuration file is not YAML: {one_line(error)}"
    if isinstance(error, MissingMandatoryValue) and error.full_key:
        return _missing(str(error.full_key))
    if isinstance(error, InterpolationKeyError) and error.full_key:
        return _of_another_kind(error)
    message = str(error)
    if (match := _UNMERGEABLE.match(message)) and "Cannot merge" in str(error.__cause__):
        kind = "a list" if "object_type=list" in str(error.__cause__) else "a mapping"
        return (
            f"{match[1]} must be {kind}: set {match[1].split('=')[0]}{'=[A,B]' if kind == 'a list' else '.NAME=value'}"
        )
    if match := _THERE_ALREADY.search(message):
        return f"{match[1]} is there already: give {match[1]}=VALUE without a plus"
    if match := _UNKNOWN_KEY.search(message):
        listing = "moe-train --cfg job" if config_name == CONFIG_NAME else "moe-sim --cfg"
        return unknown_key(match[1].split("@")[0], known_keys(overrides, config_name=config_name), listing)
    if match := _AMBIGUOUS.search(message):
        key, _, values = match[1].partition("=")
        runs = ", or add -m for a run of each" if config_name == CONFIG_NAME else ""
        as_list = f", or {key}=[{values}]" if key in ("recipes", *COLLECTIONS) else ""
        return f"{match[1]} gives several values: give one{as_list}{runs}"
    if match := _NOT_LOADED.search(message):
        return _no_choice(match[1], match[2], choices(match[1]))
    if message.startswith("Config group override must be"):
        override = _wrong_choice(overrides)
        names = ", ".join(choices(override.partition("=")[0]))
        return f"{override} is not a choice: choose one of {names}" if names else f"{override}: give KEY=VALUE"
    first = message.splitlines()[0].removeprefix(_BY_A_RESOLVER)
    detail = f" ({one_line(error.__cause__)})" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return one_line(first + detail)


def _of_another_kind(error: InterpolationKeyError) -> str:
    """A part takes a value from another that has none such, as text from a model of images."""
    wanted = re.findall(r"'([^']+)'", str(error))[0]
    return (
        f"{error.full_key} is taken from {wanted}, which is not there: give {error.full_key}=VALUE, or model and data "
        "of one kind, as in recipes=quickstart (text) and recipes=swinv2_moe (images)"
    )


def _wrong_choice(overrides: Sequence[str]) -> str:
    """The override that names no file of its group."""
    for override in overrides:
        group, _, name = override.partition("=")
        if group in _groups() and not (CONFIG_DIR / group / f"{name}.yaml").is_file():
            return override
    return "one of the groups"


def _about_choice(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").partition("/")
    if group == "hydra":
        folder, _, name = name.rpartition("/")
        group = f"hydra/{folder}"
    found = error.options or choices(group)  # Hydra names none for a list of choices
    options = [option for option in found if not option.startswith("_")]
    if f"{group}={name}" in _EXTRAS:
        return f"{group}={name} needs a plugin of Hydra: run pip install 'moe-lightning[{_EXTRAS[f'{group}={name}']}]'"
    if not options:
        return one_line(str(error))
    return _no_choice(group, name, options)


def _no_choice(group: str, name: str, options: Sequence[str]) -> str:
    what = "recipe" if group == "recipes" else group.removesuffix("s")
    return f"there is no {what} '{name}'{suggestion(name, options)}: choose one of {', '.join(options)}"


def choices(group: str) -> list[str]:
    """Names of a group's files."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def unreadable(override: str) -> str:
    """The sentence for a word of the command line that is not a setting."""
    key, has_value, _ = override.partition("=")
    if has_value and re.fullmatch(r"[+~]*[\w/@]+(\.[\w-]+)*", key):
        return (
            f"the value in {shown(override)} cannot be read: write a list as [A,B], and text with "
            f"special characters in two pairs of quotes, '{key}=\"...\"'"
        )
    return f"{shown(override)} is not a setting: write KEY=VALUE, such as trainer.max_steps=100"


def unknown_key(key: str, known: Iterable[str], listing: str) -> str:
    """The sentence for a key that there is not.

    Args:
        known: dotted keys of the configuration.
        listing: the command that shows them.
    """
    names = set(known)
    if key in names or any(name.startswith(f"{key}.") for name in names):
        return f"{key} cannot be set so: give {key}=CHOICE, or {key}.NAME=VALUE"
    group, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if group == "callbacks" and f"callbacks.{name}" not in names and name in choices("callbacks"):
        return f"there is no key '{key}', because callbacks.{name} is not chosen: add callbacks={name}"
    near, section = suggestion(key.replace("/", "."), names), key.rpartition(".")[0]
    parts = (known.rpartition(".") for known in names)
    beside = sorted(last for folder, _, last in parts if folder == section and not last.startswith("_"))
    if near or not section or not beside:
        return f"there is no key '{key}'{near}: {listing} shows all keys"
    return f"there is no key '{key}': {section} has {', '.join(beside)}"


def known_keys(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str = CONFIG_NAME
) -> list[str]:
    """Dotted keys of the configuration under the overrides that choose a recipe or a group; without them where these
    fail.

    Args:
        overrides: of the command line.
        config_dir: the user's own folder of recipes.
        config_name: moe-train's or moe-sim's.
    """
    groups = _groups() if config_name == CONFIG_NAME else ["model", "recipes"]
    keys = (key for key, _ in walk(_composed(overrides, config_dir, config_name)))
    return [*(key for key in keys if key and "[" not in key), *groups]


def _composed(overrides: Sequence[str], config_dir: str | None, config_name: str) -> Any:
    """The unresolved configuration that `known_keys` lists."""
    chosen = [text for text in overrides if text.partition("=")[0] in _groups() and "=" in text]
    for tried in ([*own_recipes(config_dir), *chosen], []):
        try:
            with config_folder():
                return OmegaConf.to_container(compose(config_name, tried), resolve=False)
        except (HydraException, OmegaConfBaseException, ValueError):
            continue
    return {}


def _groups() -> list[str]:
    return [folder.name for folder in CONFIG_DIR.iterdir() if folder.is_dir() and not folder.name.startswith("_")]
