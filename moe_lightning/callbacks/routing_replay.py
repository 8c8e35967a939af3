"""Keeps which experts every token of a training takes, or forces them, on any number of ranks."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.randomness import SampleStream
from moe_lightning.moe.replayed_routing import (
    Choices,
    Piece,
    check_expert_ids,
    choosing,
    forced,
    read_samples,
    routers_of,
    write_piece,
)
from moe_lightning.moe.router import Router
from moe_lightning.strategies.expert_parallel import own_strategy
from moe_lightning.strategies.stages import StageState, stages_of


@validated
class RoutingReplay(Callback):
    """Records or replays the routing of a training, token by token; evaluation routes by itself.

    Args:
        path: folder of `moe.replayed_routing`; of several machines, one that all of them see.
        mode: "record" writes what the routers choose, each rank its samples; "replay" forces what was written, on any
            number of ranks, with gradients through the weights.

    Raises:
        ConfigurationError: when training starts, another strategy, no router whose choices can be kept, or a stage of a
            pipeline without one; while it runs, tokens that the folder does not have.
    """

    def __init__(self, path: str, mode: Literal["record", "replay"] = "record") -> None:
        self._folder = Path(path)
        self._mode = mode
        self._stack = ExitStack()
        self._routers: list[Router] = []
        self._layers: list[int] = []
        self._seen: dict[Piece, _Seen] = {}
        self._table: tuple[Piece, Tensor] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own_strategy(trainer, "RoutingReplay", "call replay_routing in your step")
        stages = stages_of(trainer)
        with nullcontext() if stages is None else stages.cut.whole():
            self._routers = routers_of(pl_module)
        self._layers = list(range(len(self._routers))) if stages is None else stages.numbers
        if not self._layers:
            raise ConfigurationError(
                "a stage of mesh.pp has no MoE layer whose routing could be kept: use fewer stages, or drop "
                "RoutingReplay"
            )
        self._seen = {}
        choose = self._record if self._mode == "record" else self._replay
        choosers = [lambda router, scores, layer=layer: choose(layer, router, scores) for layer in self._layers]
        self._stack.enter_context(choosing([self._routers[layer] for layer in self._layers], choosers))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for piece, seen in sorted(self._seen.items(), key=lambda entry: entry[0]):
            self._write(piece, seen, stages_of(trainer))
        self._seen = {}

    def _write(self, piece: Piece, seen: _Seen, stages: StageState | None) -> None:
        """What was chosen for the samples of a micro-batch; collective in a pipeline, whose first stage writes."""
        if seen.by_layer.keys() != set(self._layers):
            return
        ids_TLK = Choices([seen.by_layer[layer] for layer in self._layers]).stacked()
        if stages is not None:
            ids_LTK = ids_TLK.movedim(1, 0)
            all_LTK = stages.counts_of_all(ids_LTK)
            ids_TLK = ids_LTK.new_zeros(len(self._routers), *ids_LTK.shape[1:]) if all_LTK is None else all_LTK
            ids_TLK = ids_TLK.movedim(0, 1)
        if stages is None or 0 in stages.cut.stages:
            write_piece(self._folder, piece, ids_TLK.reshape(seen.count, -1, *ids_TLK.shape[1:]).cpu())

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stack.close()

    def _record(self, layer: int, router: Router, scores_TE: Tensor) -> Tensor:
        chosen = router.choose(scores_TE)
        if router.training:
            _require_position(router.stream)
            if router.stream.num_samples:
                seen = self._seen.setdefault(_piece(router.stream), _Seen(count=router.stream.num_samples))
                seen.by_layer[layer] = chosen
        return chosen

    def _replay(self, layer: int, router: Router, scores_TE: Tensor) -> Tensor:
        stream = router.stream
        if not router.training or stream.is_stand_in:
            return router.choose(scores_TE)
        _require_position(stream)
        piece = _piece(stream)
        if self._table is None or self._table[0] != piece:
            ids = read_samples(self._folder, piece, stream.num_samples)
            check_expert_ids(ids, self._routers)
            self._table = piece, ids.flatten(0, 1).long()
        return forced(self._table[1][:, layer])(router, scores_TE)


@dataclass
class _Seen:
    """What was chosen for as many samples, int64 [T, K] by layer."""

    count: int
    by_layer: dict[int, Tensor] = field(default_factory=dict)


def _piece(stream: SampleStream) -> Piece:
    return Piece(step=stream.step, first_sample=stream.first_sample, part=stream.part, parts=stream.parts)


def _require_position(stream: SampleStream) -> None:
    if not stream.num_samples and not stream.is_stand_in:
        raise ConfigurationError(
            "RoutingReplay does not know which samples this batch holds: give training data by a torch DataLoader with "
            "a batch_size, or a StepLoader"
        )
