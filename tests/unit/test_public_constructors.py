"""Every argument of the public constructors with values that few arguments can have: never a raw TypeError."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import moe_lightning
from moe_lightning import ExpertParallelStrategy, LoadBalancer, PartialExpertsCheckpoint
from moe_lightning.balancing.planner import BalancePolicy
from moe_lightning.callbacks.speeds import SpeedPolicy
from moe_lightning.checkpoint.policy import CheckpointSettings
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.strategies.placed_experts import PlacementOptions
from tests.sweep.values import VALUES

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
    "CompileDense", "DynamicK", "ExpertModelSummary", "ExpertParallelStrategy", "FaultRecovery",
    "ForcedRouting", "GPTConfig", "GPTModule", "HuggingFaceConfig", "LoadBalancer", "MoELayer", "OptimizerConfig",
    "PartialExpertsCheckpoint", "RouterConfig", "RoutingReplay", "SpikeGuard",
    "StepSampler", "SwinConfig", "UpcyclingConfig",
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


@pytest.mark.parametrize(
    ("cls", "policy"),
    [
        (LoadBalancer, BalancePolicy),
        (LoadBalancer, SpeedPolicy),
        (PartialExpertsCheckpoint, CheckpointSettings),
        (ExpertParallelStrategy, PlacementOptions),
    ],
)
def test_defaults_are_those_of_the_policy_that_is_made(cls: type, policy: type) -> None:
    given, own = inspect.signature(cls).parameters, inspect.signature(policy).parameters
    shared = (given.keys() & own.keys()) - {"min_replicas"}  # of the balancer: as many as FaultRecovery promises
    assert len(shared) > 2
    assert {name: given[name].default for name in shared} == {name: own[name].default for name in shared}


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
