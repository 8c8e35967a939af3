"""`moe-ckpt`: inspect, verify, export, edit and delete checkpoints.

    moe-ckpt inspect DIR          sizes, versions of every expert, lost tokens
    moe-ckpt verify DIR           checksums and coverage of one checkpoint, or of all in a directory
    moe-ckpt export DIR FILE      one safetensors file
    moe-ckpt export-hf CKPT DIR   a Hugging Face folder that plain transformers loads
    moe-ckpt export-loads LOADS FILE --ranks N --slots S   measured loads as an inference engine's first placement
    moe-ckpt edit CKPT FILE       prune, merge and duplicate experts, with the loss before and after
    moe-ckpt prune DIR --keep N   keep the newest N
    moe-ckpt clean [DIR]          list snapshots in memory whose run and agent are dead; --yes deletes them

DIR may also be a run directory, outputs/NAME, a `.ckpt` file or a directory of these (not for prune), or the URL of a
store such as s3://BUCKET/NAME. Exit codes: 0 done, 1 a damaged checkpoint, 2 a user error.

Formats of export-loads:

* sglang (v0.5, `--init-expert-location FILE`): JSON or .pt of a mapping with `physical_to_logical_map` [layers, slots
  of all ranks], or with `logical_count` [layers, experts], from which the engine plans by itself. Its layers are all
  of the model, those without experts too.
* vllm (proposed in vllm-project/vllm pull request 49572, `eplb_config.initial_expert_map_path`): JSON, the same table
  of the MoE layers as a list of lists. Releases up to v0.26 begin with every expert in its own slot and learn loads.
* vllm-ascend (v0.11 and later, `expert_map_path`): JSON of layers, in each the experts of every device.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from annotated_types import Interval
from rich.console import Console
from rich.table import Table

from moe_lightning.arguments import Count, Parser, input_file, output_file, value
from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import Cluster, allocate_replicas, imbalance
from moe_lightning.balancing.replica_placement import deal_to_ranks
from moe_lightning.checkpoint import inspect
from moe_lightning.checkpoint.commit import prune
from moe_lightning.checkpoint.directory import has_manifest
from moe_lightning.checkpoint.inspect import FileSummary, newest_file, summarise_file
from moe_lightning.checkpoint.manifest import Manifest
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.checkpoint.storage.interface import Place, exists
from moe_lightning.cli.expert_edits import least_loaded
from moe_lightning.config import NonNegativeInt, Probability
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.moe.forced_routing import read_loads, read_routing_trace
from moe_lightning.user_errors import sentence_of_memory

Engine = Literal["sglang", "sglang-counts", "vllm", "vllm-ascend"]
ENGINES: tuple[str, ...] = get_args(Engine)

_SHARES = 10**5
"""Telemetry writes shares with so many steps."""


@dataclass(frozen=True, kw_only=True)
class ServingPlacement:
    """Experts in the slots of a serving cluster.

    Attributes:
        slots_LP: int64 [layers, slots of all ranks], the expert of each; rank r has the r-th of equal parts.
        counts_LE: int64 [layers, experts], the loads it was made for.
        imbalance_before: busiest rank over mean of plain expert parallelism with as many ranks, mean of the layers.
        imbalance_after: the same of this placement, every replica with an equal share of its expert's tokens.
    """

    slots_LP: IntArray
    counts_LE: IntArray
    imbalance_before: float
    imbalance_after: float


def measured_counts(path: Path, last: int | None = None) -> IntArray:
    """Assignments of each expert, int64 [layers, experts], of a routing trace (.npz) or in proportion to an
    expert_load.csv.

    Args:
        last: samples from the end that count; None: all.

    Raises:
        ConfigurationError: a file that is neither.
    """
    first = -(last or 0)
    if path.suffix == ".npz":
        counts, _ = read_routing_trace(path)
        whole: IntArray = counts[first:].sum(axis=(0, 2))
        return whole
    _, shares_LSE = read_loads(path)
    scaled: IntArray = np.rint(shares_LSE[:, first:].sum(axis=1) * _SHARES).astype(np.int64)
    return scaled


def plan_serving(counts_LE: IntArray, num_ranks: int, slots_per_rank: int) -> ServingPlacement:
    """Replicas by water-filling, dealt so that ranks carry alike where engines split tokens equally over replicas.

    Raises:
        ConfigurationError: fewer slots than experts, or more slots of a rank than experts.
    """
    num_experts = counts_LE.shape[1]
    if num_ranks * slots_per_rank < num_experts:
        raise ConfigurationError(
            f"{num_ranks} ranks with {slots_per_rank} slots cannot hold {num_experts} experts: raise --ranks or --slots"
        )
    if slots_per_rank > num_experts:
        raise ConfigurationError(
            f"--slots={slots_per_rank} is more than the {num_experts} experts, and a second copy on a rank is of no "
            "use: lower it"
        )
    cluster = Cluster.of(num_ranks, slots_per_rank, ranks_per_node=num_ranks)
    slots, after, before = [], [], []
    for load_E in counts_LE:
        replicas_E = allocate_replicas(
            load_E, slots=cluster.num_slots, num_nodes=1, min_replicas=1, max_replicas=num_ranks
        )
        held_EN = deal_to_ranks(replicas_E[:, None], cluster, load_E).replicas
        slots.append(np.concatenate([np.repeat(np.arange(num_experts), held_N) for held_N in held_EN.T]))
        after.append(imbalance((load_E / held_EN.sum(axis=1)) @ held_EN))
        before.append(imbalance(np.array([part.sum() for part in np.array_split(load_E, num_ranks)])))
    return ServingPlacement(
        slots_LP=np.stack(slots),
        counts_LE=counts_LE,
        imbalance_before=float(np.mean(before)),
        imbalance_after=float(np.mean(after)),
    )


def form_of(plan: ServingPlacement, engine: Engine, num_ranks: int, dense_layers: Sequence[int] = ()) -> Any:
    """Return the content of an engine's file as plain lists and mappings.

    Args:
        dense_layers: places of the model's layers without experts, for sglang: their rows are the plain placement.

    Raises:
        ConfigurationError: a place that the model does not have, or dense layers where the engine counts MoE layers.
    """
    slots_LP, counts_LE = plan.slots_LP, plan.counts_LE
    if dense_layers and not engine.startswith("sglang"):
        raise ConfigurationError(
            f"--dense-layers is for sglang: {engine} counts layers with experts only, leave it out"
        )
    for place in sorted(set(dense_layers)):
        if not 0 <= place <= len(slots_LP):
            raise ConfigurationError(f"--dense-layers {place} is no place in a model of {len(slots_LP) + 1} layers")
        plain_P = np.arange(slots_LP.shape[1]) % counts_LE.shape[1]
        slots_LP = np.insert(slots_LP, place, plain_P, axis=0)
        counts_LE = np.insert(counts_LE, place, 1, axis=0)
    if engine == "sglang":
        return {"physical_to_logical_map": slots_LP.tolist()}
    if engine == "sglang-counts":
        return {"logical_count": counts_LE.tolist()}
    if engine == "vllm":
        return slots_LP.tolist()
    devices_LNS = slots_LP.reshape(len(slots_LP), num_ranks, -1).tolist()
    layers = [
        {
            "layer_id": layer,
            "device_count": num_ranks,
            "device_list": [{"device_id": n, "device_expert": held} for n, held in enumerate(devices)],
        }
        for layer, devices in enumerate(devices_LNS)
    ]
    return {"moe_layer_count": len(layers), "layer_list": layers}


def write_form(form: Any, path: Path) -> None:
    """JSON, or for sglang a .pt that `torch.load(weights_only=True)` reads.

    Raises:
        ConfigurationError: another kind of file.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(form))
    elif path.suffix == ".pt" and isinstance(form, dict) and "layer_list" not in form:
        import torch

        torch.save({name: torch.tensor(rows) for name, rows in form.items()}, path)
    else:
        raise ConfigurationError(f"{path.name} must end with .json, or for sglang with .pt: the engine goes by it")


