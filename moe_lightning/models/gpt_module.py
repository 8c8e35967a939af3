"""GPT as a LightningModule: next-token loss, optimizer, warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from moe_lightning.compat import private_lightning
from moe_lightning.config import Coefficient, Fraction, NonNegativeInt, Probability, build_config, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPT, GPTConfig, ModelSize, model_size
from moe_lightning.models.optimizers import Adafactor, Muon, by_expert, muon_groups, parameter_groups
from moe_lightning.moe.losses import auxiliary_loss, global_mean, mean_over_targets, num_targets
from moe_lightning.parallel.sequence import ContextParallel
from moe_lightning.parallel.tensor import parted_logits


@validated
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule.

    Attributes:
        name: "adamw"; "muon": Muon for matrices, each expert's by itself, and AdamW for the rest; or "adafactor":
            factored second moments and no first ones, each expert's by itself.
        lr: peak learning rate; of Adafactor relative to the size of each tensor.
        betas, eps: of AdamW.
        weight_decay: matrices decay, biases and norms do not.
        momentum: of Muon.
        fused: of AdamW, one kernel for all tensors.
        warmup_steps: optimizer steps of linear warm-up.
        decay: "cosine" or "linear" down to min_lr_ratio * lr at the end of training, whose length then has to be known,
            or "constant".
        min_lr_ratio: final share of the peak.

    Raises:
        ConfigurationError: a value outside its range, or `fused` for another optimizer than AdamW.
    """

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    lr: Annotated[float, Interval(gt=0, le=1e3)] = 3e-4
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Annotated[float, Interval(gt=0, le=1)] = 1e-8
    weight_decay: Coefficient = 0.1
    momentum: Probability = 0.95
    fused: bool = False
    warmup_steps: NonNegativeInt = 100
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: Fraction = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.fused and self.name != "adamw":
            raise ConfigurationError(f"fused=true is for name='adamw', not {self.name!r}: drop one of them")

    def factor(self, step: int, total_steps: int) -> float:
        """Share of the peak learning rate at a step."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        shape = 0.5 * (1.0 + math.cos(math.pi * done)) if self.decay == "cosine" else 1.0 - done
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape


Batch: TypeAlias = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and targets; of padded sequences also bool [B, L], False where an input is padding; of packed ones behind that
int64 [B, L], the position at which the document of each input begins.
"""


class SupervisedModule(pl.LightningModule):
    """Trains `model` on batches (inputs, targets), (inputs, targets, is_token) or (inputs, targets, is_token, begins)
    with AdamW; the loss is the mean cross-entropy over the targets that are not -100. Where `is_token` is False an
    input is padding, which no expert gets; documents that `begins` tells apart do not see each other.

    Logs `train/loss`, `val/loss` and `test/loss`, auxiliary losses not included.

    Attributes:
        attention_width: heads times head size, summed over the layers; None where inputs are not token ids [B, L], so
            that nobody knows how many operations a batch takes.
    """

    model: Any
    optimizer_config: OptimizerConfig
    attention_width: int | None = None
    _num_tokens: Tensor | int | None = None
    _attended: Tensor | int = 0

    def logits(self, batch: Batch) -> Tensor:
        """[..., V] of a batch."""
        return self(batch[0], *batch[2:])  # type: ignore[no-any-return]

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, without auxiliary losses. Override it to train on another one."""
        with parted_logits(self.model) as ranks:
            logits = self.logits(batch)
        return mean_over_targets(logits, batch[1], ranks)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._logged_loss(batch, "train/loss") + auxiliary_loss(self.model)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._logged_loss(batch, "val/loss")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._logged_loss(batch, "test/loss")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely next token at each position, or the most likely class; int64."""
        return self.logits(batch).argmax(dim=-1)

    @property
    def flops_per_batch(self) -> int | None:
        """Floating-point operations for the tokens of this rank's part of the last batch, while training of the
        backward pass too: what Lightning's ThroughputMonitor and our Telemetry ask for. With `mesh.tp` those of all
        ranks that compute its samples. None: unknown.
        """
        if self.attention_width is None or self._num_tokens is None:
            return None
        tokens = int(self._num_tokens)
        flops = self._size.training_flops(tokens, int(self._attended) / max(1, tokens), self.attention_width)
        return flops if self.training else flops // 3

    @cached_property
    def _size(self) -> ModelSize:
        return model_size(self.model)

    def _logged_loss(self, batch: Batch, name: str) -> Tensor:
        self._num_tokens = batch[2].sum() if len(batch) > 2 else batch[0].numel()
        context, length = getattr(self.model, "context", None) or ContextParallel(), batch[0].shape[-1]
        self._attended = self._num_tokens * context.whole(length)
        if len(batch) > 3:  # the places 0 to n - 1 of a document of n tokens, doubled and one more, sum to n * n
            places = context.positions(length, batch[3])
            assert isinstance(places, Tensor)
            self._attended = ((2 * places + 1) * batch[2]).sum()
        loss, count = self.loss(batch), num_targets(batch[1])
        if self.training:
            shared = global_mean(self, loss, count)
            self.log(name, shared.detach(), prog_bar=True, sync_dist=shared is loss)  # stock strategies share nothing
            return shared
        self.log(name, loss, prog_bar=True, sync_dist=True, batch_size=int(count))
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return optimizer_with_schedule(self, self.optimizer_config)


