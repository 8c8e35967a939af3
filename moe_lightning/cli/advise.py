"""`moe-train --advise`: mesh, slots, replicas, checkpoints and batch for a model on a machine, written as a recipe.

The planner is that of `moe-sim recommend`. What it needs to know comes from the configuration of moe-train and from
this machine, or from `--cluster NODESxGPUSxNAME`, whose numbers are the presets of simulate/hardware.yaml.
"""

from __future__ import annotations

import re
import textwrap
import timeit
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from moe_lightning.cli.capacity import RANK_BYTES, ranks_of
from moe_lightning.cli.composition import (
    CONFIG_NAME,
    build_object,
    check_config,
    choices,
    composition_errors,
    config_folder,
    own_recipes,
)
from moe_lightning.cli.planning import PlannedRun, memory_refusal, planned_run
from moe_lightning.cli.simulation import CALLBACKS, HEAD, launch_command, recipe_file, recommended_settings
from moe_lightning.config import shown
from moe_lightning.cores import available_memory, usable_cores
from moe_lightning.dispatch.placement import uniform_slots
from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.checkpoint_cost import cheapest_interval
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.hardware import PRESETS, Hardware, preset
from moe_lightning.simulate.mesh_search import ROOM
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.recommend import Advice, recommend
from moe_lightning.simulate.scenario import Scenario, format_bytes
from moe_lightning.simulate.step_model import StepModel
from moe_lightning.simulate.workload import make_routing
from moe_lightning.user_errors import suggestion

_WIDTH = 80
_NAME, _VALUE = 15, 16  # columns of a row
_MTBF_HOURS, _REPAIR_HOURS = 100.0, 1.0  # of a node, as in moe-sim
_CLUSTER = re.compile(r"(?:(\d{1,5})x)?(\d{1,4})x([A-Za-z]\w*)")
_LEAST_S, _MOST_STEPS, _FAILURES = 60.0, 30_000, 3
"""Length of a simulation: so many failures, or steps where these are short."""
_FOLDER = "outputs/advice/recipes"
_MATRIX = 512
_DENSE_UTILIZATION, _EXPERT_UTILIZATION, _STEP_S = 0.2, 0.4, 0.03
"""On a CPU: share of the rate of a plain product in dense layers and in experts, and the fixed cost of a step."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware that a run is planned for.

    Attributes:
        hardware: of its ranks.
        num_nodes: machines.
        words: where it is, and how many ranks.
        source: where the numbers come from.
        on_cpu: ranks compute on the CPU.
    """

    hardware: Hardware
    num_nodes: int
    words: str
    source: str
    on_cpu: bool

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.hardware.ranks_per_node


def advise(settings: Sequence[str], *, cluster: str | None, out: str | None, config_dir: str | None) -> None:
    """Print the advice and write the recipe.

    Args:
        settings: overrides of the command line.
        cluster: see `_cluster`; None: this machine.
        out: file of the recipe; None: one in the folder of recipes.
        config_dir: the user's own folder of recipes.

    Raises:
        ConfigurationError: a setting or cluster that cannot be, a model that the planner does not know or that does not
            fit.
    """
    config = _configuration(settings, config_dir)
    base = _base(settings)
    folder = Path(config_dir, "recipes") if config_dir else Path(_FOLDER)
    machine = _this_machine(config) if cluster is None else _cluster(cluster)
    run, notes = _run_on(config, machine)
    given = _given(config, settings)
    advice, run = _advice(run, machine, given)
    _check_slots(run, config["strategy"].get("replicas") or given.get("min_replicas", advice.policy.min_replicas))
    target = recipe_file(Path(out or folder / f"{base}_advised.yaml"), "--out ")
    if config_dir and (Path(config_dir) / "recipes" / f"{base}.yaml").is_file() and target.parent != folder:
        raise ConfigurationError(f"--out {target} must be in {folder}, beside the recipe {base} that it begins with")
    for line in _lines(advice, run, machine, base, notes, given):
        print(line)
    target.write_text(_recipe(advice, run, machine, config, settings, target))
    print(f"\nrecipe       {target}\nstart        {launch_command(target)}")


def _base(settings: Sequence[str]) -> str:
    """The recipe that the advice begins with."""
    return next((one.partition("=")[2] for one in settings if one.startswith("recipes=")), "quickstart")


