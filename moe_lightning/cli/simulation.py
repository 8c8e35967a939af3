"""Simulations of `moe-sim`: from overrides to reports, and to recommended recipes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval
from hydra import compose
from omegaconf import OmegaConf

from moe_lightning.cli.composition import (
    CONFIG_DIR,
    build_object,
    check_arguments,
    choices,
    composition_errors,
    config_folder,
    with_quotes,
)
from moe_lightning.cli.overrides import refuse_option
from moe_lightning.config import TARGET, NonNegativeInt, build_config, require, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.hardware import Hardware, load_hardware, preset
from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.mesh_search import mesh_table
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.recommend import Advice, recommend
from moe_lightning.simulate.scenario import Report, Scenario
from moe_lightning.simulate.workload import Exponent, RoutingKind, Workload, gpt_workload, make_routing
from moe_lightning.simulate.world_change import world_changes
from moe_lightning.text_table import table
from moe_lightning.user_errors import suggestion

_MOST_MODEL_BYTES = 10**17
"""Limit for its weights, beyond the largest clusters."""
_BYTES_VOCABULARY = 256


def _workload(config: Mapping[str, Any]) -> Workload:
    from moe_lightning.cli.capacity import check_model
    from moe_lightning.models.gpt import GPTConfig, least_gpt_parameters

    model, kind = config["model"], f"{GPTConfig.__module__}.{GPTConfig.__qualname__}"
    if model.get(TARGET) != kind:
        raise ConfigurationError(f"model.{TARGET}={shown(model.get(TARGET))} must be {kind}: choose a model of text")
    check_arguments(model, "model")
    vocab_size = _BYTES_VOCABULARY if model["vocab_size"] == "auto" else model["vocab_size"]
    router = {**model["router"], "forced": None}  # routing=... says how tokens are routed here
    gpt = build_object({**model, "vocab_size": vocab_size, "router": router}, "model")
    check_model(gpt, least_gpt_parameters(gpt), _MOST_MODEL_BYTES)
    return gpt_workload(gpt, rank_batch=config["rank_batch"], global_batch=config["global_batch"])


def _hardware(config: Mapping[str, Any]) -> Hardware:
    changes = {key: value for key, value in config["hardware"].items() if key != "preset"}
    name = str(config["hardware"]["preset"])
    if name.endswith(".json"):
        given = {key: value for key, value in changes.items() if value is not None and key != "ranks_per_node"}
        return build_config(
            Hardware, vars(load_hardware(Path(name), changes["ranks_per_node"])) | given, key="hardware"
        )
    return preset(name, **changes)


def given(config: Mapping[str, Any], group: str, but: str) -> dict[str, Any]:
    """Those of a group's keys that are set."""
    return {key: value for key, value in config[group].items() if key != but and value is not None}


def scenario_of(config: Mapping[str, Any], name: str) -> Scenario:
    """The scenario of a policy: that of the configuration, or another one on the same failures.

    Raises:
        ConfigurationError: a part that cannot be.
    """
    workload, hardware = _workload(config), _hardware(config)
    if config["nodes"] * hardware.ranks_per_node > _MOST_RANKS:
        raise ConfigurationError(
            f"nodes={config['nodes']} with hardware.ranks_per_node={hardware.ranks_per_node} are more than "
            f"{_MOST_RANKS:g} ranks: lower one of them"
        )
    failures = build_config(Failures, config["failures"], key="failures")
    routing = config["routing"]
    duration_s = 3600.0 * config["hours"]
    changes = {key: value for key, value in config["policy"].items() if key != "name"}
    shared = {"slots": changes["slots"]}  # the memory of a rank is the same whatever the policy
    return Scenario(
        workload=workload,
        hardware=hardware,
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
        mesh=build_config(MeshSpec, given(config, "mesh", "search"), key="mesh"),
    )


