"""Pages of the documentation site that are made from the code: options, metrics, error messages, the Python API.

conf.py writes them into `docs/generated/` whenever the site is built, so they never differ from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

import moe_lightning
from moe_lightning.cli.composition import PLAIN
from moe_lightning.config import described, shown

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "moe": "Routers, experts, losses",
    "dispatch": "Placement and dispatch",
    "balancing": "Balancing",
    "parallel": "Mesh and process groups",
    "state": "State of a run",
    "checkpoint": "Checkpoints",
    "elastic": "Rendezvous, launchers",
    "strategies": "Strategy",
    "callbacks": "Callbacks",
    "models": "Models",
    "data": "Data",
    "doctor": "Parity doctor",
    "simulate": "Simulator",
    "cli": "Commands",
    "compat": "Compatibility",
}
"""Title of each package, in the order of the pages."""


FIRST = {
    "data": "moe_lightning.data.text.TextData",
    "optimizer": "moe_lightning.models.gpt_module.OptimizerConfig",
    "model": "moe_lightning.models.gpt.GPTConfig",
    "strategy": "moe_lightning.strategies.expert_parallel.ExpertParallelStrategy",
}
"""Options that come first on their page."""

ELASTIC = "moe_lightning.elastic.membership.ElasticSettings"
GROUPS, CHOICE = ("model", "optimizer", "data", "strategy", "trainer", "callbacks", "logger"), ["str", "Sequence[str]"]
"""Keys that choose configurations by their names, or set keys of the one that is chosen."""

API_GROUPS = {
    "Strategy and layer": (
        *("ExpertParallelStrategy", "ExpertParallelCallback", "MoELayer", "RouterConfig", "ForcedRouting"),
        "ContextParallel",
    ),
    "Losses and gradients": ("auxiliary_loss", "global_mean", "global_sum", "gradient_norms"),
    "Models": (
        *("GPT", "GPTConfig", "GPTModule", "OptimizerConfig", "HuggingFaceConfig", "HuggingFaceModule"),
        *("UpcyclingConfig", "SwinConfig", "SwinModule"),
    ),
    "Data": ("StepLoader", "StepSampler"),
    "Errors": ("CheckpointError", "ConfigurationError", "ParityError"),
}
"""Public names by subject; those that are in no group are callbacks and tools."""


def write(folder: Path) -> None:
    """Write all generated pages, and delete those that are no longer generated."""
    pages = {"options": options(), "metrics": metrics(), "errors": errors(), "api": api()}
    pages |= {f"api/{name}": api_page(name) for name in moe_lightning.__all__}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, lines in pages.items():
        text = "\n".join(lines) + "\n"
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # Sphinx reads only changed pages again
            path.write_text(text)
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder).with_suffix("")) not in pages:
            path.unlink()


def definition(term: str, meaning: str) -> Iterator[str]:
    """Yield the lines of an entry of a definition list, which is readable on narrow screens, unlike a wide table."""
    yield ""
    yield term
    yield f": {meaning}"


# ---------------------------------------------------------------- options


def options() -> Iterator[str]:
    """Yield the lines of the page of all keys of the configuration."""
    yield "# Options"
    yield ""
    yield "All keys of `moe-train`, with type, default and meaning. Set a key on the command line"
    yield "(`moe-train strategy.slots=6`) or in a recipe. Defaults are those of the classes; a configuration group or a"
    yield "recipe may set other values. `moe-train --cfg job` prints the composed configuration."
    seen: set[type] = set()
    yield from sections(FIRST.items(), seen)
    yield from commented("The run", "", ROOT / "conf" / "train.yaml", ("defaults", "module", "hydra"))
    yield from sections([("elastic.settings", ELASTIC)], seen)
    yield from commented("trainer: Trainer", "trainer.", ROOT / "conf" / "trainer" / "default.yaml", ())
    yield from sections(configured(), seen)


def sections(named: Iterable[tuple[str, str]], seen: set[type]) -> Iterator[str]:
    """Yield the sections of classes and of the classes of their options, each once."""
    waiting = [(prefix, find(target)) for prefix, target in named if "moe_lightning." in target]
    while waiting:
        prefix, cls = waiting.pop(0)
        if cls in seen:
            continue
        seen.add(cls)
        yield from class_options(prefix, cls)
        waiting[:0] = [(f"{prefix}.{name}", nested) for name, nested in nested_options(cls)]


def commented(title: str, prefix: str, path: Path, left_out: Container[str]) -> Iterator[str]:
    """Yield the section of a configuration file whose comments explain its keys."""
    yield ""
    yield f"## {title}"
    if prefix == "trainer.":
        yield ""
        yield "Arguments of Lightning's Trainer."
    parents: list[str] = []
    for line in path.read_text().splitlines():
        match = re.fullmatch(r"( *)(\w+):(?: +([^#]*?))?(?: +# (.*))?", line)
        if match is None:
            continue
        indent, key, value, comment = match.groups()
        parents[len(indent) // 2 :] = [key]
        if parents[0] in left_out or "settings" in parents or not value:
            continue
        meaning = f"default `{value}`"
        yield from definition(f"`{prefix}{'.'.join(parents)}`", f"{meaning} · {comment}" if comment else meaning)


def nested_options(cls: type) -> Iterator[tuple[str, type]]:
    """Yield the name and the class of each option that has options of its own."""
    for name, hint in hints_of(cls).items():
        for option in (hint, *typing.get_args(hint)):
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                yield name, option


def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotations of a class's options."""
    return typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__, include_extras=True)


