"""What moe-sim simulates, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_lightning.config import TARGET, build_config, fits, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.hardware import Hardware, load_hardware, preset
from moe_lightning.simulate.mesh import Mesh
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.routing import make_routing
from moe_lightning.simulate.scenario import Scenario
from moe_lightning.simulate.workload import Workload, gpt_workload

_MOST_MODEL_BYTES = 10**18
"""Of its training: beyond the largest clusters."""
_BYTES_VOCABULARY = 256


def _workload(config: Mapping[str, Any]) -> Workload:
    from moe_lightning.cli.capacity import check_model
    from moe_lightning.models.gpt import GPTConfig
    from moe_lightning.models.size import least_gpt_parameters
    from moe_lightning.moe.router import RouterConfig

    model = _arguments(config["model"], GPTConfig, "model")
    if model["vocab_size"] == "auto":
        model["vocab_size"] = _BYTES_VOCABULARY
    if not isinstance(model["router"], Mapping):
        raise ConfigurationError(
            f"model.router={shown(model['router'])} must be a mapping: set model.router.NAME=value"
        )
    router = _arguments(model["router"], RouterConfig, "model.router")
    if not fits(router.get("forced"), dict[str, Any] | None):
        raise ConfigurationError(f"model.router.forced={shown(router['forced'])} must be null or a mapping")
    model["router"] = build_config(RouterConfig, router | {"forced": None}, key="model.router")
    described_model = build_config(GPTConfig, model, key="model")
    sizes = {f"model.{key}": value for key, value in model.items() if type(value) is int}
    check_model(sizes, least_gpt_parameters(described_model), _MOST_MODEL_BYTES)
    return gpt_workload(described_model, rank_batch=config["rank_batch"], global_batch=config["global_batch"])


def _arguments(node: Mapping[str, Any], kind: type, key: str) -> dict[str, Any]:
    """Those of the one kind of object that the simulator knows here."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if node.get(TARGET, name) != name:
        raise ConfigurationError(f"{key}.{TARGET}={shown(node[TARGET])} must be {name}: choose a model of text")
    return {argument: value for argument, value in node.items() if argument != TARGET}


def _hardware(config: Mapping[str, Any]) -> Hardware:
    changes = {key: value for key, value in config["hardware"].items() if key != "preset"}
    name = str(config["hardware"]["preset"])
    if name.endswith(".json"):
        given = {key: value for key, value in changes.items() if value is not None and key != "ranks_per_node"}
        return build_config(
            Hardware, vars(load_hardware(Path(name), changes["ranks_per_node"])) | given, key="hardware"
        )
    return preset(name, **changes)


def _mesh(config: Mapping[str, Any]) -> Mesh:
    return build_config(Mesh, given(config, "mesh", "search"), key="mesh")


def given(config: Mapping[str, Any], group: str, but: str) -> dict[str, Any]:
    """Those of a group's keys that are set."""
    return {key: value for key, value in config[group].items() if key != but and value is not None}


def scenario_of(config: Mapping[str, Any], name: str) -> Scenario:
    """The scenario of a policy: that of the configuration, or another one on the same failures.

    Raises:
        ConfigurationError: a part that cannot be.
    """
    workload = _workload(config)
    failures = build_config(Failures, config["failures"], key="failures")
    routing = config["routing"]
    duration_s = 3600.0 * config["hours"]
    changes = {key: value for key, value in config["policy"].items() if key != "name"}
    shared = {"slots": changes["slots"]}  # the memory of a rank is the same whatever the policy
    return Scenario(
        workload=workload,
        hardware=_hardware(config),
        policy=policy(name, **changes) if name == config["policy"]["name"] else policy(name, key="compare", **shared),
        routing=make_routing(
            routing["kind"],
            num_experts=workload.num_experts,
            num_layers=workload.num_layers,
            exponent=routing["exponent"],
            path=routing["path"],
        ),
        events=failures.events(config["nodes"], duration_s, config["seed"]),
        num_nodes=config["nodes"],
        duration_s=duration_s,
        mesh=_mesh(config),
    )
