"""Bugs of expert-parallel trainers, put into real runs on two ranks, and what the doctor must name of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from moe_lightning.compat import private_lightning
from moe_lightning.moe.layer import moe_layers

REPLICATED = {"replicas": 2}
STAGED = {"strategy": {"mesh": {"pp": 2}}, "model": {"tie_embeddings": False}}


class Seed(pl.Callback):
    """Does harm on the ranks, at the moments of the run that it is given; stands before the doctor."""

    def __init__(
        self,
        at_start: Callable[[pl.Trainer, Any, int], object] | None = None,
        at_batch: Callable[[pl.Trainer, Any, int, Any], object] | None = None,
        at_gradients: Callable[[pl.Trainer, Any, int], object] | None = None,
        at_end: Callable[[pl.Trainer, Any, int], object] | None = None,
    ) -> None:
        self._at_start, self._at_batch, self._at_gradients, self._at_end = at_start, at_batch, at_gradients, at_end

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._at_start:
            self._at_start(trainer, pl_module, trainer.global_rank)
        if self._at_gradients:
            self._after_backward(trainer, pl_module, self._at_gradients)

    @staticmethod
    def _after_backward(trainer: pl.Trainer, pl_module: Any, change: Callable[[pl.Trainer, Any, int], object]) -> None:
        """Change gradients as a backward pass would: what a hook of Lightning's changes is compared between ranks."""
        own = trainer.strategy.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            loss = own(*args, **kwargs)
            if not private_lightning.is_accumulating(trainer):
                change(trainer, pl_module, trainer.global_rank)
            return loss

        trainer.strategy.backward = backward

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._at_batch:
            self._at_batch(trainer, pl_module, trainer.global_rank, batch)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self._at_end:
            self._at_end(trainer, pl_module, trainer.global_rank)


@dataclass(frozen=True)
class SeededBug:
    """One bug.

    Attributes:
        seed: what makes the callback that does it.
        kind, name: of the first thing that parts; part of its name.
        words: of the likely cause, or of what differs.
        step: in which it first does harm.
        options: of the training.
    """

    seed: Callable[[], Seed]
    kind: str
    name: str
    words: str = ""
    step: int = 1
    options: dict[str, Any] = field(default_factory=lambda: {"strategy": REPLICATED})


def _expert_gradients(trainer: pl.Trainer) -> list[Tensor]:
    return [p.grad for p in trainer.strategy.experts.stack_of if p.grad is not None]  # type: ignore[attr-defined]


def _around_replica_sum(
    before: Callable[[pl.Trainer, int], object] | None = None,
    after: Callable[[pl.Trainer, int], object] | None = None,
    *,
    skip: bool = False,
) -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        experts: Any = trainer.strategy.experts  # type: ignore[attr-defined]
        own = experts.sum_replica_gradients

        def wrong() -> None:
            if before:
                before(trainer, rank)
            if not skip:
                own()
            if after:
                after(trainer, rank)

        experts.sum_replica_gradients = wrong

    return Seed(at_start=install)


def _lost_replica() -> Seed:
    return _around_replica_sum(
        before=lambda trainer, rank: [g.zero_() for g in _expert_gradients(trainer)] if rank == 1 else None
    )


def _not_renormalised() -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        router: Any = moe_layers(module)[1].router
        router.config = dataclasses.replace(router.config, normalize_top_k=False)

    return Seed(at_start=install)


def _output_of(find: Callable[[Any], nn.Module], change: Callable[[Any], Any], *ranks: int) -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        if not ranks or rank in ranks:
            find(module).register_forward_hook(lambda part, arguments, output: change(output))

    return Seed(at_start=install)


def _unsummed() -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        parted: Any = module.model.blocks[1].attention.out.forward

        def own_part(part: Any, own: Any, ranks: Any, x: Tensor) -> Any:
            return ranks.own(nn.functional.linear(x, part.weight, part.bias), 1)

        parted.style = own_part

    return Seed(at_start=install)


def _first_dropped(routing: Any) -> Any:
    ids, counts = routing.expert_ids_TK.clone(), routing.tokens_per_expert_E.clone()
    counts[ids[0, 0]] -= 1
    ids[0, 0] = -1
    return dataclasses.replace(routing, expert_ids_TK=ids, tokens_per_expert_E=counts)


def _other_order(trainer: pl.Trainer, module: Any, rank: int, batch: Any) -> None:
    if rank == 1:
        for leaf in batch:
            leaf.copy_(leaf.flip(0))


