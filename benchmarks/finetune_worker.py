"""One rank of moe-bench finetune."""

from __future__ import annotations

import resource
import statistics
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.finetune import SHAPES, Options
from moe_lightning.cli.short_training import StepClock, quiet_trainer
from moe_lightning.models.gpt_module import OptimizerConfig, SupervisedModule
from moe_lightning.models.huggingface.architecture import SparseArchitecture
from moe_lightning.models.huggingface.loading import new_model, recompute_activations, transformers
from moe_lightning.moe.adapters import AdapterConfig
from moe_lightning.moe.experts import experts_are_deferred
from moe_lightning.moe.losses import mean_over_targets
from moe_lightning.strategies import ExpertParallelStrategy

_LR = 1e-3


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Train one contender; what this rank saw."""
    contender = settings.pop("contender")
    options = Options(**settings)
    pl.seed_everything(0, verbose=False)
    losses, step_s = _peft(options) if contender == "peft" else _ours(options, contender)
    return {
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "step_s": statistics.median(step_s[1:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _config(options: Options) -> Any:
    values = SHAPES[options.shape] | {"max_position_embeddings": options.context, "norm_topk_prob": False}
    return transformers().OlmoeConfig(**values, pad_token_id=None, eos_token_id=None, use_cache=False)


def _batches(options: Options) -> TensorDataset:
    """The same sequences at every step, so that the loss falls."""
    vocabulary = SHAPES[options.shape]["vocab_size"]
    ids = torch.randint(vocabulary, (options.batch, options.context + 1), generator=torch.Generator().manual_seed(1))
    ids = ids.repeat(options.steps + 1, 1)
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def _pool_rows(pool: Tensor, shapes: dict[str, torch.Size], expert: int) -> dict[str, Tensor]:
    """Rows out of a pool of random numbers: drawing billions of them would take longer than training."""
    return {
        name: pool.roll(97 * expert + index).repeat(-(-shape.numel() // pool.numel()))[: shape.numel()].view(shape)
        for index, (name, shape) in enumerate(shapes.items())
    }


class _Finetuned(SupervisedModule):
    """An OLMoE of random weights with adapters."""

    def __init__(self, options: Options, kind: Any) -> None:
        super().__init__()
        self._options, self._adapter = options, AdapterConfig(kind=kind, rank=options.rank, alpha=2.0 * options.rank)
        self.optimizer_config = OptimizerConfig(lr=_LR, warmup_steps=0, decay="constant", weight_decay=0.0)

    @override
    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        assert experts_are_deferred()
        architecture = SparseArchitecture(_config(self._options))
        self.model = new_model(architecture, self._adapter)
        pool = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(2))
        for layer in architecture.layers.values():
            layer.experts.source = partial(_pool_rows, pool, layer.experts.shapes)
        self.model.train()
        if self._options.shape != "small":
            recompute_activations(self.model)

    @override
    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.model(input_ids=ids_BL).logits  # type: ignore[no-any-return]


class _Losses(StepClock):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @override
    def note(self, trainer: pl.Trainer) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def _ours(options: Options, kind: str) -> tuple[list[float], list[float]]:
    seen = _Losses()
    trainer = quiet_trainer(
        ExpertParallelStrategy(check_state_every=0),
        steps=options.steps + 1,
        callbacks=[seen],
        plugins=[LightningEnvironment()],
        precision=options.precision,
        log_every_n_steps=1,
    )
    trainer.fit(_Finetuned(options, kind), DataLoader(_batches(options), options.batch))
    return seen.losses, seen.step_s


def _peft(options: Options) -> tuple[list[float], list[float]]:
    """peft on one process: its adapters on the stacked weights of experts, and a plain loop."""
    import peft

    dtype = torch.float32 if options.precision == "32-true" else torch.bfloat16
    model = transformers().AutoModelForCausalLM.from_config(_config(options), dtype=dtype)
    wanted = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=[], target_parameters=wanted, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=_LR, weight_decay=0.0)
    losses, seconds = [], []
    for inputs, targets in DataLoader(_batches(options), options.batch):
        began = time.perf_counter()
        loss = mean_over_targets(adapted(input_ids=inputs).logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
    return losses, seconds
