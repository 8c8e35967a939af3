"""First-fit packing of several documents into one sample.

Packs are made once, in an order that the seed decides, and are then samples like others: the step sampler permutes
them anew every epoch and cuts its steps over ranks, and one integer resumes it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning.arrays import IntArray
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.losses import IGNORED_TARGET


def first_fit(lengths: IntArray, capacity: int) -> IntArray:
    """The pack of each document, taken one by one: the first pack that has room, or a new one (Johnson 1974).

    The packs are the leaves of a tree in which every node knows the most room below it.

    Args:
        lengths: int64 [N], tokens of each document, between 1 and `capacity`.
        capacity: tokens of a pack.

    Returns:
        int64 [N], packs counted from 0; none is empty.
    """
    assert ((lengths >= 1) & (lengths <= capacity)).all()
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    packs = np.empty(len(lengths), dtype=np.int64)
    for document, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        packs[document] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return packs


class Packed(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Pack i as inputs [L] and targets [L], int64, is_token [L], bool, and begins [L], int64: the position at which the
    document of each input begins. Models restart positions there, and look at no other document.

    What is left of a pack is padding: targets of -100, is_token False, and a document of its own.

    Args:
        documents: map-style; an item is (inputs, targets, ...), of which the first `lengths[i]` positions are taken.
        lengths: int64 [N], tokens of each document.
        context_length: L.
        seed: of the order in which documents are packed; None: their own.

    Raises:
        ConfigurationError: there are no documents, or one has no token or more than L.
    """

    def __init__(
        self,
        documents: Dataset[tuple[Tensor, ...]],
        lengths: IntArray,
        context_length: int,
        *,
        seed: int | None = None,
    ) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        wrong = lengths[(lengths < 1) | (lengths > context_length)]
        if len(wrong) or not len(lengths):
            found = f"one of {wrong[0]} tokens" if len(wrong) else "none"
            raise ConfigurationError(
                f"packing needs documents of 1 to context_length={context_length} tokens, and there is {found}: cut "
                "them, or leave them out"
            )
        self.documents = documents
        self.data_key = getattr(documents, "data_key", None)
        self.lengths = lengths
        self.context_length = context_length
        order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
        packs = first_fit(lengths[order], context_length)
        self._members = order[np.argsort(packs, kind="stable")]
        self._bounds = np.concatenate([[0], np.bincount(packs).cumsum()])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def members(self, index: int) -> list[int]:
        """The documents of a pack, in order."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        members: list[int] = self._members[self._bounds[index] : self._bounds[index + 1]].tolist()
        return members

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = torch.zeros(self.context_length, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED_TARGET)
        begins = torch.zeros_like(inputs)
        end = 0
        for member in self.members(index):
            x, y = self.documents[member][:2]
            length = int(self.lengths[member])
            if min(len(x), len(y)) < length:
                raise ConfigurationError(
                    f"document {member} has {len(x)} inputs and {len(y)} targets, fewer than the {length} that its "
                    "length says: count it again"
                )
            begin, end = end, end + length
            inputs[begin:end], targets[begin:end] = x[:length], y[:length]
            begins[begin:end] = begin
        begins[end:] = end
        return inputs, targets, torch.arange(self.context_length) < end, begins

    def require_step(self, global_batch_size: int) -> None:
        """
        Raises:
            ConfigurationError: fewer packs than the samples of a step.
        """
        if len(self) < global_batch_size:
            raise ConfigurationError(
                f"packing makes {len(self)} samples of context_length={self.context_length} tokens, fewer than "
                f"global_batch_size={global_batch_size}: lower either, or give more text"
            )

    def summary(self, what: str) -> str:
        """One line.

        Args:
            what: documents are called.
        """
        tokens = int(self.lengths.sum())
        full = 100 * tokens / (len(self) * self.context_length)
        return (
            f"packing: {len(self.lengths):,} {what} in {len(self):,} samples of {self.context_length:,} tokens, "
            f"{full:.1f} % full"
        )