def _configuration(settings: Sequence[str], config_dir: str | None) -> dict[str, Any]:
    """The configuration of the run, resolved and checked."""
    from moe_lightning.cli.train import resolved

    names = {one.partition("=")[0] for one in settings}
    fixed = [f"{key}=advised" for key in ("run_name", "run_dir") if key not in names]
    with composition_errors(settings), config_folder():
        composed = compose(CONFIG_NAME, [*own_recipes(config_dir), *settings, *fixed], return_hydra_config=True)
        OmegaConf.set_struct(composed, False)
        del composed.hydra
    config = resolved(composed)
    check_config(config)
    if (groups := config["strategy"].get("ep_size")) is not None:
        raise ConfigurationError(
            f"strategy.ep_size={groups} cuts the ranks into groups, which do not survive a lost rank, and --advise "
            "plans runs that recover: drop strategy.ep_size"
        )
    if (partial := config["callbacks"].get("partial_experts_checkpoint")) is not None:
        build_object(partial, "callbacks.partial_experts_checkpoint")  # the planner names parts of a policy instead
    return config


def _cluster(text: str) -> Machine:
    """The cluster of NODESxGPUSxNAME."""
    match = _CLUSTER.fullmatch(text)
    if match is None or not int(match[1] or 1) or not int(match[2]):
        raise ConfigurationError(f"--cluster {shown(text)} must be NODESxGPUSxNAME such as 4x8xH100")
    name = match[3].lower()
    if name not in PRESETS:
        raise ConfigurationError(
            f"--cluster {text}: {match[3]} is not known{suggestion(name, PRESETS)}: choose one of "
            f"{', '.join(key.upper() for key in PRESETS)}, the nearest to it"
        )
    nodes, ranks = int(match[1] or 1), int(match[2])
    words = f"{nodes} node{'s' * (nodes > 1)} of {ranks} {match[3].upper()}"
    hardware = preset(name, ranks_per_node=ranks)
    return Machine(hardware=hardware, num_nodes=nodes, words=words, source=f"preset {name}", on_cpu=False)