def overview(scenario: Scenario, report: Report, failures: Mapping[str, Any]) -> str:
    """Size of the model, speed in the field's units, and the failures that were assumed."""
    work, hardware, nodes = scenario.workload, scenario.hardware, scenario.num_nodes
    experts = work.num_layers * work.expert_params
    tokens_per_s = report.goodput * work.context_length
    flops = 3 * (work.dense_flops_per_token + 2 * work.top_k * experts)  # forward and backward
    peak = float(hardware.rank_speeds(nodes * hardware.ranks_per_node).sum()) * hardware.flops_per_s
    whole, active = work.dense_params + work.num_experts * experts, work.dense_params + work.top_k * experts
    speed = "nothing is trained"
    if tokens_per_s:
        days = 1e12 / tokens_per_s / 86400
        mfu = tokens_per_s * flops / peak
        speed = f"{tokens_per_s:,.0f} tokens/s, MFU {mfu:.1%}, {days:,.3g} days for 10^12 tokens"
    rows = [
        ("model", f"{whole / 1e9:.3g}B parameters, {active / 1e9:.3g}B active for a token"),
        ("speed", speed),
        ("failures", _assumed(failures, nodes)),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def _assumed(failures: Mapping[str, Any], nodes: int) -> str:
    kind, count = failures["kind"], failures["simultaneous"]
    if kind in ("exponential", "weibull"):
        mtbf = failures["node_mtbf_hours"]
        others = "" if count == 1 else f", each time with {count - 1} more"
        return (
            f"assumed: a node fails every {mtbf:,g} h on average ({kind}), one of the {nodes} every "
            f"{mtbf / nodes:,.3g} h{others}; failures.node_mtbf_hours=N changes it"
        )
    if kind == "periodic":
        return f"assumed: {'one node' if count == 1 else f'{count} nodes'} every {failures['period_s']:,g} s"
    return f"of the trace {failures['path']}" if kind == "trace" else "none assumed: failures.kind=exponential has some"


CALLBACKS = ("load_balancer", "fault_recovery")
"""Choices of conf/callbacks in a recommended recipe; partial_experts is part of the last."""

HEAD = "# @package _global_\n# Recommended by "
"""Beginning of a recipe that moe-sim recommend or moe-train --advise wrote."""


def recipe_file(path: Path, key: str) -> Path:
    """The file of a recipe that will be written; its folder is created.

    Args:
        key: where the user has named it, for messages.

    Raises:
        ConfigurationError: moe-train would not find it, it is somebody else's, or it cannot be written.
    """
    if path.parent.name != "recipes" or path.suffix != ".yaml":
        raise ConfigurationError(f"{key}{path} must be recipes/NAME.yaml, where moe-train --config-dir looks for it")
    if path.exists() and not (path.is_file() and path.read_text(errors="replace").startswith(HEAD)):
        raise ConfigurationError(f"{key}{path} exists and was not recommended: name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{key}{path} cannot be written ({error.strerror}): write elsewhere") from error
    return path


def launch_command(path: Path) -> str:
    """The command that trains with a recipe, see `recipe_file`."""
    return shlex.join(["moe-train", "--config-dir", str(path.parent.parent), f"recipes={path.stem}"])


def recommended_settings(advice: Advice, simultaneous: int) -> dict[str, Any]:
    """Return the settings of a moe-train recipe that trains as advised, with CALLBACKS.

    Args:
        simultaneous: nodes that fail at once.
    """
    policy, mesh = advice.policy, advice.scenario.mesh
    balancer: dict[str, Any] = {"rebalance_every": policy.rebalance_every, "min_replicas": policy.min_replicas}
    if policy.placement is not None:
        balancer["placement_rule"] = policy.placement
    return {
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
            "fault_recovery": {
                "min_replicas": policy.min_replicas,
                "protection": policy.protection,
                "failures": simultaneous,
            },
        },
    }


