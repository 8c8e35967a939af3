"""`moe-ckpt export-hf` and `export-gguf`: checkpoint of a HuggingFaceModule to a folder that plain transformers loads,
or to a file that llama.cpp loads.

The checkpoint is a file or a directory. One process writes one layer's experts at a time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_lightning.checkpoint.inspect import chat_template, end_of_text, trained_tokenizer
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.cli.resume import config_of
from moe_lightning.cli.run_metrics import metrics_files, read_metrics
from moe_lightning.cli.saved_model import (
    SavedModel,
    open_saved,
    other_tokenizer,
    precision_of,
    require_known,
    trained_config,
)
from moe_lightning.config import build_config, shown
from moe_lightning.data.text import shown_sources, sources_of
from moe_lightning.data.tokenizer import load_tokenizer
from moe_lightning.errors import ConfigurationError
from moe_lightning.hub import CONFIG, TOKENIZER, TOKENIZERS, hub_name, local_folder, local_tokenizer
from moe_lightning.state.tensors import BASE_DIGEST, digest_of, require_same_base

if TYPE_CHECKING:
    from moe_lightning.models.huggingface.architecture import Architecture
    from moe_lightning.models.huggingface.card import TrainingFacts


def export_checkpoint(path: Place, target: Path, *, dtype: str | None = None, adapter_alone: bool = False) -> int:
    """Write the model of a checkpoint for plain transformers; returns the bytes of its tensors.

    Experts that a partial checkpoint left behind come as they were saved last. Adapters are added to the weights of the
    checkpoint that training began with. Tokenizer and model card are written beside them. The folder gets its name when
    all is in it.

    Args:
        path: a Lightning checkpoint file, a checkpoint directory, or a directory of these: its newest.
        target: a folder that does not exist.
        dtype: of the tensors; None: that of the checkpoint that training began with.
        adapter_alone: write the adapters only, as peft loads them.

    Raises:
        ConfigurationError: it is of another module, without adapters that are asked for or without their model,
            transformers has no class for the model, or the folder exists.
        CheckpointError: it is missing or damaged.
    """
    from moe_lightning.models.huggingface.card import write_card
    from moe_lightning.models.huggingface.export import existing, new_folder, require_adapters, write_adapter

    if target.exists():
        raise existing(target)
    trained = _Trained(path, dtype)
    config, export, facts = trained.config, trained.export, _facts(trained.source)
    if adapter_alone:
        require_adapters(config.adapter)
        _require_original(config.pretrained)
    with new_folder(target) as staged:
        if adapter_alone:
            assert config.adapter is not None  # `require_adapters`
            written = write_adapter(staged, export, config.adapter, config.pretrained, *trained.adapters())
        else:
            written = export.write(staged, *trained.weights())
        trained.copy_companions(staged)
        has_tokenizer = any((staged / name).is_file() for name in TOKENIZERS)
        write_card(staged, config, trained.optimizer, facts, is_adapter=adapter_alone)
    for remark in _remarks(trained, target, adapter_alone=adapter_alone, has_tokenizer=has_tokenizer):
        print(f"moe-ckpt: {remark}", file=sys.stderr)
    return written


def _remarks(trained: _Trained, target: Path, *, adapter_alone: bool, has_tokenizer: bool) -> Iterator[str]:
    """Sentences on what an exported folder lacks, or computes otherwise than the run."""
    config, export = trained.config, trained.export
    if export.drafting and not adapter_alone:
        said = ", ".join(f"{name}=0 in the place of {count}" for name, count in export.drafting.items())
        yield (
            f"{target} has no layers for multi-token prediction, which are not trained: its config.json says {said}, "
            "so let an engine draft no tokens with it"
        )
    changed = [f"{name}={shown(value)}" for name, value in config.overrides.items() if "drop" not in name]
    if changed and adapter_alone:  # all but dropout changes what the model computes
        yield (
            f"{config.pretrained} was trained with model.overrides of {', '.join(changed)}, which adapters cannot "
            "hold: set them in its config.json, or export without --adapter"
        )
    if adapter_alone and config.adapter is not None and config.adapter.kind == "qlora":
        yield (
            f"the adapters of {target} were trained beside experts rounded to four bits (model.adapter.kind=qlora), "
            f"and peft adds them to those of {config.pretrained}, which is another model: export without --adapter for "
            "the one that was trained"
        )
    if hasattr(export.config, "vocab_size") and not has_tokenizer:
        yield f"{target} has no tokenizer, since {config.pretrained} has none here: copy its files into the export"


def _require_original(pretrained: str) -> None:
    """Refuse adapters alone of a model that is neither on the Hub nor here, to which nothing could add them.

    Raises:
        ConfigurationError: it is not here.
    """
    if hub_name(pretrained) is None and not (local_folder(pretrained) / CONFIG).is_file():
        raise ConfigurationError(
            f"{pretrained} is not here, and --adapter writes adapters that name it as their model: put that folder back"
        )


def export_gguf(path: Place, target: Path, *, dtype: str | None = None) -> int:
    """Write the model of a checkpoint, with its tokenizer, for llama.cpp; returns the bytes of the file.

    Args:
        path, dtype: see `export_checkpoint`; adapters are added to the weights.
        target: a file that does not exist.

    Raises:
        ConfigurationError: it is of another module, llama.cpp does not know its family, an option of it or its
            tokenizer, the package gguf is missing, or the file exists.
        CheckpointError: it is missing or damaged.
    """
    try:
        from moe_lightning.models.huggingface.gguf_file import check_gguf, write_gguf
    except ImportError as error:
        raise ConfigurationError(f"GGUF needs the package gguf ({error}): pip install 'moe-lightning[gguf]'") from error
    if target.exists():
        raise ConfigurationError(f"{target} exists already: name another file")
    trained = _Trained(path, dtype)
    check_gguf(trained.export)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        trained.copy_companions(folder)
        if not (folder / TOKENIZER).is_file():
            raise ConfigurationError(
                f"{trained.config.pretrained} has no tokenizer.json, which a GGUF file needs: put it there"
            )
        trained.export.write_config(folder)
        return write_gguf(target, trained.export, *trained.weights(), folder)


class _Trained:
    """A checkpoint of a HuggingFaceModule, whose tensors are read when they are asked for.

    Args:
        path, dtype: see `export_checkpoint`.
    """

    def __init__(self, path: Place, dtype: str | None) -> None:
        from moe_lightning.models.gpt_module import OptimizerConfig
        from moe_lightning.models.huggingface.export import plan_export
        from moe_lightning.models.huggingface.loading import build_skeleton
        from moe_lightning.models.huggingface.module import HuggingFaceConfig
        from moe_lightning.moe.adapters import adapt_dense

        self.source = open_saved(path)
        values = self.source.values.get("hyper_parameters", {})
        if "huggingface" not in values:
            raise ConfigurationError(
                f"{path} is not a checkpoint of a HuggingFaceModule, and transformers has no class for others: write "
                "the weights alone with moe-ckpt export CKPT model.safetensors"
            )
        self.config = build_config(HuggingFaceConfig, trained_config(values))
        self.optimizer = build_config(OptimizerConfig, values["optimizer"])
        self.architecture = self.config.architecture(values["huggingface"])
        self.skeleton = build_skeleton(self.architecture, self.config.adapter)
        if self.config.adapter is not None:
            adapt_dense(self.skeleton, self.config.adapter)
        layers = [f"{block}.moe" for block in self.architecture.layers]
        self.names = self.source.names(layers)
        require_known(self.names, self.skeleton.state_dict(), self.source.path)
        self.export = plan_export(self.architecture, self.skeleton, dtype)

    def copy_companions(self, target: Path) -> None:
        """Give a folder the tokenizer, with what belongs to it, of the run or of the model that it began with."""
        from moe_lightning.models.huggingface.export import copy_companions

        values = self.source.values
        copy_companions(
            local_folder(self.config.pretrained),
            target,
            self.export,
            named=self._named_tokenizer(),
            tokenizer=trained_tokenizer(values),
            chat_template=chat_template(values),
            end_of_text=end_of_text(values),
        )

    def _named_tokenizer(self) -> Path | None:
        """Return the tokenizer.json that the data of the run named, where it is not that of the model.

        Raises:
            ConfigurationError: it is no tokenizer.json: a checkpoint of others may name any file of this machine.
        """
        named = other_tokenizer(self.source.values)
        if named is None:
            return None
        file = local_tokenizer(named)
        if not file.is_file():
            cure = "put it back" if hub_name(named) is None else "download it"
            print(
                f"moe-ckpt: {named}, the tokenizer of the run, is not here, so the export has that of "
                f"{self.config.pretrained}: {cure} and export again",
                file=sys.stderr,
            )
            return None
        load_tokenizer(str(file))
        return file

    def adapters(self) -> tuple[Mapping[str, Tensor], Iterator[dict[str, Tensor]]]:
        """Return the adapters alone: those outside of experts by their names in the model, and the stacks of one block
        after the other; the folder of the weights beside them is not read.

        Raises:
            ConfigurationError: the weights beside them are others than at the beginning.
        """
        from moe_lightning.moe.adapters import dense_base

        base, named = {*dense_base(self.skeleton)}, list(self.skeleton.named_parameters())
        held = [name for name, parameter in named if parameter in base and name in self.names]
        changed = held and digest_of(map(self.source.dense, held)) != self.source.dense(BASE_DIGEST).item()
        if changed or not self._has_first_experts():
            raise ConfigurationError(
                f"{self.source.path} has trained other weights too, which adapters alone cannot hold: export without "
                "--adapter"
            )
        return self._dense_adapters(), _stacks(self.source, self.architecture, "lora_")

    def _has_first_experts(self) -> bool:
        """True if the experts beside the adapters are those of the beginning; directories have no others."""
        for index, (block, layer) in enumerate(self.architecture.layers.items()):
            base = [name for name in sorted(layer.experts.base_names) if f"{block}.moe.experts.{name}" in self.names]
            stacks = [self.source.experts(index, f"{block}.moe", name, layer.num_experts) for name in base]
            digests = self.source.experts(index, f"{block}.moe", BASE_DIGEST, layer.num_experts)
            if stacks and any(digest_of(rows) != digest.item() for *rows, digest in zip(*stacks, digests, strict=True)):
                return False
        return True

    def weights(self) -> tuple[Mapping[str, Tensor], Iterator[dict[str, Tensor]]]:
        """Return the tensors outside of experts by their names in the model, and the stacks of one block after the
        other. Adapters are added to what the checkpoint has, and to the folder's weights where it has none.

        Raises:
            CheckpointError: the folder holds other weights than those that the adapters were trained beside.
        """
        from moe_lightning.models.huggingface.export import merged_dense
        from moe_lightning.models.huggingface.loading import load_model
        from moe_lightning.moe.experts import deferred_experts

        if self.config.adapter is None:
            dense = {name: self.source.dense(name) for name in self.export.dense}
            return dense, _stacks(self.source, self.architecture)
        with precision_of(self.source), deferred_experts():
            here = load_model(self.architecture, self.config.weights(), self.config.adapter).state_dict()
        saved, folder = self.source.dense(BASE_DIGEST), self.config.pretrained
        require_same_base(saved, here[BASE_DIGEST], BASE_DIGEST, folder)
        held = {name: self.source.dense(name) for name in self.export.dense if name in self.names}
        return merged_dense(here | held | self._dense_adapters(), self.config.adapter), self._merged_experts()

    def _dense_adapters(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.skeleton.named_parameters() if ".adapter.lora_" in name]
        return {name: self.source.dense(name) for name in names}

    def _merged_experts(self) -> Iterator[dict[str, Tensor]]:
        from moe_lightning.models.huggingface.export import merged_experts
        from moe_lightning.moe.adapters import is_adapter

        assert self.config.adapter is not None
        for index, (block, layer) in enumerate(self.architecture.layers.items()):
            experts, prefix = layer.experts, f"{block}.moe.experts."
            experts.place(range(layer.num_experts), torch.device("cpu"))
            here = {name: stack.detach() for name, stack in experts.stacked_parameters().items()}
            names = [name for name in here if is_adapter(name) or f"{prefix}{name}" in self.names]
            saved = {name: self.source.experts(index, f"{block}.moe", name, layer.num_experts) for name in names}
            require_same_base(saved[BASE_DIGEST], here[BASE_DIGEST], f"MoE layer {index}", self.config.pretrained)
            yield merged_experts(here | saved, experts.shapes, self.config.adapter)
            experts.to_empty(device="meta")  # one layer at a time


def _stacks(source: SavedModel, architecture: Architecture, prefix: str = "") -> Iterator[dict[str, Tensor]]:
    """The stacks [E, ...] of one block after the other, those whose names begin so."""
    for index, (block, layer) in enumerate(architecture.layers.items()):
        names = [name for name in layer.experts.stacked_parameters() if name.startswith(prefix)]
        yield {name: source.experts(index, f"{block}.moe", name, layer.num_experts) for name in names}


def _facts(source: SavedModel) -> TrainingFacts:
    """Return facts of the training from the run of a checkpoint; the steps alone if it was copied away from it."""
    from moe_lightning.models.huggingface.card import TrainingFacts

    steps = int(source.values["global_step"])
    data = (config_of(str(source.path)) or {}).get("data")
    if not isinstance(data, Mapping):
        return TrainingFacts(steps=steps)
    batch_size, length = data.get("global_batch_size"), data.get("context_length")
    logged = read_metrics(metrics_files(Path(str(source.path)).absolute().parents[1]))
    before = {name: [value for step, value in values.items() if step <= steps] for name, values in logged.items()}
    return TrainingFacts(
        steps=steps,
        source=shown_sources(sources_of(data["source"], "text")) if data.get("source") else str(data.get("path") or ""),
        global_batch_size=batch_size if isinstance(batch_size, int) else None,
        context_length=length if isinstance(length, int) else None,
        metrics={name: values[-1] for name, values in before.items() if values},
    )