def _own_norms() -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        precision: Any = trainer.strategy.precision_plugin
        precision.clip_grad_by_norm = lambda optimizer, most: clip(module, most)

    @torch.no_grad()
    def clip(module: Any, most: float) -> None:  # torch's own function takes the norm of the whole model here
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((most / (norm + 1e-6)).clamp_max(1.0))

    return Seed(at_start=install)


def _of_group(group: int, **factors: float) -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        settings = trainer.optimizers[0].param_groups[group]
        settings.update({name: settings[name] * factor for name, factor in factors.items()})

    return Seed(at_start=install)


def _skipped_expert() -> Seed:
    kept: list[Tensor] = []

    def rows(module: Any) -> list[Tensor]:
        experts = moe_layers(module)[0].experts
        slot = experts.slot_experts.index(2)
        return [p.data[slot] for p in experts.stacked_parameters().values()]

    def keep(trainer: pl.Trainer, module: Any, rank: int) -> None:
        kept[:] = [row.clone() for row in rows(module)]

    def undo(trainer: pl.Trainer, module: Any, rank: int) -> None:
        for row, before in zip(rows(module), kept, strict=True):
            row.copy_(before)

    return Seed(at_gradients=keep, at_end=undo)


def _stale_replica(trainer: pl.Trainer, module: Any, rank: int, batch: Any) -> None:
    if rank == 1 and trainer.global_step == 1:
        next(iter(moe_layers(module)[1].experts.stacked_parameters().values())).data[3].add_(0.001)


def _dropout_on_one(trainer: pl.Trainer, module: Any, rank: int) -> None:
    module.model.blocks[0].dropout.p = 0.2 if rank == 1 else 0.0


def _part_of_embedding(trainer: pl.Trainer, module: Any, rank: int) -> None:
    if rank == 1:
        module.model.token_embedding.weight.grad.mul_(0.5)


def _heavier_last_micro(trainer: pl.Trainer, module: Any, rank: int) -> None:
    steps: Any = trainer.strategy.steps
    own = steps.share
    steps.share = lambda: own() * (2 if steps.batch.micro == steps.batch.num_micros - 1 else 1)


def _flip_head(trainer: pl.Trainer, module: Any, rank: int) -> None:
    module.model.norm.weight.grad.neg_()


def _bias_by_own_counts(trainer: pl.Trainer, module: Any, rank: int) -> None:
    router: Any = moe_layers(module)[0].router
    own = router.count_for_bias
    router.count_for_bias = lambda counts_E: own(counts_E.flip(0) if rank else counts_E)


def _choose_first_half(trainer: pl.Trainer, module: Any, rank: int) -> None:
    for layer in moe_layers(module):
        layer.router.expert_bias_E[3:] = -10.0  # type: ignore[index, operator]


def _idle_left_out(trainer: pl.Trainer, module: Any, rank: int) -> None:
    for stack in trainer.strategy.experts.stack_of if trainer.global_step else ():  # type: ignore[attr-defined]
        if stack.grad is not None and not stack.grad.any():
            stack.grad = None


BIASED = {"model": {"router": {"bias_update_rate": 0.01}}}

