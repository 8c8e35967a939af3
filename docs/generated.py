"""Pages of the documentation site that are made from the code: options, metrics, error messages, the Python API.

conf.py writes them into `docs/generated/` whenever the site is built, so they never differ from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import moe_lightning
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
    "strategy": "moe_lightning.strategies.expert_parallel.ExpertParallelStrategy",
    "model.model": "moe_lightning.models.gpt.GPTConfig",
    "optimizer": "moe_lightning.models.gpt_module.OptimizerConfig",
}
"""Options that come first on their page."""


def write(folder: Path) -> None:
    """Write all generated pages."""
    folder.mkdir(exist_ok=True)
    for name, lines in {"options": options(), "metrics": metrics(), "errors": errors(), "api": api()}.items():
        text = "\n".join(lines) + "\n"
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # an unchanged page is not read again
            path.write_text(text)


# ---------------------------------------------------------------- options


def options() -> Iterator[str]:
    """Yield the lines of the page of all keys of the configuration."""
    yield "# Options"
    yield ""
    yield "Every key of `moe-train`, with its type, its default and its meaning. A key is given on the command line"
    yield "(`moe-train strategy.slots=6`) or in a recipe. Defaults are those of the classes; `moe-train --cfg job`"
    yield "prints a composed configuration."
    seen: set[type] = set()
    waiting = [
        (prefix, find(target)) for prefix, target in (*FIRST.items(), *configured()) if "moe_lightning." in target
    ]
    while waiting:
        prefix, cls = waiting.pop(0)
        if cls in seen:
            continue
        seen.add(cls)
        yield from class_options(prefix, cls)
        waiting[:0] = [(f"{prefix}.{name}", nested) for name, nested in nested_options(cls)]


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
            yield from targets(path.parent.name, yaml.safe_load(path.read_text()))


def targets(prefix: str, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the `_target_`s in a node with their keys."""
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        yield prefix, node["_target_"]
    for key, value in node.items():
        yield from targets(f"{prefix}.{key}", value)


def find(target: str) -> type:
    """Return the class that a `_target_` names."""
    module, _, name = target.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def class_options(prefix: str, cls: type) -> Iterator[str]:
    """Yield the section of a class: a table with a row for each option."""
    meanings = documented(cls)
    hints = hints_of(cls)
    rows = []
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = cell(described(hints[parameter.name])) if parameter.name in hints else ""
        rows.append((f"`{parameter.name}`", kind, default(parameter), cell(meanings.get(parameter.name, ""))))
    if not rows:
        return
    yield ""
    yield f"## {prefix}: {cls.__name__}"
    yield ""
    yield cell(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])
    yield ""
    yield "| option | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def default(parameter: inspect.Parameter) -> str:
    """Return the default as it would be typed."""
    value = parameter.default
    if value is parameter.empty:
        return "required"
    if not isinstance(value, str | int | float | bool | list | tuple | dict | type(None)):
        return "see its own options"
    return f"`{shown(value)}`"


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


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---------------------------------------------------------------- metrics


def metrics() -> Iterator[str]:
    """Yield the lines of the page of logged metrics: what the docstring of each callback says besides its options."""
    yield "# Metrics"
    yield ""
    yield "`NN` stands for the number of an MoE layer or a rank. Metrics of a step are logged every"
    yield "`trainer.log_every_n_steps` steps to every logger; `loss` and the metrics of a module are its own."
    for name in ("telemetry.Telemetry", "load_balancer.LoadBalancer", "checkpoint.PartialExpertsCheckpoint",
                 "fault_recovery.FaultRecovery"):  # fmt: skip
        cls = find(f"moe_lightning.callbacks.{name}")
        yield ""
        yield f"## {cls.__name__}"
        for paragraph in inspect.cleandoc(cls.__doc__ or "").split("\n\n"):
            if re.search(METRIC, paragraph) and not re.match(r"\w+:\n", paragraph):
                yield ""
                yield re.sub(METRIC, r"`\g<0>`", paragraph)


METRIC = r"(?<![\w`/])(train|val|device|moe|comm|balance|checkpoint|recovery|parameters)/[\w/{}]*\w}?(?!`)"
"""Name of a metric in a docstring, with its area before the slash."""


# ---------------------------------------------------------------- errors


def errors() -> Iterator[str]:
    """Yield the lines of the page of all error messages that a user can meet."""
    yield "# Error messages"
    yield ""
    yield "Each message says what is wrong, the limit and the cure. In this list words in *CAPITALS* stand for values."
    yield "Search for a few words of the message; the module says where it comes from."
    for package, title in PACKAGES.items():
        messages = sorted(
            {(message, path.stem) for path in sources(package) for message in raised(ast.parse(path.read_text()))}
        )
        if not messages:
            continue
        yield ""
        yield f"## {title}"
        yield ""
        yield "| message | module |"
        yield "|---|---|"
        yield from (f"| {cell(message)} | `{package}/{module}` |" for message, module in messages)


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
    """Yield the lines of the reference of all public names."""
    yield "# Python API"
    yield ""
    yield "The names that `moe_lightning` exports. Everything else is internal and may change between releases."
    for name in moe_lightning.__all__:
        value = getattr(moe_lightning, name)
        yield ""
        yield f"## {name}"
        yield ""
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        yield "```{eval-rst}"
        yield f".. {kind}:: {value.__module__}.{value.__qualname__}"
        if kind == "autoclass":
            yield "   :members:"
        yield "```"
