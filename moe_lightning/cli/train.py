"""`moe-train`: compose a configuration and start its ranks.

Ranks read a configuration file in the run directory. They never see the command line, so neither they nor the jobs of
a multirun can start the command again.

A search optimizes the last logged value of `objective`: the rank that logs writes its metrics into the run directory,
where the command that started the ranks reads them, whichever launcher it used. `doctor=true` trains a few steps beside
one process and compares them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import socket
import sys
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from omegaconf import DictConfig, OmegaConf, open_dict

from moe_lightning import __version__, user_errors
from moe_lightning.cli.capacity import check_processes, ranks_of
from moe_lightning.cli.composition import (
    COLLECTIONS,
    CONFIG_DIR,
    CONFIG_NAME,
    KEYS,
    check_arguments,
    check_groups,
    check_hydra_settings,
    check_recipe,
    check_top_level,
    choices,
    composition_errors,
    fixed_keys,
    known_keys,
    register_model_bases,
    with_quotes,
)
from moe_lightning.cli.dial import check_dial, dial_line, with_dial
from moe_lightning.cli.next_steps import next_steps
from moe_lightning.cli.overrides import read_settings, refuse_option
from moe_lightning.cli.resume import changes, check_changes, check_start, config_of, effect, goes_on, may_be_repeated
from moe_lightning.cli.run_directory import DOCTOR, RunDirectory, Traces, locked, remove_empty
from moe_lightning.config import TARGET, PositiveInt, fits, shown
from moe_lightning.cores import usable_cores
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.elastic.worker import Interrupted, outlive_readers
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import replace_text
from moe_lightning.hub import missing_weights
from moe_lightning.text_table import in_columns, table
from moe_lightning.user_errors import suggestion

if TYPE_CHECKING:
    from moe_lightning.checkpoint.storage.interface import Place
    from moe_lightning.elastic.launcher import ElasticLauncher

_WIDTH = 110  # of the recipes' lines
_INDENT = 32  # of what stands beside a key
_TEXT = """\
moe-train: train a Mixture-of-Experts model with expert parallelism

usage: moe-train [recipes=NAME] [key=value ...] [-m] [--config-dir DIR]

recipes{own}
{recipes}

keys (all of them: moe-train --cfg job)
  depth=N                       one dial: sizes, batch, lr and steps of a small MoE of N layers
  ranks=auto                    local ranks: every GPU, or 2 on the CPU
  data.source=stdlib            file, folder or glob of text, JSONL, Parquet; tokens of moe-data
  data.tokenizer=bytes          bpe:8192, or the path of a tokenizer.json
  data.global_batch_size=N      samples of one step, over all ranks
  model=NAME                    {models}
  model.num_experts=N           and d_model, num_layers, router.top_k, ...
  optimizer.lr=X                peak learning rate
  trainer.max_steps=N           length of the run
  trainer.precision=32-true     bf16-mixed, or 16-mixed on a V100 or T4
  strategy.replicas=null        replicas of each expert
  run_name=NAME                 files go to outputs/NAME
  resume=true                   false: start over; or a checkpoint's path
  task=train                    validate: measure the last checkpoint

options
  -m, --multirun                one run for every combination: optimizer.lr=1e-3,3e-3
  -c, --cfg job                 print the configuration instead of training
  --config-dir DIR              your recipes: DIR/recipes/NAME.yaml
  --info searchpath             where configurations are looked for (also: defaults, plugins)
  --advise [RECIPE]             mesh, slots, checkpoints, memory and speed for this machine, as a recipe of yours
     --cluster 4x8xH100         for nodes x GPUs elsewhere
     --out DIR/recipes/NAME.yaml  where to write it
  -sc install=bash              completion: eval "$(moe-train -sc install=bash)"
  --health [RUN_DIR]            check this machine, or show the nodes that have joined a run or were refused
  --version                     with --report: versions and machine, for a report of a fault

examples
  moe-train                                          train the quickstart, two to four minutes
  moe-train recipes=text data.source=~/books         train on your own text
  moe-train recipes=swinv2_moe data.path=photos/     or images: a folder for each class
  moe-train model.num_experts=16 run_name=wide       change anything, keep it apart
  moe-train -m optimizer.lr=1e-3,3e-3                two runs, one after the other
  torchrun --nproc-per-node=8 --no-python moe-train  let torchrun start the ranks