BUGS: dict[str, SeededBug] = {
    "one_replica_lost": SeededBug(_lost_replica, "gradient", "experts", "parts of some ranks"),
    "weights_not_renormalised": SeededBug(_not_renormalised, "activation", "1.feed_forward.router.weights"),
    "combined_in_wrong_order": SeededBug(
        lambda: _output_of(lambda m: moe_layers(m)[0].experts, lambda rows: rows.roll(1, 0)),
        "activation",
        "blocks.0.feed_forward",
    ),
    "dropped_token": SeededBug(
        lambda: _output_of(lambda m: moe_layers(m)[1].router, _first_dropped, 1),  # type: ignore[return-value]
        "activation",
        "1.feed_forward.router.expert_ids",
        "rank 1",
    ),
    "other_order_on_one_rank": SeededBug(lambda: Seed(at_batch=_other_order), "inputs", "input 0", "rank 1"),
    "norm_of_one_rank": SeededBug(
        _own_norms, "clipped gradient", "", "whole model", options={"trainer": {"gradient_clip_val": 0.1}}
    ),
    "learning_rate_of_a_group": SeededBug(lambda: _of_group(1, lr=10.0), "update", "norm", "10 times"),
    "expert_left_out": SeededBug(_skipped_expert, "update", "expert 2", "leaves it out"),
    "stale_replica": SeededBug(lambda: Seed(at_batch=_stale_replica), "weights", "expert 3", "ranks 0 and 1", step=2),
    "dropout_on_one_rank": SeededBug(lambda: Seed(at_start=_dropout_on_one), "activation", "0.dropout", "rank 1"),
    "embedding_not_summed": SeededBug(
        lambda: Seed(at_gradients=_part_of_embedding), "gradient", "token_embedding", "sum"
    ),
    "bf16_in_a_layer": SeededBug(
        lambda: _output_of(lambda m: m.model.blocks[0].attention.qkv, lambda y: y.to(torch.bfloat16).float()),
        "activation",
        "0.attention.qkv",
        "precision",
    ),
    "rows_not_summed": SeededBug(
        _unsummed, "activation", "1.attention.out", "a sum over ranks", options={"strategy": {"mesh": {"tp": 2}}}
    ),
    "scaled_stage": SeededBug(
        lambda: _output_of(lambda m: m.model.blocks[1], lambda y: 1.01 * y, 1),
        "activation",
        "blocks.1 ",
        options=STAGED,
    ),
    "loss_of_a_stage": SeededBug(
        lambda: Seed(at_start=_heavier_last_micro), "loss", "", "the mean over", options=STAGED
    ),
    "bias_by_own_counts": SeededBug(
        lambda: Seed(at_start=_bias_by_own_counts),
        "counted tokens",
        "0.feed_forward.router",
        "ranks 0 and 1",
        options=BIASED,
    ),
    "idle_experts_left_out": SeededBug(
        lambda: Seed(at_start=_choose_first_half, at_gradients=_idle_left_out),
        "update",
        "experts",
        "leaves it out",
        step=2,
        options=BIASED,
    ),
    "sign": SeededBug(lambda: Seed(at_gradients=_flip_head), "gradient", "model.norm.weight", "sign"),
}


# ---------------------------------------------------------------------- in the user's module and callbacks


def _at_start(change: Callable[[Any, int], object]) -> Callable[[], Seed]:
    """Return a seed that changes the module of a rank before the first step."""
    return lambda: Seed(at_start=lambda trainer, module, rank: change(module, rank))


def _at_gradients(change: Callable[[Any, int], object]) -> Callable[[], Seed]:
    """Return a seed that changes gradients of a rank, as hooks of the user's do."""
    return lambda: Seed(at_gradients=lambda trainer, module, rank: change(module, rank))


def _after_step(step: int, change: Callable[[pl.Trainer, Any, int], object]) -> Callable[[], Seed]:
    """Return a seed that changes a rank at the end of a step."""
    return lambda: Seed(
        at_end=lambda trainer, module, rank: trainer.global_step == step and change(trainer, module, rank)
    )


def _output(path: str, change: Callable[[Any], Any], *ranks: int) -> Callable[[], Seed]:
    """Return a seed that changes the output of a part of the model."""
    return lambda: _output_of(lambda module: module.model.get_submodule(path), change, *ranks)


def _loss(change: Callable[[Tensor, int], Tensor]) -> Callable[[], Seed]:
    """Return a seed that changes the loss of the training step."""

    def install(module: Any, rank: int) -> None:
        own = module.training_step
        module.training_step = lambda *args: change(own(*args), rank)

    return _at_start(install)


def _targets(change: Callable[[Tensor], Tensor], *ranks: int) -> Callable[[], Seed]:
    """Return a seed that changes the targets in the training step, behind the loader."""

    def install(module: Any, rank: int) -> None:
        own = module.training_step
        if rank in ranks:
            module.training_step = lambda batch, *index: own((batch[0], change(batch[1])), *index)

    return _at_start(install)


def _group(settings: Callable[[dict[str, Any]], dict[str, Any]], group: int, *ranks: int) -> Callable[[], Seed]:
    """Return a seed that changes settings of a group of parameters."""

    def change(trainer: pl.Trainer, module: Any, rank: int) -> None:
        if not ranks or rank in ranks:
            found = trainer.optimizers[0].param_groups[group]
            found.update(settings(found))

    return lambda: Seed(at_start=change)


def _transposed_gradient(module: Any, rank: int) -> None:
    gradient = module.model.blocks[0].attention.out.weight.grad
    gradient.copy_(gradient.T.clone())


def _accumulated() -> Seed:
    """Gradients of a step are not set to zero before the next one."""
    kept: dict[str, Tensor] = {}

    def add(trainer: pl.Trainer, module: Any, rank: int) -> None:
        for name, parameter in module.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.add_(kept.get(name, torch.zeros(())))
                kept[name] = parameter.grad.clone()

    return Seed(at_gradients=add)