def configured() -> Iterator[tuple[str, str]]:
    """Yield the key and the class of every object that a configuration group builds."""
    for path in sorted((ROOT / "conf").glob("*/*.yaml")):
        if path.parent.name != "recipes":
            text = path.read_text()
            prefix = "" if "# @package _global_" in text else path.parent.name
            yield from targets(prefix, yaml.safe_load(text))


def targets(prefix: str, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the `_target_`s in a node with their keys."""
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        yield prefix, node["_target_"]
    for key, value in node.items():
        yield from targets(f"{prefix}.{key}".lstrip("."), value)


def find(target: str) -> type:
    """Return the class that a `_target_` names."""
    module, _, name = target.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def class_options(prefix: str, cls: type) -> Iterator[str]:
    """Yield the section of a class: its options with type, default and meaning."""
    meanings = documented(cls)
    hints = hints_of(cls)
    rows: list[str] = []
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = plain(described(hints[parameter.name])) if parameter.name in hints else ""
        facts = [
            *([kind] if kind else []),
            default(parameter),
            *filter(None, [plain(meanings.get(parameter.name, ""))]),
        ]
        rows += definition(f"`{prefix}.{parameter.name}`", " · ".join(facts))
    if not rows:
        return
    yield ""
    yield f"## {prefix}: {cls.__name__}"
    yield ""
    yield plain(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])
    yield from rows


def default(parameter: inspect.Parameter) -> str:
    """Return the default as it would be typed."""
    value = parameter.default
    if value is parameter.empty:
        return "required"
    if not isinstance(value, str | int | float | bool | list | tuple | dict | type(None)):
        return "see its own options"
    return f"default `{shown(value)}`"


def documented(cls: type) -> dict[str, str]:
    """Return the meaning of each option as the docstring's Args or Attributes state it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
            for names, meaning in re.findall(
                r"^    (\w[\w, \n]*?): ((?:.*\n?)(?:        .*\n?)*)", section, re.MULTILINE
            ):
                found |= dict.fromkeys(re.split(r",\s*", names), " ".join(meaning.split()))
    return found


def plain(text: str) -> str:
    """Return text on one line, without what Markdown would take for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


# ---------------------------------------------------------------- types of the keywords of train()

SETTINGS = ROOT / "moe_lightning" / "cli" / "settings.pyi"
_HEAD = '''"""Types of the keywords of `moe_lightning.train`, for completion in editors and for type checkers.

Made from the classes of the configuration by `python docs/generated.py`; the classes check values when they are built.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
'''

Keys = dict[str, dict[str, list[str]]]
"""Name of a mapping, its keys, and the types of each as source."""


def settings() -> str:
    """Return the source of the stub `SETTINGS`: nothing needs these types while a program runs."""
    keys: Keys = {"Settings": {"run_name": ["str"], "ranks": ["int", "str"], "module": ["Mapping[str, Any]"]}}
    run = yaml.safe_load((ROOT / "conf" / "train.yaml").read_text())
    for name, hint in PLAIN.items():
        add_key(keys, "Settings", name, as_source(hint))
    for name, value in run["elastic"].items():
        kind = bool | str if value == "auto" else str | None if value is None else type(value)
        add_key(keys, "ElasticKeys", name, [] if name == "settings" else as_source(kind))
    for prefix, target in [*FIRST.items(), ("elastic.settings", ELASTIC), *configured()]:
        if prefix == "module":  # of the user, perhaps
            continue
        parent = "Settings"
        for part in prefix.split("."):
            name = f"{part.title().replace('_', '')}Keys"
            add_key(keys, parent, part, [name, *(CHOICE if parent == "Settings" and part in GROUPS else [])])
            parent = name
        add_options(keys, parent, find(target))
    lines = [_HEAD]
    for name, own in keys.items():
        lines += ["", f"class {name}(TypedDict, total=False):", *([] if own else ["    pass"])]
        lines += [f"    {key}: {'Any' if 'Any' in types else ' | '.join(types)}" for key, types in own.items()]
    return "\n".join(lines) + "\n"


def add_options(keys: Keys, name: str, cls: type) -> None:
    """Add the options of a class, and of the classes of its options, to the mapping of that name."""
    keys.setdefault(name, {})
    nested = dict(nested_options(cls))
    for option, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or option not in hints_of(cls):
            continue
        if option in nested:
            of_option = f"{nested[option].__name__.removesuffix('Config')}Keys"
            add_options(keys, of_option, nested[option])
            add_key(keys, name, option, [of_option])
        else:
            add_key(keys, name, option, as_source(hints_of(cls)[option]))


def add_key(keys: Keys, name: str, key: str, types: Sequence[str]) -> None:
    """Add types to those of a key, which objects of several classes may have."""
    known = keys.setdefault(name, {}).setdefault(key, [])
    known += [text for text in dict.fromkeys(types) if text not in known]


def as_source(hint: Any) -> list[str]:
    """Return the members of a type, as a configuration can state them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return as_source(args[0])
    if origin in (typing.Union, types.UnionType):
        return [text for member in args for text in as_source(member)]
    if origin is Literal:
        return [f"Literal[{', '.join(map(repr, args))}]"]
    if hint in (bool, int, float, str):
        return [hint.__name__]
    if hint in (None, type(None)):
        return ["None"]
    found = origin or hint
    if not isinstance(found, type):
        return ["Any"]
    if issubclass(found, os.PathLike):
        return ["str"]
    if issubclass(found, Mapping):
        return ["Mapping[str, Any]"]
    return ["Sequence[Any]"] if issubclass(found, Sequence) else ["Any"]


# ---------------------------------------------------------------- metrics


def metrics() -> Iterator[str]:
    """Yield the lines of the page of logged metrics: what the docstring of each callback says besides its options."""
    yield "# Metrics"
    yield ""
    yield "`NN` stands for the index of an MoE layer or a rank. Metrics of a step are logged to every logger every"
    yield "`trainer.log_every_n_steps` steps. `loss` and other metrics of your module are logged by the module itself."
    for name in ("telemetry.Telemetry", "load_balancer.LoadBalancer", "checkpoint.PartialExpertsCheckpoint",
                 "fault_recovery.FaultRecovery"):  # fmt: skip
        cls = find(f"moe_lightning.callbacks.{name}")
        yield ""
        yield f"## {cls.__name__}"
        for paragraph in inspect.cleandoc(cls.__doc__ or "").split("\n\n"):
            if re.search(METRIC, paragraph) and not re.match(r"\w+:\n", paragraph):
                yield ""
                yield re.sub(METRIC, r"`\g<0>`", paragraph)


METRIC = r"(?<![\w`/])(train|val|device|moe|comm|ranks|balance|checkpoint|recovery|parameters)/[\w/{}]*\w}?(?!`)"
"""Name of a metric in a docstring, with its area before the slash."""


# ---------------------------------------------------------------- errors


def errors() -> Iterator[str]:
    """Yield the lines of the page of all error messages that a user can meet."""
    yield "# Error messages"
    yield ""
    yield "Most messages have two parts: the cause, with the value and its limit, and the cure. Each entry below shows"
    yield "the cause first and the cure beneath it, with the module that raises it. Words in *CAPITALS* stand for"
    yield "values, so search for a few other words of your message."
    yield ""
    yield "A command prints a user error as one line without a traceback and ends with exit code 2. In a script, catch"
    yield "[ConfigurationError](api/ConfigurationError.md), [CheckpointError](api/CheckpointError.md) or"
    yield "[ParityError](api/ParityError.md)."
    for package, title in PACKAGES.items():
        messages = sorted(
            {(message, path.stem) for path in sources(package) for message in raised(ast.parse(path.read_text()))}
        )
        if not messages:
            continue
        yield ""
        yield f"## {title}"
        for text, module in messages:
            cause, cure = cause_and_cure(plain(text))
            place = f"`{package}/{module}`"
            yield from definition(cause, f"{cure} · {place}" if cure else place)


def cause_and_cure(text: str) -> tuple[str, str]:
    """Return the two parts of a message; the second is empty where it names no cure."""
    match = re.fullmatch(r"(.+?): ([a-z`](?:(?!: [a-z]).)+)", text)
    if match is None or re.match(r"(its?|the|they|that|both|such|\*)\b", match[2]):
        return text, ""
    return match[1], match[2][0].upper() + match[2][1:]


def sources(package: str) -> list[Path]:
    """Return the modules of a package."""
    return sorted((ROOT / "moe_lightning" / package).rglob("*.py"))


def raised(tree: ast.AST) -> Iterator[str]:
    """Yield the messages of the errors that a module raises for its users."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call) or not call.args or not isinstance(call.func, ast.Name):
            continue
        if call.func.id in ("ConfigurationError", "CheckpointError", "ParityError"):
            text = message(call.args[0])
            if len(re.findall(r"[a-z]{2,}", text)) > 2:  # one that is handed on is listed where it is made
                yield text


def message(node: ast.expr) -> str:
    """Return a message with its values replaced by their names."""
    if isinstance(node, ast.Constant):
        return re.sub(r"([*_`\[\]])", r"\\\1", str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    if isinstance(node, ast.FormattedValue):
        words = re.findall(r"[A-Za-z]+", ast.unparse(node.value)) or ["value"]
        named = [word for word in words if word not in ("self", "len", "sorted", "str", "join", "repr", "shown")]
        return f"*{(named or words)[-1].upper()}*"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message(node.left) + message(node.right)
    return "*TEXT*"


# ---------------------------------------------------------------- API


def api() -> Iterator[str]:
    """Yield the lines of the overview of all public names."""
    yield "# Python API"
    yield ""
    yield "The names that `moe_lightning` exports, with one page each. Everything else is internal and may change"
    yield "between releases."
    grouped = {name for names in API_GROUPS.values() for name in names}
    others = tuple(name for name in moe_lightning.__all__ if name not in grouped)
    for title, names in ({"Callbacks and tools": others} | API_GROUPS).items():
        yield ""
        yield f"## {title}"
        for name in names:
            doc = inspect.cleandoc(getattr(moe_lightning, name).__doc__ or "").split("\n\n")[0]
            yield from definition(f"[{name}](api/{name}.md)", plain(doc))
    yield ""
    yield "```{toctree}"
    yield ":hidden:"
    yield ""
    yield from (f"api/{name}" for name in moe_lightning.__all__)
    yield "```"


def api_page(name: str) -> Iterator[str]:
    """Yield the lines of the page of a public name."""
    value = getattr(moe_lightning, name)
    kind = "autoclass" if inspect.isclass(value) else "autofunction"
    yield f"# {name}"
    yield ""
    yield f"`from moe_lightning import {name}`"
    yield ""
    yield "```{eval-rst}"
    yield f".. {kind}:: {value.__module__}.{value.__qualname__}"
    if kind == "autoclass":
        yield "   :members:"
    yield "```"


if __name__ == "__main__":
    SETTINGS.write_text(settings())
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(SETTINGS)], check=True)
