"""Every recipe trains two steps at a reduced size, on one rank in the process of the test; by default four do.

tests/unit/test_conf.py composes all of them. Recipes for Hugging Face models are run by
tests/distributed/test_huggingface_cli.py, on small checkpoints; those that are only simulated by test_sim_cli.py.
"""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra import compose
from omegaconf import DictConfig

from moe_lightning.cli.composition import CONFIG_DIR, config_folder
from moe_lightning.cli.train import main
from tests.agents import ForkedAgent
from tests.commands import SMALL_MODEL, WORDS, write_words
from tests.documented import PLUGINS
from tests.programs import exit_code

ELSEWHERE = {"olmoe_finetune", "olmoe_fsdp", "olmoe_qlora", "upcycle_gpt2", "upcycle_llama", "deepseek_v3_sim"}
IMAGES = {"swinv2_moe", "moc_swinv2_moe"}
QUICK = {"moc_swinv2_moe", "pro_prophet_moe_gpt_s"}
"""Partial checkpoints of images, shadows."""
RECIPES = sorted({path.stem for path in (CONFIG_DIR / "recipes").glob("*.yaml")} - ELSEWHERE)

SMALL = [
    "run_name=small",
    "ranks=1",
    "logger=csv",
    "data.num_workers=0",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
]
SMALL_TEXT = [*SMALL_MODEL, "model.vocab_size=auto", "data.tokenizer=bytes", *WORDS, "data.val_samples=4"]
SMALL_IMAGES = [
    "model.image_size=16",
    "model.patch_size=2",
    "model.window_size=4",
    "model.embed_dim=8",
    "model.depths=[2,2]",
    "model.num_heads=[2,2]",
    "model.num_dense_layers=0",
]
FITTED = {
    "trace_routing": ["model.router.forced.path=trace.npz"],
    "lazarus_gpt_l": ["strategy.slots=16"],  # one rank holds what three or more shared
    "lazarus_gpt_m": ["strategy.slots=12"],
    "lazarus_gpt_s": ["strategy.slots=8"],
    "long_context": ["strategy.mesh.cp=1"],
    "pipeline": ["strategy.mesh.pp=1", "strategy.micro_batches=null"],
    "moc_swinv2_moe": ["data.path=images"],
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="partial checkpoints need Linux's shared memory")


def write_data(folder: Path) -> None:
    """What the reduced recipes read."""
    write_words(folder)
    counts = np.ones((2, 2, 1, 8), dtype=np.uint16)
    np.savez(folder / "trace.npz", counts=counts, iteration=np.array([1, 2]))
    for name in range(12):
        images = folder / "images" / f"class_{name}"
        images.mkdir(parents=True)
        for number in range(2):
            header = b"P6 8 8 255 "  # the plainest format of images
            (images / f"{number}.ppm").write_bytes(header + bytes([20 * name, 100 * number, 7] * 64))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.start_agent", ForkedAgent)


def require_extras(recipe: str) -> None:
    """Skip a recipe whose packages are not here."""
    if recipe in IMAGES and not all(map(importlib.util.find_spec, ("transformers", "PIL"))):
        pytest.skip("images need transformers and Pillow: pip install '.[images]'")
    if recipe in PLUGINS:  # without -m it trains one run
        pytest.importorskip(PLUGINS[recipe])


def reduced(recipe: str, samples: int) -> list[str]:
    """Arguments that make two small steps of a recipe, with so many samples in each of its micro-batches."""
    composed = _composed(recipe)
    micro_batches = composed.trainer.accumulate_grad_batches
    sizes = SMALL_IMAGES if recipe in IMAGES else SMALL_TEXT
    found = [*SMALL, *sizes, f"data.global_batch_size={samples * micro_batches}"]
    found.append(f"trainer.val_check_interval={2 * micro_batches}")
    if composed.model.num_experts > 16:
        found.append("model.num_experts=16")
    if composed.elastic.enabled is True:  # its launcher is for ranks of their own, see tests/chaos
        found.append("elastic.enabled=false")
    return found


def _composed(recipe: str) -> DictConfig:
    with config_folder():
        return compose("train", [f"recipes={recipe}"])


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in RECIPES]
)
def test_trains_two_steps(recipe: str, capfd: pytest.CaptureFixture[str]) -> None:
    require_extras(recipe)
    assert exit_code(main, [f"recipes={recipe}", *reduced(recipe, 2), *FITTED.get(recipe, [])]) == 0
    said = capfd.readouterr()
    assert "step 2/2" in said.out
    run = Path("outputs/small")
    with (run / "csv" / "version_0" / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(losses) == 2
    assert all(2 < loss < 8 for loss in losses), "about the logarithm of 256 bytes, or of 12 classes"
    assert list((run / "checkpoints").iterdir())
