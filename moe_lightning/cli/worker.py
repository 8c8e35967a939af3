"""One rank of a training run: builds everything from the composed configuration, trains, validates.

Started by the launcher as `python -m moe_lightning.cli.worker CONFIG`; a run of one rank, and one started by torchrun
or srun, calls `train` in the process of moe-train itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from moe_lightning.checkpoint.storage.interface import Place


def main() -> int:
    """Run one rank under the launcher; the exit code."""
    from moe_lightning.elastic.worker import work

    return work("moe-train", lambda: train(read_config(Path(sys.argv[1]))))


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that moe-train composed and left in the run directory."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(config, dict)
    return {str(name): value for name, value in config.items()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Objects built from a configuration."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: pl.LightningDataModule


def train(config: Mapping[str, Any]) -> None:
    """Train and validate as the composed configuration says, in this process.

    Raises:
        ConfigurationError, CheckpointError: a mistake of the user.
        Interrupted: the run was ended by Ctrl-C or SIGTERM.
    """
    from moe_lightning.cli.run_directory import RunDirectory
    from moe_lightning.cli.run_setup import GracefulStop, quiet_libraries
    from moe_lightning.cli.train import write_metrics
    from moe_lightning.elastic.worker import Interrupted

    quiet_libraries()
    run = build(config)
    try:
        checkpoint = agreed_checkpoint(run, config)
        if config["task"] == "train":
            run.trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint)
            for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GracefulStop) and callback.stopped_by is not None:
                    raise Interrupted(callback.stopped_by)
            trained = _logged(run)
            if not config["doctor"]:
                measure(run)
        else:
            trained = {}
            run.trainer.validate(run.module, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
        metrics = trained | _logged(run)
        if run.trainer.is_global_zero:
            write_metrics(RunDirectory(Path(config["run_dir"])).metrics, metrics)
    except SystemExit:  # Lightning's answer to signals, with a code of its own
        if run.trainer.received_sigterm or run.trainer.interrupted:
            raise Interrupted(signal.SIGTERM if run.trainer.received_sigterm else signal.SIGINT) from None
        raise
    finally:
        elastic = getattr(run.trainer.strategy, "elastic", None)
        if elastic is not None:
            elastic.close()


def _logged(run: Run) -> dict[str, float]:
    """The last value of every metric that was logged; may be collective."""
    return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def measure(run: Run) -> None:
    """Validate the trained model, unless its last step has just been validated, and sum the run up; collective."""
    from moe_lightning.callbacks.summary import Summary

    summaries = [callback for callback in run.trainer.callbacks if isinstance(callback, Summary)]  # type: ignore[attr-defined]
    is_current = bool(summaries) and all(summary.is_current(run.trainer) for summary in summaries)
    if not run.trainer.strategy.reduce_boolean_decision(is_current, all=True):
        run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        return
    for summary in summaries:
        summary.report(run.trainer)


def build(config: Mapping[str, Any]) -> Run:
    """Build what the configuration describes, after checking every name and type in it.

    Raises:
        ConfigurationError: one sentence about the first thing that is wrong.
    """
    import lightning.pytorch as pl

    from moe_lightning.cli.composition import build_object

    config, parts = _parts(config)
    trainer = build_object(
        config["trainer"],
        "trainer",
        strategy=parts["strategy"],
        callbacks=[*parts["callbacks"], *_records(config)],
        logger=parts["logger"] or False,
        plugins=_environment_plugins(),
    )
    _expect(trainer, pl.Trainer, "trainer")
    return Run(trainer=trainer, module=parts["module"], data=parts["data"])


def check(config: Mapping[str, Any]) -> None:
    """Build all but the trainer, and throw it away.

    Raises:
        ConfigurationError: one sentence about the first thing that is wrong.
    """
    _parts(config)


def _parts(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The configuration with the data's sizes, and the objects of its groups."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

    from moe_lightning.cli.composition import build_object, check_config
    from moe_lightning.cli.run_setup import check_room

    check_config(config)
    pl.seed_everything(config["seed"], verbose=False)
    _check_pretrained(config)
    parts: dict[str, Any] = {"data": build_object(config["data"], "data")}
    _expect(parts["data"], pl.LightningDataModule, "data")
    _restore_tokenizer(config, parts["data"])
    config = with_sizes_of_data(config, parts["data"])
    for name, kind in (("module", pl.LightningModule), ("strategy", Strategy)):
        parts[name] = build_object(config[name], name)
        _expect(parts[name], kind, name)
    check_room(config, parts["module"])
    parts["callbacks"] = _built_group({"callbacks": with_one_checkpoint(config["callbacks"])}, "callbacks")
    # Measuring a checkpoint is no step of the run whose curves these are.
    parts["logger"] = _built_group(config, "logger") if config["task"] == "train" else []
    return config, parts


def _check_pretrained(config: Mapping[str, Any]) -> None:
    """Refuse a wrong `model.pretrained` before its tokenizer, which the data ask for, is missed.

    Raises:
        ConfigurationError: it is no folder of a checkpoint, or of a model that is not known.
    """
    from moe_lightning.cli.composition import build_object

    model = config["module"].get("config")
    if isinstance(model, Mapping) and model.get("pretrained") is not None:
        from moe_lightning.models.huggingface.loading import check_folder
        from moe_lightning.models.huggingface.module import HuggingFaceConfig

        check_folder(Path(model["pretrained"]).expanduser())
        if str(model.get("_target_")).endswith(f".{HuggingFaceConfig.__name__}"):
            build_object(model, "module.config").architecture()


def _restore_tokenizer(config: Mapping[str, Any], data: object) -> None:
    """Give the data the tokenizer that was trained for the checkpoint which the command goes on from, before tokens are
    made; whether that checkpoint is whole is decided later, by all ranks.
    """
    from moe_lightning.checkpoint.files import checkpoint_values
    from moe_lightning.checkpoint.storage import place_of
    from moe_lightning.cli.run_directory import RunDirectory
    from moe_lightning.data.text import TextData
    from moe_lightning.errors import CheckpointError

    if not isinstance(data, TextData) or not data.trains_tokenizer or config["resume"] is False:
        return
    place = place_of(config["resume"]) if isinstance(config["resume"], str) else store_of_checkpoints(config)
    if place is None:
        newest = RunDirectory(Path(config["run_dir"])).newest_checkpoint()
        place = None if newest is None else newest.path
    if place is not None:
        with suppress(CheckpointError, OSError):
            data.load_state_dict(checkpoint_values(place).get(type(data).__qualname__, {}))


def _expect(built: object, kind: type, key: str) -> None:
    from moe_lightning.errors import ConfigurationError

    if not isinstance(built, kind):
        raise ConfigurationError(
            f"{key}._target_ makes a {type(built).__name__}, not a {kind.__name__}: name a class of that kind"
        )


def _records(config: Mapping[str, Any]) -> list[pl.Callback]:
    """Callbacks that every run has."""
    from moe_lightning.cli.run_directory import RunDirectory
    from moe_lightning.cli.run_setup import GracefulStop, ResumedWithOverrides, RunRecord

    records: list[pl.Callback] = [RunRecord(RunDirectory(Path(config["run_dir"])), config), GracefulStop()]
    return [*records, ResumedWithOverrides()] if config["resume_overrides"] else records


def with_one_checkpoint(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """Callbacks that write one kind of checkpoints into a folder, or partial ones into a store: of several choices, as
    in callbacks=[partial_experts,routing_recorder], a later one brings back the full ones that partial ones replace.
    """
    full, partial = callbacks.get("checkpoint"), callbacks.get("partial_experts_checkpoint")
    is_elsewhere = store_of_checkpoints({"callbacks": callbacks}) is not None
    if full and partial and (is_elsewhere or full.get("dirpath") == partial.get("dirpath")):
        return {**callbacks, "checkpoint": None}
    return dict(callbacks)


def store_of_checkpoints(config: Mapping[str, Any]) -> Place | None:
    """Return the object store of partial checkpoints; None if they go into a folder, or there are none."""
    from moe_lightning.checkpoint.storage import place_of

    partial = config["callbacks"].get("partial_experts_checkpoint") or {}
    place = place_of(str(partial.get("dirpath") or "."))
    return None if isinstance(place, Path) else place


def _built_group(config: Mapping[str, Any], group: str) -> list[Any]:
    """The objects of a group whose entries have names; null leaves one out."""
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger

    from moe_lightning.cli.composition import build_object

    built = {f"{group}.{name}": build_object(node, f"{group}.{name}") for name, node in config[group].items() if node}
    for key, thing in built.items():
        _expect(thing, Callback if group == "callbacks" else Logger, key)
    return list(built.values())


def agreed_checkpoint(run: Run, config: Mapping[str, Any]) -> str | None:
    """The checkpoint that all ranks go on from, or None: rank 0 looks, after it has kept older worlds from committing;
    collective."""
    from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
    from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy

    strategy = run.trainer.strategy
    if not isinstance(strategy, ExpertParallelStrategy):
        return checkpoint_to_load(config)

    def look() -> str | None:
        for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, PartialExpertsCheckpoint) and config["task"] == "train":
                callback.enter_root(strategy)
        return checkpoint_to_load(config)

    return strategy.decide(look)


def checkpoint_to_load(config: Mapping[str, Any]) -> str | None:
    """The checkpoint that the run goes on from, or None.

    Raises:
        ConfigurationError: `resume` names a file that is not there, or there is nothing to validate.
        CheckpointError: there are files, and all are damaged.
    """
    from lightning.pytorch.utilities import rank_zero_warn

    from moe_lightning.checkpoint.directory import headings
    from moe_lightning.checkpoint.storage import place_of, storage_of
    from moe_lightning.cli.run_directory import RunDirectory
    from moe_lightning.errors import ConfigurationError

    resume = config["resume"]
    if isinstance(resume, str):
        place = place_of(resume)
        if not (place.exists() if isinstance(place, Path) else storage_of(place).is_dir(place)):
            raise ConfigurationError(f"resume={resume} does not exist: give a checkpoint's path, true or false")
        return resume
    directory = RunDirectory(Path(config["run_dir"]))
    wanted = resume or config["task"] == "validate"
    store = store_of_checkpoints(config)
    if wanted and store is not None and headings(store):
        return str(store)
    newest = directory.newest_intact(rank_zero_warn) if wanted else None
    if newest is None and config["task"] == "validate":
        raise ConfigurationError(
            f"{store or directory.checkpoints} holds no checkpoint to validate: train first, or give resume=CHECKPOINT"
        )
    if newest is None:
        return None
    # Of directories the loader itself takes the newest whole one, and says which damaged one it passed over.
    return str(directory.checkpoints if newest.path.is_dir() else newest.path)


_MOST_SPARE = 4
"""A model may know so many times the tokens or classes of the data before it is told."""


def with_sizes_of_data(config: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """The configuration with `vocab_size: auto` and `num_classes: auto` of the model replaced by the data's.

    Raises:
        ConfigurationError: the model has fewer tokens or classes than the data, or asks for what the data have not.
    """
    from lightning.pytorch.utilities import rank_zero_warn

    from moe_lightning.errors import ConfigurationError

    model = config["module"].get("config")
    if not isinstance(model, Mapping):
        return dict(config)
    sizes = {}
    for name, things in (("vocab_size", "tokens"), ("num_classes", "classes")):
        wanted, needed = model.get(name), getattr(data, name, None) if name in model else None
        if wanted == "auto" and needed is None:
            raise ConfigurationError(
                f"model.{name}=auto asks {type(data).__name__} for its {things}, but it has none: choose data that fit "
                "the model, as data=images for images"
            )
        if needed is not None and wanted != "auto" and wanted < needed:
            raise ConfigurationError(
                f"model.{name}={wanted} is below the {needed} {things} of the data: use model.{name}=auto"
            )
        if needed is not None and wanted != "auto" and wanted > _MOST_SPARE * needed:
            rank_zero_warn(
                f"model.{name}={wanted} is {wanted / needed:.0f} times the {needed} {things} of the data, so most "
                f"of the softmax is computed for nothing: use model.{name}=auto, or data that have as many"
            )
        if needed is not None:
            sizes[name] = needed if wanted == "auto" else wanted
    return {**config, "module": {**config["module"], "config": {**model, **sizes}}}


def _environment_plugins() -> list[Any]:
    """Ranks started by our launcher are described by plain variables; torchrun and SLURM are found by Lightning
    itself.
    """
    from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]

    from moe_lightning.elastic.membership import ELASTIC_VARIABLE
    from moe_lightning.parallel.context import STORE_VARIABLE

    return [LightningEnvironment()] if {STORE_VARIABLE, ELASTIC_VARIABLE} & os.environ.keys() else []


if __name__ == "__main__":
    from moe_lightning.elastic.worker import leave

    leave(main())