def _this_machine(config: Mapping[str, Any]) -> Machine:
    """This machine with the ranks of the configuration: its GPUs by their name, its cores by a short measurement."""
    from moe_lightning.cli.train import with_ranks

    trainer = with_ranks(config, external=False)["trainer"]
    ranks = ranks_of(trainer)
    if trainer["accelerator"] != "cpu":
        described = torch.cuda.get_device_properties(0)
        name = next((key for key in PRESETS if key.upper() in described.name.upper().replace(" ", "")), None)
        if name is None:
            raise ConfigurationError(
                f"{described.name} is not among the GPUs with known rates ({', '.join(PRESETS)}): give --cluster with "
                "the nearest of them, such as --cluster 1x8xA800"
            )
        hardware = preset(name, ranks_per_node=ranks, memory_bytes=float(described.total_memory))
        words = f"this machine, {ranks} {described.name}"
        return Machine(hardware=hardware, num_nodes=1, words=words, source=f"preset {name}", on_cpu=False)
    threads = max(1, usable_cores() // ranks)
    words = f"this machine, {ranks} rank{'s' * (ranks > 1)} of {threads} CPU thread{'s' * (threads > 1)}"
    hardware = measured_cpu(ranks, threads)
    rate = f"products measured at {hardware.flops_per_s / 1e9:.0f} GFLOP/s a rank, the rest assumed"
    return Machine(hardware=hardware, num_nodes=1, words=words, source=rate, on_cpu=True)


def measured_cpu(ranks: int, threads: int) -> Hardware:
    """The numbers of this machine's ranks: products and copies are timed for a moment, the rest is assumed."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        matrix, block = torch.randn(_MATRIX, _MATRIX), torch.zeros(1 << 24, dtype=torch.uint8)
        product_s = min(timeit.repeat(lambda: torch.mm(matrix, matrix), number=1, repeat=7))
        copy_s = min(timeit.repeat(block.clone, number=1, repeat=7))
    finally:
        torch.set_num_threads(before)
    copied = block.numel() / copy_s / ranks
    free = available_memory() / ranks - RANK_BYTES
    return Hardware(
        ranks_per_node=ranks,
        flops_per_s=2 * _MATRIX**3 / product_s,
        utilization=_DENSE_UTILIZATION,
        expert_utilization=_EXPERT_UTILIZATION,
        link_bytes_per_s=1e9,
        node_bytes_per_s=copied / 4,
        latency_s=2e-4,
        expert_s=2e-5,
        step_s=_STEP_S,
        overlap=0.0,
        memory_bytes_per_s=copied,
        host_copy_bytes_per_s=copied / 2,
        storage_bytes_per_s=3e8,
        memory_bytes=max(1.0, free),
        host_memory_bytes=float(available_memory()),
    )


def _run_on(config: Mapping[str, Any], machine: Machine) -> tuple[PlannedRun, list[str]]:
    """The run on a machine, and what had to be changed for it."""
    ranks, per_node = machine.num_ranks, machine.hardware.ranks_per_node
    accelerator = "cpu" if machine.on_cpu else "gpu"
    trainer = {**config["trainer"], "accelerator": accelerator, "devices": per_node, "num_nodes": 1}
    run = planned_run({**config, "trainer": trainer}, ranks, per_node)
    if run is None:
        raise ConfigurationError(
            "--advise plans language models with experts (model=NAME of a GPT, or model=huggingface), AdamW, Muon or "
            "Adafactor, and dense=ddp, zero1, fsdp or hsdp: this run has another part"
        )
    run = replace(run, has_snapshots=machine.on_cpu)  # of the callbacks that the recipe adds
    if run.global_batch < ranks // run.mesh.unit:
        raised = 1 << (ranks - 1).bit_length()
        note = f"{run.global_batch} samples are fewer than the {ranks} ranks; more samples change the training"
        return replace(run, global_batch=raised), [note]
    return run, []


def _check_slots(run: PlannedRun, replicas: int) -> None:
    """Refuse slots that have no room for the experts with which training starts, as it does itself."""
    needed = uniform_slots(run.plain_workload.num_experts, run.num_ranks // run.mesh.pp, replicas)
    if needed > run.stage_slots:
        raise ConfigurationError(
            f"strategy.slots={run.stage_slots} cannot hold the {needed} experts that {replicas} replicas of each put "
            f"on a rank: use at least {needed}"
        )


_POLICY = {
    "strategy.slots": "slots",
    "callbacks.partial_experts_checkpoint.every_n_steps": "interval_steps",
    "callbacks.partial_experts_checkpoint.k_snapshot": "k_snapshot",
    "callbacks.partial_experts_checkpoint.k_persist": "k_persist",
    "callbacks.partial_experts_checkpoint.lossless": "lossless",
    "callbacks.dynamic_k.threshold": "plt_threshold",
    "callbacks.load_balancer.rebalance_every": "rebalance_every",
    "callbacks.load_balancer.min_replicas": "min_replicas",
    "callbacks.fault_recovery.min_replicas": "min_replicas",
    "callbacks.fault_recovery.protection": "protection",
    "callbacks.fault_recovery.failures": "protection_copies",
}
"""Settings that the planner chooses otherwise, and their names in its policy."""
_OF_RECIPE = ("strategy.slots", "callbacks.fault_recovery.failures")
_OPEN = (None, "auto")
"""Values that leave a setting to the planner."""


def _given(config: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The parts of the policy that the command line gives, and those that a recipe may give too."""
    keys = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(settings))}
    composed = OmegaConf.create(dict(config))
    found = {name: OmegaConf.select(composed, key) for key, name in _POLICY.items() if key in keys.union(_OF_RECIPE)}
    return {name: value for name, value in found.items() if value not in _OPEN}


def _advice(run: PlannedRun, machine: Machine, given: Mapping[str, Any]) -> tuple[Advice, PlannedRun]:
    """The planner's advice, and the run with it; recomputation only where nothing fits without."""
    try:
        return _planned(run, machine, given)
    except ConfigurationError:
        again = replace(run, training=replace(run.training, recomputes=True))
        if run.model.is_pretrained:
            again = replace(run, mesh=replace(run.mesh, recompute=True))
        try:
            return _planned(again, machine, given)
        except ConfigurationError:
            refusal = memory_refusal(run, ROOM * machine.hardware.memory_bytes)
            if refusal is None:
                raise
            raise ConfigurationError(refusal.partition("; check_memory")[0]) from None


