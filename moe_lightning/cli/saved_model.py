"""Models of checkpoints, without a training: every tensor is read by its name, verified and without unpickling code.

A checkpoint is a file, as stock Lightning writes it, or a directory. Experts that a partial checkpoint left behind come
as they were saved last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_lightning.checkpoint.directory import directories, has_manifest
from moe_lightning.checkpoint.files import read_file
from moe_lightning.checkpoint.inspect import newest_files, resolve, tokenizer_origin
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.storage import storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.checkpoint.training_state import SCOPES_OF_A_MODEL
from moe_lightning.config import build_config
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.hub import TOKENIZER, local_folder
from moe_lightning.moe.adapters import is_adapter
from moe_lightning.state.pieces import DTYPES, is_expert_key, is_moment, parse_dense_key, parse_expert_key
from moe_lightning.state.tensors import BASE_DIGEST, require_same_base

if TYPE_CHECKING:
    from moe_lightning.models.huggingface.module import HuggingFaceConfig

_MODEL = "model."
"""Where our modules keep the model."""


def checkpoints_of(path: Place) -> Place:
    """The folder of checkpoints of a run directory; any other path as it is."""
    inside = path / "checkpoints" if isinstance(path, Path) else path
    return inside if isinstance(inside, Path) and inside.is_dir() and not has_manifest(path) else path


def open_saved(path: Place, *, report: Callable[[str], None] | None = None) -> SavedModel:
    """Open a checkpoint: a file, a directory, or the newest complete one of a directory of these.

    Args:
        path: where it is, or the directory of its run.
        report: called with a sentence for every damaged one that is passed over; None: the newest file must be whole.

    Raises:
        ConfigurationError: there is none.
        CheckpointError: it is damaged.
    """
    place = checkpoints_of(path)
    found: SavedModel | None = None
    problems: list[str] = []
    for file in newest_files(place):
        try:
            found = _File(file)
            break
        except CheckpointError as error:
            if report is None or file == place:
                raise
            problems.append(str(error))
    if problems and found is None and not directories(place):
        raise CheckpointError(
            f"{place} holds no complete checkpoint: {problems[0]}; restore one from a copy, or name another directory"
        )
    if report is not None:
        for problem in problems:
            report(problem)
    if found is not None:
        return found
    return _Directory(resolve(place, report)) if storage_of(place).is_dir(place) else _File(Path(place))


def trained_config(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a HuggingFaceModule, with `pretrained` as every folder understands it. Where that is
    gone and the path as given is here, as in a project that was moved as a whole, it stays as given.
    """
    config = dict(hyper_parameters["config"])
    origin = hyper_parameters.get("origin")
    if origin is not None and (Path(origin).exists() or not Path(config["pretrained"]).expanduser().exists()):
        config["pretrained"] = origin
    return config


def other_tokenizer(values: Mapping[str, Any]) -> str | None:
    """Return `tokenizer_origin` of a checkpoint's values where that is not the tokenizer of its model; else None."""
    named, model = tokenizer_origin(values), values["hyper_parameters"].get("origin")
    return None if named in (model, f"{model}/{TOKENIZER}") else named


def network_of(saved: SavedModel) -> Any:
    """Build the model of a checkpoint in its precision: a GPT, or a model of transformers with our MoE layers.

    Raises:
        ConfigurationError: it is of another module.
        CheckpointError: a tensor is missing, of another shape or not of the model, or adapters were trained beside
            other weights.
    """
    hyper_parameters = saved.values.get("hyper_parameters", {})
    config = hyper_parameters.get("config")
    if "huggingface" in hyper_parameters:
        from moe_lightning.models.huggingface.module import HuggingFaceConfig

        trained = build_config(HuggingFaceConfig, trained_config(hyper_parameters))
        with precision_of(saved):
            network = _transformers_model(trained, hyper_parameters["huggingface"])
        _fill(network, saved, base=None if trained.adapter is None else local_folder(trained.pretrained))
        return network
    if not isinstance(config, Mapping) or not {"vocab_size", "num_experts", "context_length"} <= set(config):
        raise ConfigurationError(
            f"{saved.path} is not a checkpoint of a GPTModule or a HuggingFaceModule: only their models are built here"
        )
    from moe_lightning.models.gpt import GPT, GPTConfig

    with precision_of(saved):
        network = GPT(build_config(GPTConfig, config))
    _fill(network, saved, base=None)
    return network


def _transformers_model(config: HuggingFaceConfig, values: Mapping[str, Any]) -> Any:
    """Build the model with random weights, or with adapters beside those of the folder that it was trained from."""
    from moe_lightning.models.huggingface.loading import load_model, new_model

    architecture = config.architecture(values)
    if config.adapter is None:
        return new_model(architecture)
    return load_model(architecture, config.weights(), config.adapter)


