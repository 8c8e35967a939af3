"""Every argument of the public constructors with values that few arguments can have: never a raw TypeError."""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from torch import nn

import moe_lightning
from moe_lightning.config import hints_of
from moe_lightning.errors import CheckpointError, ConfigurationError
from tests.sweep.values import VALUES
from tests.test_layers import PACKAGE

NEEDED: dict[str, dict[str, Any]] = {
    "GPTModule": {"config": {"d_model": 8, "num_heads": 2, "num_layers": 2}},
    "HuggingFaceConfig": {"pretrained": "folder"},
    "MoELayer": {"d_model": 4, "d_expert": 8, "num_experts": 4},
    "PartialExpertsCheckpoint": {"dirpath": "folder"},
    "RoutingReplay": {"path": "folder"},
    "StepSampler": {"num_samples": 8, "global_batch_size": 2},
    "SwinConfig": {"num_classes": 4},
}
"""Arguments without a default."""

CLASSES = (
    "CompileDense", "DynamicK", "ExpertModelSummary", "ExpertParallelStrategy", "FaultRecovery", "ForcedRouting",
    "GPTConfig", "GPTModule", "HuggingFaceConfig", "LoadBalancer", "MoELayer", "OptimizerConfig",
    "PartialExpertsCheckpoint", "RouterConfig", "RoutingReplay", "StepSampler",
    "SwinConfig", "UpcyclingConfig",
)  # fmt: skip


def _parameters(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


@pytest.mark.parametrize("name", CLASSES)
def test_wrong_arguments_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cls = getattr(moe_lightning, name)
    cases = [(argument, label) for argument in _parameters(cls) for label in VALUES]
    assert cases
    wrong = [f"{argument}={label}: {told}" for argument, label in cases if (told := _told(cls, argument, label))]
    assert wrong == []


def _told(cls: type, argument: str, label: str) -> str | None:
    """What is wrong with the answer to a value."""
    if (cls.__name__, label) == ("MoELayer", "1e14"):  # nothing estimates what a layer of its own takes
        return None
    try:
        cls(**{**NEEDED.get(cls.__name__, {}), argument: VALUES[label]})
    except (ConfigurationError, CheckpointError) as error:
        named = {*re.findall(r"\w+", str(error)), "config", "optimizer", "world_size"}  # the last: "for 3 ranks"
        return None if argument in named else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted" if label in ("nan", "inf") else None


# ---------------------------------------------------------------------- all classes of the package

_SAMPLES = {"float": 0.5, "int": 2, "bool": False, "Path": "folder", "str": "abc"}
"""By a word of an annotation, a value for an argument without a default."""

_FOREIGN = (BaseException, enum.Enum, argparse.ArgumentParser, dict, Protocol)
"""Whose constructors are Python's."""


_EXTRAS = ("lm_eval", "gguf")
"""Packages that some modules need as a whole."""


def _buildable() -> Iterator[tuple[type, dict[str, Any]]]:
    """Classes of the package that can be made from plain values, and such values for what they need."""
    for info in pkgutil.walk_packages([str(PACKAGE)], "moe_lightning."):
        if {"kernels", "conf", "compat"} & set(info.name.split(".")):  # compat: constructors of Lightning's own classes
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name in _EXTRAS:
                continue
            raise
        for name, cls in vars(module).items():
            is_ours = inspect.isclass(cls) and cls.__module__ == info.name and not name.startswith("_")
            if not is_ours or issubclass(cls, _FOREIGN) or cls.__init__ in (object.__init__, nn.RMSNorm.__init__):
                continue
            needed = _plain_arguments(cls)
            if needed is not None and _error(cls, needed) is None:
                yield cls, needed


def _plain_arguments(cls: type) -> dict[str, Any] | None:
    """For all that a constructor needs; None where something of it is no plain value."""
    hints, needed = hints_of(cls), {}
    for parameter in inspect.signature(cls).parameters.values():
        if (
            parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            or parameter.default is not parameter.empty
        ):
            continue
        hint = str(hints.get(parameter.name))
        fitting = [value for word, value in _SAMPLES.items() if word in hint and "rray" not in hint]
        if not fitting:
            return None
        needed[parameter.name] = fitting[0]
    return needed


def _error(cls: type, arguments: dict[str, Any]) -> str | None:
    """What a constructor raised that is no sentence of ours."""
    try:
        cls(**arguments)
    except (ConfigurationError, CheckpointError):
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.slow
def test_no_constructor_of_the_package_fails_in_pythons_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = [
        f"{cls.__module__}.{cls.__qualname__}({name}={label}): {error}"
        for cls, needed in _buildable()
        for name in _parameters(cls)
        for label in VALUES
        if label != "1e14"  # sizes that cannot be had: what a class alone takes, nothing estimates
        and (error := _error(cls, {**needed, name: VALUES[label]})) is not None
    ]
    assert raw == []
