"""Routers: the K experts of each token and their weights, capacities and groups.

Shapes: T tokens of this rank, K choices, E experts, D model width, G groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Annotated, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from moe_lightning import kernels as ops
from moe_lightning.compat import private_torch
from moe_lightning.config import Coefficient, PositiveInt, Probability, build_config, effects, option, validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity, sample_experts
from moe_lightning.moe.randomness import NoiseSource, SampleStream
from moe_lightning.registry import Registry


def drop_overflow(
    expert_ids_TK: Tensor, weights_TK: Tensor, limit: int, num_experts: int, policy: Literal["probability", "position"]
) -> Tensor:
    """Replace by -1 what exceeds an expert's limit: its smallest weights, or its last tokens.

    Returns:
        int64 [T, K]; each expert keeps min(limit, its assignments).
    """
    ids_M = expert_ids_TK.flatten()
    if policy == "probability":
        by_weight_M = torch.argsort(weights_TK.flatten(), descending=True, stable=True)
        rank_M = torch.empty_like(ids_M)
        rank_M[by_weight_M] = ops.sort_by_expert(ids_M[by_weight_M, None], num_experts).rank_in_expert_TK[:, 0]
    else:
        rank_M = ops.sort_by_expert(ids_M[:, None], num_experts).rank_in_expert_TK[:, 0]
    return torch.where(rank_M < limit, ids_M, -1).view_as(expert_ids_TK)


def limit_to_best_groups(selection_TE: Tensor, num_groups: int, top_groups: int, group_top_k: int) -> Tensor:
    """Minus infinity outside each token's best groups."""
    grouped_TGE = selection_TE.view(len(selection_TE), num_groups, selection_TE.shape[1] // num_groups)
    group_scores_TG = grouped_TGE.topk(min(group_top_k, grouped_TGE.shape[-1]), dim=-1).values.sum(dim=-1)
    best_TG = ops.top_k_experts(group_scores_TG, top_groups)
    allowed_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(-1, best_TG, True)
    return grouped_TGE.masked_fill(~allowed_TG.unsqueeze(-1), -torch.inf).flatten(-2)


@validated
@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Choice of experts for tokens. The defaults are a dropless softmax router with the global load-balancing loss.

    A new option is one field here: `option` declares its effects, and configurations take its key from the field.

    Attributes:
        name: of the router: "linear", or one that somebody has registered in `ROUTERS`. A router with settings of its
            own takes a subclass of this one.
        top_k: experts per token.
        score: "softmax" or "sigmoid" of the logits.
        softmax_after_top_k: take the softmax over the K chosen logits only (Mixtral) instead of over all E before
            choosing.
        normalize_top_k: divide the K weights by their sum, if K > 1: else the router would have no gradient.
        scale: factor on the weights (DeepSeek's routed scaling factor).
        noisy_top_k: add normal noise of a learned standard deviation to the logits while training (Shazeer et al.
            2017, eq. 4).
        jitter: multiply the router's input by uniform noise in [1 - jitter, 1 + jitter] while training (Switch
            Transformer).
        weigh_inputs: multiply the expert's input by the weight instead of its output (Llama 4); needs top_k=1.
        num_groups: cut the experts into this many groups and choose only inside the best `top_groups` of them
            (DeepSeek-V2/V3).
        top_groups: groups to choose from.
        group_top_k: a group scores the sum of this many of its best experts: 2 as in DeepSeek-V3, 1 as in DeepSeek-V2.
        aux_loss_coef: weight of the load-balancing loss.
        aux_loss_scope: "global" uses the counts of the whole micro-batch (law L1), "local" those of this rank, which
            gives L1 up.
        z_loss_coef: weight of the router z-loss.
        bias_update_rate: step of the selection bias that balances without a loss (DeepSeek-V3); 0 turns it off. The
            strategy updates it after each step of an optimizer that trains a parameter of the layer, and not after a
            step that `stop_on_nan` skips.
        capacity_factor: None is dropless; else an expert takes at most ceil(factor * T * K / E) assignments from a
            rank, which gives L1 and L2 up.
        drop_policy: "probability" keeps the assignments with the largest weights, "position" the first ones.
        forced: follow a given popularity of experts instead of the scores.
    """

    name: str = option("linear", is_fused=True)  # its class shows what it does otherwise
    top_k: PositiveInt = option(2, is_resumable=True, is_fused=True)
    score: Literal["softmax", "sigmoid"] = option("softmax", is_fused=True)
    softmax_after_top_k: bool = option(False, is_fused=True)
    normalize_top_k: bool = option(True, is_fused=True)
    scale: Annotated[float, Interval(gt=0, le=1e6)] = option(1.0, is_fused=True)
    noisy_top_k: bool = option(False, draws_noise="in training")
    jitter: Probability = option(0.0, changes_function=False, draws_noise="in training")
    weigh_inputs: bool = option(False, is_fused=True)
    num_groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    group_top_k: PositiveInt = option(2, is_fused=True)
    aux_loss_coef: Coefficient = option(0.01, changes_function=False, is_fused=True)
    aux_loss_scope: Literal["global", "local"] = option("global", changes_function=False, is_fused=True)
    z_loss_coef: Coefficient = option(0.0, changes_function=False, is_fused=True)
    bias_update_rate: Coefficient = option(0.0, changes_function=False, is_fused=True)
    capacity_factor: Annotated[float, Interval(gt=0, le=1e6)] | None = option(
        None, changes_function=False, is_fused=True
    )
    drop_policy: Literal["probability", "position"] = option("probability", changes_function=False, is_fused=True)
    forced: ForcedRouting | None = option(None, changes_function=False, draws_noise="always")

    def __post_init__(self) -> None:
        ROUTERS.find(self.name, "name")
        if self.forced is not None:
            object.__setattr__(self, "forced", build_config(ForcedRouting, self.forced))
        if self.softmax_after_top_k and self.score != "softmax":
            raise ConfigurationError("softmax_after_top_k=true needs score='softmax', not 'sigmoid'")
        if self.weigh_inputs and self.top_k != 1:
            raise ConfigurationError(f"weigh_inputs=true needs top_k=1, not {self.top_k}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigurationError(f"top_groups={self.top_groups} must be between 1 and num_groups={self.num_groups}")

    def check(self, num_experts: int) -> None:
        """Raise ConfigurationError where this router cannot serve so many experts."""
        if num_experts % self.num_groups:
            raise ConfigurationError(
                f"num_groups={self.num_groups} does not divide num_experts={num_experts}: lower it"
            )
        reachable = num_experts // self.num_groups * self.top_groups
        if self.top_k > reachable:
            raise ConfigurationError(
                f"top_k={self.top_k} is more than the {reachable} experts that a token may choose from: lower it"
            )

    def capacity(self, num_assignments: int, num_experts: int) -> int:
        """Most assignments that an expert takes from a rank with so many in total, under a capacity factor."""
        assert self.capacity_factor is not None
        factor = Fraction(str(self.capacity_factor))  # as it was written: 1.1 of ten assignments are no more than 11
        return math.ceil(factor * num_assignments / num_experts)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Decision of a router for T tokens.

    Attributes:
        expert_ids_TK: int64, distinct within a token; -1 where capacity dropped the assignment, or the row is padding
            or belongs to no sample of this rank.
        weights_TK: float32, differentiable.
        scores_TE: float32 scores before selection, differentiable: what the load-balancing loss pushes on.
        logits_TE: float32.
        tokens_per_expert_E: int64, assignments before any drop.
        x_TD: the tokens to go on with, see `kernels.Routed`; None: those that were given.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    logits_TE: Tensor
    tokens_per_expert_E: Tensor
    x_TD: Tensor | None = None


class TokenRouter(Protocol):
    """Interface of a router, which is a module. `Router` implements all of it; a router with other scores or another
    choice overrides `logits` or `choose`.

    Attributes:
        config: as given; the layer reads the auxiliary losses and the capacity from it.
        stream: the position in the global batch; whoever draws noise keys it by this, or the loss depends on the ranks.
    """

    config: RouterConfig
    stream: SampleStream

    def __call__(self, x_TD: Tensor, is_token_T: Tensor | None = None) -> Routing:
        """Choose experts for every row that is a token (None: all are), and -1 for all others and in dummy batches."""

    def count_for_bias(self, tokens_per_expert_E: Tensor) -> None:
        """The global counts of a training micro-batch are known."""

    def forget_counts(self) -> None:
        """The step will not end: what was counted in it has not happened."""

    def update_bias(self) -> None:
        """The optimizer has made a step; what changes here must come out alike on all ranks."""

    def reset_parameters(self) -> None:
        """Begin anew."""


class RouterFactory(Protocol):
    """Makes a layer's router, a module with the members of `TokenRouter`."""

    def __call__(
        self,
        d_model: int,
        num_experts: int,
        config: RouterConfig,
        /,
        *,
        init_std: float,
        bias: bool,
        selection_bias: bool,
    ) -> TokenRouter:
        """For the arguments see `Router`.

        Raises:
            ConfigurationError: a setting that this router does not have.
        """


@dataclass(frozen=True)
class ChoiceHooks:
    """Replay and records of a router's choices.

    Attributes:
        chooser: answers for `Router.choose`, given the router and its scores; None: the router chooses.
        observers: called with the router and the choices of every forward pass, before padding and drops.
    """

    chooser: Callable[[Router, Tensor], Tensor] | None = None
    observers: tuple[Callable[[Router, Tensor], None], ...] = ()


class Router(private_torch.Float32Module):
    """A linear router in float32, or float64 where its weights or rows are, whatever the precision around it.

    Args:
        d_model: width D of the tokens.
        num_experts: E.
        config: how to choose.
        init_std: standard deviation of the weights.
        bias: add a learned bias to the logits (GPT-OSS).
        selection_bias: keep the bias that only the choice of experts sees (DeepSeek-V3) even where nothing updates it.

    Attributes:
        choice_hooks: of `moe.replayed_routing`; a copy has none.
        adapter: what is added to the logits, float32 [T, D] -> [T, E], see `moe.adapters`; None: nothing.
    """

    in_float32 = ("expert_bias_E",)  # in bfloat16 small steps of the bias would be lost
    expert_bias_E: Tensor
    unbalanced_tokens_E: Tensor

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        config: RouterConfig,
        *,
        init_std: float = 0.02,
        bias: bool = False,
        selection_bias: bool = False,
    ) -> None:
        super().__init__()
        config.check(num_experts)
        self.config = config
        self.num_experts = num_experts
        self._init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, d_model)) if config.noisy_top_k else None
        if selection_bias or config.bias_update_rate > 0:
            self.register_buffer("expert_bias_E", torch.zeros(num_experts, dtype=torch.float32))
        if config.bias_update_rate:
            self.register_buffer("unbalanced_tokens_E", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.stream = SampleStream()
        self.tag = 0
        self._popularity: Popularity | None = None
        self._twins_E: Tensor | None = None
        self.choice_hooks = ChoiceHooks()
        self.adapter: nn.Module | None = None
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose choices nobody replays or observes."""
        return {**self.__dict__, "choice_hooks": ChoiceHooks()}

    @property
    def has_selection_bias(self) -> bool:
        """True if the choice of experts sees a bias of its own."""
        return hasattr(self, "expert_bias_E")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights from the global generator; everything else starts at zero."""
        for _, tensor in (*self.named_parameters(), *self.named_buffers()):
            tensor.zero_()
        self.weight.copy_(torch.randn_like(self.weight) * self._init_std)

    def forward(self, x_TD: Tensor, is_token_T: Tensor | None = None) -> Routing:
        """Choose experts for every row that is a token; None: all are."""
        config = self.config
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE, scores_TE, weights_TK, expert_ids_TK, alike_TD = self.routed(x_TD)
        for observe in self.choice_hooks.observers:
            observe(self, expert_ids_TK)
        if self.stream.is_dummy_batch:
            expert_ids_TK = torch.full_like(expert_ids_TK, -1)
        elif is_token_T is not None:
            expert_ids_TK = expert_ids_TK.masked_fill(~is_token_T.unsqueeze(-1), -1)
        tokens_E = ops.count_by_expert(expert_ids_TK, self.num_experts)
        if config.capacity_factor is not None:
            limit = config.capacity(int(tokens_E.sum()), self.num_experts)
            expert_ids_TK = drop_overflow(
                expert_ids_TK, weights_TK.detach(), limit, self.num_experts, config.drop_policy
            )
        return Routing(
            expert_ids_TK=expert_ids_TK,
            weights_TK=weights_TK,
            scores_TE=scores_TE,
            logits_TE=logits_TE,
            tokens_per_expert_E=tokens_E,
            x_TD=alike_TD,
        )

    def routed(self, x_TD: Tensor) -> ops.Routed:
        """Return the choices of rows, tokens or not."""
        if self.is_plain and ops.fuses_router(x_TD, self.num_experts):
            choice = ops.Choice(
                top_k=self.config.top_k,
                is_sigmoid=self.config.score == "sigmoid",
                normalizes=self.config.softmax_after_top_k or (self.config.normalize_top_k and self.config.top_k > 1),
                scale=self.config.scale,
            )
            selection_E = self.expert_bias_E if self.has_selection_bias else None
            return ops.route(x_TD, self.weight, choice, bias_E=self.bias, selection_E=selection_E)
        logits_TE = self.logits(x_TD.to(torch.promote_types(x_TD.dtype, self.dtype)))
        scores_TE = logits_TE.softmax(dim=-1) if self.config.score == "softmax" else logits_TE.sigmoid()
        scores_TE = self._alike(scores_TE, logits_TE)
        chooser = self.choice_hooks.chooser
        ids_TK = self.choose(scores_TE) if chooser is None else chooser(self, scores_TE)
        weights_TK = self._weigh(scores_TE, logits_TE, ids_TK)
        return ops.Routed(logits_TE=logits_TE, scores_TE=scores_TE, weights_TK=weights_TK, ids_TK=ids_TK)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits of rows that are not wider."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def is_plain(self) -> bool:
        """True if nothing stands between rows, logits, scores and choice that `kernels.route` does not serve."""
        config, kind = self.config, type(self)
        acts = ("always", "never", "in training") if self.training else ("always", "never")
        return (
            kind.logits is Router.logits
            and kind.choose is Router.choose
            and self.choice_hooks.chooser is None
            and self.adapter is None
            and self._twins_E is None
            and all(getattr(config, n) == default for n, (default, draws) in _UNFUSED.items() if draws in acts)
            and not (config.softmax_after_top_k and self.has_selection_bias)
        )

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] of rows in float32 or float64, in the dtype of the rows; differentiable."""
        config = self.config
        if self.training and config.jitter:
            noise_TD = self.stream.uniform(NoiseSource.JITTER.key(self.tag), x_TD.shape[0], x_TD.shape[1], x_TD.device)
            x_TD = x_TD * (1.0 + config.jitter * (2.0 * noise_TD - 1.0))
        bias_E = None if self.bias is None else self.bias.to(x_TD.dtype)
        logits_TE = F.linear(x_TD, self.weight.to(x_TD.dtype), bias_E)
        if self.adapter is not None:
            logits_TE = logits_TE + self.adapter(x_TD)
        logits_TE = self._alike(logits_TE)
        if self.training and self.noise_weight is not None:
            std_TE = F.softplus(F.linear(x_TD, self.noise_weight.to(x_TD.dtype)))
            key = NoiseSource.SELECTION.key(self.tag)
            noise_TE = self.stream.normal(key, logits_TE.shape[0], self.num_experts, x_TD.device)
            logits_TE = logits_TE + noise_TE * std_TE
        return logits_TE

    @torch.no_grad()
    def choose(self, scores_TE: Tensor) -> Tensor:
        """int64 [T, K], distinct experts of each token by their scores, float32 [T, E]."""
        config = self.config
        if config.forced is not None:
            if self._popularity is None or self._popularity.layer != self.tag:  # layers are numbered late
                self._popularity = Popularity(config.forced, self.num_experts, self.tag)
            key = NoiseSource.SELECTION.key(self.tag)
            uniform_T1 = self.stream.uniform(key, scores_TE.shape[0], 1, scores_TE.device)
            return sample_experts(self._popularity.at(self.stream.step), uniform_T1[:, 0], config.top_k)
        selection_TE = scores_TE.detach()
        if self.has_selection_bias:
            selection_TE = selection_TE + self.expert_bias_E
        if config.num_groups > 1:
            selection_TE = limit_to_best_groups(selection_TE, config.num_groups, config.top_groups, config.group_top_k)
        return ops.top_k_experts(selection_TE, config.top_k)

    def _weigh(self, scores_TE: Tensor, logits_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        if self.config.softmax_after_top_k:
            weights_TK = logits_TE.gather(-1, expert_ids_TK).softmax(dim=-1)
        else:
            weights_TK = scores_TE.gather(-1, expert_ids_TK)
            if self.config.normalize_top_k and self.config.top_k > 1:
                weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return weights_TK if self.config.scale == 1 else weights_TK * self.config.scale

    @torch.no_grad()
    def find_twins(self) -> None:
        """Let experts with the same row, as copies have until they learn, have the same logits to the last bit: those
        of a matrix product depend on the column, so that rounding would choose between them otherwise on other ranks.
        """
        rows: list[Tensor] = [self.weight]
        if self.bias is not None:
            rows.append(self.bias[:, None])
        if self.adapter is not None:
            rows.append(self.adapter.get_parameter("lora_b"))
        _, group_E = torch.unique(torch.cat(rows, dim=1), dim=0, return_inverse=True)
        first_E = (group_E[:, None] == group_E).int().argmax(dim=1)
        is_alone = bool((first_E == torch.arange(self.num_experts, device=first_E.device)).all())
        self._twins_E = None if is_alone else first_E

    def _alike(self, values_TE: Tensor, of_TE: Tensor | None = None) -> Tensor:
        """With those of an expert's first twin, and gradients of its own.

        Args:
            of_TE: the values' arguments: where noise makes these differ, the values may; None: they are alike.
        """
        if self._twins_E is None:
            return values_TE
        constant_TE = values_TE.detach()
        first_TE = constant_TE[:, self._twins_E]
        if of_TE is not None:
            first_TE = torch.where(of_TE == of_TE[:, self._twins_E], first_TE, constant_TE)
        return first_TE + (values_TE - constant_TE)  # of which the second is exactly zero

    @torch.no_grad()
    def count_for_bias(self, tokens_per_expert_E: Tensor) -> None:
        """Remember the global counts of a training micro-batch for the next `update_bias`."""
        if self.config.bias_update_rate:
            self.unbalanced_tokens_E += tokens_per_expert_E.to(self.unbalanced_tokens_E.device)

    def forget_counts(self) -> None:
        """Drop the counts of a step that will not end."""
        if self.config.bias_update_rate:
            self.unbalanced_tokens_E.zero_()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raise the selection bias of underloaded experts and lower that of overloaded ones (DeepSeek-V3, 2.1.2); a
        no-op when off.
        """
        if self.config.bias_update_rate:
            counts_E = self.unbalanced_tokens_E.float()
            self.expert_bias_E += self.config.bias_update_rate * torch.sign(counts_E.mean() - counts_E)
            self.unbalanced_tokens_E.zero_()
        if self._twins_E is not None:
            self.find_twins()


_UNFUSED = {
    field.name: (field.default, effects(RouterConfig)[field.name].draws_noise)
    for field in fields(RouterConfig)
    if not effects(RouterConfig)[field.name].is_fused
}
"""Options that `kernels.route` serves at their defaults only: the default, and when the option draws noise."""

ROUTERS: Registry[RouterFactory] = Registry("router", RouterFactory, {"linear": Router}, makes=TokenRouter)
