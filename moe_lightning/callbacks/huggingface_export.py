"""Exports a trained Hugging Face model for plain transformers, layer by layer: no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from moe_lightning.checkpoint.full_state import full_model_state
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.hub import local_folder
from moe_lightning.models.huggingface.card import TrainingFacts, write_card
from moe_lightning.models.huggingface.export import (
    Export,
    check_target,
    copy_companions,
    merged_dense,
    merged_experts,
    plan_export,
    require_adapters,
    write_adapter,
)
from moe_lightning.models.huggingface.module import HuggingFaceModule
from moe_lightning.moe.experts import Experts
from moe_lightning.state.tensors import cuts_of
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.placed_experts import stages_of

Form = Literal["merged", "adapter"]


@validated
class HuggingFaceExport(pl.Callback):
    """Writes the model at the end of training into a folder that transformers' from_pretrained loads.

    Args:
        dirpath: of the folder; it must not exist, unless this run (the same `default_root_dir`) exported it before.
        dtype: of its tensors; None: that of the checkpoint the model came from.
        form: of a model with adapters: "merged" into its weights, or the "adapter" alone, which peft loads.

    Raises:
        ConfigurationError: at the start of training: the folder holds something else or cannot be written,
            transformers has no class for the model, or a pipeline leaves ranks a part of it.
    """

    def __init__(self, dirpath: str | Path, dtype: str | None = None, form: Form = "merged") -> None:
        self._path = Path(dirpath)
        self._dtype, self._form = dtype, form

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _checked(pl_module)
        _check_form(module, self._form)
        _require_whole(trainer)
        plan_export(module.architecture, module.model, self._dtype)
        _check(trainer, self._path)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        export_to_huggingface(trainer, self._path, dtype=self._dtype, form=self._form)


def export_to_huggingface(
    trainer: pl.Trainer, path: str | Path, *, dtype: str | None = None, form: Form = "merged"
) -> None:
    """Write the trainer's HuggingFaceModule as a checkpoint that plain transformers loads; collective.

    Rank 0 writes: the dense weights, which it has, then the experts of one layer after the other, which it collects
    from their lowest holders. The tokenizer and other small files of the checkpoint it came from are taken over, and a
    model card is written.

    Args:
        trainer: with a model, under ExpertParallelStrategy or any strategy of one rank.
        path: of a folder that does not exist, or that the same run exported; that one is replaced.
        dtype: of the tensors; None: that of the checkpoint the model came from.
        form: of a model with adapters, see HuggingFaceExport.

    Raises:
        ConfigurationError: another module or strategy, a folder that holds something else or cannot be written, or a
            model that transformers has no class for.
    """
    module, path = _checked(trainer.lightning_module), Path(path)
    _check_form(module, form)
    if not isinstance(trainer.strategy, ExpertParallelStrategy) and trainer.world_size > 1:
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} on {trainer.world_size} ranks cannot be exported: "
            "use ExpertParallelStrategy"
        )
    _require_whole(trainer)
    export = plan_export(module.architecture, module.model, dtype)
    _check(trainer, path)
    dense, stacks = module.model.state_dict(), _stacks(trainer, module, export)
    if isinstance(trainer.strategy, ExpertParallelStrategy):
        dense = full_model_state(dense, {}, trainer.strategy.world, cuts=cuts_of(module.model))
    adapter, data = module.config.adapter, getattr(trainer, "datamodule", None)
    if trainer.is_global_zero and adapter is not None and form == "adapter":
        write_adapter(path, export, adapter, module.config.pretrained, dense, stacks, run=_run(trainer))
    elif trainer.is_global_zero:
        if adapter is not None:
            dense, shapes = merged_dense(dense, adapter), [_experts(module, b).shapes for b in export.blocks]
            stacks = (merged_experts(s, shape, adapter) for s, shape in zip(stacks, shapes, strict=True))
        export.write(path, dense, stacks, run=_run(trainer))
    else:
        for _ in stacks:  # gives rank 0 what it asks for
            continue
    if trainer.is_global_zero:
        names = {"tokenizer": "trained_tokenizer", "chat_template": "chat_template", "end_of_text": "end_of_text"}
        own = {key: getattr(data, name, None) for key, name in names.items()}
        copy_companions(local_folder(module.config.pretrained), path, export.config, **own)
        facts = TrainingFacts(
            steps=trainer.global_step,
            source=str(getattr(data, "source", "")),
            global_batch_size=getattr(data, "global_batch_size", None),
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        )
        write_card(path, module.config, module.optimizer_config, facts, is_adapter=form == "adapter")
    trainer.strategy.barrier("export_to_huggingface")


def _stacks(trainer: pl.Trainer, module: HuggingFaceModule, export: Export) -> Iterator[dict[str, Tensor]]:
    """The full stacks of one block after the other, on rank 0; empty on the others."""
    strategy = trainer.strategy
    for block in export.blocks:
        parameters = _experts(module, block).stacked_parameters()
        local = {name: parameter.detach() for name, parameter in parameters.items()}
        if not isinstance(strategy, ExpertParallelStrategy):
            yield local
            continue
        rows = {name: strategy.experts.stack_of[parameter] for name, parameter in parameters.items()}
        yield full_model_state(local, rows, strategy.world)


def _experts(module: HuggingFaceModule, block: str) -> Experts:
    return module.architecture.layers[block].experts


def _check_form(module: HuggingFaceModule, form: Form) -> None:
    if form == "adapter":
        require_adapters(module.config.adapter)


def _require_whole(trainer: pl.Trainer) -> None:
    if stages_of(trainer).num_stages > 1:
        raise ConfigurationError(
            "mesh.pp leaves every rank some blocks of the model only, which HuggingFaceExport cannot write: leave it "
            "out (callbacks.huggingface_export=null), and export the checkpoint of this run with moe-ckpt export-hf"
        )


def _check(trainer: pl.Trainer, path: Path) -> None:
    """As rank 0 sees the folder, on every rank, so that none waits for one that has given up."""
    sentence = None
    if trainer.is_global_zero:
        try:
            check_target(path, _run(trainer))
        except ConfigurationError as error:
            sentence = str(error)
    sentence = trainer.strategy.broadcast(sentence)
    if sentence is not None:
        raise ConfigurationError(sentence)


def _run(trainer: pl.Trainer) -> str:
    return str(Path(trainer.default_root_dir).resolve())


def _checked(module: pl.LightningModule) -> HuggingFaceModule:
    if not isinstance(module, HuggingFaceModule):
        raise ConfigurationError(
            f"{type(module).__name__} has no counterpart in transformers: only a HuggingFaceModule can be exported"
        )
    return module
