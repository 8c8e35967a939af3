"""Attention over sequences that several ranks share: each computes one part of every sequence (context parallelism).

Everything but attention works on positions one by one. Attention gives sequence for heads: an all-to-all leaves every
rank whole sequences of its share of the heads, and another one undoes it (DeepSpeed-Ulysses, arXiv 2309.14509). Where
the heads of keys and values do not divide, ranks gather keys and values and keep their own queries.

Shapes: B sequences, H heads, L positions of this rank, C head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_lightning.comm.sequence_exchange import Sharers
from moe_lightning.errors import ConfigurationError


class ContextParallel:
    """Where this rank's part of each sequence lies, and attention over whole sequences.

    A module that mixes positions keeps one as its attribute `context`; the strategy puts its own there. Without a
    strategy, with `mesh.cp=1`, and outside of the strategy's steps, sequences are whole.
    """

    def __init__(self) -> None:
        self._sharers: Sharers | None = None
        self._length: int | None = None
        self.is_attending = False

    def __deepcopy__(self, memo: dict[int, object]) -> ContextParallel:
        """A copy of a module has its sequences among the same ranks."""
        return self

    def enter(self, sharers: Sharers | None, length: int | None) -> None:
        """Sequences are cut over ranks, into parts of `length` positions, until this is called again.

        Args:
            sharers: None: they are whole.
            length: None: the batch was not cut.
        """
        self._sharers, self._length = sharers, length

    @property
    def is_cut(self) -> bool:
        """Whether sequences are cut in the running step."""
        return self._sharers is not None

    @property
    def _parts(self) -> int:
        return 1 if self._sharers is None else self._sharers.size

    def whole(self, length: int) -> int:
        """Positions of a sequence of which this rank has `length`.

        Raises:
            ConfigurationError: `length` is not the part that the batch was cut into.
        """
        if self.is_cut and length != self._length:
            raise ConfigurationError(
                f"attention got {length} positions, but mesh.cp={self._parts} has cut the batch into parts of "
                f"{self._length}: a step must not add or drop positions, so shift targets in the dataset"
            )
        return length * self._parts

    def first(self, length: int) -> int:
        """The position in its sequence of this rank's first one, of `length`.

        Raises:
            ConfigurationError: see `whole`.
        """
        self.whole(length)
        return 0 if self._sharers is None else self._sharers.rank * length

    def attention(
        self,
        q_BHLC: Tensor,
        k_BGLC: Tensor,
        v_BGLC: Tensor,
        *,
        is_causal: bool = True,
        documents_BL: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Scaled dot-product attention over whole sequences; [B, H, L, C of values].

        Args:
            q_BHLC: queries of this rank's positions, which carry their place in the whole sequence already.
            k_BGLC, v_BGLC: keys and values; H is a multiple of their G heads.
            is_causal: a position sees none after it.
            documents_BL: integers; a position sees those of its own number only. None: one document.
            window: a position sees this many up to itself; needs `is_causal`. None: all.
            scale: of the products; None: 1 / sqrt(C).

        Raises:
            ConfigurationError: see `whole`.
        """
        length, first = self.whole(q_BHLC.shape[2]), self.first(q_BHLC.shape[2])
        sharers, swaps = self._sharers, k_BGLC.shape[1] % self._parts == 0
        if sharers is not None:
            if swaps:
                q_BHLC, k_BGLC, v_BGLC = sharers.swap([q_BHLC, k_BGLC, v_BGLC], 1, 2)
                first = 0
            else:
                k_BGLC, v_BGLC = sharers.gather([k_BGLC, v_BGLC], 2)
            if documents_BL is not None:
                (documents_BL,) = sharers.gather([documents_BL], 1)
        mask = None
        if documents_BL is not None or window is not None or (is_causal and q_BHLC.shape[2] != length):
            queries = slice(first, first + q_BHLC.shape[2])
            mask = _visible(queries, length, is_causal, documents_BL, window, q_BHLC.device)
        self.is_attending = True
        mixed = F.scaled_dot_product_attention(
            q_BHLC, k_BGLC, v_BGLC, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale,
            enable_gqa=q_BHLC.shape[1] != k_BGLC.shape[1],
        )  # fmt: skip
        self.is_attending = False
        return sharers.swap([mixed], 2, 1)[0] if sharers is not None and swaps else mixed


class OtherAttention(TorchFunctionMode):
    """Finds attention that does not ask the context, and so would see the positions of a part only: torch's own
    function, or a softmax over positions for each position.

    Raises:
        ConfigurationError: there is some.
    """

    def __init__(self, context: ContextParallel, length: int) -> None:
        super().__init__()
        self._context, self._length = context, length

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_softmax = getattr(func, "__name__", "") == "softmax" and args and isinstance(args[0], Tensor)
        is_attention = func is F.scaled_dot_product_attention or (is_softmax and self._is_square(args[0]))
        if is_attention and not self._context.is_attending:
            raise ConfigurationError(
                f"{getattr(func, '__name__', func)} mixes the {self._length} positions of a part only, where mesh.cp "
                "has cut sequences: call the attention of a moe_lightning.ContextParallel, which the module keeps as "
                "`context`, or set mesh.cp=1"
            )
        return func(*args, **(kwargs or {}))

    def _is_square(self, scores: Tensor) -> bool:
        return scores.ndim > 2 and tuple(scores.shape[-2:]) == (self._length, self._length)


def _visible(
    queries: slice, length: int, is_causal: bool, documents_BL: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """bool [1 or B, 1, queries, length]: what each query sees."""
    at = torch.arange(length, device=device)
    behind = at[queries, None] - at
    seen = torch.ones_like(behind, dtype=torch.bool)
    if is_causal:
        seen = behind >= 0
    if window is not None:
        seen = seen & (behind < window)
    seen = seen[None, None]
    if documents_BL is not None:
        seen = seen & (documents_BL[:, None, queries, None] == documents_BL[:, None, None, :])
    return seen


def attach_context(model: nn.Module, context: ContextParallel) -> None:
    """Let every module of the model that mixes positions read this context."""
    for module in model.modules():
        if isinstance(getattr(module, "context", None), ContextParallel):
            module.context = context  # type: ignore[assignment]
