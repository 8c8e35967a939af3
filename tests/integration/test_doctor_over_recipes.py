"""`moe-train doctor=true` over every recipe, on two ranks: no false alarm."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.commands import WORDS, moe_train
from tests.huggingface_models import make_checkpoint
from tests.integration.test_recipes import FITTED, RECIPES, reduced, require_extras, write_data

PRETRAINED = {
    "olmoe_finetune": ["model.pretrained=olmoe", "data.path=sums.jsonl"],
    "olmoe_fsdp": ["model.pretrained=olmoe", "data.path=sums.jsonl"],
    "olmoe_qlora": ["model.pretrained=olmoe", "data.path=sums.jsonl"],
    "upcycle_gpt2": ["model.pretrained=gpt2", *WORDS, "data.val_samples=4"],
    "upcycle_llama": ["model.pretrained=llama", *WORDS, "data.val_samples=4"],
}
SMALL_PRETRAINED = ["run_name=small", "model.context_length=48", "data.tokenizer=bytes", "data.global_batch_size=4"]
SMALL_PRETRAINED += ["trainer.precision=32-true", "trainer.max_steps=2"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="moe-train's launcher of local ranks needs Linux"),
]


def assert_nothing_is_found(folder: Path, *arguments: str) -> None:
    """Let the doctor find nothing."""
    done = moe_train(folder, "doctor=true", *arguments, "ranks=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"doctor +2 steps, \d\d+ tensors, largest difference .*: the same", done.stdout), done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_false_alarm_over_recipes(recipe: str, tmp_path: Path) -> None:
    require_extras(recipe)
    write_data(tmp_path)
    fitted = [] if recipe in ("long_context", "pipeline") else FITTED.get(recipe, [])  # their two ranks are there
    assert_nothing_is_found(tmp_path, f"recipes={recipe}", *reduced(recipe, 4), *fitted)


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        *((recipe, []) for recipe in PRETRAINED),
        ("olmoe_finetune", ["strategy.mesh.tp=2"]),
        ("olmoe_finetune", ["strategy.mesh.pp=2"]),
    ],
)
def test_no_false_alarm_over_recipes_of_pretrained_models(recipe: str, mesh: list[str], tmp_path: Path) -> None:
    write_data(tmp_path)
    lines = [{"prompt": f"{i} + 1", "response": str(i + 1)} for i in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = PRETRAINED[recipe][0].partition("=")[2]
    make_checkpoint(model, tmp_path / model, vocab_size=256)
    assert_nothing_is_found(tmp_path, f"recipes={recipe}", *PRETRAINED[recipe], *SMALL_PRETRAINED, *mesh)


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer=muon", "callbacks=load_balancer", "callbacks.load_balancer.rebalance_every=1", "strategy.slots=6"],
        ["optimizer=adafactor"],
        ["data.packing=true"],
        ["callbacks=fault_recovery", "strategy.replicas=2"],
    ],
    ids=" ".join,
)
def test_no_false_alarm_over_settings(arguments: list[str], tmp_path: Path) -> None:
    write_data(tmp_path)
    assert_nothing_is_found(tmp_path, "recipes=quickstart", *reduced("quickstart", 4), *arguments)


def test_a_failing_doctor_ends_with_2(tmp_path: Path) -> None:
    write_data(tmp_path)
    too_close = "+callbacks.parity_doctor.tolerance=1e-15"
    done = moe_train(tmp_path, "doctor=true", *reduced("quickstart", 4), too_close, "ranks=2")
    assert done.returncode == 2
    assert "parity fails at step 1" in done.stdout
    assert re.search(r"^moe-train: error: parity fails at step 1: .*\n\Z", done.stderr, re.MULTILINE), done.stderr
    assert not list(tmp_path.glob("outputs/small/checkpoints"))
