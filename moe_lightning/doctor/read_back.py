"""A checkpoint that is written, and read back into a training whose state was overwritten in between."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from moe_lightning.compat import private_torch
from moe_lightning.doctor.recorder import blocks
from moe_lightning.files import machine_folder
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.parallel.context import World
from moe_lightning.state.tensors import local

_LOST = torch.nan
"""Stands in the place of every number until it is read."""


_CAUSES = {
    "the position": "a resume would train on samples again, or leave some out",
    "the schedule": "a resume would begin the schedule again",
    "the learning rate": "a resume would begin the schedule again",
    "the buffer": "a resume would route, or normalize, in another way",
}


class ReadBack:
    """Writes a checkpoint at the end of a training and reads it back; to be made when the training starts.

    Args:
        trainer: its schedules and positions are still those of a new training.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._schedules = [_numbers_of(config.scheduler) for config in _schedules(trainer)]

    def first_change(self, trainer: pl.Trainer, module: pl.LightningModule, world: World) -> str | None:
        """Return a sentence on the first rank's first number that does not come back; collective."""
        before = {key: value.clone() for key, value in _state(trainer, module)}
        with tempfile.TemporaryDirectory(dir=_folder(trainer)) as own:
            folder = all_gather_json(own, world)[0]
            path = Path(folder) / "doctor.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
            self._forget(trainer, module)
            _read(trainer, module, path)
            after = dict(_state(trainer, module))
            told = all_gather_json(next(_changes(before, after), None), world)  # all have read the file
        return next((each for each in told if each is not None), None)

    @torch.no_grad()
    def _forget(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave nothing of the training in the objects that a checkpoint is read into."""
        for tensor in _values(module):
            tensor.fill_(_LOST if tensor.is_floating_point() else 0)
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["lr"] = _LOST
        for config, state in zip(_schedules(trainer), self._schedules, strict=True):
            vars(config.scheduler).update(state)
        for sampler in _samplers(trainer):
            sampler.consumed = 0


def _values(module: nn.Module) -> Iterator[Tensor]:
    """Weights, frozen ones too, and buffers that checkpoints hold."""
    yield from (local(p) for p in module.parameters() if not p.is_meta)
    yield from (buffer for _, buffer in _buffers(module))


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that checkpoints hold, but for running statistics: each rank has its own, a checkpoint those of one."""
    own = {buffer for part in module.modules() if hasattr(part, "track_running_stats") for buffer in part.buffers()}
    saved = module.state_dict().keys()
    return (
        (name, buffer)
        for name, buffer in module.named_buffers()
        if name in saved and buffer not in own and buffer.is_floating_point() and not buffer.is_meta
    )


def _state(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """This rank's part of what a checkpoint holds, by what it is and its name, in the order of reports."""
    states = {p: state for optimizer in trainer.optimizers for p, state in optimizer.state.items()}
    of_blocks: list[tuple[tuple[str, str], Tensor]] = []
    for block in blocks(trainer, module, frozen=True):
        yield ("the weights", block.name), block.of(local(block.parameter))
        for key, value in states.get(block.parameter, {}).items():
            if isinstance(value, Tensor):
                is_whole = local(value).shape != local(block.parameter).shape
                of_blocks.append(((key, block.name), local(value) if is_whole else block.of(local(value))))
    for name, buffer in _buffers(module):
        yield ("the buffer", name), buffer
    yield from of_blocks
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            yield ("the learning rate", f"group {index} of optimizer {number}"), torch.as_tensor(group["lr"])
    for number, config in enumerate(_schedules(trainer)):
        for key, value in _numbers_of(config.scheduler).items():
            yield ("the schedule", f"{key} of scheduler {number}"), torch.as_tensor(value)
    for number, sampler in enumerate(_samplers(trainer)):
        yield ("the position", f"loader {number}"), torch.as_tensor(sampler.consumed)


def _changes(before: Mapping[tuple[str, str], Tensor], after: Mapping[tuple[str, str], Tensor]) -> Iterator[str]:
    """Sentences on what has not come back as it was."""
    for (what, name), value in before.items():
        found = after.get((what, name))
        if found is None or not torch.equal(value.nan_to_num(), found.nan_to_num()):
            yield _sentence(what, name, _size(value), None if found is None else _size(found))


def _sentence(what: str, name: str, before: float, after: float | None) -> str:
    """Return a sentence on a change.

    Args:
        what: "the weights", a moment's name, or one of `_CAUSES`.
        name: of the tensor, or of what has the number.
        before, after: norms, or the numbers themselves; after is None where nothing came back.
    """
    verb = "are" if what == "the weights" else "is"
    was = f"a checkpoint is not read back as it was: {what} of {name} {verb}"
    if after is None:
        return f"{was} not in it, and a resume would begin without"
    cause = _CAUSES.get(what, "a resume would update with other moments, or count its steps anew")
    if what == "the weights" and after == before:
        cause = "the same numbers in other places: another order of experts, or a transpose"
    elif what == "the weights":
        cause = "those of another expert, layer or rank, rounded, or never written"
    return f"{was} {after:.6g}, not {before:.6g}: {cause}"


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm()) if tensor.ndim else float(tensor)


def _read(trainer: pl.Trainer, module: pl.LightningModule, path: Path) -> None:
    """Read as a Trainer does that resumes, but for the progress of its loops."""
    strategy = trainer.strategy
    checkpoint = strategy.load_checkpoint(path, weights_only=False)
    module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=bool(module.strict_loading))
    strategy.load_optimizer_state_dict(checkpoint)
    for config, state in zip(_schedules(trainer), checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)


def _schedules(trainer: pl.Trainer) -> list[Any]:
    return list(trainer.strategy.lr_scheduler_configs)


def _numbers_of(scheduler: Any) -> dict[str, Any]:
    return {key: value for key, value in scheduler.state_dict().items() if isinstance(value, int | float)}


def _samplers(trainer: pl.Trainer) -> list[Any]:
    """The samplers of loaders with a position of their own."""
    loaders = private_torch.tree_leaves(getattr(trainer.train_dataloader, "iterables", trainer.train_dataloader))
    return [loader.step_sampler for loader in loaders if hasattr(loader, "step_sampler")]


def _folder(trainer: pl.Trainer) -> str:
    """Return a folder that all ranks of a machine reach."""
    folder = machine_folder(trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