"""


def help_text(config_dir: str | None = None) -> str:
    """Return the text of `moe-train --help`.

    Args:
        config_dir: the user's own folder of recipes.
    """
    folders = [CONFIG_DIR / "recipes", *([Path(config_dir).expanduser() / "recipes"] if config_dir else [])]
    recipes = {path.stem: _description(path) for folder in folders for path in sorted(folder.glob("*.yaml"))}
    width = max(map(len, recipes), default=0)
    room = _WIDTH - width - 4
    lines = (
        f"  {name:<{width}}  {textwrap.shorten(about, room, placeholder=' ...')}" for name, about in recipes.items()
    )
    names = " ".join(choices("model"))
    models = ("\n" + " " * _INDENT).join(textwrap.wrap(names, 100 - _INDENT, break_on_hyphens=False))
    return _TEXT.format(recipes="\n".join(lines), own=f" (also in {config_dir})" if config_dir else "", models=models)


def _description(path: Path) -> str:
    """The first comment of a recipe that is not Hydra's."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        comment = re.fullmatch(r"#\s*(.+)", line)
        if comment and not comment[1].startswith("@"):
            return comment[1]
    return ""


def objective_of(path: Path, name: str) -> float:
    """The metric of this name in a file that `RunDirectory.write_metrics` has left.

    Raises:
        ConfigurationError: no run has left its metrics, the name is none of them, or its value is not finite.
    """
    try:
        metrics: dict[str, float] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ConfigurationError(
            f"objective={name} cannot be told, because the run has left no metrics in {path}: give the same command "
            "with task=validate for metrics of the validation, or with resume=false"
        ) from None
    if name not in metrics:
        of_the_model = [metric for metric in sorted(metrics) if "/layer" not in metric]  # deep models have hundreds
        raise ConfigurationError(
            f"objective={name} is not a metric that the run logged{suggestion(name, metrics)}: use one of "
            f"{', '.join(of_the_model)}"
        )
    if not math.isfinite(metrics[name]):
        raise ConfigurationError(
            f"objective={name} came out as {metrics[name]}, which nothing can be compared with: "
            "narrow the search to values at which training stays finite, such as lower learning rates"
        )
    return metrics[name]


_CALLBACK = "parity_doctor"
_LEFT_OUT = ("checkpoint", "partial_experts_checkpoint", "fault_recovery", "fault_injection", "dynamic_k")
"""Callbacks that write checkpoints, or need some: nothing goes on from this run."""


def examined(composed: DictConfig) -> None:
    """Let a run be a short one of its own, which leaves nothing in the folder of the run that it examines.

    Raises:
        ConfigurationError: it does not train.
    """
    if composed.get("task") != "train":
        raise ConfigurationError(f"doctor=true compares steps of training, and task={composed.task} has none: drop one")
    OmegaConf.set_struct(composed, False)
    composed.run_dir = f"{composed.run_dir}/{DOCTOR}"
    composed.resume, composed.elastic.enabled, composed.logger = False, False, {}
    composed.trainer.limit_val_batches, composed.objective = 0, None
    given = composed.callbacks.get(_CALLBACK) or {}
    target = {"_target_": "moe_lightning.doctor.parity_doctor.ParityDoctor"}
    retained = {name: node for name, node in composed.callbacks.items_ex(resolve=False) if name not in _LEFT_OUT}
    composed.callbacks = retained | {_CALLBACK: {**target, **given}}


_NO_SETTINGS = {"module", "program", "num_ranks", "log_dir"}
"""Arguments of ElasticLauncher that moe-train gives: they say which program runs."""


