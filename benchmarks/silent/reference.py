"""The same training in plain PyTorch: a loop over batches, experts one after the other, no ranks, no Trainer."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.silent.case import Training
from benchmarks.silent.comparison import Run, Snapshot
from benchmarks.silent.model import Language
from moe_lightning import MoELayer
from moe_lightning.models import gpt_module
from moe_lightning.moe.layer import moe_layers


class PlainMoE(MoELayer):
    """The parameters of an MoELayer, computed as the papers write it: no dispatch, no kernels, no reuse of memory.

    Attributes:
        counts_E: assignments of tokens since the last update of the selection bias.
        gap: least difference, since then, between scores of which one was chosen and the other not.
    """

    counts_E: Tensor
    gap = math.inf

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        router: Any = self.router
        config, experts = router.config, self.experts
        x_TD = x.reshape(-1, x.shape[-1])
        is_token_T = torch.ones(len(x_TD), dtype=torch.bool) if is_token is None else is_token.reshape(-1)
        dtype = torch.promote_types(router.weight.dtype, torch.float32)
        with torch.autocast("cpu", enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), router.weight.to(dtype))
            scores_TE = logits_TE.softmax(-1) if config.score == "softmax" else logits_TE.sigmoid()
            bias_E = getattr(router, "expert_bias_E", torch.zeros(self.num_experts))
            best = (scores_TE.detach() + bias_E).sort(dim=-1, descending=True)
            ids_TK = best.indices[:, : config.top_k]
            if config.top_k < self.num_experts and self.training and bool(is_token_T.any()):
                gaps_T = best.values[:, config.top_k - 1] - best.values[:, config.top_k]
                self.gap = min(self.gap, float(gaps_T[is_token_T].min()))
            weights_TK = scores_TE.gather(-1, ids_TK)
            if config.normalize_top_k and config.top_k > 1:  # else the router would learn nothing
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            weights_TK = weights_TK * config.scale
        out_TD = x_TD.new_zeros(x_TD.shape)
        counts = []
        for expert in range(self.num_experts):
            rows, choices = torch.where((ids_TK == expert) & is_token_T.unsqueeze(1))
            counts.append(len(rows))
            y = expert_of(experts, expert, x_TD[rows])
            out_TD = out_TD.index_add(0, rows, (y * weights_TK[rows, choices, None].to(y.dtype)).to(out_TD.dtype))
        if self.training:
            self._add_losses(logits_TE[is_token_T], scores_TE[is_token_T], torch.tensor(counts))
        if self.shared_expert is not None:
            out_TD = out_TD + self.shared_expert(x_TD)
        return out_TD.view(x.shape)

    def _add_losses(self, logits_TE: Tensor, scores_TE: Tensor, counts_E: Tensor) -> None:
        config = self.router.config
        self.counts_E = getattr(self, "counts_E", 0) + counts_E
        shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        balance = self.num_experts * (counts_E / counts_E.sum() * shares_TE.mean(0)).sum()
        z_loss = logits_TE.logsumexp(-1).square().mean()
        self.auxiliary_loss = config.aux_loss_coef * balance + config.z_loss_coef * z_loss

    def update(self) -> None:
        """Move the selection bias by the counts of a step."""
        router: Any = self.router
        if router.config.bias_update_rate:
            counts_E = self.counts_E.float()
            router.expert_bias_E += router.config.bias_update_rate * torch.sign(counts_E.mean() - counts_E)
        self.counts_E, self.gap = torch.zeros(self.num_experts), math.inf


def plain_mean(logits: Tensor, targets: Tensor, ranks: object = None) -> Tensor:
    """The mean cross-entropy over targets that are not -100, in float32 or more."""
    logits_TV = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits_TV, targets.flatten(), ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)


def expert_of(experts: nn.Module, expert: int, x_MD: Tensor) -> Tensor:
    """One expert applied to rows."""
    stacks: dict[str, Tensor] = experts.stacked_parameters()  # type: ignore[operator]
    row = {name: stack[expert] for name, stack in stacks.items()}

    def product(x: Tensor, name: str) -> Tensor:
        y = x @ row[f"w_{name}"]
        if f"lora_w_{name}_a" in row:
            y = y + experts.adapter * (x @ row[f"lora_w_{name}_a"] @ row[f"lora_w_{name}_b"])  # type: ignore[operator]
        return y + row[f"b_{name}"].to(y.dtype) if f"b_{name}" in row else y

    h_MF = product(x_MD, "up")
    if experts.activation == "swiglu":
        gate, up = h_MF.chunk(2, dim=-1)
        return product(F.silu(gate) * up, "down")
    return product(F.gelu(h_MF), "down")


def build(training: Training) -> pl.LightningModule:
    """Build the module, with the first weights of every world."""
    pl.seed_everything(7, verbose=False)
    module = training.module(training.model)
    module.configure_model()
    vars(gpt_module)["mean_over_targets"] = plain_mean  # in this process, which is the reference's alone
    for layer in moe_layers(module):
        layer.__class__ = PlainMoE
        vars(layer).pop("forward", None)  # nothing is computed again here
    return module


def plain_run(training: Training, steps: int, saved_at: int, dtype: torch.dtype = torch.float32) -> Run:
    """Train for so many steps, with snapshots of the state at `saved_at` and at the end.

    Args:
        dtype: of weights and all arithmetic; the first weights are those of float32.
    """
    warnings.filterwarnings("ignore", module="lightning.pytorch.*")
    module = build(training).to(dtype)
    optimizers, schedules = optimizers_of(module)
    run = Run()
    epochs = itertools.repeat(DataLoader(training.data(), batch_size=training.batch_size))
    batches = itertools.chain.from_iterable(epochs)
    module.train()
    bf16 = "bf16" in str(training.trainer.get("precision", ""))
    for step in range(1, steps + 1):
        if hasattr(module, "at_step"):
            module.at_step(step)  # type: ignore[operator]
        micros = [next(batches) for _ in range(training.micro_batches)]
        weights = [int((micro[1] != -100).sum()) for micro in micros]
        for optimizer in optimizers:
            optimizer.zero_grad()
        step_loss = 0.0
        for micro, weight in zip(micros, weights, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss: Any = Language.training_step(module, micro, 0)  # type: ignore[arg-type]
                share = weight / sum(weights)
                (loss * share).backward()
                auxiliary = sum(
                    float(layer.auxiliary_loss.detach())
                    for layer in moe_layers(module)
                    if layer.auxiliary_loss is not None
                )
            step_loss = float(loss.detach()) - auxiliary  # as logged: of the last micro-batch
        run.losses.append(step_loss)
        run.gaps.append(min(getattr(layer, "gap", math.inf) for layer in moe_layers(module)))
        run.gradients.append(gradients_of(module) | counts_of(module))
        if not math.isfinite(step_loss):
            for schedule in schedules:
                schedule.step()
            for layer in moe_layers(module):
                layer.counts_E = torch.zeros(layer.num_experts)
            continue
        most = training.trainer.get("gradient_clip_val", getattr(module, "clips_at", None))
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if most is not None and training.trainer.get("gradient_clip_algorithm") == "value":
                nn.utils.clip_grad_value_(parameters, most)
            elif most is not None:
                norm = float(nn.utils.clip_grad_norm_(parameters, most))
                run.norms += [norm] if optimizer is optimizers[-1] else []
            optimizer.step()
            schedule.step()
        for layer in moe_layers(module):
            layer.update()  # type: ignore[operator]
        if training.validates:
            run.validations.append(validated(module, training))
        if step in (saved_at, steps):
            run.snapshots.append(snapshot_of(module, optimizers))
    return run


@torch.no_grad()
def validated(module: Any, training: Training) -> float:
    """The mean loss over all targets of the held-out samples."""
    module.eval()
    total, count = 0.0, 0
    for batch in DataLoader(training.data(), batch_size=6):
        weight = int((batch[1] != -100).sum())
        total, count = total + float(module.loss(batch)) * weight, count + weight
    module.train()
    return total / count


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, those of experts each by itself."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if ".experts." in name:
                found |= {f"{name} of expert {expert}": row.clone() for expert, row in enumerate(gradient)}
            else:
                found[name] = gradient.clone()
    return found


def counts_of(module: nn.Module) -> dict[str, Tensor]:
    """Tokens of each expert since the last update of its selection bias."""
    return {
        f"counts of {name}": layer.counts_E.float()
        for name, layer in module.named_modules()
        if isinstance(layer, PlainMoE) and layer.router.config.bias_update_rate
    }


def snapshot_of(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Snapshot:
    """The state as a checkpoint of stock Lightning has it."""
    return Snapshot.of(
        {
            "state_dict": copy.deepcopy(module.state_dict()),
            "optimizer_states": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        },
        [names_of(module, optimizer) for optimizer in optimizers],
    )


def optimizers_of(module: pl.LightningModule) -> tuple[list[Any], list[Any]]:
    """Return the module's optimizers, and their learning-rate schedules."""
    found: Any = module.configure_optimizers()
    entries = found if isinstance(found, list) else [found]
    return [entry["optimizer"] for entry in entries], [entry["lr_scheduler"]["scheduler"] for entry in entries]


def names_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of an optimizer's parameters in the order of its state."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
