"""Recorded and replayed routing: the experts of every token, in memory and on disk.

For fine-tuning on text that an inference engine generated (its router and the trainer's differ in the last digits, and
so in choices), and for comparing runs token by token. Choices are forced, weights are not: they come from the scores of
the router that trains, with their gradients.

On disk a directory of safetensors files, one for each micro-batch of a step:
`step-00000012.sample-000008.part-0-of-1.safetensors` holds `expert_ids`, integers [samples, positions, layers, K], of
the samples that follow the 8th one of the global batch of step 12, in its order; -1 in all K where the router shall
choose. Where several ranks share samples, each writes its part of their positions. A file may hold all samples of a
step, as an inference engine writes them; entries that occur twice are equal.

Shapes: B samples, L positions, T = B * L tokens, K choices, layers in the order of the model's modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_lightning.compat import private_torch
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import replacing, save_safetensors
from moe_lightning.moe.layer import moe_layers
from moe_lightning.moe.router import Router

_NAME = re.compile(r"step-(\d+)\.sample-(\d+)\.part-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True, order=True)
class TokenRange:
    """Position of a micro-batch's tokens in the global batch.

    Attributes:
        step: optimizer step; where a module optimizes manually, the number of the batch.
        first_sample: in its global batch.
        part, parts: of the positions of each sample.
    """

    step: int
    first_sample: int
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"step-{self.step:08d}.sample-{self.first_sample:06d}.part-{self.part}-of-{self.parts}.safetensors"


def write_tokens(folder: Path, tokens: TokenRange, expert_ids: Tensor) -> None:
    """Write [samples, positions, layers, K], whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / tokens.name) as staged:
        save_safetensors({"expert_ids": expert_ids.to(torch.int16).contiguous()}, staged, {"format": "pt"})


def remove_tokens(folder: Path, first_step: int) -> None:
    """Remove what is recorded of a step and of all later ones."""
    for tokens in _recorded_ranges(folder) if folder.is_dir() else ():
        if tokens.step >= first_step:
            (folder / tokens.name).unlink(missing_ok=True)


def read_samples(folder: Path, wanted: TokenRange, count: int) -> Tensor:
    """[count, positions of the part, layers, K] of as many samples, from all files that have some.

    Raises:
        ConfigurationError: the folder lacks some of it, or holds a damaged file.
    """
    recorded = sorted(tokens for tokens in _recorded_ranges(folder) if tokens.step == wanted.step)
    held: dict[int, dict[tuple[int, int], Tensor]] = {}
    last = wanted.first_sample + count
    for tokens in recorded:
        if tokens.first_sample < last:
            for at, sample in enumerate(_read(folder / tokens.name), start=tokens.first_sample):
                if wanted.first_sample <= at < last:
                    held.setdefault(at, {})[tokens.part, tokens.parts] = sample
    samples = [_whole(held.get(at, {})) for at in range(wanted.first_sample, last)]
    found = [sample for sample in samples if sample is not None]
    if len(found) < count:
        at = wanted.first_sample + samples.index(None)
        raise ConfigurationError(
            f"{folder} has no routing of sample {at} of step {wanted.step} in whole: record it with the same data, "
            "global batch and seed, or stop before that step"
        )
    if len({sample.shape for sample in found}) > 1 or any(len(sample) % wanted.parts for sample in found):
        raise ConfigurationError(
            f"{folder} holds samples of different lengths in step {wanted.step}, or such as {wanted.parts} ranks "
            "cannot share: pad them as the batches are padded"
        )
    return torch.stack([sample.chunk(wanted.parts)[wanted.part] for sample in found])


def _recorded_ranges(folder: Path) -> list[TokenRange]:
    if not folder.is_dir():
        raise ConfigurationError(f"the routing to replay, {folder}, is not a folder: give one that was recorded")
    names = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    numbers = (tuple(map(int, name.groups())) for name in names if name is not None)
    return [TokenRange(step=s, first_sample=f, part=part, parts=parts) for s, f, part, parts in numbers]


def _read(path: Path) -> Tensor:
    try:
        ids = load_file(path)["expert_ids"]
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigurationError(f"{path} holds no expert_ids, or is damaged ({error}): record it again") from error
    if ids.ndim != 4 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ConfigurationError(
            f"{path} holds expert_ids of {list(ids.shape)}, {ids.dtype}: give integers [samples, positions, layers, K]"
        )
    return ids


def _whole(parts: dict[tuple[int, int], Tensor]) -> Tensor | None:
    """A sample, from one set of parts that is complete."""
    for size in {parts_of for _, parts_of in parts}:
        if all((part, size) in parts for part in range(size)):
            return torch.cat([parts[part, size] for part in range(size)])
    return None


@dataclass
class Choices:
    """Choices of a model's routers in the forward passes of a context, the last one for each.

    Attributes:
        by_layer: int64 [T, K] of each layer.
    """

    by_layer: list[Tensor | None] = field(default_factory=list)

    def stacked(self) -> Tensor:
        """int64 [T, layers, K].

        Raises:
            ConfigurationError: a layer saw no token, or layers have unlike K.
        """
        found = [chosen for chosen in self.by_layer if chosen is not None]
        if len(found) < len(self.by_layer) or not found:
            raise ConfigurationError("not every MoE layer has routed tokens: run the model inside record_routing")
        if len({chosen.shape for chosen in found}) > 1:
            raise ConfigurationError(
                f"the MoE layers chose {[tuple(chosen.shape) for chosen in found]} experts (tokens, top_k), which no "
                "table holds: give them one top_k"
            )
        return torch.stack(found, dim=1)