def elastic_options(config: Mapping[str, Any], *, external: bool) -> dict[str, Any] | None:
    """Arguments of ElasticLauncher; None for a run that is not elastic.

    Args:
        external: torchrun, srun or the like started these ranks.

    Raises:
        ConfigurationError: a key or value that it cannot have, nothing that recovers, or ranks that end together.
    """
    from moe_lightning.elastic.launcher import ElasticLauncher  # imports torch
    from moe_lightning.elastic.protocol import Address

    options = dict(config["elastic"])
    enabled, settings = options.pop("enabled", "auto"), options.pop("settings", {})
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"elastic.settings={shown(settings)} must be a mapping: set elastic.settings.NAME=value"
        )
    for name in _NO_SETTINGS & options.keys():
        raise ConfigurationError(f"elastic.{name} is not a setting: moe-train --cfg job shows all keys")
    for kind, values, key in ((ElasticSettings, settings, "elastic.settings"), (ElasticLauncher, options, "elastic")):
        check_arguments({TARGET: f"{kind.__module__}.{kind.__qualname__}", **values}, key)
    waits = ElasticSettings(**settings)
    if waits.membership != "etcd" and (address := options.get("rdzv_endpoint")) is not None:
        try:
            Address.parse(address)
        except ConfigurationError as error:
            raise ConfigurationError(f"elastic.rdzv_endpoint={error}") from None
    recovers = bool(config["callbacks"].get("fault_recovery"))
    if not fits(enabled, bool | Literal["auto"]):
        raise ConfigurationError(f"elastic.enabled={shown(enabled)} must be true, false or auto")
    meets_others = options.get("rdzv_endpoint") is not None or options.get("num_nodes", 1) != 1
    if external and enabled and (enabled is True or meets_others):
        asked = "elastic.enabled=true" if enabled is True else "elastic.rdzv_endpoint or elastic.num_nodes is given"
        raise ConfigurationError(
            f"{asked}, but torchrun or srun started these ranks and ends all of them with the first: run moe-train "
            "itself on every node, under SLURM in a step of one task for each, with elastic.rdzv_endpoint=HOST:PORT"
        )
    if enabled is True and not recovers:
        raise ConfigurationError("elastic.enabled=true needs a callback that recovers: use callbacks=fault_recovery")
    if enabled and meets_others and not recovers:
        raise ConfigurationError(
            "elastic.rdzv_endpoint or elastic.num_nodes is given, but no callback recovers, so this machine would "
            "train alone: add callbacks=fault_recovery, or give elastic.enabled=false"
        )
    return None if external or not (enabled and recovers) else {**options, "settings": waits}


_CPU_RANKS = 2
_RANKS_OF_A_CORE = 4
"""Beyond, a warning says that they wait for each other."""