def recipe_text(advice: Advice, config: Mapping[str, Any], path: Path) -> str:
    """The YAML of a recipe that trains as advised.

    Args:
        advice: what to choose.
        config: moe-sim's configuration.
        path: where the recipe will lie, for its launch command.
    """
    report = advice.report
    # The model as it was simulated, whatever file or overrides it came from.
    body = {"model": dict(config["model"])} | recommended_settings(advice, config["failures"]["simultaneous"])
    if config["global_batch"]:
        body["data"] = {"global_batch_size": config["global_batch"]}
    head = (
        f"{HEAD}moe-sim for {config['nodes']} nodes: {report.goodput:.4g} samples/s, "
        f"PLT {report.plt:.5f} predicted.\n#\n"
        f"#   {launch_command(path)}\n"
        f"defaults:\n  - override /callbacks: [{', '.join(CALLBACKS)}]\n\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(body))


def _mesh_of_recipe(mesh: MeshSpec) -> dict[str, Any]:
    """The arguments of the strategy that lay the model over the ranks."""
    axes = {"pp": mesh.pp, "cp": mesh.cp, "tp": mesh.tp}
    chosen = {"dense": mesh.dense, "shard_size": mesh.shard_size, "mesh": axes if mesh.unit > 1 else None}
    return {key: value for key, value in chosen.items() if value}


CONFIG_NAME = "simulate"

_TYPES: dict[str, Any] = {
    "nodes": Annotated[int, Interval(ge=1, le=1e5)],
    "hours": Annotated[float, Interval(gt=0, le=1e5)],
    "seed": NonNegativeInt,
    "compare": list[str] | None,
    "world_sizes": list[Annotated[int, Interval(ge=2, le=1e6)]] | None,
    "rank_batch": Annotated[int, Interval(ge=1, le=1e6)] | None,
    "global_batch": Annotated[int, Interval(ge=1, le=1e9)] | None,
    "recipe": str,
    "hardware.preset": str,
    "policy.name": str,
    "mesh.search": bool,
    "routing.kind": RoutingKind,
    "routing.exponent": Exponent,
    "routing.path": str | None,
}
"""Of the keys that no constructor takes as they are."""

_GROUPS = ("hardware", "mesh", "policy", "routing", "failures", "model")

_MOST_RANKS = 1e5


def run(arguments: list[str]) -> int:
    """Run the command line without help and version; returns the exit code."""
    advise = arguments[:1] == ["recommend"]
    overrides = [with_quotes(word) for word in arguments[advise:] if word != "--cfg"]
    for word in overrides:
        if word.startswith("-"):
            raise refuse_option("moe-sim", word, ["--cfg", "--help", "--version"])
    config = compose_simulation(overrides)
    if "--cfg" in arguments:
        print(OmegaConf.to_yaml(OmegaConf.create(dict(config))), end="")
        return 0
    return _recommend(config) if advise else _simulate(config)


def compose_simulation(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration under some overrides.

    Raises:
        ConfigurationError: an override that cannot be read, or a key or choice that there is not.
    """
    _check_choices(overrides)
    with (
        composition_errors(overrides, CONFIG_NAME),
        config_folder(),
    ):
        composed = OmegaConf.to_container(compose(CONFIG_NAME, list(overrides)), resolve=True, throw_on_missing=True)
    assert isinstance(composed, dict)
    config = {str(key): value for key, value in composed.items()}
    for key in config:
        if key not in _GROUPS and key not in _TYPES:
            raise ConfigurationError(f"{key} is not a key of moe-sim{suggestion(key, _TYPES)}: see moe-sim --cfg")
    for key in _GROUPS:
        if not isinstance(config.get(key), dict):
            raise ConfigurationError(f"{key}={shown(config.get(key))} must be a mapping: set {key}.NAME=value")
    for key, hint in _TYPES.items():
        *groups, name = key.split(".")
        value = config[groups[0]][name] if groups else config[name]
        require(value, hint, key)
    return config


def _check_choices(overrides: Sequence[str]) -> None:
    """Refuse recipes and models that are for moe-train alone."""
    for override in overrides:
        group, _, name = override.partition("=")
        if group not in ("recipes", "model") or name not in choices(group):
            continue
        if group == "recipes" and not name.endswith("_sim"):
            simulated = ", ".join(recipe for recipe in choices(group) if recipe.endswith("_sim"))
            raise ConfigurationError(
                f"{override} is for moe-train: use one of {simulated}, or give model, nodes and hardware"
            )
        if group == "model" and "module" in OmegaConf.load(CONFIG_DIR / group / f"{name}.yaml"):
            raise ConfigurationError(
                f"{override} is for moe-train, and moe-sim simulates GPTs alone: give one of these, such as model=gpt_l"
            )


def _simulate(config: Mapping[str, Any]) -> int:
    names = [str(config["policy"]["name"]), *(str(name) for name in config["compare"] or [])]
    if config["mesh"]["search"]:
        raise ConfigurationError("mesh.search=true is for moe-sim recommend: say that, or give the axes of the mesh")
    scenarios = {name: scenario_of(config, name) for name in dict.fromkeys(names)}
    reports = {name: simulate(scenario) for name, scenario in scenarios.items()}
    first = reports[names[0]]
    print(f"{names[0]} on {config['nodes']} nodes for {config['hours']} h, {len(first.recoveries)} recoveries")
    print(overview(scenarios[names[0]], first, config["failures"]))
    print(first.table())
    print(mesh_table(scenarios[names[0]]))
    if config["world_sizes"]:
        print(world_changes(scenarios[names[0]], config["world_sizes"]))
    if len(reports) > 1:
        print(comparison(reports))
    return 0


def comparison(reports: Mapping[str, Report]) -> str:
    """One line for each policy; the ratio is of goodput, to the first."""
    first = next(iter(reports.values()))
    accounts = ("useful", "lost", "overhead", "idle")
    rows = [
        (
            name,
            f"{report.goodput:.4g}",
            f"{report.goodput / first.goodput:.3f}" if first.goodput else "-",
            *(f"{100 * report.share(account):.2f}" for account in accounts),
            f"{report.plt:.5f}",
            len(report.recoveries),
        )
        for name, report in reports.items()
    ]
    headers = ("policy", "samples/s", "ratio", *(f"{account} %" for account in accounts), "PLT", "recoveries")
    return table(headers, rows)


def _recommend(config: Mapping[str, Any]) -> int:
    scenario = scenario_of(config, "ours")
    fixed, failing = given(config, "policy", "name"), config["failures"]["simultaneous"]
    if failing >= scenario.num_nodes > 1 and "protection" not in fixed:
        raise ConfigurationError(
            f"failures.simultaneous={failing} takes all of the {scenario.num_nodes} nodes, which leaves no copy of a "
            "snapshot: give less, or policy.protection=none"
        )
    target = recipe_file(Path(str(config["recipe"])), "recipe=")
    advice = recommend(
        scenario,
        failing,
        fixed=fixed,
        fixed_mesh=given(config, "mesh", "search") if config["mesh"]["search"] else None,
    )
    if advice.meshes is not None:
        print(advice.meshes.table())
    print(overview(scenario, advice.report, config["failures"]))
    print(advice.table())
    target.write_text(recipe_text(advice, config, target))
    print(f"recipe       {target}")
    return 0
