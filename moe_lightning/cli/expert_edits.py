"""`moe-ckpt edit`: prune, merge and duplicate the experts of a checkpoint file.

An edit is a table of shares: each new expert is a weighted sum of old ones. Every tensor with a row for each expert
(weights, router rows and biases, the optimizer's moments) is multiplied by the same table. Copies of one old expert are
bit-equal.

The file holds experts stacked [E, ...] whatever ranks wrote it, so the edited one trains on, on any number of ranks.
The report is the validation loss of the same batches before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_lightning.checkpoint.files import read_file, write_file
from moe_lightning.cli.resume import config_of
from moe_lightning.cli.saved_model import require_known
from moe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from moe_lightning.models.gpt_module import GPTModule


def mixed(value: Any, table: NDArray[np.float64] | None) -> Any:
    """Rows [new experts, ...] of a tensor [E, ...]: copies of single rows, or sums in double precision, in the order of
    the experts; zeros without a share. What is no tensor with a row for each expert stays.

    Args:
        table: shares [new experts, E], see `cli.expert_edits`; None: the value is of no expert.
    """
    if table is None or not isinstance(value, Tensor) or value.shape[:1] != (table.shape[1],):
        return value
    rows = value.new_zeros(len(table), *value.shape[1:])
    for row, shares in zip(rows, table, strict=True):
        parts = np.flatnonzero(shares).tolist()
        if len(parts) == 1:
            row.copy_(value[parts[0]])
        elif parts:
            row.copy_(sum(value[e].double() * float(shares[e]) for e in parts))
    return rows


@dataclass(frozen=True, kw_only=True)
class ExpertEdit:
    """Edit of one layer's experts. New order: experts that stay, a merged one in the place of its first part; then the
    copies.

    Attributes:
        prune: experts that go.
        merge: groups of experts that become one.
        duplicate: experts that get a copy, as often as they are named.
    """

    prune: tuple[int, ...] = ()
    merge: tuple[tuple[int, ...], ...] = ()
    duplicate: tuple[int, ...] = ()

    def table(self, num_experts: int) -> NDArray[np.float64]:
        """Shares [new experts, E] of the E old experts in each new one; a merged one is the mean of its parts.

        Raises:
            ConfigurationError: an expert that there is not, one in two places, or none left.
        """
        merged = [expert for group in self.merge for expert in group]
        used = [*self.prune, *merged]
        for expert in (*used, *self.duplicate):
            if not 0 <= expert < num_experts:
                raise ConfigurationError(f"expert {expert} is not in the layer: name some of 0 to {num_experts - 1}")
        for expert in used:
            if used.count(expert) > 1 or (expert in self.prune and expert in self.duplicate):
                raise ConfigurationError(f"expert {expert} is named twice: prune it, or merge it, or duplicate it")
        if any(len(group) < 2 for group in self.merge):
            raise ConfigurationError(f"merging {self.merge} needs two experts at least in each group, such as 0+3")
        group_of = {group[0]: group for group in self.merge}
        gone = {*self.prune, *merged} - set(group_of)
        rows = [group_of.get(e, (e,)) for e in range(num_experts) if e not in gone]
        rows += [(e,) for e in self.duplicate]
        if len(rows) == 0:
            raise ConfigurationError(f"pruning all {num_experts} experts leaves none: keep one at least")
        shares = np.zeros((len(rows), num_experts))
        for row, parts in zip(shares, rows, strict=True):
            row[list(parts)] = 1 / len(parts)
        return shares


_PER_EXPERT = ("LoadBalancer", "PartialExpertsCheckpoint", "DynamicK")
"""Callbacks whose state counts the experts: they begin anew."""


@dataclass(frozen=True, kw_only=True)
class EditReport:
    """Result of an edit.

    Attributes:
        experts: of a layer, before and after.
        losses: validation loss of the same batches, before and after; None: the checkpoint's run is not known.
        can_resume: False: the checkpoint has weights alone.
    """

    experts: tuple[int, int]
    losses: tuple[float, float] | None
    can_resume: bool


def edit_file(
    source: Path,
    target: Path,
    edits: Callable[[int], Sequence[ExpertEdit]],
    *,
    batches: int = 8,
) -> EditReport:
    """Write the edited checkpoint; the source stays as it is.

    Args:
        source: a `.ckpt` of a GPTModule.
        target: a file that does not exist.
        edits: of each MoE layer, asked with their number; afterwards all have equally many experts.
        batches: of validation, for the report.

    Raises:
        ConfigurationError: an edit that cannot be, or that changes nothing, another module, layers that would differ,
            or data of the run that cannot be loaded: nothing is written.
        CheckpointError: the source is missing or damaged, or holds more than the model of its configuration.
    """
    if target.exists():
        raise ConfigurationError(f"{target} exists: name a file that does not")
    checkpoint = read_file(source)
    module = _module(checkpoint, source)
    require_known(checkpoint["state_dict"], module.state_dict(), source)
    num_experts = module.config.num_experts
    tables = [edit.table(num_experts) for edit in edits(len(_layers(module)))]
    _check(tables, module.config.router.top_k)
    config = config_of(source) if batches else None
    before = None if config is None else _loss_before(source, config, batches)
    edited = edit_checkpoint(checkpoint, module, tables)
    edited["hyper_parameters"]["config"]["num_experts"] = len(tables[0])
    write_file(edited, target)
    return EditReport(
        experts=(num_experts, len(tables[0])),
        losses=None if config is None or before is None else (before, _loss(target, config, batches)),
        can_resume="optimizer_states" in edited,
    )


def edit_checkpoint(
    checkpoint: Mapping[str, Any], module: GPTModule, tables: Sequence[NDArray[np.float64]]
) -> dict[str, Any]:
    """The checkpoint with new experts; what is not changed is shared with the given one.

    Args:
        module: of the old shape, with its model; its values are not read.
        tables: of every MoE layer, shares [new experts, old experts].
    """
    from moe_lightning.models.gpt_module import optimizer_of
    from moe_lightning.strategies.averaging import CURRENT

    layers = zip(_layers(module), tables, strict=True)
    table_of = {f"{name}.{part}.": table for name, table in layers for part in ("experts", "router")}
    edited = {**checkpoint, "hyper_parameters": copy.deepcopy(checkpoint["hyper_parameters"])}
    for part in {"state_dict", CURRENT} & checkpoint.keys():  # under averaging the second are the weights to train on
        edited[part] = {name: mixed(value, _table_of(name, table_of)) for name, value in checkpoint[part].items()}
    named = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = optimizer_of(module, module.optimizer_config).param_groups
    names = [named[id(parameter)] for group in groups for parameter in group["params"]]
    if (optimizers := checkpoint.get("optimizer_states")) is not None:  # else a file of weights alone
        edited["optimizer_states"] = [_edited_optimizer(saved, names, table_of) for saved in optimizers]
    if (callbacks := checkpoint.get("callbacks")) is not None:
        kept = {name: value for name, value in callbacks.items() if not str(name).startswith(_PER_EXPERT)}
        edited["callbacks"] = kept
    return edited


def _layers(module: GPTModule) -> list[str]:
    """Names of the MoE layers."""
    from moe_lightning.moe.layer import MoELayer

    return [name for name, found in module.named_modules() if isinstance(found, MoELayer)]


def _table_of(name: str, table_of: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64] | None:
    return next((table for prefix, table in table_of.items() if name.startswith(prefix)), None)


def _edited_optimizer(
    saved: Mapping[str, Any], names: Sequence[str], table_of: Mapping[str, NDArray[np.float64]]
) -> dict[str, Any]:
    state = {}
    for number, entry in saved["state"].items():
        table = _table_of(names[number], table_of)
        state[number] = {key: mixed(value, table) for key, value in entry.items()}
    return {**saved, "state": state}


def _check(tables: Sequence[NDArray[np.float64]], top_k: int) -> None:
    """Refuse an edit that changes nothing, makes layers differ, or leaves a token too few experts."""
    sizes = {len(table) for table in tables}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the layers would have {sorted(sizes)} experts: edit them so that all have equally many"
        )
    count, before = tables[0].shape
    if all(np.array_equal(table, np.eye(before)) for table in tables):
        raise ConfigurationError("the edited checkpoint would be the same one: give --prune, --merge or --duplicate")
    if count < top_k:
        raise ConfigurationError(
            f"{count} of {before} experts would be left, and each token goes to top_k={top_k}: prune or merge fewer"
        )


def _module(checkpoint: Mapping[str, Any], path: Path) -> GPTModule:
    """The module of a checkpoint, without values.

    Raises:
        ConfigurationError: it is of another kind, or its experts cannot be edited.
    """
    from moe_lightning.models.gpt_module import GPTModule

    hyper = checkpoint.get("hyper_parameters", {})
    if not {"vocab_size", "num_experts", "router"} <= set(hyper.get("config", {})):
        raise ConfigurationError(f"{path} is not a checkpoint of a GPTModule, whose experts alone can be edited")
    with torch.device("meta"):
        module = GPTModule(hyper["config"], hyper.get("optimizer"))
        module.configure_model()
    if module.config.router.num_groups > 1:
        raise ConfigurationError(
            f"{path} has router.num_groups={module.config.router.num_groups}, and an edited group would score "
            "otherwise: only experts without groups can be edited"
        )
    return module


def parse_edits(
    num_layers: int,
    *,
    prune: Sequence[str] = (),
    merge: Sequence[str] = (),
    duplicate: Sequence[str] = (),
) -> list[ExpertEdit]:
    """Edits of every layer from words such as `3,5` (all layers) or `0:3,5` (layer 0); parts of a merged expert are
    joined by +.

    Raises:
        ConfigurationError: a word of another form, or a layer that there is not.
    """
    found: dict[str, list[list[Any]]] = {}
    for kind, words in (("prune", prune), ("merge", merge), ("duplicate", duplicate)):
        found[kind] = [[] for _ in range(num_layers)]
        for word in words:
            head, colon, tail = word.rpartition(":")
            try:
                layers = [int(head)] if colon else range(num_layers)
                parts = [tuple(map(int, part.split("+"))) for part in tail.split(",")]
                if kind != "merge":
                    parts = [expert for (expert,) in parts]  # type: ignore[misc]
            except ValueError:
                raise ConfigurationError(
                    f"--{kind} {word!r} must be experts such as {'0+3' if kind == 'merge' else '3,5'}, or of one layer "
                    f"such as {'1:0+3' if kind == 'merge' else '1:3,5'}"
                ) from None
            for layer in layers:
                if not 0 <= layer < num_layers:
                    raise ConfigurationError(f"--{kind} {word!r} names layer {layer} of {num_layers} MoE layers")
                found[kind][layer] += parts
    columns = zip(found["prune"], found["merge"], found["duplicate"], strict=True)
    return [ExpertEdit(prune=tuple(p), merge=tuple(m), duplicate=tuple(d)) for p, m, d in columns]


def _loss_before(source: Path, config: Mapping[str, Any], batches: int) -> float:
    try:
        return _loss(source, config, batches)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; --batches 0 edits without measuring the loss") from error


def _loss(path: Path, config: Mapping[str, Any], batches: int) -> float:
    """Return the validation loss of a checkpoint on the first batches of a run's data, on one process."""
    import lightning.pytorch as pl

    from moe_lightning.cli.composition import build_object
    from moe_lightning.cli.training import quiet_libraries

    quiet_libraries()
    from moe_lightning.models.gpt_module import GPTModule

    pl.seed_everything(config["seed"], verbose=False)
    data = build_object(config["data"], "data")
    checkpoint = read_file(path)
    data.load_state_dict(checkpoint.get(type(data).__qualname__, {}))
    hyper = checkpoint["hyper_parameters"]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=batches,
    )  # fmt: skip
    module = GPTModule(hyper["config"], hyper.get("optimizer"))
    module.configure_model()
    module.load_state_dict(checkpoint["state_dict"])
    (measured,) = trainer.validate(module, datamodule=data, verbose=False)
    return float(measured["val/loss"])
