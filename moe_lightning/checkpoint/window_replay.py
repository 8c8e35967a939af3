"""The steps of a window that a restore runs again, until the state of every expert is whole.

Training itself runs them, from the same samples; after each update this puts experts whose turn is yet to come back to
the weights of the step, and gives those whose turn it is their whole state. What the update made of them is discarded;
their gradients count in the norm, as they did. Source: MoEvement (arXiv 2412.15411) 3.
"""

from __future__ import annotations

import torch

from moe_lightning.checkpoint.memory_checkpoint import MemoryCheckpoint
from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.errors import ConfigurationError
from moe_lightning.state.pieces import is_moment


def replay_of(restored: CheckpointSource, max_steps: int) -> WindowReplay | None:
    """The replay that makes restored state whole; None where it is, and what was read is let go of.

    Args:
        max_steps: of the training; -1: no limit.

    Raises:
        ConfigurationError: training ends before the state is whole.
    """
    if restored.first_step == restored.step:
        restored.release()
        return None
    if 0 <= max_steps < restored.step:
        raise ConfigurationError(
            f"max_steps={max_steps} ends before the state of {restored.path.name} is whole, whose steps "
            f"{restored.first_step + 1} to {restored.step} are run again: raise max_steps to {restored.step}"
        )
    return WindowReplay(restored)


class WindowReplay:
    """A replay that has begun: the state is that after the window's first step.

    Args:
        source: what was restored; it must be readable until the end.

    Attributes:
        first, last: steps of the window; after the last one everything is whole.
        step: updates that the state contains.
        reaches_all: experts may move meanwhile: wherever they are, what they lack can be read.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._versions = source.expert_versions()
        self.first = self.step = source.first_step
        self.last = source.step
        self.reaches_all = not isinstance(source, MemoryCheckpoint)

    @property
    def is_over(self) -> bool:
        """Whether the state is whole again."""
        return self.step >= self.last

    @torch.no_grad()
    def advance(self, state: TrainingState) -> None:
        """After an update, before anything sees the weights: set what it could not compute."""
        self.step += 1
        for layer, stack in enumerate(state.stacks):
            for slot, expert in stack.held():
                turn = int(self._versions[layer, expert])
                for piece in state.rows(layer, slot, expert) if turn >= self.step else ():
                    if turn == self.step:
                        self._source.read_into(piece.key, piece.tensor)
                    elif not is_moment(piece.key):
                        self._source.read_into(self._source.key_at(piece.key, self.step), piece.tensor)
