"""Every key of moe-train with values that few keys can have: one sentence, or a run that trains a step.

The default run takes a sample of the cases and builds what they describe; the slow ones take all and train.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from moe_lightning.cli import train, worker
from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.cli.elastic import elastic_options
from moe_lightning.cli.ranks import with_ranks
from tests.forks import FORKS
from tests.sweep import VALUES, judged, keys_of, outcome

COMMON = ["run_name=x", "trainer.accelerator=cpu", "trainer.max_steps=1", "trainer.log_every_n_steps=1"]
TEXT = [
    *COMMON,
    "ranks=1",
    "model=llama_moe_tiny",
    "data.source=words.txt",
    "data.cache_dir=cache",
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
    "recovery": [*TEXT, "logger=csv", "callbacks=fault_injection", "elastic.enabled=true"],
    "images": [*COMMON, "ranks=1", "model=swinv2_moe_tiny", "data=images", "logger=csv"],
    "logged": [*TEXT, "logger=default", "logger.wandb.offline=true"],
}  # fmt: skip
TRAINED = ("text", "balanced")
"""What is trained for a step; the others need several ranks, the network or minutes, and are built."""

ENDLESS = {("trainer.max_steps", "1e14"), ("module.config", "{}")}
"""A run without an end and a model of the default sizes: nothing is wrong with them."""


def _composed(base: str) -> Any:
    with initialize_config_dir(str(CONFIG_DIR.absolute()), version_base="1.3"):
        config = compose("train", BASES[base])
    OmegaConf.set_struct(config, False)
    return config


def _cases(bases: list[str]) -> list[tuple[str, str, str]]:
    """(base, key, value) of every key of these, each key once."""
    seen, found = set[str](), []
    for base in bases:
        for key, _ in keys_of(OmegaConf.to_container(_composed(base), resolve=False)):
            if key not in seen:
                found += [(base, key, name) for name in VALUES if (key, name) not in ENDLESS]
            seen.add(key)
    return found


def _build(config: Any) -> None:
    """What moe-train does up to the start of training, in this process."""
    plain = with_ranks(train.resolved(config), external=False)
    elastic_options(plain, external=False)
    worker.check(plain)


def _sweep(folder: str, cases: list[tuple[str, str, str]], trains: bool, pipe: Connection) -> None:
    """Run the cases, each in a child of this process, and send what is wrong."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    Path("words.txt").write_text("".join(f"line {i} of {i * i} words of text\n" for i in range(3000)))
    bases = {base: _composed(base) for base in {base for base, _, _ in cases}}
    for config in bases.values():  # the corpus, and modules that every case would import
        config.run_dir = "outputs/first"
        _build(config.copy())
    wrong = []
    for number, (base, key, name) in enumerate(cases):
        config = bases[base].copy()
        config.run_dir = f"outputs/{number}"
        OmegaConf.update(config, key, VALUES[name], merge=False, force_add=True)
        run: Callable[[Any], None] = train.run_job if trains and base in TRAINED else _build
        result = outcome(lambda run=run, config=config: run(config), timeout_s=90)  # type: ignore[misc]
        current = OmegaConf.select(bases[base], key)
        plain = OmegaConf.to_container(current) if OmegaConf.is_config(current) else current
        problem = judged(key, name, plain, result)
        if problem is not None:
            wrong.append(f"{key}={name}: {problem}")
    pipe.send(wrong)


def _wrong(folder: Path, cases: list[tuple[str, str, str]], *, trains: bool) -> list[str]:
    assert cases
    pipe, end = FORKS.Pipe()
    process = FORKS.Process(target=_sweep, args=(str(folder), cases, trains, end))
    process.start()
    end.close()
    try:
        told: list[str] = pipe.recv()
        return told
    finally:
        process.kill()
        process.join()


def test_a_sample_of_all_keys_and_values(tmp_path: Path) -> None:
    sample = [case for case in _cases(["text", "images"]) if zlib.crc32(repr(case).encode()) % 24 == 0]
    assert _wrong(tmp_path, sample, trains=False) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("base", BASES)
def test_all_keys_and_values(base: str, tmp_path: Path) -> None:
    cases = [case for case in _cases(list(BASES)) if case[0] == base]
    assert _wrong(tmp_path, cases, trains=True) == []