def _planned(run: PlannedRun, machine: Machine, given: Mapping[str, Any]) -> tuple[Advice, PlannedRun]:
    workload, nodes = run.workload, machine.num_nodes
    room = machine.hardware.memory_bytes - run.memory().snapshots  # which every mesh shares alike
    hardware = replace(machine.hardware, memory_bytes=max(1.0, room))
    routing = make_routing("zipf", num_experts=workload.num_experts, num_layers=workload.num_layers)
    ours = policy("ours", **given)
    own_mesh = replace(run.mesh, micro_batches=None)  # what of it the user has left open is searched later
    cost = StepModel(workload, hardware, ours, routing, nodes, own_mesh).cost(nodes, 0, 0)
    period_s = 3600 * _MTBF_HOURS / nodes
    duration_s = max(_LEAST_S, min(_FAILURES * period_s, _MOST_STEPS * cost.step_s))
    scenario = Scenario(
        workload=workload,
        hardware=hardware,
        policy=ours,
        routing=routing,
        events=Failures(kind="periodic", period_s=period_s, repair_s=3600 * _REPAIR_HOURS).events(nodes, duration_s, 0),
        num_nodes=nodes,
        duration_s=duration_s,
        mesh=run.mesh,
    )
    mesh = {name: getattr(run.mesh, name) for name in ("pp", "cp", "tp") if getattr(run.mesh, name) > 1}
    mesh |= {"chunks": run.mesh.chunks, "recompute": run.mesh.recompute}
    if run.mesh.dense != "ddp":
        mesh["dense"] = run.mesh.dense
    elif run.training.optimizer != "adamw":
        mesh |= {"dense": "zero1", "tp": 1}  # whole matrices
    if run.model.is_pretrained:
        mesh |= {name: getattr(run.mesh, name) for name in ("pp", "cp", "tp")}
    # The interval is that of the assumed failures, of which a short simulation has none.
    interval = cheapest_interval(workload, hardware, ours, machine.num_ranks, cost, faults_per_s=1 / period_s)
    fixed = {"interval_steps": interval, **given}
    scenario = replace(scenario, policy=replace(ours, **fixed))
    failures = max(1, min(ours.protection_copies, nodes - 1))
    advice = recommend(scenario, simultaneous=failures, fixed=fixed, fixed_mesh=mesh)
    return advice, replace(run, mesh=advice.scenario.mesh, slots=advice.policy.slots)


# ---------------------------------------------------------------- words


_ROWS = {
    "slots": "slots",
    "replicas": "min_replicas",
    "protection": "protection",
    "rebalance": "rebalance_every",
    "checkpoint": "interval_steps",
    "K_snapshot": "k_snapshot",
    "K_persist": "k_persist",
}
"""Rows of parts of the policy."""


def _lines(
    advice: Advice, run: PlannedRun, machine: Machine, base: str, notes: Sequence[str], given: Mapping[str, Any]
) -> Iterator[str]:
    """The lines of the advice, at most 80 columns wide."""
    yield f"advice for {base} on {machine.words}"
    yield ""
    for name, value, reason in _rows(advice, run, machine, notes):
        why = "as given" if _ROWS.get(name) in given else reason
        text = f"{name:<{_NAME}}{value:<{_VALUE - 1}} {why}"
        yield from textwrap.wrap(text, _WIDTH, subsequent_indent=" " * (_NAME + _VALUE)) or [""]


_Row = tuple[str, str, str]
"""Name, value and reason of a choice or prediction."""


def _rows(advice: Advice, run: PlannedRun, machine: Machine, notes: Sequence[str]) -> Iterator[_Row]:
    yield from _mesh_rows(advice, run, machine)
    yield from _placement_rows(advice, run, machine)
    yield from _checkpoint_rows(advice, run)
    yield from _batch_rows(advice, run, machine, notes)
    yield "", "", ""
    yield from _predictions(advice, run, machine)


