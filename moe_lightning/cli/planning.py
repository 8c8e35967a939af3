"""A run of moe-train as the planner sees it, and the check that its memory suffices.

Before ranks start, the memory of a rank (`simulate.memory`) is compared with what is free: on the CPU what this machine
and its container have available, shared by its ranks; on a GPU that of the device. A run that does not fit ends with
one sentence that names what helps; `check_memory=false` starts it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from moe_lightning.cli.capacity import MOMENTS, RANK_BYTES, free_bytes, is_on_cpu, nodes_of, ranks_of
from moe_lightning.cli.composition import build_object
from moe_lightning.cli.footprint import PRECISIONS, TrainingShape, count_footprint
from moe_lightning.cli.targets import located
from moe_lightning.config import TARGET
from moe_lightning.data.corpus import tokenizer_of
from moe_lightning.data.text import sources_of
from moe_lightning.data.tokenizer import BYTES, check_tokenizer, is_trained, load_tokenizer
from moe_lightning.dispatch.placement import uniform_slots
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPT, GPTConfig
from moe_lightning.moe.experts import deferred_experts
from moe_lightning.parallel.mesh import MICRO_BATCHES_PER_RANK, STAGES_PER_RANK
from moe_lightning.simulate.memory import RankMemory, rank_memory
from moe_lightning.simulate.mesh import DENSE, MeshSpec
from moe_lightning.simulate.scenario import format_bytes
from moe_lightning.simulate.workload import Footprint, TransformerSizes, Workload, footprint_of, model_workload

_SNAPSHOT_BUFFERS = 3  # being taken, being written, kept for a recovery
_CERTAIN = 4.0
"""Free memory over the closed form from which on nothing is counted: counting takes a second."""
_MIXED_STATE_BYTES = 14
_GPT = f"{GPTConfig.__module__}.{GPTConfig.__qualname__}"
_HUGGING_FACE = "moe_lightning.models.huggingface.module.HuggingFaceConfig"


Build = Callable[[], nn.Module]
"""Makes a model on the meta device, with experts that wait for their slots."""


class DescribedModel(NamedTuple):
    """A model as the planner sees it.

    Attributes:
        build: makes it.
        sizes: of the transformer.
        vocab_size: logits of a token.
        is_pretrained: of Hugging Face.
        adapted: makes it with adapters in its place; None: it has some, or can have none.
    """

    build: Build
    sizes: TransformerSizes
    vocab_size: int
    is_pretrained: bool = False
    adapted: Build | None = None


@lru_cache(maxsize=32)
def _plain_workload(model: DescribedModel, precision: str) -> Workload:
    stored, computed = PRECISIONS[precision]
    return model_workload(
        model.build(),
        model.sizes,
        global_batch=1,
        activation_bytes=(computed or stored).itemsize,
        state_bytes=_MIXED_STATE_BYTES if computed else (1 + MOMENTS["adamw"]) * stored.itemsize,
    )


@lru_cache(maxsize=32)
def _footprint(model: DescribedModel, training: TrainingShape) -> Footprint | None:
    """None: the model does not run on tensors without memory, so its closed form has to do."""
    try:
        return count_footprint(model.build(), training)
    except Exception:  # of transformers' code, which may read values
        if model.is_pretrained:
            return None
        raise


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run as far as its memory and speed depend on it.

    Attributes:
        model: that is trained.
        training: precision, optimizer and recomputation.
        mesh: over which the model lies.
        global_batch: samples of a step.
        slots: of a rank, for each MoE layer; None: as many as `replicas` need.
        replicas: of each expert.
        num_ranks, ranks_per_node: of the world.
        has_snapshots: checkpoints are copied into buffers that share the ranks' memory.
        offloads: moments of dense parameters are in the memory of the host, and updated there.
        counts: the memory of activations is counted on the model, which is built for it; False: by a closed form.
    """

    model: DescribedModel
    training: TrainingShape
    mesh: MeshSpec
    global_batch: int
    slots: int | None
    replicas: int
    num_ranks: int
    ranks_per_node: int
    has_snapshots: bool = False
    offloads: bool = False
    counts: bool = True

    @property
    def plain_workload(self) -> Workload:
        """The workload with its memory in closed form."""
        return replace(_plain_workload(self.model, self.training.precision), global_batch=self.global_batch)

    @property
    def workload(self) -> Workload:
        """The workload with its memory counted."""
        return replace(self.plain_workload, footprint=_footprint(self.model, self.training) if self.counts else None)

    @property
    def stage_slots(self) -> int:
        """Slots of a rank for each MoE layer."""
        experts, ranks = self.plain_workload.num_experts, max(1, self.num_ranks // self.mesh.pp)
        return min(experts, self.slots or uniform_slots(experts, ranks, self.replicas))

    def memory(self) -> RankMemory:
        """Return the memory of the rank with most samples."""
        work = self.workload
        if self.offloads:
            footprint = footprint_of(work)
            on_device = replace(footprint, dense=footprint.dense._replace(optimizer=0.0), dense_update=0.0)
            work = replace(work, footprint=on_device)
        slices = self.num_ranks / self.mesh.unit
        micro_batches = self.mesh.micro_batches_of(self.global_batch / slices)
        samples = -(-self.global_batch // (slices * micro_batches)) * slices * micro_batches
        memory = rank_memory(
            replace(work, global_batch=round(samples)),
            self.mesh,
            self.num_ranks,
            slots=self.stage_slots,
            ranks_per_node=self.ranks_per_node,
        )
        if not self.has_snapshots:
            return memory
        dense, expert = footprint_of(work).dense, footprint_of(work).expert
        state = (dense.weight + dense.optimizer) * work.dense_params
        state += (expert.weight + expert.optimizer) * (work.parameters - work.dense_params)
        return replace(memory, snapshots=_SNAPSHOT_BUFFERS * state / self.num_ranks)


def planned_run(config: Mapping[str, Any], num_ranks: int, ranks_per_node: int) -> PlannedRun | None:
    """Return a run as the planner sees it; None for models, precisions and shardings that it does not know.

    Args:
        config: of moe-train, resolved.
        num_ranks, ranks_per_node: of the world.

    Raises:
        ConfigurationError: a model or mesh that cannot be.
    """
    model, trainer, strategy = config["module"].get("config"), config["trainer"], config["strategy"]
    target = model.get(TARGET) if isinstance(model, Mapping) else None
    precision, name = str(trainer.get("precision")), config["optimizer"].get("name")
    dense = strategy.get("dense", "ddp")
    if target not in (_GPT, _HUGGING_FACE) or precision not in PRECISIONS or name not in MOMENTS or dense not in DENSE:
        return None
    described = _gpt(model, config["data"]) if target == _GPT else _pretrained(model)
    if described is None:
        return None
    axes = {axis: size for axis, size in (strategy.get("mesh") or {}).items() if axis in ("pp", "cp", "tp")}
    pp = axes.get("pp", 1)
    micro_batches = trainer.get("accumulate_grad_batches", 1)
    if pp > 1:
        micro_batches *= strategy.get("micro_batches") or MICRO_BATCHES_PER_RANK * pp
    recovery = config["callbacks"].get("fault_recovery") or {}
    groups = max(1, num_ranks // (strategy.get("ep_size") or num_ranks))
    on_cpu = is_on_cpu(trainer)
    mesh = MeshSpec(
        **axes,
        dense=dense,
        shard_size=strategy.get("shard_size"),
        micro_batches=micro_batches,
        chunks=STAGES_PER_RANK[strategy.get("schedule", "1f1b")] if pp > 1 else 1,
        recompute=bool(model.get("gradient_checkpointing")),
    )
    mesh.shape(num_ranks)
    return PlannedRun(
        model=described,
        training=TrainingShape(
            context_length=described.sizes.context_length,
            vocab_size=described.vocab_size,
            precision=precision,
            optimizer=name,
            recomputes=bool(config["callbacks"].get("recompute_dense")),
            averages=any(_averages_weights(one, key) for key, one in config["callbacks"].items() if one),
            on_cpu=on_cpu,
            num_ranks=num_ranks,
        ),
        mesh=mesh,
        global_batch=config["data"].get("global_batch_size") or num_ranks,
        slots=strategy.get("slots"),
        replicas=strategy.get("replicas") or recovery.get("min_replicas") or groups,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        has_snapshots=on_cpu and bool(config["callbacks"].get("partial_experts_checkpoint")),
        offloads=not on_cpu and bool(strategy.get("offload_optimizer")),
    )


def _averages_weights(callback: Mapping[str, Any], key: str) -> bool:
    kind = located(callback.get(TARGET), f"callbacks.{key}")
    return isinstance(kind, type) and issubclass(kind, WeightAveraging)


def _gpt(model: Mapping[str, Any], data: Mapping[str, Any]) -> DescribedModel | None:
    vocab_size = model.get("vocab_size", "auto")
    if vocab_size == "auto":
        vocab_size = _vocab_size(data)
    gpt = build_object({**model, "vocab_size": vocab_size}, "model")
    assert isinstance(gpt, GPTConfig)
    if not gpt.num_experts:
        return None

    def build() -> nn.Module:
        with torch.device("meta"), deferred_experts():
            return GPT(gpt)

    sizes = TransformerSizes.of_gpt(gpt)
    return DescribedModel(
        build, replace(sizes, context_length=data.get("context_length") or sizes.context_length), vocab_size
    )


def _pretrained(model: Mapping[str, Any]) -> DescribedModel | None:
    from moe_lightning.models.huggingface.loading import build_skeleton
    from moe_lightning.models.huggingface.module import attention_width
    from moe_lightning.moe.adapters import AdapterConfig, adapt_dense

    described = build_object(model, "model")
    if described.upcycling is not None:
        return None
    config = described.architecture().config

    def build(adapter: AdapterConfig | None) -> nn.Module:
        skeleton = build_skeleton(described.architecture(), adapter)
        if adapter is not None:
            with torch.device("meta"):
                adapt_dense(skeleton, adapter)
        return _Logits(skeleton)

    heads = config.num_attention_heads
    sizes = TransformerSizes(
        d_model=config.hidden_size,
        depth=config.num_hidden_layers,
        context_length=described.context_length,
        attention_width=attention_width(config) or 0,
        num_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        embedding_params=config.vocab_size * config.hidden_size,
        tied=bool(config.tie_word_embeddings),
    )
    adapted = partial(build, AdapterConfig(kind="qlora")) if described.adapter is None else None
    return DescribedModel(partial(build, described.adapter), sizes, config.vocab_size, True, adapted)


class _Logits(nn.Module):
    """A model of transformers that is called with token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def _vocab_size(data: Mapping[str, Any]) -> int:
    """Tokens of the data, or fewer where only reading them would tell."""
    sources = sources_of(data["source"], "text") if data.get("source") else ()
    tokenizer = tokenizer_of(sources, data.get("tokenizer")) or BYTES
    check_tokenizer(tokenizer)
    return int(tokenizer.removeprefix("bpe:")) if is_trained(tokenizer) else load_tokenizer(tokenizer).vocab_size


# ---------------------------------------------------------------- the check


def check_memory(config: Mapping[str, Any]) -> None:
    """Refuse a run whose ranks need more memory than is free for them.

    Args:
        config: of moe-train, with its ranks decided; what is wrong with it is told elsewhere.

    Raises:
        ConfigurationError: what it needs, what is free, and what helps.
    """
    ranks_here, refusal = ranks_of(config["trainer"]), None
    with suppress(ConfigurationError):
        run = planned_run(config, ranks_here * nodes_of(config), ranks_here)
        if run is not None:
            free = free_bytes(config["trainer"])
            process = RANK_BYTES if run.training.on_cpu else 0
            roughly = replace(run, counts=False).memory().total
            if _CERTAIN * roughly > free - process:
                is_near = roughly < _CERTAIN * (free - process)  # else nothing as large is built
                refusal = memory_refusal(replace(run, counts=is_near), free - process, process)
    if refusal is not None:
        raise ConfigurationError(refusal)


def memory_refusal(run: PlannedRun, free: float, process: float = 0.0) -> str | None:
    """Return the sentence about a run that does not fit; None for one that does.

    Args:
        free: bytes for the memory of a rank.
        process: bytes of the process itself, which are told with both.
    """
    memory = run.memory()
    if memory.total <= free:
        return None
    needs = f"this run needs {format_bytes(memory.total + process)} a rank, {format_bytes(free + process)} are free"
    cure = (
        "no setting saves enough alone: use a smaller model or model.context_length, more machines, or several of "
        "docs/memory.md"
    )
    for setting, changed in _cures(run):
        need = changed.memory().total
        if need <= free:
            cure = f"use {setting} ({format_bytes(need + process)})"
            break
    return f"{needs}: {cure}; check_memory=false starts it anyway"


def _cures(run: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    """Yield settings that save memory, those that cost least time first; the last ones change what is trained."""
    mesh, training, ranks = run.mesh, run.training, run.num_ranks
    slices = ranks // mesh.unit
    micro = mesh.micro_batches or 1
    if mesh.pp == 1:
        factor = 2
        while run.global_batch % (slices * micro * factor) == 0:
            many = replace(mesh, micro_batches=micro * factor)
            yield f"trainer.accumulate_grad_batches={micro * factor}", replace(run, mesh=many)
            factor *= 2
    if slices * mesh.cp > 1 and mesh.dense == "ddp":
        yield "strategy.dense=zero1", replace(run, mesh=replace(mesh, dense="zero1"))
    if run.model.is_pretrained and not mesh.recompute:
        yield "model.gradient_checkpointing=true", replace(run, mesh=replace(mesh, recompute=True))
    if not run.model.is_pretrained and not training.recomputes:
        setting = "callbacks=recompute or, beside others, callbacks=[OTHERS,recompute]"
        yield setting, replace(run, training=replace(training, recomputes=True))
    if slices * mesh.cp > 1 and mesh.dense in ("ddp", "zero1") and training.optimizer == "adamw":
        yield "strategy.dense=fsdp", replace(run, mesh=replace(mesh, dense="fsdp"))
    if training.precision == "32-true" and not training.on_cpu:
        yield "trainer.precision=bf16-mixed", replace(run, training=replace(training, precision="bf16-mixed"))
    if run.model.adapted is not None:
        yield "model.adapter.kind=qlora", replace(run, model=run.model._replace(build=run.model.adapted, adapted=None))
    batch = run.global_batch // 2
    while batch >= slices * micro:
        yield f"data.global_batch_size={batch}", replace(run, global_batch=batch)
        batch //= 2
