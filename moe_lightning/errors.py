"""Errors caused by a user's input or a lost peer; every other exception is a defect of this package."""

from __future__ import annotations


class UserError(Exception):
    """An error whose message is one sentence for the user; nothing of ours raises it itself."""


class ConfigurationError(UserError, ValueError):
    """A value given by the user cannot work: the message names the value, the limit and the cure in one sentence."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is missing, damaged or of another shape: the message names the file, what is wrong and the cure."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is not a checkpoint at a path; stock Lightning raises FileNotFoundError there."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint is damaged, cut off or written by something else: the message has no cure, which those who quote it
    add, and `user_errors.sentence_of`."""


class ForeignMessageError(UserError, RuntimeError):
    """Message from another process that this package did not write, or that is damaged: nothing of it is used."""


class StateDamagedError(UserError, RuntimeError):
    """State in memory is damaged and no rank has it intact: the message names the tensor and its ranks.

    Attributes:
        reason: the message without the cure.
        is_here: this rank's values may be damaged.
        last_good: last step of whose snapshots no damage is known.
    """

    def __init__(self, message: str, *, reason: str = "", is_here: bool = True, last_good: int = -1) -> None:
        super().__init__(message)
        self.reason, self.is_here, self.last_good = reason or message, is_here, last_good


class NonFiniteLossError(UserError, RuntimeError):
    """A loss is no finite number, and the run was asked to end then: the message names rank, step and samples."""


class LossSpikeError(UserError, RuntimeError):
    """The loss spikes although training went back to an earlier state: the message names step, loss and limit."""


class ParityError(UserError, RuntimeError):
    """A run on several ranks is not that of one process: the message names step, tensor, values and likely cause."""


class WorldAbortedError(ConnectionError):
    """The present world was aborted while its ranks communicated: what arrived is not used."""
