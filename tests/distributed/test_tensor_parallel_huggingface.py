"""Hugging Face models in parts over ranks (mesh.tp): the logits and exports of transformers, the losses of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moe_lightning.errors import ConfigurationError
from tests.distributed.harness import run_ranks
from tests.distributed.test_huggingface import OPTIMIZER, TOLERANCE, Probe, _fit, check, train
from tests.distributed.training import RandomTokens, Recorder, make_trainer
from tests.huggingface_models import make_checkpoint
from tests.parameters import slow

TP2 = {"mesh": {"tp": 2}}
NAMES = ("mixtral_tied", "olmoe", "qwen3", "deepseek", "gpt_oss")
DENSE = ("llama", "mistral", "qwen3_dense")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("huggingface")
    for name in (*NAMES, *DENSE, "gpt2"):
        make_checkpoint(name, folder / name / "theirs")
    return folder


@pytest.fixture(scope="module")
def reference(root: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(1, train, root, NAMES, {})[0]
    return result


@pytest.mark.parametrize("world_size", [slow(2), 4])
def test_families(world_size: int, root: Path, reference: dict[str, Any]) -> None:
    """Logits at the start and the end, losses, and the export while layers are cut."""
    ranks = run_ranks(world_size, train, root, NAMES, TP2)
    for name in NAMES:
        check(name, root, reference, ranks, f"{world_size}")


class Padded(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Sequences of unlike lengths."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, targets = RandomTokens()[index]
        is_token = torch.arange(16) < 6 + index % 9
        return ids.masked_fill(~is_token, 0), targets.masked_fill(~is_token, -100), is_token


def upcycle(rank: int, world_size: int, root: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    """Losses of upcycled models, and of one that learns from padded sequences."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    results = {}
    for name in DENSE:
        torch.manual_seed(11)
        config = {"pretrained": str(root / name / "theirs"), "context_length": 16}
        sparse = {"num_experts": 4, "moe_every": 2}
        module = HuggingFaceModule({**config, "upcycling": sparse}, OPTIMIZER)
        results[name] = _fit(rank, world_size, strategy, module, Probe(name, None))["losses"]
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, strategy, max_steps=4, gradient_clip_val=1.0, callbacks=[recorder])
    config = {"pretrained": str(root / "mixtral_tied" / "theirs"), "context_length": 16, "gradient_checkpointing": True}
    trainer.fit(HuggingFaceModule(config, OPTIMIZER), DataLoader(Padded(), batch_size=12))
    return {**results, "padded": recorder.losses}


def test_upcycled_and_padded(root: Path) -> None:
    (alone,) = run_ranks(1, upcycle, root, {})
    for result in run_ranks(4, upcycle, root, TP2):
        for name, losses in alone.items():
            np.testing.assert_allclose(result[name], losses, rtol=0, atol=TOLERANCE, err_msg=name)


def refusal(rank: int, world_size: int, root: Path) -> str:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    config = {"pretrained": str(root / "gpt2" / "theirs"), "context_length": 16, "upcycling": {"num_experts": 4}}
    trainer = make_trainer(rank, world_size, TP2, max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(HuggingFaceModule(config, OPTIMIZER), DataLoader(RandomTokens(), batch_size=12))
    return str(caught.value)


def test_unknown_layers_are_refused(root: Path) -> None:
    assert all("does not know the layers of a gpt2" in found for found in run_ranks(2, partial(refusal, root=root)))
