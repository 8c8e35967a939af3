"""Cuts the sequences of every batch over the ranks that share its samples (mesh.cp), and makes predictions whole."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from moe_lightning import seams
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.sequence import ContextParallel, OtherAttention, Sharers, attach_context
from moe_lightning.strategies.worlds import Worlds

_MIXERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase, nn.Conv1d)
"""torch's own modules that mix positions and know nothing of parts."""


class SequenceParts:
    """Which part of each sequence is this rank's.

    Args:
        worlds: whose ranks share samples.
    """

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._context = ContextParallel()
        self._sharers: Sharers | None = None
        self._length: int | None = None  # of this rank's parts of the last batch
        self._batches = 0

    @property
    def parts(self) -> int:
        """Ranks that share a sample."""
        return self._worlds.mesh.shape.cp

    def attach(self, module: pl.LightningModule) -> None:
        """Let a module's attention know of parts.

        Raises:
            ConfigurationError: it has a part that mixes positions and would not.
        """
        if self._worlds.axes.cp > 1:
            _require_context(module, self._worlds.axes.cp)
        attach_context(module, self._context)
        self.enter_world()

    def enter_world(self) -> None:
        """Take this rank's part in the present world."""
        self._sharers = Sharers.of(self._worlds.present)
        self._batches, self._length = 0, None
        self._watched: set[bool] = set()
        self.leave()

    def enter(self) -> None:
        """A step begins: its sequences are parts."""
        self._context.enter(self._sharers, self._length)

    @contextmanager
    def watched(self, *, training: bool) -> Generator[None, None, None]:
        """Around a module's step: its first one in a world shall have no attention that knows nothing of parts.

        Raises:
            ConfigurationError: it has.
        """
        if self._sharers is None or self._length is None or training in self._watched:
            yield
            return
        with OtherAttention(self._context, self._length):
            yield
        self._watched.add(training)

    def leave_world(self) -> None:
        """Let go of its groups."""
        self._sharers = None
        self.leave()

    def leave(self) -> None:
        """Outside of steps sequences are whole."""
        self._context.enter(None, None)

    def cut(self, batch: Any) -> Any:
        """This rank's part of every tensor [B, L, ...] of a batch; tensors [B] stay.

        Raises:
            ConfigurationError: tensors that do not all have L positions, or an L that the ranks do not divide; ranks
                that share samples have unlike ones.
        """
        if self._sharers is None:
            return batch
        leaves = [leaf for leaf in seams.tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._batches += 1
        is_looked_at = self._batches & (self._batches - 1) == 0  # the first ones, and then more and more rarely
        if is_looked_at and self._sharers.differ(_digest(leaves)):
            raise ConfigurationError(
                f"the {self.parts} ranks that share samples under mesh.cp={self.parts} have loaded unlike batches: let "
                "a sample follow from its index alone, not from a random generator of the process"
            )
        sequences = [leaf for leaf in leaves if leaf.ndim > 1]
        lengths = {leaf.shape[1] for leaf in sequences}
        if len(lengths) != 1:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ConfigurationError(
                f"mesh.cp={self.parts} cuts the second dimension of a batch's tensors, which must be the positions of "
                f"all, but the batch has tensors of {shapes}: give tensors [B, L, ...] of one L, or [B]"
            )
        (length,) = lengths
        if length % self.parts:
            raise ConfigurationError(
                f"sequences of {length} positions cannot be cut into mesh.cp={self.parts} equal parts: pad or cut them "
                f"to a multiple of {self.parts}, with targets of -100 where they are padded"
            )
        self._length = length // self.parts
        part = slice(self._sharers.rank * self._length, (self._sharers.rank + 1) * self._length)
        return seams.tree_map(lambda leaf: leaf[:, part] if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf, batch)

    def require_targets(self, batch: Any) -> None:
        """
        Raises:
            ConfigurationError: sequences without targets beside them: made in the step, those at the borders of parts
                would be lacking.
        """
        if self.parts == 1 or sum(isinstance(leaf, Tensor) for leaf in seams.tree_leaves(batch)) > 1:
            return
        raise ConfigurationError(
            f"mesh.cp={self.parts} cuts sequences before the step sees them, which so cannot shift inputs to make "
            "targets: let the dataset give (inputs, targets)"
        )

    @torch.no_grad()
    def whole(self, prediction: Any) -> Any:
        """A prediction of whole sequences on the first of the ranks that share them, and of no rows on the others."""
        sharers = self._sharers
        if sharers is None:
            return prediction

        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            if leaf.ndim > 1 and leaf.shape[1] == self._length:
                (leaf,) = sharers.gather([leaf], 1)
            return leaf if sharers.rank == 0 else leaf[:0]

        return seams.tree_map(gathered, prediction)


def _digest(leaves: list[Tensor]) -> list[object]:
    """Short, and unlike for unlike tensors."""
    return [
        [list(leaf.shape), zlib.crc32(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())]
        for leaf in leaves
    ]


def _require_context(module: pl.LightningModule, parts: int) -> None:
    holders = {name: m for name, m in module.named_modules() if isinstance(_context_of(m), ContextParallel)}
    kind = type(module).__name__
    knowing = [name for name, holder in holders.items() if _mixes(holder)]
    for name, part in module.named_modules():
        is_known = any(holder == name or holder.startswith(f"{name}.") for holder in holders)
        if not _mixes(part) or is_known or any(name.startswith(f"{outer}.") for outer in knowing):
            continue
        raise ConfigurationError(
            f"mesh.cp={parts} cuts sequences, and {name or kind} ({type(part).__name__}) of {kind} would mix the "
            "positions of a part only: let it keep a moe_lightning.ContextParallel() as `context` and call "
            "context.attention, or set mesh.cp=1"
        )
    if not holders:
        raise ConfigurationError(
            f"mesh.cp={parts} cuts sequences, and no part of {kind} knows of it: let its attention keep "
            "a moe_lightning.ContextParallel() as `context` and call context.attention, or set mesh.cp=1"
        )


def _context_of(module: nn.Module) -> object:
    return module.__dict__.get("context")


def _mixes(module: nn.Module) -> bool:
    """Whether a module mixes positions, as far as its name tells."""
    return isinstance(module, _MIXERS) or type(module).__name__.endswith(("Attention", "Attn", "Mamba", "Mixer"))
