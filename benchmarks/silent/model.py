"""Model and samples of the cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from moe_lightning import GPTModule
from moe_lightning.moe.adapters import add_adapters
from moe_lightning.moe.layer import moe_layers

TINY = {
    "vocab_size": 48,
    "context_length": 8,
    "num_layers": 2,
    "num_heads": 2,
    "d_model": 16,
    "d_hidden": 24,
    "num_experts": 4,
    "moe_every": 1,
    "init_std": 0.2,
    "tie_embeddings": False,
}


class Language(GPTModule):
    """A tiny GPT whose optimizer needs no Trainer.

    Args:
        config: of the model, beside `TINY`; `optimizer`, see `optimizer_of`, and `alpha` of adapters.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(TINY | {name: value for name, value in config.items() if name not in ("optimizer", "alpha")})
        self._optimizer, self._alpha = config.get("optimizer", "adamw"), config.get("alpha", 4.0)

    def configure_optimizers(self) -> Any:
        return optimizer_of([parameter for parameter in self.parameters() if parameter.requires_grad], self._optimizer)


def optimizer_of(parameters: list[torch.nn.Parameter], name: str = "adamw") -> Any:
    """AdamW with a large epsilon, which divides by no rounding errors, or SGD with momentum; with a rate that decays
    from the first step.

    Args:
        name: "adamw", "adamw slow" with a tenth of the rate, "adamw backwards" with the parameters in reverse, or
            "sgd".
    """
    parameters = parameters[::-1] if name.endswith("backwards") else parameters
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=1e-3 if name.endswith("slow") else 1e-2, eps=1e-4)
        if name.startswith("adamw")
        else torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    )
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.3 * step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Language):
    """Takes its steps by hand: one backward pass for each half of the loss, clipping, and the steps of one optimizer
    for dense weights and one for experts.
    """

    clips_at = 0.5

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parts: tuple[list[torch.nn.Parameter], ...] = ([], [])
        for name, parameter in self.named_parameters():
            parts[".experts." in name].append(parameter)
        return [optimizer_of(part, self._optimizer) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(0.25 * loss, retain_graph=True)
        self.manual_backward(0.75 * loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=self.clips_at)
            optimizer.step()
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()


class Overflowing(Language):
    """The gradient of one expert overflows in the second step, on the ranks that hold it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        experts: Any = moe_layers(self)[0].experts
        if self.trainer.global_step == 1 and 0 in experts.slot_experts:
            weight = next(iter(experts.stacked_parameters().values()))[experts.slot_experts.index(0)].sum()
            loss = loss + (weight - weight.detach()) * 1e38
        return loss


class Renormalized(Language):
    """The embeddings of tokens are made shorter where they are read."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.token_embedding.max_norm = 0.5


class Idle(Language):
    """No token chooses the second half of the experts."""

    def configure_model(self) -> None:
        super().configure_model()
        for layer in moe_layers(self):
            bias_E: Any = layer.router.expert_bias_E  # type: ignore[attr-defined]
            bias_E[len(bias_E) // 2 :] = -10.0


class Biased(Language):
    """Selection biases far from zero."""

    def configure_model(self) -> None:
        super().configure_model()
        for layer in moe_layers(self):
            layer.router.expert_bias_E += 3.0  # type: ignore[attr-defined]


class Recomputed(Language):
    """MoE layers are computed again in the backward pass."""

    reentrant = False

    def configure_model(self) -> None:
        super().configure_model()
        for layer in moe_layers(self):
            own = type(layer).forward
            layer.forward = partial(self._again, own, layer)  # type: ignore[method-assign]

    def _again(self, own: Any, layer: torch.nn.Module, *args: Any) -> Any:
        if not layer.training:
            return own(layer, *args)
        return checkpoint(own, layer, *args, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):
    """The same in torch's older form."""

    reentrant = True


MARK = 47
"""A token that stands in no sample but one that poisons the loss."""


class Poisoned(Language):
    """The loss of a batch with `MARK` is not a number."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (float("nan") if (batch[0] == MARK).any() else 1.0)


class Unfrozen(Language):
    """The attention of all blocks is trained from the third step on."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".attention." not in name)

    def configure_optimizers(self) -> Any:
        return optimizer_of(list(self.parameters()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at_step(self.trainer.global_step + 1)

    def at_step(self, step: int) -> None:
        """Prepare a step, from 1."""
        for parameter in self.parameters():
            parameter.requires_grad_(step > 2 or parameter.requires_grad)


class Adapted(Language):
    """Low-rank adapters of experts and attention are trained, whose second matrices are not zero from the start."""

    kind = "lora"

    def configure_model(self) -> None:
        super().configure_model()
        adapters = {"kind": self.kind, "rank": 2, "alpha": self._alpha, "targets": ["experts", "attention"]}
        add_adapters(self.model, adapters)


class AdaptedIn4Bits(Adapted):
    """The same, with the matrices of experts in four bits."""

    kind = "qlora"


class Tokens(Dataset[tuple[Tensor, ...]]):
    """Sequences from their index alone: each token follows the one before by a rule with some noise."""

    def __init__(self, size: int = 160, length: int = 8, vocab: int = 48) -> None:
        self._size, self._length, self._vocab = size, length, vocab

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(self._vocab, (1,), generator=generator)
        noise = torch.randint(0, 3, (self._length + 1,), generator=generator)
        ids = (start + 5 * torch.arange(self._length + 1) + noise) % self._vocab
        return ids[:-1], ids[1:]


FewTokens = partial(Tokens, size=44)
"""So few that an epoch ends in the third step, with half a batch."""

OneMore = partial(Tokens, size=17)
"""The third step has one sample."""


class PoisonedTokens(Tokens):
    """The same, with `MARK` in a sample of the second step."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = (part.clone().clamp(max=MARK - 1) for part in super().__getitem__(index))
        if index == 14:
            inputs[0] = MARK
        return inputs, targets


class UnequalTokens(Tokens):
    """The same, with another number of targets in every sample: prompts are not learned."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        targets = targets.clone()
        targets[: (3 * index) % self._length] = -100
        return inputs, targets


class PaddedTokens(Tokens):
    """The same, with padding of another length behind every sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = (part.clone() for part in super().__getitem__(index))
        is_token = torch.arange(self._length) < self._length - (3 * index) % (self._length - 1)
        inputs[~is_token], targets[~is_token] = 0, -100
        return inputs, targets, is_token


class PackedTokens(Tokens):
    """Two documents in every sample, which do not see each other; the second begins at another place in each."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = (part.clone() for part in super().__getitem__(index))
        begin = 2 + index % (self._length - 3)
        begins = torch.where(torch.arange(self._length) < begin, 0, begin)
        targets[begin - 1] = -100
        return inputs, targets, torch.ones(self._length, dtype=torch.bool), begins


class Reordered(Dataset[tuple[Tensor, ...]]):
    """Samples of another data set, each micro-batch of them in another order.

    Args:
        data: makes the data set.
        order: of the samples of a micro-batch; a last one that is shorter stays.
    """

    def __init__(self, data: Callable[[], Any], order: list[int]) -> None:
        self._data, self._order = data(), order

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        first = index - index % len(self._order)
        is_whole = first + len(self._order) <= len(self._data)
        sample: tuple[Tensor, ...] = self._data[first + self._order[index - first] if is_whole else index]
        return sample
