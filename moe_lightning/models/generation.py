"""Text generation with a GPT: cached keys and values, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor
from typing_extensions import override

from moe_lightning.config import PositiveInt, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPT
from moe_lightning.parallel.sequence import ContextParallel, attach_context


@validated
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token, with the meaning that transformers gives to these options.

    Attributes:
        temperature: divisor of the logits, at least 0.001, as these must stay finite; None: always the most likely
            token.
        top_k: number of most likely tokens to choose from; None: all.
        top_p: only the most likely tokens whose probabilities first sum to this.
    """

    temperature: Annotated[float, Interval(ge=1e-3)] | None = None
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0

    def choose(self, logits_V: Tensor) -> int:
        """Return a token for logits.

        Raises:
            ConfigurationError: see `check_logits`.
        """
        check_logits(logits_V)
        if self.temperature is None:
            return int(logits_V.argmax())
        logits_V = logits_V.float() / self.temperature
        if self.top_k is not None:
            least = logits_V.topk(min(self.top_k, len(logits_V))).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
        if self.top_p < 1:
            ascending_V, order_V = logits_V.sort()
            is_cut_V = ascending_V.softmax(-1).cumsum(-1) <= 1 - self.top_p
            is_cut_V[-1] = False
            logits_V = logits_V.masked_fill(torch.empty_like(is_cut_V).scatter_(0, order_V, is_cut_V), -torch.inf)
        return int(logits_V.softmax(-1).multinomial(1))

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `generate` of transformers."""
        one = {"num_beams": 1, "num_return_sequences": 1}  # tokens of several would not come one after the other
        if self.temperature is None:
            return one | {"do_sample": False}
        chosen = {"temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p}
        return one | {"do_sample": True, **chosen}


def check_logits(logits: Tensor) -> None:
    """
    Raises:
        ConfigurationError: some are NaN, of which no token can be chosen.
    """
    if logits.isnan().any():
        raise ConfigurationError(
            "the model's logits are NaN, as after a training that has diverged: give an earlier one of its checkpoints"
        )


class KeyValueCache(ContextParallel):
    """Attention of new tokens over all tokens of a sequence, in the place of the `context` of an attention layer.

    The first call has the beginning of the sequence, each later one a single token.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys = self._values = torch.empty(0)

    @override
    def first(self, length: int) -> int:
        return self._keys.shape[2] if self._keys.numel() else 0

    @override
    def whole(self, length: int) -> int:
        return self.first(length) + length

    @override
    def attention(self, q_BHLC: Tensor, k_BGLC: Tensor, v_BGLC: Tensor, **options: Any) -> Tensor:
        is_beginning = not self._keys.numel()
        if not is_beginning:
            k_BGLC, v_BGLC = torch.cat((self._keys, k_BGLC), 2), torch.cat((self._values, v_BGLC), 2)
        self._keys, self._values = k_BGLC, v_BGLC
        return F.scaled_dot_product_attention(
            q_BHLC, k_BGLC, v_BGLC, is_causal=is_beginning, enable_gqa=q_BHLC.shape[1] != k_BGLC.shape[1]
        )


def generate(model: GPT, ids: Sequence[int], sampling: Sampling, max_new_tokens: int) -> Iterator[int]:
    """Yield the tokens that follow `ids`; when the context is full, its older half is dropped.

    Args:
        model: in evaluation mode.
        ids: at least one token, and at most those of the context.
    """
    sequence, new, former = list(ids), list(ids), model.context
    try:
        for index in range(max_new_tokens):
            if index == 0 or len(sequence) > model.config.context_length:
                if index:
                    sequence = new = sequence[-max(1, model.config.context_length // 2) :]
                _cache_keys_and_values(model)
            with torch.no_grad():
                logits_BLV = model(torch.tensor([new], device=model.token_embedding.weight.device))
            token = sampling.choose(logits_BLV[0, -1])
            sequence, new = [*sequence, token], [token]
            yield token
    finally:
        attach_context(model, former)


def _cache_keys_and_values(model: GPT) -> None:
    """Give each attention layer an empty cache; the model follows the positions of the first layer."""
    caches = [KeyValueCache() for _ in model.blocks]
    for block, cache in zip(model.blocks, caches, strict=True):
        block.attention.context = cache  # type: ignore[union-attr]
    model.context = caches[0]
