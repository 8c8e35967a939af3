"""Packed documents on any number of ranks, whatever cuts their samples or the model."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.data.instructions import InstructionData
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, Recorder, make_trainer
from tests.parameters import slow

LENGTH, BATCH, STEPS = 96, 8, 3
ROUTER = {"top_k": 2, "aux_loss_coef": 0.5, "z_loss_coef": 0.1}
PLAIN = {"top_k": 2, "aux_loss_coef": 0.0}  # in a pipeline statistics are those of a micro-batch
LLAMA = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False}


@cache
def conversations() -> str:
    lines = [{"prompt": "p" * (i % 5), "response": chr(97 + i % 26) * (1 + i * i % 41)} for i in range(60)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def train(
    rank: int,
    world_size: int,
    *,
    folder: Path,
    mesh: dict[str, int] | None = None,
    pretrained: Path | None = None,
    **model: Any,
) -> Any:
    path = folder / f"{rank}.jsonl"
    path.write_text(conversations())
    recorder = Recorder()
    trainer = make_trainer(
        rank, world_size, {"mesh": mesh or {}}, callbacks=[recorder], max_steps=STEPS, limit_val_batches=0
    )
    sizes = TINY | {"vocab_size": 256, "context_length": LENGTH, "router": ROUTER, "dropout": 0.1} | model
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, decay="constant")
    module: Any
    if pretrained is None:
        module = GPTModule(sizes, optimizer)
    else:
        from moe_lightning.models.huggingface.module import HuggingFaceModule

        module = HuggingFaceModule({"pretrained": str(pretrained), "context_length": LENGTH, **model}, optimizer)
    data = InstructionData(path=path, context_length=LENGTH, global_batch_size=BATCH, end_token="\0", packing=True)
    trainer.fit(module, datamodule=data)
    return recorder.losses, recorder.gradient_norms


@pytest.mark.parametrize(
    ("world_size", "mesh", "model"),
    [
        (2, {}, {}),
        slow(3, {}, LLAMA),
        slow(2, {"cp": 2}, {}),
        slow(4, {"cp": 2}, LLAMA),
        slow(4, {"cp": 4}, LLAMA | {"num_kv_heads": 1}),
        slow(2, {"tp": 2}, LLAMA),
        slow(2, {"pp": 2}, {"tie_embeddings": False, "router": PLAIN}),
    ],
)
def test_the_loss_does_not_depend_on_the_world(
    world_size: int, mesh: dict[str, int], model: dict[str, Any], tmp_path: Path
) -> None:
    expected = train(0, 1, folder=tmp_path, **model)
    for losses, norms in run_pooled(world_size, partial(train, folder=tmp_path, mesh=mesh, **model)):
        np.testing.assert_allclose(losses, expected[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(norms, expected[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "model"),
    [
        ("mixtral", {"cp": 2}, {}),
        ("olmoe", {"tp": 2}, {}),
        ("gpt_oss", {"tp": 2}, {}),
        ("olmoe", {"pp": 2}, {"router": {"aux_loss_coef": 0.0, "jitter": 0.1}, "gradient_checkpointing": True}),
    ],
)
def test_hugging_face_models(name: str, mesh: dict[str, int], model: dict[str, Any], tmp_path: Path) -> None:
    from tests.huggingface_models import make_checkpoint

    sizes = {"vocab_size": 256, "max_position_embeddings": LENGTH, "initializer_range": 0.1}
    window = {"sliding_window": 7} if name == "mixtral" else {}
    make_checkpoint(name, tmp_path / "model", **sizes, **window)
    fit: Any = partial(train, folder=tmp_path, pretrained=tmp_path / "model", **model)
    expected = fit(0, 1)
    for losses, norms in run_pooled(2, partial(fit, mesh=mesh)):
        np.testing.assert_allclose(losses, expected[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(norms, expected[1], rtol=1e-4)