@contextmanager
def record_routing(model: nn.Module) -> Generator[Choices, None, None]:
    """Keep which experts every token takes in the forward passes inside, its own choices or replayed ones.

    Raises:
        ConfigurationError: a model without MoE layers, or with a router of another kind.
    """
    routers = routers_of(model)
    choices = Choices([None] * len(routers))

    def observe(layer: int, _: Router, ids_TK: Tensor) -> None:
        if not private_torch.is_in_backward():  # a layer that is computed again belongs to an earlier pass
            choices.by_layer[layer] = ids_TK

    with observing(routers, [partial(observe, layer) for layer in range(len(routers))]):
        yield choices


@contextmanager
def replay_routing(model: nn.Module, expert_ids: Tensor) -> Generator[None, None, None]:
    """Force these experts on every token in the forward passes inside.

    The backward pass may follow outside, also with `gradient_checkpointing` of a HuggingFaceModule. Where you call
    torch.utils.checkpoint yourself, it belongs inside, because it routes the tokens again.

    Args:
        expert_ids: integers [B, L, layers, K] or [T, layers, K]; -1 in all K: the router chooses.

    Raises:
        ConfigurationError: as `record_routing`, or a table that does not fit the model or its tokens.
    """
    routers = routers_of(model)
    check_expert_ids(expert_ids, routers)
    table = expert_ids.flatten(0, -3).long()
    with choosing(routers, [forced(table[:, layer]) for layer in range(len(routers))]):
        yield


def forced(ids_TK: Tensor) -> Callable[[Router, Tensor], Tensor]:
    """A choice of these experts."""

    def choose(router: Router, scores_TE: Tensor) -> Tensor:
        if len(ids_TK) != len(scores_TE):
            raise ConfigurationError(
                f"the routing to replay has {len(ids_TK)} tokens, but the model sees {len(scores_TE)}: give the table "
                "of this batch, padding included"
            )
        ids = ids_TK.to(scores_TE.device)
        left = ids < 0
        return torch.where(left, router.choose(scores_TE), ids) if left.any() else ids

    return choose


def check_expert_ids(expert_ids: Tensor, routers: Sequence[Router]) -> None:
    """
    Raises:
        ConfigurationError: not [..., tokens, layers, K] of these routers, no experts of theirs, or one twice for a
            token.
    """
    wanted, found = (len(routers), routers[0].config.top_k), tuple(expert_ids.shape[-2:])
    if expert_ids.ndim < 3 or found != wanted:
        raise ConfigurationError(
            f"the routing to replay has the shape {list(expert_ids.shape)}, but this model needs [..., tokens, "
            f"{wanted[0]} layers, {wanted[1]} experts]: record it with the same model"
        )
    if expert_ids.is_floating_point() or expert_ids.dtype is torch.bool:
        raise ConfigurationError(f"the routing to replay is {expert_ids.dtype}: give numbers of experts as integers")
    ids, num_experts = expert_ids.long(), min(router.num_experts for router in routers)
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_experts:
        raise ConfigurationError(
            f"the routing to replay names the experts {int(ids.min())} to {int(ids.max())}, but there are 0 to "
            f"{num_experts - 1} (-1: the router chooses)"
        )
    ordered = ids.sort(dim=-1).values
    is_free = (ids < 0).any(dim=-1)
    if (is_free != (ids < 0).all(dim=-1)).any() or (
        (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1) & ~is_free
    ).any():
        raise ConfigurationError(
            "the routing to replay gives a token an expert twice, or some of its experts only: give K distinct ones, "
            "or -1 for all K"
        )


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers of the MoE layers, in order.

    Raises:
        ConfigurationError: there is none, or one of another kind.
    """
    routers = [layer.router for layer in moe_layers(model)]
    if not routers:
        raise ConfigurationError(f"{type(model).__name__} has no MoE layer whose routing could be kept")
    for router in routers:
        if not isinstance(router, Router):
            raise ConfigurationError(
                f"a router of type {type(router).__name__} decides in its own way: routing is kept and replayed for "
                "moe_lightning's Router and its subclasses"
            )
    return [router for router in routers if isinstance(router, Router)]


@contextmanager
def observing(
    routers: Sequence[Router], observers: Sequence[Callable[[Router, Tensor], None]]
) -> Generator[None, None, None]:
    """Show every router's choices to its observer."""
    for router, observe in zip(routers, observers, strict=True):
        hooks = router.choice_hooks
        router.choice_hooks = replace(hooks, observers=(*hooks.observers, observe))
    try:
        yield
    finally:
        for router, observe in zip(routers, observers, strict=True):
            hooks = router.choice_hooks
            router.choice_hooks = replace(hooks, observers=tuple(o for o in hooks.observers if o is not observe))


@contextmanager
def choosing(
    routers: Sequence[Router], choices: Sequence[Callable[[Router, Tensor], Tensor]]
) -> Generator[None, None, None]:
    """Replace the choices of routers."""
    before = [router.choice_hooks.chooser for router in routers]
    for router, choice in zip(routers, choices, strict=True):
        router.choice_hooks = replace(router.choice_hooks, chooser=choice)
    try:
        yield
    finally:
        for router, chooser in zip(routers, before, strict=True):
            router.choice_hooks = replace(router.choice_hooks, chooser=chooser)
