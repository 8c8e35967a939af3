"""Commands of `moe-ckpt`: each takes the parsed command line and returns the exit code."""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

from moe_lightning.arrays import IntArray
from moe_lightning.checkpoint import inspect as checkpoints
from moe_lightning.checkpoint.commit import prune as prune_all_but
from moe_lightning.checkpoint.files import read_checkpoint, tensors_in
from moe_lightning.checkpoint.inspect import dense_bytes, newest_file, step_of_file
from moe_lightning.checkpoint.manifest import Manifest
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.checkpoint.storage.interface import exists
from moe_lightning.cli.expert_edits import edit_file, parse_edits
from moe_lightning.cli.saved_model import checkpoints_of
from moe_lightning.cli.serving import form_of, measured_counts, plan_serving
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.text_table import table
from moe_lightning.user_errors import printable


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was parsed; returns the exit code."""
    if isinstance(getattr(arguments, "path", None), str):
        arguments.path = checkpoints_of(place_of(arguments.path))
    return _COMMANDS[arguments.command](arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    file = newest_file(arguments.path)
    if file is not None:
        print(_facts_of_file(file))
        return 0
    checkpoint = checkpoints.resolve(arguments.path)
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
        *((f"  {scope}", _size(size)) for scope, size in checkpoints.scope_bytes(manifest).items()),
    )
    print(facts)
    if versions_LE.size:
        print(_versions(versions_LE))
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
        return "nothing: every expert was written again"
    return manifest.previous or "nothing: every expert is of this session's first checkpoint"


def _print(line: str) -> None:
    """Print a line, which may hold names of a checkpoint from elsewhere."""
    print(printable(line), flush=True)  # before a sentence on stderr


def _facts(*rows: tuple[str, str]) -> str:
    """Return lines of a name and a value."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {printable(value)}" for name, value in rows)


def _facts_of_file(path: Path) -> str:
    values = read_checkpoint(path)
    model = list(tensors_in(values["state_dict"]))
    return _facts(
        ("checkpoint", path.name),
        ("taken after step", str(step_of_file(values, path))),
        ("model", f"{_size(dense_bytes(model))} in {len(model)} tensors"),
        ("optimizers", _size(dense_bytes(tensors_in(values.get("optimizer_states"))))),
        ("on disk", _size(path.stat().st_size)),
    )


def _versions(versions_LE: IntArray) -> str:
    layers = [(layer, *("-" if v < 0 else v for v in versions)) for layer, versions in enumerate(versions_LE)]
    headers = ("layer", *map(str, range(versions_LE.shape[1])))
    return table(headers, layers, title="version of each expert (step), by layer")


def _verify(arguments: argparse.Namespace) -> int:
    verdicts = checkpoints.verify_all(arguments.path)
    for verdict in verdicts:
        found = "pruned meanwhile" if verdict.is_pruned else verdict.problem or "whole"
        _print(f"{verdict.name}: {found}")
    damaged = sum(verdict.problem is not None for verdict in verdicts)
    if damaged:
        what = f"{damaged} of {len(verdicts)} in {arguments.path} are" if len(verdicts) > 1 else f"{arguments.path} is"
        raise CheckpointError(f"{what} not whole: restore from a copy what is named above, or name another checkpoint")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    file = newest_file(arguments.path)
    if file is not None:
        written, what = checkpoints.export_file(file, arguments.target), file.name
    else:
        checkpoint = checkpoints.resolve(arguments.path)
        written, what = checkpoints.export(checkpoint, arguments.target), checkpoint.path.name
        if checkpoint.first_step < checkpoint.step:
            what += f", the model after step {checkpoint.first_step}"
    _print(f"{arguments.target}: {_size(written)} of {what}{_tokenizer(arguments)}")
    return 0


def _tokenizer(arguments: argparse.Namespace) -> str:
    """Return the path of the copied tokenizer; "" if the run has trained none."""
    place = checkpoints.tokenizer_beside(arguments.target)
    return f", its tokenizer in {place}" if exists(storage_of(place), place) else ""


def _export_hf(arguments: argparse.Namespace) -> int:
    from moe_lightning.cli.huggingface import export_checkpoint

    alone = arguments.adapter
    written = export_checkpoint(arguments.path, arguments.target, dtype=arguments.dtype, adapter_alone=alone)
    _print(f"{arguments.target}: {_size(written)} for {'peft' if alone else 'transformers'}")
    return 0