def is_externally_launched() -> bool:
    """True if torchrun, srun or the like started this process as one rank of several."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def with_ranks(config: Mapping[str, Any], *, external: bool) -> dict[str, Any]:
    """The configuration with accelerator and devices decided.

    Raises:
        ConfigurationError: devices that this machine lacks, another number of ranks than was started, or several nodes
            without anything that starts them.
    """
    trainer = dict(config["trainer"])
    gpus = _visible_gpus()
    accelerator = trainer.get("accelerator", "auto")
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise ConfigurationError(
            f"trainer.accelerator={shown(accelerator)} is not supported: choose one of cpu, gpu, auto"
        )
    if accelerator in ("gpu", "cuda") and not gpus:
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}, but torch sees no GPU here: use trainer.accelerator=cpu"
        )
    trainer["accelerator"] = accelerator
    if external:
        started, wanted = _ranks_from_environment(), trainer.get("devices", "auto")
        everywhere = started["devices"] * started["num_nodes"]
        if wanted not in ("auto", -1, "-1", started["devices"], everywhere):
            raise ConfigurationError(
                f"ranks={shown(wanted)}, but torchrun or srun started {started['devices']} on each node: give "
                "ranks=auto, or start as many"
            )
        if accelerator != "cpu" and started["devices"] > gpus:
            raise ConfigurationError(
                f"{started['devices']} ranks on each node, but torch sees {gpus} GPUs in each of them: start as many "
                f"ranks as there are GPUs, under SLURM with --gpus-per-node={started['devices']} in place of "
                "--gpus-per-task and --gpu-bind"
            )
        trainer |= started
    else:
        if trainer.get("num_nodes", 1) != 1:
            raise ConfigurationError(
                f"trainer.num_nodes={trainer['num_nodes']} needs a launcher on every node: "
                "start moe-train with torchrun or srun"
            )
        trainer["devices"] = _devices(trainer.get("devices", "auto"), gpus if accelerator != "cpu" else 0)
    return {**config, "trainer": trainer}


def _devices(wanted: Any, gpus: int) -> int | list[int]:
    """Return the number of ranks, or the GPUs that are listed.

    Args:
        gpus: that ranks may use; 0 on the CPU.

    Raises:
        ConfigurationError: the value, and what it may be.
    """
    if wanted in ("auto", -1, "-1"):
        return gpus or _CPU_RANKS
    if fits(wanted, list[int]):
        if not gpus:
            raise ConfigurationError(
                f"ranks={shown(wanted)} is a list of GPUs, and this run uses the CPU: give the number of ranks, such "
                f"as ranks={max(1, len(wanted))}"
            )
        if not wanted or not all(0 <= index < gpus for index in wanted):
            raise ConfigurationError(f"ranks={wanted} must name some of the {gpus} GPUs here: use 0 to {gpus - 1}")
        return list(wanted)
    if not fits(wanted, PositiveInt):
        others = "auto, or a list of GPUs such as [0,1]" if gpus else "or auto"
        raise ConfigurationError(f"ranks={shown(wanted)} must be an integer of at least 1, {others}")
    if gpus and wanted > gpus:
        raise ConfigurationError(
            f"ranks={wanted} is more than the {gpus} GPUs that torch sees: lower it, or use trainer.accelerator=cpu"
        )
    if not gpus:
        check_processes(wanted)
        cores = usable_cores()
        if wanted > _RANKS_OF_A_CORE * cores:
            print(
                f"moe-train: ranks={wanted} share {cores} cores, so a step takes {wanted / cores:.0f} times as long: "
                f"more than {_RANKS_OF_A_CORE * cores} are for trying things out",
                file=sys.stderr,
            )
    return int(wanted)


def _ranks_from_environment() -> dict[str, int]:
    """Ranks per node and nodes, as torchrun or SLURM state them.

    Raises:
        ConfigurationError: variables that count something else than ranks, or tasks of SLURM whose number on a node is
            not stated, which Lightning refuses.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        world = int(os.environ["WORLD_SIZE"])
        if world > 1 and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys():
            raise ConfigurationError(
                f"WORLD_SIZE={world} is set without LOCAL_RANK and LOCAL_WORLD_SIZE, as where Kubeflow counts pods: "
                "start moe-train with torchrun in each pod, or unset RANK and WORLD_SIZE and give "
                "elastic.rdzv_endpoint=HOST:PORT"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return {"devices": local, "num_nodes": max(1, world // local)}
    nodes, tasks = int(os.environ.get("SLURM_STEP_NUM_NODES", "1")), int(os.environ["SLURM_STEP_NUM_TASKS"])
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise ConfigurationError(
            f"SLURM has started {tasks} tasks and does not say how many on each node: give srun or sbatch "
            f"--ntasks-per-node={tasks // nodes} in place of --ntasks"
        )
    return {"devices": tasks // nodes, "num_nodes": nodes}


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; exits with 0, 1 (a defect), 2 (the user's mistake), 130 (Ctrl-C) or 143 (SIGTERM)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _ended_by_sigterm():
            _run(arguments)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", signal.SIGINT)
        outlook = "; ".join(["", *getattr(stop, "__notes__", [])])
        print(f"moe-train: ended by {signal.Signals(number).name}{outlook}", file=sys.stderr)
        sys.exit(128 + number)
    except Exception as error:
        sys.exit(user_errors.report("moe-train", error))
    sys.exit(0)


def _run(arguments: Sequence[str]) -> None:
    if "--version" in arguments:
        from moe_lightning.cli.environment_report import environment_report

        print(environment_report() if "--report" in arguments else f"moe-train {__version__}")
    elif {"--advise", "--health"} & set(arguments) and {"--help", "-h"} & set(arguments):
        print(help_text(), end="")
    elif "--advise" in arguments:
        _advise(arguments)
    elif "--health" in arguments:
        _print_health([word for word in arguments if word != "--health"])
    else:
        _run_hydra(arguments)


def _print_health(words: Sequence[str]) -> None:
    """Print a table: this machine's row, or those of the nodes of a run.

    Raises:
        ConfigurationError: this machine is not healthy, or the directory has no such rows.
    """
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise ConfigurationError(f"--health takes the directory of a run or nothing, not {' '.join(words)}")
    import torch

    from moe_lightning.elastic import health

    if words:
        directory = RunDirectory(Path(words[0]))
        nodes = health.read_health(directory.logs, directory.path)
    else:
        node = socket.gethostname()
        nodes = [health.check_node(node, Path.cwd())]
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            health.check_products(node, device)
            name = torch.cuda.get_device_name(device)
            print(f"{device}: {name}, memory {health.bandwidth_gb_s(device):.0f} GB/s, its products are right")
    print(table(health.HEALTH_HEADERS, health.health_rows(nodes)))


def run_command(arguments: Sequence[str]) -> tuple[Path, dict[str, float]]:
    """Run a command of one training, and return its run directory and its metrics; raises as `run_job`."""
    jobs = _run_hydra(arguments)
    if len(jobs) != 1:
        raise ConfigurationError("one training has one value of each setting: call it once for each of several")
    directory, task = jobs[0]
    return directory, RunDirectory(directory).read_metrics(task)


def _run_hydra(arguments: Sequence[str]) -> list[tuple[Path, str]]:
    """Run a command and return the run directory and the task of each of its jobs."""
    # Hydra's machinery without hydra.main, which would answer a wrong option with a screen of usage.
    from hydra import version
    from hydra.core.hydra_config import HydraConfig

    from moe_lightning.compat.private_hydra import checked_compositions, get_args_parser, run_hydra

    version.setbase("1.3")
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    info = parser._option_string_actions["--info"]
    info.nargs, info.choices = None, ["searchpath", "defaults", "plugins"]  # the others print Hydra's, too
    arguments = _as_settings(arguments)
    options, rest = parser.parse_known_intermixed_args(list(arguments))
    if rest:
        raise refuse_option("moe-train", rest[0], [name for name in parser._option_string_actions if name[:2] == "--"])
    if options.help:
        print(help_text(options.config_dir), end="")
        return []
    _check_options(options)
    options.overrides = [with_quotes(override) for override in options.overrides]
    failures: list[Exception] = []
    jobs: list[tuple[Path, str]] = []

    def job(composed: DictConfig) -> float | None:
        runtime = HydraConfig.get().runtime
        try:
            # Under hydra.job.chdir=true relative paths are those of the command all the same.
            with chdir(runtime.cwd), _own_wandb_run():
                objective = run_job(composed)
            jobs.append((Path(runtime.cwd, str(composed.run_dir)), str(composed.task)))  # of the doctor, if it ran
            return objective
        except Exception as error:
            failures.append(error)
            remove_empty(Path(runtime.output_dir))  # Hydra made it before anything was checked
            if options.multirun:  # the other jobs go on, and the sweeper judges by what is raised here
                print(f"moe-train: a job failed: {user_errors.one_line(error)}", file=sys.stderr)
                raise
            return None  # Hydra would print a note of its own

    with ExitStack() as contexts:
        contexts.enter_context(_full_errors())
        contexts.enter_context(_own_failures(failures))
        contexts.enter_context(composition_errors(arguments))
        if options.multirun:
            os.environ.setdefault("WANDB_RUN_GROUP", f"sweep-{zlib.crc32(' '.join(options.overrides).encode()):08x}")
            unnamed = ",".join(f"'{key}'" for key in fixed_keys(options.overrides))
            options.overrides.append(f"hydra.job.config.override_dirname.exclude_keys=[{unnamed}]")
        if options.config_dir is not None or any("hydra.searchpath" in word for word in options.overrides):
            check = partial(check_hydra_settings, words=tuple(options.overrides))
            contexts.enter_context(checked_compositions(check))
        register_model_bases()
        run_hydra(
            args=options,
            args_parser=parser,
            task_function=job,
            config_path=str(CONFIG_DIR.absolute()),
            config_name=CONFIG_NAME,
        )
    if failures and not options.multirun:  # a sweeper that has not raised them allows for some
        raise failures[0]
    return jobs


@contextmanager
def _full_errors() -> Iterator[None]:
    """Let Hydra raise inside, in place of printing and exiting; the program that calls finds its environment again."""
    former = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if former is not None:
            os.environ["HYDRA_FULL_ERROR"] = former


@contextmanager
def _own_wandb_run() -> Iterator[None]:
    """Finish a run of W&B that is begun inside, as the end of a process does: the next training would log into
    it. A run that was there stays.
    """

    def current() -> Any:
        return getattr(sys.modules.get("wandb"), "run", None)

    before, exit_code = current(), 1
    try:
        yield
        exit_code = 0
    finally:
        if (run := current()) is not None and run is not before:
            run.finish(exit_code=exit_code)


_ADVICE_OPTIONS = ("--cluster", "--out", "--config-dir")


def _advise(arguments: Sequence[str]) -> None:
    """Run `moe-train --advise [RECIPE] [--cluster CLUSTER] [--out FILE] [--config-dir DIR] [key=value ...]`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    for option in _ADVICE_OPTIONS:
        parser.add_argument(option, type=os.path.expanduser)  # most shells leave that of --out=~/path
    given, words = parser.parse_known_args([word for word in arguments if word != "--advise"])
    for word in words:
        if word.startswith("-"):
            raise refuse_option("moe-train --advise", word, [*_ADVICE_OPTIONS, "--help"])
    settings = [f"recipes={word}" if re.fullmatch(r"[\w-]+", word) else word for word in words]
    config_dir = given.config_dir
    _check_config_dir(config_dir)
    from moe_lightning.cli.advise import advise  # takes seconds to import

    folder = [] if config_dir is None else ["--config-dir", config_dir]
    read = [with_quotes(one) for one in _as_settings([*settings, *folder]) if one not in folder]
    advise(read, cluster=given.cluster, out=given.out, config_dir=config_dir)


def run_job(composed: DictConfig) -> float | None:
    """Train as one composed configuration says: in this process, or on ranks of its own. What sweepers get: the last
    value of the metric that `objective` names, None without one and on ranks above 0 of torchrun and the like.

    Raises:
        ConfigurationError, CheckpointError: a mistake of the user, found here.
        RanksFailed, Interrupted: from the launcher.
    """
    config = resolved(composed)
    external = is_externally_launched()
    elastic = elastic_options(config, external=external)
    config = with_ranks(config, external=external)
    directory = RunDirectory(Path(config["run_dir"]))
    if external and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != "0":
        if not _finished(directory, config):
            _launch(directory, config, elastic, external=external)
        return None
    if finished := _finished(directory, config):
        from moe_lightning.cli.training import check

        check(config)  # wrong values are named all the same
        print(finished)
        _print_next_steps(directory, config)
        return _objective(directory, config)
    if elastic is not None:
        _elastic_launcher(directory, config, elastic).check()
    _prepare(directory, config, is_first=False)  # what can be refused is refused before anything is written
    with ExitStack() as locks:
        before = directory.traces()
        directory.create()
        party = config["elastic"]["rdzv_endpoint"] if elastic is not None else None
        is_first = locks.enter_context(locked(directory, party))
        earlier: Path | None = None
        try:
            earlier, state = _prepare(directory, config, is_first=is_first)
            if earlier is not None:  # it took its lock along
                directory.create()
                locks.enter_context(locked(directory, party))
            print(in_columns(f"run    {directory}{state}"), flush=True)  # at once: the ranks take seconds to start
            if line := dial_line(composed):
                print(in_columns(line), flush=True)
            replace_text(directory.command, OmegaConf.to_yaml(OmegaConf.create(config)))
            _launch(directory, config, elastic, external=external)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.add_note(_outlook(directory, starts_over=config["resume"] is False))
            _undo(directory, before, earlier, error, is_alone=party is None)
            raise
        _print_next_steps(directory, config)
        return _objective(directory, config)


def _undo(
    directory: RunDirectory, before: Traces, earlier: Path | None, error: BaseException, *, is_alone: bool
) -> None:
    """Leave the directory as it was where a command has ended before a step: neither an earlier run nor the correction
    of the command may suffer. Ranks can refuse until their first step, so nobody can check all before.

    Args:
        before: what was there when the command began.
        earlier: where the run is that the command moved aside.
        error: that ended it.
        is_alone: no other machine is at work in the directory.
    """
    failure = getattr(error, "failure", None)
    is_refusal = user_errors.sentence_of(error) is not None if failure is None else failure.kind == "mistake"
    if earlier is not None:
        # Without this machine the others may train on, and a launcher may repeat the command; what was refused, or
        # ended by Ctrl-C, leaves all as it was.
        is_ctrl_c = isinstance(error, KeyboardInterrupt) and getattr(error, "signal", signal.SIGINT) == signal.SIGINT
        if ((is_alone and (is_ctrl_c or not may_be_repeated())) or is_refusal) and directory.put_back(earlier):
            print(f"run    {directory} is the earlier run again: this one has not trained", flush=True)
        elif not directory.holds_run():
            print(f"run    {directory} has not trained: the earlier run stays in {earlier.name}", flush=True)
    elif is_alone and is_refusal:  # after a crash the logs of the ranks may be wanted
        directory.clear(before)


def _objective(directory: RunDirectory, config: Mapping[str, Any]) -> float | None:
    return None if config["objective"] is None else objective_of(directory.metrics(config["task"]), config["objective"])


@contextmanager
def _own_failures(failures: Sequence[Exception]) -> Iterator[None]:
    """Raises the first failure of a job as it was, whatever a sweeper has made of it."""
    try:
        yield
    except Exception:
        if failures:
            raise failures[0] from None
        raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the command on SIGTERM as on Ctrl-C, unless a launcher or a training has its own handler."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(signal.Signals(number))

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _outlook(directory: RunDirectory, *, starts_over: bool) -> str:
    """Return a clause on what the same command does next after an interruption.

    Args:
        starts_over: by resume=false.
    """
    newest = directory.newest_checkpoint()
    if newest is None:
        return "no checkpoint had been written, so the same command starts over"
    saved = newest.path.relative_to(directory.path)
    how = " with resume=true" if starts_over else ""
    return f"{directory}/{saved} is saved, and the same command{how} resumes after step {newest.step}"


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The composed configuration without interpolations, its top level checked.

    Raises:
        ConfigurationError: a key that there is not, an interpolation that leads nowhere, or a value that cannot be.
    """
    if type(composed.get("run_name")) is int:
        OmegaConf.update(composed, "run_name", str(composed.run_name))
    with open_dict(composed):
        for name in COLLECTIONS:  # callbacks=[] chooses none
            composed.setdefault(name, {})
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    check_recipe({str(name): value for name, value in raw.items()})
    check_groups({str(name): value for name, value in raw.items()})
    check_dial(composed)
    if composed.get("doctor") is True:
        with composition_errors(()):
            examined(composed)
    with composition_errors(()):
        container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    config = {str(name): value for name, value in container.items() if name in KEYS}
    check_top_level(config)
    return config


def _launch(
    directory: RunDirectory, config: Mapping[str, Any], elastic: Mapping[str, Any] | None, *, external: bool
) -> None:
    """Train, in this process or on ranks of its own."""
    _fetch_pretrained(config)
    num_ranks = ranks_of(config["trainer"])
    arguments = [str(directory.command.absolute())]
    if elastic is not None:
        _elastic_launcher(directory, config, elastic).run(arguments)
    elif external or num_ranks == 1:
        from moe_lightning.cli.training import train

        outlive_readers()
        train(config)
    else:
        from moe_lightning.elastic.launcher import LocalLauncher

        LocalLauncher(num_ranks=num_ranks, log_dir=directory.logs).run(arguments)


def _fetch_pretrained(config: Mapping[str, Any]) -> None:
    model = config["module"].get("config")
    name = model.get("pretrained") if isinstance(model, Mapping) else None
    if isinstance(name, str) and missing_weights(name):
        from moe_lightning.cli.training import fetch_pretrained  # imports torch

        fetch_pretrained(config, name)


def _print_next_steps(directory: RunDirectory, config: Mapping[str, Any]) -> None:
    steps = next_steps(directory, config) if config["task"] == "train" and not config["doctor"] else ""
    if steps:
        print(f"\n{steps}", flush=True)


def _elastic_launcher(
    directory: RunDirectory, config: Mapping[str, Any], elastic: Mapping[str, Any]
) -> ElasticLauncher:
    from moe_lightning.elastic.launcher import ElasticLauncher  # imports torch

    return ElasticLauncher(num_ranks=ranks_of(config["trainer"]), log_dir=directory.logs, **elastic)


def _finished(directory: RunDirectory, config: Mapping[str, Any]) -> str:
    """Return the message of a run that has nothing left to do; "" for any other.

    Raises:
        ConfigurationError: it has made more steps than the command asks for, or with settings that the command would
            change.
    """
    max_steps = config["trainer"].get("max_steps")
    if config["task"] != "train" or not goes_on(config) or not isinstance(max_steps, int) or max_steps <= 0:
        return ""
    last = directory.has_reached(max_steps)
    if last is None:
        return ""
    start = "" if config["resume"] is False else ", start over with resume=false"
    head, cure = f"{directory} has finished its {last.step} steps", f"give this run another run_name{start}"
    former = config_of(last.path)
    # Under manual optimization a batch may have several steps, and the last one passes the limit.
    if max_steps < last.step and max_steps != ((former or {}).get("trainer") or {}).get("max_steps"):
        raise ConfigurationError(f"{head}, and trainer.max_steps={max_steps} asks for fewer: {cure}")
    found = changes(former, config) if former else []
    check_changes(found, overrides=config["resume_overrides"])
    if any(change.is_on_request for change in found):  # else a search would take its metrics for those of the command
        raise ConfigurationError(f"{head}, and has none left for other settings{effect(found)}: {cure}")
    return f"{head}: {cure}, or measure it with task=validate"


def _prepare(directory: RunDirectory, config: Mapping[str, Any], *, is_first: bool) -> tuple[Path | None, str]:
    """Find what the run goes on from, or make room for it.

    Returns where the earlier run was moved, and what there is to say.

    Args:
        is_first: no other machine of the run has done so.

    Raises:
        ConfigurationError: settings that the run cannot go on with, or a folder that must not be moved.
    """
    is_going_on, named = goes_on(config), config["resume"] if isinstance(config["resume"], str) else None
    starts_over = config["task"] == "train" and config["resume"] is False and not is_going_on
    if starts_over and not is_first:
        return None, ""
    newest = directory.newest_intact() if is_going_on and config["task"] == "train" else None
    store = _store_with_checkpoints(config) if config["task"] == "train" else None
    if named is not None and newest is None and store is None:
        check_start(named)
    if config["task"] != "train":
        return None, ""
    if starts_over:
        from moe_lightning.cli.training import check

        if store is not None:
            raise ConfigurationError(
                f"{store} has checkpoints, which resume=false does not delete: give another "
                "callbacks.partial_experts_checkpoint.dirpath, or resume=true"
            )
        if not directory.check_movable():
            return None, ""
        if may_be_repeated():
            directory.passed_over.touch()
        check(config)  # nothing is moved for a command that cannot train
        place = directory.move_aside()
        return place, f", the earlier run is kept in {place.name}" if place else ""
    if store is not None:
        start: str | Path | None = directory.config  # the store has none
    else:
        start = newest.path if newest is not None else named
    former = start and config_of(start)
    found = changes(former, config) if former else []
    check_changes(found, overrides=config["resume_overrides"], is_named=newest is None and store is None)
    if store is not None:
        return None, f", resuming from {store}{effect(found)}"
    if newest is not None:
        is_restart = config["resume"] is False
        hint = "after a restart; another run_name starts over" if is_restart else "resume=false starts over"
        return None, f", resuming after step {newest.step} ({hint}){effect(found)}"
    return None, effect(found)


def _store_with_checkpoints(config: Mapping[str, Any]) -> Place | None:
    """Return the object store whose checkpoints a training goes on from; None without any there."""
    partial = config["callbacks"].get("partial_experts_checkpoint") or {}
    if "://" not in str(partial.get("dirpath")):  # most runs need none of the imports
        return None
    from moe_lightning.checkpoint.directory import headings
    from moe_lightning.cli.training import store_of_checkpoints

    store = store_of_checkpoints(config)
    return store if store is not None and headings(store) else None


def _as_settings(arguments: Sequence[str]) -> list[str]:
    """The command line with other tools' names and ways of writing as overrides.

    Raises:
        ConfigurationError: a setting that means something else here.
    """
    from moe_lightning.compat.private_hydra import get_args_parser

    if list(arguments) == ["help"]:
        return ["--help"]
    options = {name: action.nargs != 0 for name, action in get_args_parser()._option_string_actions.items()}
    folder = next((after for word, after in pairwise(arguments) if word in ("--config-dir", "-cd")), None)
    folder = next((word.partition("=")[2] for word in arguments if word.startswith("--config-dir=")), folder)
    top = {*KEYS, "recipes", "hydra"}
    return with_dial(read_settings(arguments, options, top, lambda: known_keys(arguments, folder)))


def _refuse(message: str) -> NoReturn:
    raise ConfigurationError(f"{message} (moe-train --help shows the options)")


def _check_config_dir(folder: str | None) -> None:
    if folder is not None and not Path(folder).is_dir():
        raise ConfigurationError(f"--config-dir {folder} is not a folder: give the one that holds recipes/")


def _check_options(options: argparse.Namespace) -> None:
    _check_config_dir(options.config_dir)
    if "hydra.run.dir=" in options.overrides:
        raise ConfigurationError("hydra.run.dir is empty: give the folder of the run, or leave it out")
    if options.multirun and any(word.lstrip("+").startswith("hydra.run.dir=") for word in options.overrides):
        raise ConfigurationError(
            "hydra.run.dir names the folder of one run: with -m give hydra.sweep.dir=FOLDER, the parent of all"
        )
    if options.config_path is not None or options.config_name is not None:
        raise ConfigurationError(
            "--config-path and --config-name would replace moe-train's configuration: use --config-dir"
        )
    if options.experimental_rerun is not None:
        raise ConfigurationError(
            "--experimental-rerun unpickles a configuration, which can run code: give the folder's overrides again"
        )


if __name__ == "__main__":
    main()