class GPTModule(SupervisedModule):
    """Trains a GPT on batches (inputs [B, L], targets [B, L]) of token ids, (inputs, targets, is_token [B, L]) of
    padded ones, or (inputs, targets, is_token, begins [B, L]) of packed ones.

    Logs `train/loss`, `val/loss` and `test/loss`: mean cross-entropy in nats per token over the global batch,
    targets of -100 and auxiliary losses not included; `train/loss` with gradient accumulation over the last
    micro-batch of the step.

    Args:
        config: the model, as a GPTConfig or its keyword arguments.
        optimizer: the optimizer, as an OptimizerConfig or its keyword arguments.
    """

    model: GPT

    def __init__(
        self, config: GPTConfig | Mapping[str, Any], optimizer: OptimizerConfig | Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.config = build_config(GPTConfig, config)
        self.attention_width = self.config.num_layers * self.config.d_model
        self.optimizer_config = build_config(OptimizerConfig, optimizer)
        # Plain values only: a checkpoint must load without unpickling classes.
        self.save_hyperparameters({"config": asdict(self.config), "optimizer": asdict(self.optimizer_config)})

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = GPT(self.config)

    @override
    def forward(self, ids_BL: Tensor, is_token_BL: Tensor | None = None, begins_BL: Tensor | None = None) -> Tensor:
        """Logits [B, L, V]."""
        return self.model(ids_BL, is_token_BL, begins_BL)  # type: ignore[no-any-return]


def optimizer_with_schedule(module: pl.LightningModule, config: OptimizerConfig) -> OptimizerLRScheduler:
    """Return the value of a module's `configure_optimizers` for this configuration; the module must have a trainer.

    Raises:
        ConfigurationError: clipping that Lightning does not do for fused optimizers, or a decay down to an end that
            nobody knows.
    """
    optimizer, trainer = optimizer_of(module, config), module.trainer
    if config.fused and str(trainer.precision) in ("bf16-mixed", "16-mixed") and trainer.gradient_clip_val:
        raise ConfigurationError(
            f"Lightning does not clip (gradient_clip_val={trainer.gradient_clip_val}) under "
            f"precision={str(trainer.precision)!r} for optimizer.fused=true: drop one of them"
        )
    total_steps = private_lightning.steps_of_training(trainer)
    if total_steps is None and config.decay != "constant":
        raise ConfigurationError(
            f"optimizer.decay={config.decay} ends with the training, whose number of steps is unknown: give "
            "the Trainer max_steps, or use optimizer.decay=constant"
        )
    never_peaks = total_steps is not None and config.warmup_steps >= total_steps
    if never_peaks and not (trainer.fast_dev_run or trainer.overfit_batches or trainer.ckpt_path):  # type: ignore[attr-defined]
        rank_zero_warn(
            f"optimizer.warmup_steps={config.warmup_steps} is not shorter than the {total_steps} steps of this "
            f"training, so the peak optimizer.lr={config.lr} is never reached: lower warmup_steps or train longer"
        )
    schedule = WarmupAndDecay(optimizer, config, total_steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WarmupAndDecay(LambdaLR):
    """Learning-rate schedule of a configuration. A training that is resumed with another length has the rates of its
    own schedule from its first step on, and a line says so.

    Attributes:
        total_steps: optimizer steps until the decay ends, which is with the training; None for a constant rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int | None) -> None:
        self.total_steps = None if config.decay == "constant" else total_steps
        super().__init__(optimizer, lambda step: config.factor(step, total_steps or 0))

    @override
    def get_lr(self) -> list[float | Tensor]:
        self._follow_groups()
        return super().get_lr()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"total_steps": self.total_steps})
        self._follow_groups()
        shares = [share_of(self.last_epoch) for share_of in self.lr_lambdas]
        former, trained = state_dict.get("total_steps"), [n for n, rate in enumerate(self.base_lrs) if rate > 0]
        if None not in (former, self.total_steps) and former != self.total_steps and trained:
            before = self._last_lr[trained[0]] / self.base_lrs[trained[0]]
            rank_zero_warn(
                f"the learning rate decays until step {self.total_steps}, not {former} as when the checkpoint was "
                f"saved: step {self.last_epoch + 1} has {shares[trained[0]]:.3g} of the peak rate, in the former "
                f"schedule {before:.3g}"
            )
        self._last_lr = [rate * share for rate, share in zip(self.base_lrs, shares, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate  # the optimizer was restored with its former rate

    def _follow_groups(self) -> None:
        """Include groups that were added to the optimizer, as callbacks for finetuning do: their peak is the rate that
        they came with.
        """
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        self.lr_lambdas += self.lr_lambdas[:1] * (len(self.base_lrs) - len(self.lr_lambdas))


def optimizer_of(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that a configuration means for a model's parameters."""
    adam: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "muon":
        return Muon(muon_groups(model, config.weight_decay), momentum=config.momentum, **adam)
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "adafactor":
        return Adafactor(by_expert(model, groups), lr=config.lr)
    return torch.optim.AdamW(groups, fused=config.fused or None, **adam)
