"""Model and samples of the cases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from moe_lightning import GPTModule

TINY = {
    "vocab_size": 48,
    "context_length": 8,
    "num_layers": 2,
    "num_heads": 2,
    "d_model": 16,
    "d_hidden": 24,
    "num_experts": 4,
    "moe_every": 1,
    "init_std": 0.2,
    "tie_embeddings": False,
}


class Language(GPTModule):
    """A tiny GPT whose optimizer needs no Trainer: AdamW with a large epsilon, which divides by no rounding errors, and
    a rate that decays from the first step on.

    Args:
        config: of the model, beside `TINY`.
        frozen: pattern of names of parameters that are not trained.
        momentum: SGD with this momentum instead of AdamW.
    """

    def __init__(self, config: Mapping[str, Any], frozen: str = "", momentum: float | None = None) -> None:
        super().__init__(TINY | dict(config))
        self._frozen, self._momentum = frozen, momentum

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            if self._frozen and re.search(self._frozen, name):
                parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
            if self._momentum is None
            else torch.optim.SGD(groups, lr=0.1, momentum=self._momentum)
        )
        schedule = LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.3 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tokens(Dataset[tuple[Tensor, ...]]):
    """Sequences from their index alone: each token follows the one before by a rule with some noise."""

    def __init__(self, size: int = 96, length: int = 8, vocab: int = 48) -> None:
        self._size, self._length, self._vocab = size, length, vocab

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(self._vocab, (1,), generator=generator)
        noise = torch.randint(0, 3, (self._length + 1,), generator=generator)
        ids = (start + 5 * torch.arange(self._length + 1) + noise) % self._vocab
        return ids[:-1], ids[1:]


class UnequalTokens(Tokens):
    """The same, with another number of targets in every sample: prompts are not learned."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        targets = targets.clone()
        targets[: (3 * index) % self._length] = -100
        return inputs, targets


class PaddedTokens(Tokens):
    """The same, with padding of another length behind every sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = (part.clone() for part in super().__getitem__(index))
        is_token = torch.arange(self._length) < self._length - (3 * index) % (self._length - 1)
        inputs[~is_token], targets[~is_token] = 0, -100
        return inputs, targets, is_token


class PackedTokens(Tokens):
    """Two documents in every sample, which do not see each other; the second begins at another place in each."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = (part.clone() for part in super().__getitem__(index))
        begin = 2 + index % (self._length - 3)
        begins = torch.where(torch.arange(self._length) < begin, 0, begin)
        targets[begin - 1] = -100
        return inputs, targets, torch.ones(self._length, dtype=torch.bool), begins
