"""Every key of moe-train, on the configurations that together have all keys: built, and trained for two steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from hydra import compose
from omegaconf import ListConfig, OmegaConf

from moe_lightning import user_errors
from moe_lightning.callbacks.fault_injection import Kind
from moe_lightning.cli import train
from moe_lightning.cli.composition import config_folder
from moe_lightning.cli.train import elastic_options, with_ranks
from moe_lightning.cli.training import check
from tests.commands import WORDS, write_words
from tests.sweep.cases import Case
from tests.sweep.values import VALUES, keys_of

COMMON = ["run_name=x", "trainer.accelerator=cpu", "ranks=1", "trainer.max_steps=2", "trainer.log_every_n_steps=1"]
TEXT = [
    *COMMON,
    "model=llama_moe_tiny",
    *WORDS,
    "data.global_batch_size=2",
    "data.val_samples=2",
    "trainer.val_check_interval=1",
    "callbacks.summary.ngram_orders=[1]",
]
BASES: dict[str, list[str]] = {
    "text": [*TEXT, "logger=csv"],
    "balanced": [
        *TEXT, "logger=csv", "callbacks=[load_balancer,compile,routing_recorder]", "strategy.slots=6",
        "callbacks.compile_dense.backend=eager",
    ],
    "partial": [*TEXT, "logger=tensorboard", "callbacks=partial_experts"],
    "recovery": [*TEXT, "logger=csv", "callbacks=fault_injection", "elastic.enabled=true"],
    "images": [*COMMON, "model=swinv2_moe_tiny", "data=images", "logger=csv"],
    "logged": [*TEXT, "logger=default", "logger.wandb.offline=true"],
}  # fmt: skip
TRAINED = ("text", "balanced", "partial")
"""What is trained; the others need several ranks, the network or minutes, and are built."""

ENDLESS = {("trainer.max_steps", "1e14"), ("trainer.fast_dev_run", "1e14"), ("module.config", "{}")}
"""A run without an end and a model of the default sizes: nothing is wrong with them."""

_MAY_BE_MINUS_ONE = {
    "ranks", "trainer.devices", "trainer.max_epochs", "trainer.max_steps", "trainer.num_sanity_val_steps",
    "callbacks.checkpoint.save_top_k",
}  # fmt: skip


_MAY_BE_EMPTY = {"strategy.placement", "callbacks.partial_experts_checkpoint.scopes"}
_MAY_BE_EMPTY |= {f"callbacks.fault_injection.{kind}" for kind in get_args(Kind)}
"""Lists, if nothing else is given: of tables, of kinds of state, of faults."""


def building(_folder: Path) -> Iterator[Case]:
    """What moe-train does up to the start of training."""
    return _cases(list(BASES), _build)


def building_text(_folder: Path) -> Iterator[Case]:
    """The same for the keys that most runs have."""
    return _cases(["text"], _build)


def training(_folder: Path) -> Iterator[Case]:
    """Runs of two steps."""
    return _cases(list(TRAINED), train.run_job)


def _cases(bases: list[str], job: Callable[[Any], None]) -> Iterator[Case]:
    """Every key of these with every value, each key once; in the current folder."""
    warnings.simplefilter("ignore")
    write_words(lines=3000)
    seen = set[str]()
    for base in bases:
        config = composed(base)
        config.run_dir = "outputs/first"
        _build(config.copy())  # the corpus, and modules that every case would import
        for key, written in keys_of(OmegaConf.to_container(composed(base), resolve=False)):
            referred = isinstance(written, str) and written.startswith("${") and OmegaConf.select(config, key)
            current = referred if referred else written
            if key not in seen and (base == "recovery" or not key.startswith("elastic")):
                for name in VALUES:
                    if (key, name) not in ENDLESS:
                        yield Case(
                            label=f"{base}: {key}={name}",
                            run=partial(_as_command, config, key, name, job),
                            subjects=_subjects(key),
                            sensible=_is_sensible(key, name, current),
                        )
                seen.add(key)


def composed(base: str) -> Any:
    with config_folder():
        config = compose("train", BASES[base])
    OmegaConf.set_struct(config, False)
    return config


def _as_command(base: Any, key: str, name: str, job: Callable[[Any], None]) -> int:
    """The exit code of moe-train; errors are printed as it does."""
    config = base.copy()
    config.run_dir = f"outputs/{key}={name}"
    OmegaConf.update(config, key, VALUES[name], merge=False, force_add=True)
    try:
        job(config)
    except Exception as error:
        return user_errors.report("moe-train", error)
    return 0


def _build(config: Any) -> None:
    plain = with_ranks(train.resolved(config), external=False)
    elastic_options(plain, external=False)
    check(plain)


def _subjects(key: str) -> tuple[str, ...]:
    ending = key.rpartition(".")[2]
    if key.startswith("module."):
        return (ending, "module", "model", "optimizer")
    return (ending, "ranks", "abc ", "abc/") if key == "trainer.devices" else (ending, "abc ", "abc/")  # or the path


def _is_sensible(key: str, name: str, current: Any) -> bool:
    return {
        "null": True,  # the annotations say where; what comes of it is tried
        "empty": False,
        "abc": isinstance(current, str | None) or key in ("resume", "trainer.val_check_interval"),
        "-1": key in _MAY_BE_MINUS_ONE,
        "0": True,
        "nan": False,
        "inf": False,
        "1e30": False,
        "1e14": key in ("run_name", "trainer.fast_dev_run", "trainer.limit_val_batches", "trainer.overfit_batches")
        or (isinstance(current, int | None) and not isinstance(current, bool))
        or key.endswith(("_per_s", "_every")),
        "[]": isinstance(current, list | ListConfig) or key in _MAY_BE_EMPTY,
        "{}": isinstance(current, Mapping | None),
    }[name]
