"""Keeps which experts every token of a training takes, or forces them, on any number of ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from moe_lightning.errors import ConfigurationError
from moe_lightning.modules.router import Router
from moe_lightning.modules.routing_files import Piece, read_samples, write_piece
from moe_lightning.modules.routing_replay import Choices, check_expert_ids, choosing, forced, routers_of
from moe_lightning.modules.stream import SampleStream
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.values import validated


@validated
class RoutingReplay(Callback):
    """Records or replays the routing of a training, token by token; evaluation routes by itself.

    Args:
        path: folder of `modules.routing_files`; of several machines, one that all of them see.
        mode: "record" writes what the routers choose, each rank its samples; "replay" forces what was written, on any
            number of ranks, with gradients through the weights.

    Raises:
        ConfigurationError: when training starts, another strategy, or no router whose choices can be kept; while it
            runs, tokens that the folder does not have.
    """

    def __init__(self, path: str, mode: Literal["record", "replay"] = "record") -> None:
        self._folder = Path(path)
        self._mode = mode
        self._stack = ExitStack()
        self._routers: list[Router] = []
        self._seen = Choices()
        self._piece, self._count = Piece(step=0, first_sample=0), 0
        self._table: tuple[Piece, Tensor] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.strategy, ExpertParallelStrategy):
            raise ConfigurationError(
                f"RoutingReplay follows samples as ExpertParallelStrategy cuts them, not as "
                f"{type(trainer.strategy).__name__}: use strategy='expert_parallel', or replay_routing in your step"
            )
        self._routers = routers_of(pl_module)
        self._seen = Choices([None] * len(self._routers))
        choose = self._record if self._mode == "record" else self._replay
        choosers = [
            lambda router, scores, layer=layer: choose(layer, router, scores) for layer in range(len(self._routers))
        ]
        self._stack.enter_context(choosing(self._routers, choosers))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._mode == "replay" or any(chosen is None for chosen in self._seen.by_layer):
            return
        if self._count:
            ids = self._seen.stacked()
            write_piece(self._folder, self._piece, ids.view(self._count, -1, *ids.shape[1:]).cpu())
        self._seen = Choices([None] * len(self._routers))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stack.close()

    def _record(self, layer: int, router: Router, scores_TE: Tensor) -> Tensor:
        chosen = router.choose(scores_TE)
        if router.training:
            _require_position(router.stream)
            self._seen.by_layer[layer] = chosen
            self._piece, self._count = _piece(router.stream), router.stream.num_samples
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


def _piece(stream: SampleStream) -> Piece:
    return Piece(step=stream.step, first_sample=stream.first_sample, part=stream.part, parts=stream.parts)


def _require_position(stream: SampleStream) -> None:
    if not stream.num_samples and not stream.is_stand_in:
        raise ConfigurationError(
            "RoutingReplay does not know which samples this batch holds: give training data by a torch DataLoader with "
            "a batch_size, or a StepLoader"
        )
