"""Recording and replay of routing during training, on any number of ranks.

The recorder writes the format that forced routing, the simulator and the benchmarks read.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.config import PositiveInt, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import replacing
from moe_lightning.moe.forced_routing import read_routing_trace
from moe_lightning.moe.layer import moe_layers
from moe_lightning.moe.randomness import SampleStream
from moe_lightning.moe.replayed_routing import (
    Choices,
    TokenRange,
    check_expert_ids,
    choosing,
    forced,
    observing,
    read_samples,
    remove_tokens,
    routers_of,
    write_tokens,
)
from moe_lightning.moe.router import Router
from moe_lightning.strategies.checks import require_automatic_optimization
from moe_lightning.strategies.expert_parallel import own_strategy
from moe_lightning.strategies.stages import StageMap, stages_of
from moe_lightning.strategies.step_data import joined_slice
from moe_lightning.strategies.worlds import ExpertParallelCallback


@validated
class RoutingRecorder(Callback):
    """Writes an .npz with `counts` [samples, layers, ranks, experts], the assignments of every sampled step before any
    drop (0 of a layer that it does not call), and `iteration` [samples], 1 for the first step. Written when training
    ends or fails, and on rank 0 only. A resumed run continues the file: samples after the step that it resumes from are
    dropped.

    Args:
        path: of the file.
        every_n_steps: steps between two samples.

    Raises:
        ConfigurationError: every_n_steps below 1; when training starts: manual optimization, a pipeline, an elastic
            run, layers with different numbers of experts, or a resumed run whose file was recorded with other layers,
            ranks or experts.
    """

    def __init__(self, path: str, every_n_steps: PositiveInt = 10) -> None:
        self._path = Path(path)
        self._every = every_n_steps
        self._samples: dict[int, NDArray[np.integer[Any]]] = {}  # by iteration, ascending
        self._running: NDArray[np.int64] | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        require_automatic_optimization(pl_module, "RoutingRecorder counts steps", cure="drop the callback")
        stages, worlds = stages_of(trainer), getattr(trainer.strategy, "worlds", None)
        if stages.num_stages > 1 or (worlds is not None and worlds.is_elastic):
            raise ConfigurationError(
                "RoutingRecorder writes one table, of ranks that stay and have all layers: use it without mesh.pp, and "
                "with elastic.enabled=false"
            )
        layers = stages.layers
        experts = {layer.num_experts for layer in layers}
        if len(experts) != 1:
            raise ConfigurationError(
                f"RoutingRecorder writes one table for all MoE layers, but they have {sorted(experts)} experts: "
                "give them equally many"
            )
        self._running, self._samples = None, {}
        if trainer.global_step and self._path.is_file():
            self._continue(trainer.global_step, (len(layers), stages.num_ranks, experts.pop()))

    def _continue(self, step: int, shape: tuple[int, ...]) -> None:
        counts, iterations = read_routing_trace(self._path)
        if counts.shape[1:] != shape:
            raise ConfigurationError(
                f"{self._path} was recorded with {counts.shape[1:]} (layers, ranks, experts), but this run has "
                f"{shape}: give another path"
            )
        kept = iterations <= step
        self._samples = dict(zip(iterations[kept].tolist(), counts[kept], strict=True))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        is_last = not private_lightning.is_accumulating(trainer)
        begun = trainer.global_step - is_last  # steps that were done before this one
        if begun % self._every or not trainer.is_global_zero:
            return
        layers = moe_layers(pl_module)
        called = [layer.statistics for layer in layers if layer.statistics is not None]
        if not called:
            return
        nothing = torch.zeros_like(called[0].tokens_NE)
        tokens = [nothing if layer.statistics is None else layer.statistics.tokens_NE for layer in layers]
        counts = torch.stack(tokens).cpu().numpy()
        self._running = counts if self._running is None else self._running + counts
        if is_last:
            self._samples[begun + 1] = self._running.astype(np.uint32)
            self._running = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        """Replace the file at once, so that a reader never sees half of it."""
        if not trainer.is_global_zero or not self._samples:
            return
        counts, iterations = np.stack(list(self._samples.values())), np.array(list(self._samples), dtype=np.int32)
        dtype = np.uint16 if counts.max() < 1 << 16 else np.uint32
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as staged, open(staged, "wb") as file:
            np.savez_compressed(file, counts=counts.astype(dtype), iteration=iterations)


@validated
class RoutingReplay(ExpertParallelCallback):
    """Records or replays the routing of a training, token by token; evaluation routes by itself.

    Args:
        path: folder of `moe.replayed_routing`; of several machines, one that all of them see.
        mode: "record" writes what the routers choose, each rank its samples, and removes what the folder has of the
            step that it begins with and of later ones; "replay" forces what was written, on any number of ranks, with
            gradients through the weights.

    Raises:
        ConfigurationError: when training starts, another strategy, no router whose choices can be kept, or a stage of a
            pipeline without one, or routing that is replayed already; while it runs, tokens that the folder does not
            have, or to record, a layer that routes twice in a micro-batch.
    """

    def __init__(self, path: str, mode: Literal["record", "replay"] = "record") -> None:
        self._folder = Path(path)
        self._mode = mode
        self._stack = ExitStack()
        self._routers: list[Router] = []
        self._layers: list[int] = []
        self._seen: dict[TokenRange, _Seen] = {}
        self._table: tuple[TokenRange, Tensor] | None = None
        self._has_begun = False

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own_strategy(trainer, "RoutingReplay", "call replay_routing in your step")
        with stages_of(trainer).whole_module():
            self._routers = routers_of(pl_module)
        self._begin(stages_of(trainer))

    @override
    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Other layers may be on this rank now, and a step is repeated; of a committed one the hook may be left."""
        self._stack.close()
        step, seen = own_strategy(trainer, "RoutingReplay").elastic.step, self._seen
        self._begin(stages_of(trainer))
        if step is not None and stages_of(trainer).num_stages == 1:
            self._seen = {tokens: own for tokens, own in seen.items() if tokens.step < step.version}

    def _begin(self, stages: StageMap) -> None:
        self._layers = stages.own(range(len(self._routers)))
        if not self._layers:
            raise ConfigurationError(
                "a stage of mesh.pp has no MoE layer whose routing could be kept: use fewer stages, or drop "
                "RoutingReplay"
            )
        self._seen, self._table, self._has_begun = {}, None, False
        routers = [self._routers[layer] for layer in self._layers]
        if self._mode == "record":
            recorders = [partial(self._record, layer) for layer in self._layers]
            self._stack.enter_context(observing(routers, recorders))
        elif any(router.choice_hooks.chooser is not None for router in routers):
            raise ConfigurationError("the routing of this model is replayed already: give one RoutingReplay to replay")
        else:
            choosers = [partial(self._replay, layer) for layer in self._layers]
            self._stack.enter_context(choosing(routers, choosers))

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Remove what an attempt before has recorded, whose ranks had other samples, before any rank records."""
        batch, has_begun = joined_slice(trainer.train_dataloader), self._has_begun
        self._has_begun = True
        if self._mode == "record" and not has_begun and batch is not None and trainer.is_global_zero:
            remove_tokens(self._folder, trainer.global_step if pl_module.automatic_optimization else batch.step)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for tokens, seen in sorted(self._seen.items(), key=lambda entry: entry[0]):
            self._write(tokens, seen, stages_of(trainer))
        self._seen = {}

    def _write(self, tokens: TokenRange, seen: _Seen, stages: StageMap) -> None:
        """Write the chosen experts of a micro-batch; collective in a pipeline, whose first stage writes."""
        if seen.by_layer.keys() != set(self._layers):
            return
        ids_TLK = Choices([seen.by_layer[layer] for layer in self._layers]).stacked()
        ids_LTK = ids_TLK.movedim(1, 0)
        all_LTK = stages.counts_of_all(ids_LTK)
        ids_TLK = ids_LTK.new_zeros(len(self._routers), *ids_LTK.shape[1:]) if all_LTK is None else all_LTK
        ids_TLK = ids_TLK.movedim(0, 1)
        if 0 in stages.held:
            write_tokens(self._folder, tokens, ids_TLK.reshape(seen.count, -1, *ids_TLK.shape[1:]).cpu())

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stack.close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning calls no teardown then

    def _record(self, layer: int, router: Router, ids_TK: Tensor) -> None:
        if router.training:
            _require_position(router.stream)
            if router.stream.num_samples:
                seen = self._seen.setdefault(_range_of(router.stream), _Seen(count=router.stream.num_samples))
                if layer in seen.by_layer and not private_torch.is_in_backward():
                    raise ConfigurationError(
                        "an MoE layer has routed twice in one micro-batch, and RoutingReplay records one choice for "
                        "each token: run the other passes in eval mode, or call record_routing around each"
                    )
                seen.by_layer[layer] = ids_TK

    def _replay(self, layer: int, router: Router, scores_TE: Tensor) -> Tensor:
        stream = router.stream
        if not router.training or stream.is_dummy_batch:
            return router.choose(scores_TE)
        _require_position(stream)
        tokens = _range_of(stream)
        if self._table is None or self._table[0] != tokens:
            ids = read_samples(self._folder, tokens, stream.num_samples)
            check_expert_ids(ids, self._routers)
            self._table = tokens, ids.flatten(0, 1).long()
        return forced(self._table[1][:, layer])(router, scores_TE)


@dataclass
class _Seen:
    """Chosen experts of some samples, int64 [T, K] by layer."""

    count: int
    by_layer: dict[int, Tensor] = field(default_factory=dict)


def _range_of(stream: SampleStream) -> TokenRange:
    return TokenRange(step=stream.step, first_sample=stream.first_sample, part=stream.part, parts=stream.parts)


def _require_position(stream: SampleStream) -> None:
    if not stream.num_samples and not stream.is_dummy_batch:
        raise ConfigurationError(
            "RoutingReplay does not know which samples this batch holds: give training data by a torch DataLoader with "
            "a batch_size, or a StepLoader"
        )