_Times = Annotated[int, Interval(ge=1, le=1024)]
"""GPUs that share experts, or copies of each: beyond, planning takes hours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed usage and reason
        return int(stop.code or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    console = Console(highlight=False)
    try:
        if isinstance(getattr(arguments, "path", None), str):
            arguments.path = _of_run(place_of(arguments.path))
        return int(arguments.command(arguments, console))
    except ConfigurationError as error:
        print(f"moe-ckpt: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"moe-ckpt: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        sentence = sentence_of_memory(error)
        if sentence is None:
            raise
        print(f"moe-ckpt: {sentence}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"moe-ckpt: {error.filename or getattr(arguments, 'path', '')}: {error.strerror}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="moe-ckpt", description="Inspect, verify, export and prune checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect_ = commands.add_parser("inspect", help="sizes, versions of every expert, lost tokens")
    inspect_.set_defaults(command=_inspect)
    verify = commands.add_parser("verify", help="compare every file with its checksum")
    verify.set_defaults(command=_verify)
    export = commands.add_parser("export", help="write one safetensors file")
    export.set_defaults(command=_export)
    export_hf = commands.add_parser("export-hf", help="write a folder that plain transformers loads")
    export_hf.set_defaults(command=_export_hf)
    export_loads = commands.add_parser("export-loads", help="write the placement that an inference engine begins with")
    export_loads.set_defaults(command=_export_loads)
    edit = commands.add_parser("edit", help="prune, merge and duplicate the experts of a checkpoint file")
    edit.set_defaults(command=_edit)
    _add_edits(edit)
    prune = commands.add_parser("prune", help="delete all but the newest checkpoints")
    prune.set_defaults(command=_prune)
    clean = commands.add_parser("clean", help="list, or delete, snapshots that dead runs left in memory")
    clean.set_defaults(command=_clean)
    clean.add_argument(
        "path", type=Path, metavar="DIR", nargs="*", help="where runs keep snapshots beside /dev/shm (fallback_dir)"
    )
    clean.add_argument("--yes", action="store_true", help="delete what is listed")
    for command in (inspect_, verify, export, prune):
        command.add_argument(
            "path", metavar="DIR", help="a run, a checkpoint, a .ckpt file, or what holds them; a path or a URL"
        )
    export.add_argument("target", type=_target, metavar="FILE", help="the safetensors file to write; a path or a URL")
    export.add_argument("--prefix", default="", help="only keys that begin with this, such as expert/0/")
    export_hf.add_argument("path", metavar="CKPT", help="a .ckpt file, or a directory as above")
    export_hf.add_argument("target", type=Path, metavar="DIR", help="the folder to write; it must not exist")
    export_hf.add_argument("--adapter", action="store_true", help="write the adapters alone, as peft loads them")
    export_hf.add_argument("--dtype", help="of its tensors, such as bfloat16; default: that of the original")
    export_loads.add_argument(
        "source", type=input_file, metavar="LOADS", help="routing_trace.npz or expert_load.csv of a run"
    )
    export_loads.add_argument("target", type=output_file, metavar="FILE", help="to write: .json, or .pt for sglang")
    export_loads.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="default: %(default)s")
    export_loads.add_argument("--ranks", type=value(_Times), required=True, metavar="N", help="GPUs that share experts")
    export_loads.add_argument("--slots", type=value(Count), required=True, metavar="S", help="experts on each")
    export_loads.add_argument("--last", type=value(Count), metavar="N", help="samples that count (default: all)")
    export_loads.add_argument(
        "--dense-layers", type=int, nargs="+", default=[], metavar="I", help="layers without experts, for sglang"
    )
    prune.add_argument("--keep", type=value(int), required=True, metavar="N", help="whole checkpoints to keep")
    return parser


def _add_edits(edit: argparse.ArgumentParser) -> None:
    edit.add_argument("source", type=input_file, metavar="CKPT", help="a .ckpt file of a GPTModule")
    edit.add_argument("target", type=output_file, metavar="FILE", help="the .ckpt file to write")
    for kind, example in (("prune", "3,5"), ("merge", "0+3"), ("duplicate", "2")):
        help_ = f"experts such as {example}, or of one layer such as 1:{example}"
        edit.add_argument(f"--{kind}", nargs="+", default=[], metavar="E", help=help_)
    edit.add_argument("--prune-least", type=value(Count), metavar="N", help="prune the N with fewest tokens of a layer")
    edit.add_argument("--loads", type=input_file, help="a run's routing_trace.npz or expert_load.csv, for shares")
    edit.add_argument("--fold", type=value(_Times), default=1, metavar="N", help="N of each expert, top_k times N")
    edit.add_argument("--noise", type=value(Probability), default=0.0, help="relative noise on copies (default: 0)")
    edit.add_argument(
        "--batches", type=value(NonNegativeInt), default=8, metavar="N", help="of the report (default: 8)"
    )


def _of_run(path: Place) -> Place:
    """The checkpoints of a run directory; any other path as it is."""
    inside = path / "checkpoints" if isinstance(path, Path) else path
    return inside if isinstance(inside, Path) and inside.is_dir() and not has_manifest(path) else path


def _target(text: str) -> Place:
    try:
        place = place_of(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return output_file(text) if isinstance(place, Path) else place


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    file = newest_file(arguments.path)
    if file is not None:
        console.print(_facts_of_file(summarise_file(file)))
        return 0
    checkpoint = inspect.resolve(arguments.path)
    manifest, versions_LE = checkpoint.manifest, checkpoint.expert_versions()
    committed = datetime.fromtimestamp(manifest.created_s, UTC)
    facts = _facts(
        ("checkpoint", checkpoint.path.name),
        ("run", f"{manifest.run}, session {manifest.session}, commit {manifest.sequence}"),
        ("taken after step", _taken(manifest)),
        ("committed", f"{committed:%Y-%m-%d %H:%M:%S} UTC by {manifest.world_size} ranks"),
        ("carries on", _carries_on(manifest)),
        ("state", f"{_size(manifest.payload_bytes)}, {_size(manifest.new_bytes)} of it new"),
        ("on disk", f"{_size(manifest.disk_bytes)} in {len(manifest.files)} files"),
        ("lost tokens (PLT)", "not recorded" if manifest.plt is None else f"{100 * manifest.plt:.4f} %"),
        *((f"  {scope}", _size(size)) for scope, size in inspect.scope_bytes(manifest).items()),
    )
    console.print(facts)
    if versions_LE.size:
        console.print(_versions(versions_LE))
    return 0


def _taken(manifest: Manifest) -> str:
    if manifest.first_step == manifest.step:
        return str(manifest.step)
    return (
        f"{manifest.step}, lossless: a restore goes back to step {manifest.first_step} and runs "
        f"{manifest.step - manifest.first_step} steps again, then nothing is lost"
    )


def _carries_on(manifest: Manifest) -> str:
    if manifest.first_step < manifest.step:
        return "nothing: every expert was written anew"
    return manifest.previous or "nothing: every expert is of this session's first checkpoint"


def _facts(*rows: tuple[str, str]) -> Table:
    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column()
    for row in rows:
        facts.add_row(*row)
    return facts


def _facts_of_file(summary: FileSummary) -> Table:
    return _facts(
        ("checkpoint", summary.name),
        ("taken after step", str(summary.step)),
        ("model", f"{_size(summary.model_bytes)} in {summary.tensors} tensors"),
        ("optimizers", _size(summary.optimizer_bytes)),
        ("on disk", _size(summary.disk_bytes)),
    )


def _versions(versions_LE: IntArray) -> Table:
    table = Table(title="version of each expert (step), by layer")
    table.add_column("layer", justify="right")
    for expert in range(versions_LE.shape[1]):
        table.add_column(str(expert), justify="right")
    for layer, versions in enumerate(versions_LE):
        table.add_row(str(layer), *("-" if v < 0 else str(v) for v in versions))
    return table


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    verdicts = inspect.verify_all(arguments.path)
    for verdict in verdicts:
        found = "pruned meanwhile" if verdict.is_pruned else verdict.problem or "whole"
        console.print(f"{verdict.name}: {found}", soft_wrap=True)
    return 1 if any(verdict.problem for verdict in verdicts) else 0


def _export(arguments: argparse.Namespace, console: Console) -> int:
    file = newest_file(arguments.path)
    if file is not None:
        written = inspect.export_file(file, arguments.target, prefix=arguments.prefix)
        console.print(f"{arguments.target}: {_size(written)} of {file.name}{_tokenizer(arguments)}", soft_wrap=True)
        return 0
    checkpoint = inspect.resolve(arguments.path)
    written = inspect.export(checkpoint, arguments.target, prefix=arguments.prefix)
    is_window = checkpoint.first_step < checkpoint.step
    what = f", the model after step {checkpoint.first_step}" if is_window else ""
    where = f"{checkpoint.path.name}{what}{_tokenizer(arguments)}"
    console.print(f"{arguments.target}: {_size(written)} of {where}", soft_wrap=True)
    return 0


def _tokenizer(arguments: argparse.Namespace) -> str:
    """Return the path of the copied tokenizer; "" if the run has trained none."""
    place = inspect.tokenizer_beside(arguments.target)
    return f", its tokenizer in {place}" if not arguments.prefix and exists(storage_of(place), place) else ""


def _export_hf(arguments: argparse.Namespace, console: Console) -> int:
    from moe_lightning.cli.huggingface import export_checkpoint

    alone = arguments.adapter
    written = export_checkpoint(arguments.path, arguments.target, dtype=arguments.dtype, adapter_alone=alone)
    console.print(f"{arguments.target}: {_size(written)} for {'peft' if alone else 'transformers'}", soft_wrap=True)
    return 0


def _export_loads(arguments: argparse.Namespace, console: Console) -> int:
    counts_LE = measured_counts(arguments.source, arguments.last)
    plan = plan_serving(counts_LE, arguments.ranks, arguments.slots)
    write_form(form_of(plan, arguments.engine, arguments.ranks, arguments.dense_layers), arguments.target)
    layers, experts = counts_LE.shape
    console.print(
        f"{arguments.target}: {layers} layers of {experts} experts on {arguments.ranks} ranks of {arguments.slots}, "
        f"busiest rank over mean {plan.imbalance_before:.2f} without replicas, {plan.imbalance_after:.2f} so",
        soft_wrap=True,
    )
    return 0


def _edit(arguments: argparse.Namespace, console: Console) -> int:
    from moe_lightning.cli.expert_edits import edit_file, parse_edits

    loads_LE = None if arguments.loads is None else measured_counts(arguments.loads)
    words = {kind: getattr(arguments, kind) for kind in ("prune", "merge", "duplicate")}
    if arguments.prune_least and loads_LE is None:
        raise ConfigurationError("--prune-least needs to know the loads: give --loads")
    if arguments.prune_least and loads_LE is not None:
        least = [least_loaded(loads_E, arguments.prune_least) for loads_E in loads_LE]
        words["prune"] += [f"{layer}:{','.join(map(str, experts))}" for layer, experts in enumerate(least)]
    report = edit_file(
        arguments.source,
        arguments.target,
        lambda num_layers: parse_edits(num_layers, **words),
        loads_LE=loads_LE,
        fold=arguments.fold,
        noise=arguments.noise,
        batches=arguments.batches,
    )
    loss = "not measured: it needs the run's config.yaml and --batches above 0"
    if report.losses is not None:
        before, after = report.losses
        loss = f"{before:.6f} -> {after:.6f}, {report.batches} batches at most"
    keys = f"model.num_experts={report.experts[1]} model.router.top_k={report.top_k[1]}"
    facts = _facts(
        ("experts of a layer", f"{report.experts[0]} -> {report.experts[1]}"),
        ("experts of a token", f"{report.top_k[0]} -> {report.top_k[1]}"),
        ("validation loss", loss),
        ("go on with", f"moe-train run_name=NAME resume={arguments.target} {keys}"),
    )
    console.print(facts, soft_wrap=True)
    return 0


def _prune(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.keep < 1:
        raise ConfigurationError(f"--keep {arguments.keep} would delete every checkpoint: give at least 1")
    if newest_file(arguments.path) is not None:
        raise ConfigurationError(f"{arguments.path} holds no checkpoint directories: give a folder of them")
    if not any(verdict.is_whole for verdict in inspect.verify_all(arguments.path)[: arguments.keep]):
        raise CheckpointError(
            f"none of the newest {arguments.keep} checkpoints in {arguments.path} is whole, so nothing is "
            f"deleted: raise --keep, and see moe-ckpt verify {arguments.path}"
        )
    removed = prune(arguments.path, arguments.keep)
    console.print(f"deleted {len(removed)}: {', '.join(removed)}" if removed else "nothing to delete", soft_wrap=True)
    return 0


def _clean(arguments: argparse.Namespace, console: Console) -> int:
    missing = next((path for path in arguments.path if not path.is_dir()), None)
    if missing is not None:
        raise ConfigurationError(f"{missing} is no directory: name the one that a run's fallback_dir is")
    found = inspect.orphans(arguments.path)
    for orphan in found:
        facts = [_size(orphan.nbytes), f"checkpoints in {orphan.root or 'a place that is not recorded'}"]
        if orphan.unwritten is not None:
            facts.append(f"its snapshot of step {orphan.unwritten} was never written: the same run would write it")
        console.print(f"{orphan.path}: {', '.join([*facts, *orphan.problems])}", soft_wrap=True)
    if not found:
        console.print("no snapshots of dead runs")
    elif not arguments.yes:
        console.print(f"nothing is deleted without --yes: {_size(sum(o.nbytes for o in found))} in {len(found)} places")
    else:
        deleted = [orphan for orphan in found if inspect.remove(orphan)]
        console.print(f"deleted {len(deleted)}: {_size(sum(orphan.nbytes for orphan in deleted))}")
    return 0


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


if __name__ == "__main__":
    sys.exit(main())
