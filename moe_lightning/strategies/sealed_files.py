"""Lightning's single-file checkpoints, written durably under a seal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from moe_lightning.checkpoint.files import write_file
from moe_lightning.errors import CheckpointError


class SealedFiles(TorchCheckpointIO):
    """Files on this machine's file systems are on disk and sealed when a save returns, so that Lightning deletes older
    ones only then; other places (`s3://...`) are written as stock Lightning does.

    Raises:
        CheckpointError: the storage failed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            write_file(checkpoint, Path(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror or error}): files that were there are as they were; make "
                "room or choose another place, and go on from the newest"
            ) from error


def sealed(io: CheckpointIO) -> CheckpointIO:
    """The same, with stock Lightning's way of writing files, its own or in what wraps it, replaced by this one."""
    if type(io) is TorchCheckpointIO:
        return SealedFiles()
    if type(getattr(io, "checkpoint_io", None)) is TorchCheckpointIO:  # as AsyncCheckpointIO has one
        io.checkpoint_io = SealedFiles()  # type: ignore[attr-defined]
    return io


def reads_its_own_way(io: CheckpointIO) -> bool:
    """True if it is the user's, and what it writes may be no file of Lightning's: encrypted, say."""
    while isinstance(inner := getattr(io, "checkpoint_io", None), CheckpointIO):
        io = inner
    return type(io).load_checkpoint is not TorchCheckpointIO.load_checkpoint
