"""A recommended policy as a recipe for `moe-train`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.simulate.recommend import Advice

_HEAD = "# @package _global_\n# Recommended by moe-sim for "


def is_recommended(path: Path) -> bool:
    """Whether a file is a recipe that moe-sim wrote, which it may write again."""
    return path.is_file() and path.read_text(errors="replace").startswith(_HEAD)


def recipe_text(advice: Advice, config: Mapping[str, Any], path: Path) -> str:
    """The YAML of a recipe that trains as advised; the callbacks start from the files of conf/callbacks.

    Args:
        advice: what to choose.
        config: moe-sim's configuration.
        path: where the recipe will lie, for its launch command.
    """
    from moe_lightning.callbacks.fault_recovery import FaultRecovery

    policy, report = advice.policy, advice.report
    balancer: dict[str, Any] = _callback("load_balancer") | {
        "rebalance_every": policy.rebalance_every,
        "min_replicas": policy.min_replicas,
        "ranks_per_node": config["hardware"]["ranks_per_node"] or 1,
    }
    if policy.placement is not None:
        balancer["placement"] = policy.placement
    recovery: dict[str, Any] = {
        "_target_": "moe_lightning.callbacks.fault_recovery.FaultRecovery",
        "min_replicas": policy.min_replicas,
        "protection": policy.protection,
        "failures": config["failures"]["simultaneous"],
    }
    known = inspect.signature(FaultRecovery).parameters
    recovery = {key: value for key, value in recovery.items() if key in known or key == "_target_"}
    body: dict[str, Any] = {
        "model": _model(config["model"]),
        "strategy": {"slots": policy.slots},
        "callbacks": {
            "partial_experts_checkpoint": {
                "every_n_steps": policy.interval_steps,
                "k_snapshot": policy.k_snapshot,
                "k_persist": policy.k_persist,
                "lossless": policy.lossless,
            },
            "dynamic_k": {"threshold": policy.plt_threshold},
            "load_balancer": balancer,
            "fault_recovery": recovery,
        },
    }
    if config["global_batch"]:
        body["data"] = {"global_batch_size": config["global_batch"]}
    head = (
        f"{_HEAD}{config['nodes']} nodes: {report.goodput:.4g} samples/s, "
        f"PLT {report.plt:.5f} predicted.\n#\n"
        f"#   moe-train --config-dir {path.parent.parent} recipes={path.stem}\n"
        "defaults:\n  - override /callbacks: partial_experts\n\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(body))


def _callback(name: str) -> dict[str, Any]:
    """The node of a callback as conf/callbacks has it."""
    node = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "callbacks" / f"{name}.yaml"), resolve=False)
    assert isinstance(node, dict)
    return dict(node[name])


def _model(node: Mapping[str, Any]) -> dict[str, Any]:
    """The model as it was simulated, whatever file or overrides it came from."""
    return dict(node)
