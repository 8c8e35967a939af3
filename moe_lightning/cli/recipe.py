"""A recommended policy as a recipe for `moe-train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.simulate.mesh import Mesh
from moe_lightning.simulate.recommend import Advice

_HEAD = "# @package _global_\n# Recommended by moe-sim for "


def is_recommended(path: Path) -> bool:
    """Whether a file is a recipe that moe-sim wrote, which it may write again."""
    return path.is_file() and path.read_text(errors="replace").startswith(_HEAD)


def recipe_text(advice: Advice, config: Mapping[str, Any], path: Path, mesh: Mesh) -> str:
    """The YAML of a recipe that trains as advised; the callbacks start from the files of conf/callbacks.

    Args:
        advice: what to choose.
        config: moe-sim's configuration.
        path: where the recipe will lie, for its launch command.
        mesh: over which the model was simulated.
    """
    policy, report = advice.policy, advice.report
    balancer: dict[str, Any] = _load_balancer() | {
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
    body: dict[str, Any] = {
        "model": dict(config["model"]),  # as it was simulated, whatever file or overrides it came from
        "strategy": {"slots": policy.slots, **_mesh_of_recipe(mesh)},
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
        f"PLT {report.plt:.5f} predicted.\n#\n{_about(mesh)}"
        f"#   moe-train --config-dir {path.parent.parent} recipes={path.stem}\n"
        "defaults:\n  - override /callbacks: partial_experts\n\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(body))


def _about(mesh: Mesh) -> str:
    """A comment on what of the mesh a recipe of moe-train does not say."""
    axes = f"pp={mesh.pp} cp={mesh.cp} tp={mesh.tp} dense={mesh.dense}"
    schedule = (
        f"micro_batches={mesh.micro_batches or 'null'} chunks={mesh.chunks} recompute={str(mesh.recompute).lower()}"
    )
    return "" if mesh.is_plain else f"# Simulated with {axes} {schedule}.\n#\n"


def _mesh_of_recipe(mesh: Mesh) -> dict[str, Any]:
    """The arguments of the strategy that lay the model over the ranks; none where data parallelism alone does."""
    axes = {"pp": mesh.pp, "cp": mesh.cp, "tp": mesh.tp}
    chosen = {"dense": mesh.dense, "shard_size": mesh.shard_size, "mesh": axes if mesh.unit > 1 else None}
    return {} if mesh.is_plain else {key: value for key, value in chosen.items() if value}


def _load_balancer() -> dict[str, Any]:
    """Its node as conf/callbacks has it."""
    node = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "callbacks" / "load_balancer.yaml"), resolve=False)
    assert isinstance(node, dict)
    return dict(node["load_balancer"])
