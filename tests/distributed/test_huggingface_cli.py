"""The recipes for Hugging Face models as a user runs them, on small checkpoints, up to plain transformers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from moe_lightning.cli.ckpt import main as moe_ckpt
from tests.commands import WORDS, moe_train, write_words
from tests.huggingface_models import inputs_for, logits_of, make_checkpoint, reloaded
from tests.parameters import slow

COMMON = [
    "run_name=small",
    "logger=none",
    "model.context_length=48",
    "data.tokenizer=bytes",
    "data.global_batch_size=4",
    "trainer.precision=32-true",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=2",
    "optimizer.warmup_steps=0",
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="moe-train's launcher of local ranks needs Linux")


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("olmoe_finetune"), "olmoe_fsdp"])
def test_fine_tuning(name: str, tmp_path: Path) -> None:
    """Two ranks with partial checkpoints; the command that is shown exports the trained model."""
    make_checkpoint("olmoe", tmp_path / "olmoe", vocab_size=256)
    lines = [{"prompt": f"{i} + 1", "response": str(i + 1)} for i in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = [f"recipes={name}", "ranks=2", "model.pretrained=olmoe", "data.path=sums.jsonl"]
    # All experts in every checkpoint: with fewer, the last one would rightly hold some older ones.
    values = ("every_n_steps=2", "k_snapshot=6", "k_persist=6")
    partial = [f"callbacks.partial_experts_checkpoint.{value}" for value in values]
    trained = moe_train(tmp_path, *recipe, *partial, "trainer.max_steps=4", "optimizer.lr=0.01", *COMMON)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""
    steps = r"next   moe-generate outputs/small --chat .*\n.*\n.*\n +moe-ckpt export-hf outputs/small huggingface +#"
    assert re.search(steps, trained.stdout)

    run = tmp_path / "outputs" / "small"
    assert moe_ckpt(["export-hf", str(run), str(tmp_path / "huggingface")]) == 0
    inputs = inputs_for("olmoe")
    exported, original = (logits_of(reloaded(tmp_path / f), inputs) for f in ("huggingface", "olmoe"))
    assert not torch.equal(exported, original)


@pytest.mark.slow
def test_adapters_of_four_bits(tmp_path: Path) -> None:
    """Two ranks with partial checkpoints, of which the adapters are written alone and merged."""
    make_checkpoint("olmoe", tmp_path / "olmoe", vocab_size=256)
    lines = [{"prompt": f"{i} + 1", "response": str(i + 1)} for i in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = ["recipes=olmoe_qlora", "ranks=2", f"model.pretrained={tmp_path / 'olmoe'}", "data.path=sums.jsonl"]
    saved = [f"callbacks.partial_experts_checkpoint.{v}" for v in ("every_n_steps=2", "k_snapshot=6", "k_persist=6")]
    trained = moe_train(tmp_path, *recipe, *saved, "trainer.max_steps=4", "optimizer.lr=0.01", *COMMON)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""

    run = tmp_path / "outputs" / "small"
    assert moe_ckpt(["export-hf", str(run / "checkpoints"), str(tmp_path / "alone"), "--adapter"]) == 0
    assert moe_ckpt(["export-hf", str(run / "checkpoints"), str(tmp_path / "merged")]) == 0
    assert (tmp_path / "alone" / "adapter_model.safetensors").is_file()
    merged, original = (logits_of(reloaded(tmp_path / f), inputs_for("olmoe")) for f in ("merged", "olmoe"))
    assert not torch.equal(merged, original)


def test_instructions_without_a_recipe(tmp_path: Path) -> None:
    """The default recipe sets what every kind of data has."""
    lines = [{"prompt": f"{i} + 1", "response": str(i + 1)} for i in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["data=instructions", "data.path=sums.jsonl", "data.tokenizer=bytes"]
    small = ["ranks=1", "model.num_layers=1", "trainer.max_steps=1", "trainer.val_check_interval=1", "logger=none"]
    trained = moe_train(tmp_path, *data, *small)
    assert trained.returncode == 0, trained.stderr


@pytest.mark.slow
def test_upcycling(tmp_path: Path) -> None:
    """One rank trains; transformers has no class for the result, which stays a Lightning checkpoint."""
    make_checkpoint("gpt2", tmp_path / "gpt2", vocab_size=256)
    write_words(tmp_path, 800)
    recipe = ["recipes=upcycle_gpt2", "model.pretrained=gpt2", *WORDS]
    trained = moe_train(tmp_path, *recipe, "data.val_samples=4", "trainer.max_steps=2", "ranks=1", *COMMON)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""
    last = next((tmp_path / "outputs" / "small" / "checkpoints").glob("*.ckpt"))
    assert moe_ckpt(["export-hf", str(last), str(tmp_path / "offline")]) == 2
    assert not (tmp_path / "offline").exists()


def test_an_upcycled_llama_leaves_as_a_mixtral(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama", vocab_size=256)
    write_words(tmp_path, 800)
    recipe = ["recipes=upcycle_llama", "model.pretrained=llama", *WORDS]
    trained = moe_train(tmp_path, *recipe, "data.val_samples=4", "trainer.max_steps=2", "ranks=1", *COMMON)
    assert trained.returncode == 0, trained.stderr
    last = next((tmp_path / "outputs" / "small" / "checkpoints").glob("*.ckpt"))
    assert moe_ckpt(["export-hf", str(last), str(tmp_path / "mixtral")]) == 0
    assert reloaded(tmp_path / "mixtral").config.model_type == "mixtral"