def _export_gguf(arguments: argparse.Namespace) -> int:
    from moe_lightning.cli.huggingface import export_gguf

    written = export_gguf(arguments.path, arguments.target, dtype=arguments.dtype)
    _print(f"{arguments.target}: {_size(written)} for llama.cpp")
    return 0


def _export_loads(arguments: argparse.Namespace) -> int:
    if arguments.target.suffix != ".json":
        raise ConfigurationError(f"{arguments.target.name} must end with .json: SGLang goes by it")
    counts_LE = measured_counts(arguments.source)
    layers, experts = counts_LE.shape
    plan = plan_serving(counts_LE, arguments.ranks, arguments.slots)
    form = form_of(plan, experts, arguments.dense_layers)
    arguments.target.write_text(json.dumps(form))
    _print(
        f"{arguments.target}: {layers} layers of {experts} experts on {arguments.ranks} ranks of {arguments.slots}, "
        f"busiest rank over mean {plan.imbalance_before:.2f} without replicas, {plan.imbalance_after:.2f} so",
    )
    return 0


def _edit(arguments: argparse.Namespace) -> int:
    words = {kind: getattr(arguments, kind) for kind in ("prune", "merge", "duplicate")}
    report = edit_file(
        arguments.source,
        arguments.target,
        lambda num_layers: parse_edits(num_layers, **words),
        batches=arguments.batches,
    )
    loss = "not measured: it needs the run's config.yaml and --batches above 0"
    if report.losses is not None:
        before, after = report.losses
        loss = f"{before:.6f} -> {after:.6f}, {arguments.batches} batches at most"
    further = "its weights alone: like the source it has no state of a training to resume"
    if report.can_resume:
        target = shlex.quote(f"resume={arguments.target}")
        further = f"the settings of the run, and run_name=NAME {target} model.num_experts={report.experts[1]}"
    facts = _facts(
        ("experts of a layer", f"{report.experts[0]} -> {report.experts[1]}"),
        ("validation loss", loss),
        ("go on with", further),
    )
    print(facts)
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    if arguments.keep < 1:
        raise ConfigurationError(f"--keep {arguments.keep} would delete every checkpoint: give at least 1")
    verdicts = checkpoints.verify_directories(arguments.path)
    if not verdicts:
        raise ConfigurationError(f"{arguments.path} holds no checkpoint directories: give a folder of them")
    if not any(verdict.is_whole for verdict in verdicts[: arguments.keep]):
        raise CheckpointError(
            f"none of the newest {arguments.keep} checkpoints in {arguments.path} is whole, so nothing is "
            f"deleted: raise --keep, and see moe-ckpt verify {shlex.quote(str(arguments.path))}"
        )
    removed = prune_all_but(arguments.path, arguments.keep)
    _print(f"deleted {len(removed)}: {', '.join(removed)}" if removed else "nothing to delete")
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    missing = next((path for path in arguments.path if not path.is_dir()), None)
    if missing is not None:
        raise ConfigurationError(f"{missing} is not a directory: name one that holds checkpoints of a run")
    found = checkpoints.orphans(arguments.path)
    for orphan in found:
        facts = [_size(orphan.nbytes), f"checkpoints in {orphan.root or 'a place that is not recorded'}"]
        if orphan.unwritten is not None:
            agent = ["python", "-m", "moe_lightning.checkpoint.agent", "--arenas", str(orphan.path)]
            command = shlex.join([*agent, "--checkpoints", orphan.root or "DIRECTORY"])
            facts.append(
                f"its snapshot of step {orphan.unwritten} was never written, and is void once the run starts again: "
                f"before that, write it by {command}"
            )
        _print(f"{orphan.path}: {', '.join([*facts, *orphan.problems])}")
    if not found:
        print("no snapshots of dead runs")
    elif not arguments.yes:
        print(f"nothing is deleted without --yes: {_size(sum(o.nbytes for o in found))} in {len(found)} places")
    else:
        deleted = [orphan for orphan in found if checkpoints.remove(orphan)]
        print(f"deleted {len(deleted)}: {_size(sum(orphan.nbytes for orphan in deleted))}")
    return 0


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


_COMMANDS = {
    "inspect": _inspect,
    "verify": _verify,
    "export": _export,
    "export-hf": _export_hf,
    "export-gguf": _export_gguf,
    "export-loads": _export_loads,
    "edit": _edit,
    "prune": _prune,
    "clean": _clean,
}