@torch.no_grad()
def _fill(network: nn.Module, saved: SavedModel, *, base: Path | None) -> None:
    """Copy the tensors of a checkpoint into a model.

    Args:
        base: folder of the weights that are in the model already, beside which adapters were trained: what the
            checkpoint has not stays; None: every tensor is in the checkpoint.
    """
    from moe_lightning.moe.layer import MoELayer

    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, MoELayer)]
    stacks = {
        f"{layer}.experts.{name}": (index, layer, name, module.num_experts)
        for index, (layer, module) in enumerate(layers)
        for name in module.experts.stacked_parameters()
    }
    names, tensors = saved.names([name for name, _ in layers]), network.state_dict(keep_vars=True)
    require_known(names, tensors, saved.path)
    filled = set[Tensor]()  # by identity: tied weights are saved once
    for name, tensor in tensors.items():
        if tensor in filled or (base is not None and name not in names and not is_adapter(name)):
            continue
        value = saved.experts(*stacks[name]) if name in stacks else saved.dense(name)
        if base is not None and name.rpartition(".")[2] == BASE_DIGEST:
            require_same_base(value, tensor, name, str(base))
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} of {saved.path} has shape {list(value.shape)}, the model's {list(tensor.shape)}: "
                "it does not belong to its configuration"
            )
        tensor.copy_(value)
        filled.add(tensor)


@contextmanager
def precision_of(saved: SavedModel) -> Iterator[None]:
    """Build models inside as they were built for the training: digests of weights beside adapters are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(saved.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _trained_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype of adapters among tensors by name; without any that of experts, or of a GPT without these."""
    kinds = ("lora_", "w_up", ".token_embedding.")
    found = (dtype for kind in kinds for name, dtype in dtypes.items() if kind in name)
    return next(found, torch.float32)


def require_known(names: Iterable[str], known: Iterable[str], path: Place) -> None:
    """Refuse a checkpoint with more than the model of its configuration, such as adapters of `add_adapters`, without
    which that model would be another one.

    Args:
        names: of the checkpoint's tensors.
        known: those of the model.
        path: of the checkpoint.

    Raises:
        CheckpointError: it holds others.
    """
    others = sorted({*names}.difference(known))
    if others:
        raise CheckpointError(
            f"{path} holds {len(others)} tensors of adapters or layers that its configuration does not name, such as "
            f"{others[0]!r}: load it with the code that trained it"
        )


class _File:
    """A single file, as stock Lightning writes it; tensors are mapped.

    Attributes:
        path: of the file.
        values: what Lightning keeps beside tensors.
        dtype: of the weights that were trained.
    """

    def __init__(self, path: Path) -> None:
        checkpoint = read_file(path)
        self.path, self._state = path, checkpoint["state_dict"]
        tensors = ((name, one) for name, one in self._state.items() if isinstance(one, Tensor))  # no extra states
        self.dtype = _trained_dtype({name: tensor.dtype for name, tensor in tensors})
        self.values: Mapping[str, Any] = checkpoint

    def names(self, layers: Sequence[str]) -> set[str]:
        """The names in the model of all its tensors; `layers` are the names of the MoE layers."""
        return {name.removeprefix(_MODEL) for name in self._state if name.startswith(_MODEL)}

    def dense(self, name: str) -> Tensor:
        """A parameter or buffer by its name in the model."""
        if f"{_MODEL}{name}" not in self._state:
            raise CheckpointError(
                f"{self.path} has no tensor {_MODEL + name!r}: it does not belong to its configuration"
            )
        tensor: Tensor = self._state[f"{_MODEL}{name}"]
        return tensor

    def experts(self, index: int, layer: str, name: str, num_experts: int) -> Tensor:
        """The stack [E, ...] of one parameter of an MoE layer: its place among these, and its name in the model."""
        return self.dense(f"{layer}.experts.{name}")


class _Directory:
    """A checkpoint directory, verified; see `_File`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint.verify()
        self._checkpoint, self.path, self._keys = checkpoint, checkpoint.path, {*checkpoint.keys()}
        self.values: Mapping[str, Any] = self._checkpoint.read_object("trainer")
        shapes = self._checkpoint.shapes().items()
        self.dtype = _trained_dtype({key: DTYPES[dtype] for key, (dtype, _) in shapes if not is_moment(key)})

    def names(self, layers: Sequence[str]) -> set[str]:
        dense = {parse_dense_key(key)[0] for key in self._keys if key.startswith(f"dense/{_MODEL}")}
        experts = (parse_expert_key(key) for key in self._keys if is_expert_key(key))
        stacks = {(index, name) for index, _, _, name in experts}
        return {name.removeprefix(_MODEL) for name in dense} | {
            f"{layers[index] if index < len(layers) else index}.experts.{name}" for index, name in stacks
        }

    def dense(self, name: str) -> Tensor:
        prefix = f"dense/{_MODEL}{name}/"
        scope = next((s for s in (*SCOPES_OF_A_MODEL, "buffer") if f"{prefix}{s}" in self._keys), "weight")
        return self._checkpoint.read(f"{prefix}{scope}")

    def experts(self, index: int, layer: str, name: str, num_experts: int) -> Tensor:
        prefix = f"expert/{index}/0/"
        scope = next((s for s in SCOPES_OF_A_MODEL if f"{prefix}{s}/{name}" in self._keys), "weight")
        keys = (f"expert/{index}/{expert}/{scope}/{name}" for expert in range(num_experts))
        return torch.stack([self._checkpoint.read_first(key) for key in keys])


SavedModel = _File | _Directory
"""A checkpoint of a GPTModule or a HuggingFaceModule."""