def _moments(change: Callable[[Tensor], object], *ranks: int) -> Callable[[pl.Trainer, Any, int], None]:
    def wrong(trainer: pl.Trainer, module: Any, rank: int) -> None:
        for state in trainer.optimizers[0].state.values():
            if not ranks or rank in ranks:
                change(state["exp_avg"])

    return wrong


def _noisy_router(module: Any, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    moe_layers(module)[0].router.register_forward_pre_hook(
        lambda part, arguments: (
            arguments[0] + 0.1 * torch.randn(arguments[0].shape, generator=generator),
            *arguments[1:],
        )
    )


def _clipped_twice() -> Seed:
    def install(trainer: pl.Trainer, module: Any, rank: int) -> None:
        precision: Any = trainer.strategy.precision_plugin
        own = precision.clip_grad_by_norm
        precision.clip_grad_by_norm = lambda optimizer, most: own(optimizer, most / 2)

    return Seed(at_start=install)


USERS: dict[str, SeededBug] = {
    "loss_times_ranks": SeededBug(_loss(lambda loss, rank: 2 * loss), "loss", "", "2 times that: all layers are"),
    "loss_of_one_rank": SeededBug(_loss(lambda loss, rank: loss * (1 + rank)), "loss", "", "a weight"),
    "penalty_on_one_rank": SeededBug(_loss(lambda loss, rank: loss + 0.1 * rank), "loss", "", "an auxiliary loss"),
    "targets_shifted_on_a_rank": SeededBug(_targets(lambda y: y.roll(1, 1), 1), "loss", "", "all layers are the same"),
    "block_detached": SeededBug(
        _output("blocks.0.attention", lambda y: y.detach() + 0.0 * y), "gradient", "0.attention", "never arrives"
    ),
    "norm_skipped": SeededBug(
        _output("blocks.1.feed_forward_norm", lambda y: 0 * y + 1), "activation", "1.feed_forward_norm", "layer makes"
    ),
    "embedding_scaled": SeededBug(
        _output("token_embedding", lambda y: y * 32**0.5), "activation", "token_embedding", "5.657 times"
    ),
    "logits_of_a_rank_in_bf16": SeededBug(
        _output("head", lambda y: y.bfloat16().float(), 1), "activation", "model.head", "only samples of rank 1"
    ),
    "noise_by_rank": SeededBug(_at_start(_noisy_router), "activation", "0.feed_forward.router", "layer makes"),
    "gradient_hook_on_a_rank": SeededBug(
        _at_gradients(lambda module, rank: module.model.norm.weight.grad.mul_(1 - 0.9 * rank)),
        "gradient",
        "model.norm.weight",
        "ranks 0 and 1",
    ),
    "gradient_of_a_tensor_lost": SeededBug(
        _at_gradients(lambda module, rank: setattr(module.model.blocks[0].attention.qkv.weight, "grad", None)),
        "gradient",
        "0.attention.qkv.weight",
        "never arrives",
    ),
    "gradient_transposed": SeededBug(
        _at_gradients(_transposed_gradient), "gradient", "0.attention.out.weight", "weighed otherwise"
    ),
    "gradients_not_zeroed": SeededBug(_accumulated, "gradient", "", "of the step before", step=2),
    "clipped_at_half": SeededBug(
        _clipped_twice, "clipped gradient", "", "0.5 times", options={"trainer": {"gradient_clip_val": 0.1}}
    ),
    "momentum_of_a_group": SeededBug(_group(lambda g: {"betas": (0.5, g["betas"][1])}, 0), "update", "", "betas", 2),
    "decay_of_norms": SeededBug(_group(lambda g: {"weight_decay": 0.5}, 1), "update", "norm", "weight decay"),
    "moments_lost": SeededBug(_after_step(1, _moments(torch.Tensor.zero_)), "update", "", "moments", 2),
    "moments_in_bf16": SeededBug(
        _after_step(1, _moments(lambda moment: moment.copy_(moment.bfloat16()))), "update", "", "moments", 2
    ),
    "moments_of_a_rank": SeededBug(
        _after_step(1, _moments(lambda moment: moment.mul_(0.5), 1)), "update", "", "ranks 0 and 1", 2
    ),
    "updated_twice": SeededBug(
        _after_step(1, lambda trainer, module, rank: trainer.optimizers[0].step()), "update", "", "times the step"
    ),
    "tokens_masked_on_a_rank": SeededBug(
        lambda: Seed(at_batch=lambda trainer, module, rank, batch: rank and batch[0][:, ::4].zero_()),
        "inputs",
        "input 0",
        "rank 1",
    ),
}

BUGS |= USERS