def _mesh_rows(advice: Advice, run: PlannedRun, machine: Machine) -> Iterator[_Row]:
    mesh, meshes = advice.scenario.mesh, advice.meshes
    assert meshes is not None
    axes = " ".join(f"{axis}={size}" for axis, size in (("pp", mesh.pp), ("cp", mesh.cp), ("tp", mesh.tp)) if size > 1)
    fit = f"simplest within 1 % of the shortest step, of {meshes.fitting} that fit; {meshes.refused} do not"
    yield "mesh", f"dp={machine.num_ranks // mesh.unit} {axes}".strip(), fit
    sharing = {
        "ddp": "every rank holds all dense parameters: they fit",
        "zero1": "moments of dense parameters on one rank each",
        "fsdp": "dense parameters cut over the ranks: whole they do not fit, or cost more",
        "hsdp": "dense parameters cut inside of a node, a copy on each",
    }
    yield "dense", mesh.dense, sharing[mesh.dense]
    if run.training.recomputes or mesh.recompute:
        yield "recompute", "yes", "without it no mesh fits the memory"


def _reason(advice: Advice, name: str, otherwise: str) -> str:
    """Add to a reason what another value of a choice would cost."""
    choice = next((choice for choice in advice.choices if choice.name == name), None)
    report = advice.report
    if choice is None or not report.goodput:
        return otherwise
    change = choice.report.goodput / report.goodput - 1
    lost = f", {choice.report.plt:.2%} of the tokens lost" if choice.report.plt > report.plt else ""
    return f"{otherwise}; {choice.instead}: {change:+.1%} goodput{lost}"


def _placement_rows(advice: Advice, run: PlannedRun, machine: Machine) -> Iterator[_Row]:
    chosen = advice.policy
    fewest = _reason(advice, "slots", "the fewest within 1 % of the best step")
    yield "slots", f"{chosen.slots} of {run.workload.num_experts}", fewest
    safe = "more cost more than they save"
    if (lost := chosen.min_replicas - 1) > 0:
        safe = "one lost node stays without an effect" if lost == 1 else f"{lost} lost nodes stay without an effect"
    if machine.num_nodes == 1:
        safe = "one node: it is lost with all of its experts"
    yield "replicas", str(chosen.min_replicas), _reason(advice, "min_replicas", safe)
    if chosen.protection != "none":
        survives = _reason(advice, "protection", "snapshots survive the loss of their node")
        yield "protection", chosen.protection, survives
    between = _reason(advice, "rebalance_every", "steps between placements")
    yield "rebalance", f"every {chosen.rebalance_every}", between


def _checkpoint_rows(advice: Advice, run: PlannedRun) -> Iterator[_Row]:
    chosen, experts = advice.policy, run.workload.num_experts
    interval = _reason(advice, "interval_steps", "steps: saving costs as much as failures lose")
    yield "checkpoint", f"every {chosen.interval_steps}", interval
    kind = "experts of a layer copied in a step of a window" if chosen.lossless else "experts of a layer copied"
    copied = "more would stop training" if (chosen.k_snapshot or experts) < experts else "no token is lost"
    yield (
        "K_snapshot",
        f"{chosen.k_snapshot or experts} of {experts}",
        _reason(advice, "k_snapshot", f"{kind}: {copied}"),
    )
    if chosen.k_persist is not None:
        written = _reason(advice, "k_persist", "experts of a layer written")
        yield "K_persist", f"{chosen.k_persist} of {experts}", written


def _batch_rows(advice: Advice, run: PlannedRun, machine: Machine, notes: Sequence[str]) -> Iterator[_Row]:
    slices = machine.num_ranks // advice.scenario.mesh.unit
    micro = advice.scenario.mesh.micro_batches_of(run.global_batch / slices)
    per_rank = run.global_batch / slices / micro
    batch = notes[0] if notes else "as in the recipe; it changes the training, so it stays"
    yield "batch", f"{run.global_batch} samples", batch
    steps = f"{per_rank:g} sample{'s' * (per_rank != 1)} of a data slice at a time"
    yield "micro-batches", str(micro), steps + ("" if micro == 1 else "; fewer do not fit, or are slower")


def _predictions(advice: Advice, run: PlannedRun, machine: Machine) -> Iterator[_Row]:
    report, work = advice.report, run.workload
    tokens = run.global_batch * work.context_length / report.step_s
    yield "tokens/s", f"{tokens:,.0f}", f"step of {report.step_s:.3g} s; {machine.source}"
    memory, room = run.memory(), machine.hardware.memory_bytes
    parts = {"weights": memory.parameters, "gradients": memory.gradients, "moments": memory.optimizer}
    parts |= {"activations": memory.activations, "gathered": memory.gathered, "snapshots": memory.snapshots}
    shares = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    yield "memory", format_bytes(memory.total), f"of {format_bytes(room)} a rank: {shares}"
    share = report.goodput * work.context_length / tokens
    simulated = f"{report.duration_s / 3600:.3g} h were simulated"
    failures = f"nodes that fail every {_MTBF_HOURS:g} h and are back after {_REPAIR_HOURS:g} h (assumed)"
    assumed = f"of the tokens/s, with checkpoints and {failures}; {simulated}"
    yield "goodput", f"{share:.1%}", assumed


# ---------------------------------------------------------------- recipe


def _recipe(
    advice: Advice,
    run: PlannedRun,
    machine: Machine,
    config: Mapping[str, Any],
    settings: Sequence[str],
    path: Path,
) -> str:
    """The YAML of a recipe that trains as advised: the given one, the settings of the command line, the advice."""
    mesh, body, base = advice.scenario.mesh, OmegaConf.create({}), _base(settings)
    groups, defaults = list(CALLBACKS), [base]
    for override in OverridesParser.create().parse_overrides(list(settings)):
        key, value = override.key_or_group, override.value()
        if key == "callbacks" and "." not in key:
            chosen = value if isinstance(value, list) else [value]
            groups = [str(name) for name in chosen if name not in ("default", "partial_experts", *CALLBACKS)] + groups
        elif key == "dial":
            defaults.append(f"/dial@_global_: {value}")
        elif key not in ("recipes", "run_name", "run_dir", "ranks"):
            if override.is_delete():
                raise ConfigurationError(f"{override.input_line} cannot be written into a recipe: leave it out")
            if choices(key):
                defaults.append(f"override /{key}: {value}")
            elif key not in _POLICY or value not in _OPEN:
                OmegaConf.update(body, key, value, force_add=True)
    if run.training.recomputes and "recompute" not in groups:
        groups.insert(0, "recompute")
    defaults.append(f"override /callbacks: [{', '.join(groups)}]")
    settings_of_plan = recommended_settings(advice, advice.policy.protection_copies)
    added: dict[str, Any] = {"ranks": machine.hardware.ranks_per_node, **settings_of_plan}
    if mesh.pp > 1:
        added["strategy"] |= {"micro_batches": mesh.micro_batches_of(run.global_batch * mesh.unit / machine.num_ranks)}
    accumulated = 1 if mesh.pp > 1 else mesh.micro_batches
    if accumulated:
        added["trainer"] = _accumulating(config["trainer"], accumulated)
    if mesh.recompute and run.model.is_pretrained:
        added["model"] = {"gradient_checkpointing": True}
    added["data"] = {"global_batch_size": run.global_batch}
    if machine.num_nodes > 1:
        added["elastic"] = {"num_nodes": machine.num_nodes}
    given = {"callbacks": body.callbacks} if "callbacks" in body else {}
    merged = OmegaConf.merge(body, OmegaConf.create(added), given)
    memory = format_bytes(run.memory().total)
    head = (
        f"{HEAD}moe-train --advise: {base} on {machine.words}, {memory} a rank predicted.\n#\n"
        f"#   {launch_command(path)}{_joining(machine)}\n"
    )
    listed = "".join(f"  - {entry}\n" for entry in (*defaults, "_self_"))
    return f"{head}defaults:\n{listed}\n{OmegaConf.to_yaml(merged)}"


def _accumulating(trainer: Mapping[str, Any], micro_batches: int) -> dict[str, int]:
    """Return the Trainer's settings for so many micro-batches in a step, which validate and end an epoch after as many
    steps as before, of the same samples, and validate on as many samples.

    Args:
        trainer: settings of the run as it was.
    """
    settings = {"accumulate_grad_batches": micro_batches}
    before = trainer.get("accumulate_grad_batches", 1)
    for name in ("val_check_interval", "limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run"):
        count = trainer.get(name)
        if isinstance(count, int) and count and micro_batches != before:
            settings[name] = max(1, count * micro_batches // before)
    return settings


def _joining(machine: Machine) -> str:
    """Return the settings by which the nodes of a run find each other; empty for one node."""
    return " elastic.rdzv_endpoint=HOST:29510 elastic.secret_file=run.secret" if machine.num_nodes > 1 else ""
