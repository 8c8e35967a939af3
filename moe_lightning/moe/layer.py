"""MoE layer: router, dispatch, experts, combine.

Shapes: T tokens of this rank, K choices, E experts, N ranks, D model width.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from moe_lightning.arrays import IntArray
from moe_lightning.compat import private_torch
from moe_lightning.config import Coefficient, NonNegativeInt, PositiveInt, build_config, validated
from moe_lightning.dispatch.dispatcher import Dispatched, Dispatcher
from moe_lightning.dispatch.quota import ShadowPlan
from moe_lightning.dispatch.shadow_exchange import ShadowTransfers
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.experts import VACANT, Activation, Experts, FeedForward, computed_in
from moe_lightning.moe.losses import RealTokens, load_balancing_loss, router_z_loss, warn_of_unused_loss
from moe_lightning.moe.router import ROUTERS, RouterConfig, Routing, TokenRouter

_MOST_UNUSED_LOSSES = 20  # a few steps may be left out on purpose


class EndedWorld:
    """Experts of a layer whose Trainer has ended, all of them where memory allowed; the other ranks may be gone.

    Args:
        experts: of the layer, as this rank holds them.
        num_ranks: of the world.
        stacks: every expert's parameters on the host, [E, ...] by name; None: too large for every rank.
    """

    def __init__(self, experts: Experts, num_ranks: int, stacks: Mapping[str, Tensor] | None) -> None:
        self._num_ranks = num_ranks
        self._local = Dispatcher.local(experts.num_experts)
        self._versions = _versions(experts)
        self._by_device = {} if stacks is None else {torch.device("cpu"): dict(stacks)}

    def whole(self, experts: Experts, device: torch.device) -> tuple[Dispatcher, Mapping[str, Tensor]] | None:
        """A dispatcher for this process alone and the stacks of all experts; None where the other ranks are needed:
        stacks are not known, this rank's experts have been changed since, or gradients are wanted.
        """
        stacks = self.stacks(experts)
        if not stacks or _trains(experts):
            return None
        if device not in self._by_device:
            self._by_device[device] = {name: stack.to(device) for name, stack in stacks.items()}
        return self._local, self._by_device[device]

    def stacks(self, experts: Experts) -> Mapping[str, Tensor]:
        """Return the stacks on the host; empty where unknown, or if this rank's experts have been changed since."""
        return self._by_device.get(torch.device("cpu"), {}) if _versions(experts) == self._versions else {}

    def ranks_are_gone(self) -> ConfigurationError:
        """Return the error of a forward pass that needs the other ranks."""
        return ConfigurationError(
            f"the experts of this module lie on {self._num_ranks} ranks, and others of them have ended: give the "
            "Trainer strategy='expert_parallel' on every rank, or save a checkpoint (trainer.save_checkpoint) and load "
            "it into a new module (load_from_checkpoint)"
        )


def _trains(experts: Experts) -> bool:
    return experts.training and torch.is_grad_enabled()


def _versions(experts: Experts) -> list[int]:
    """Change when a parameter is overwritten."""
    return [private_torch.version_of(parameter) for parameter in experts.stacked_parameters().values()]


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """Counts of a layer's last micro-batch; tensors stay on their device, so that keeping them costs no
    synchronization.

    Attributes:
        tokens_NE: int64, assignments of each rank to each expert before any drop.
        computed_NE: the same after drops: what the experts computed.
        rank_loads: int64 [N], rows that each rank computed; None until they are dispatched, in a world of one rank, and
            where the host does not know.
    """

    tokens_NE: Tensor
    computed_NE: Tensor
    rank_loads: IntArray | None = None

    def __add__(self, other: LayerStatistics) -> LayerStatistics:
        """Count the micro-batches, or passes, of both as one."""
        return (
            LayerStatistics(
                tokens_NE=self.tokens_NE + other.tokens_NE, computed_NE=self.computed_NE + other.computed_NE
            )
            .with_loads(self.rank_loads)
            .with_loads(other.rank_loads)
        )

    def with_loads(self, rank_loads: IntArray | None) -> LayerStatistics:
        """Return these with further rows of the ranks, if they are known."""
        if rank_loads is None:
            return self
        return replace(self, rank_loads=rank_loads if self.rank_loads is None else self.rank_loads + rank_loads)


@dataclass
class _Passes:
    """Forward passes of a layer in training.

    Attributes:
        open_at: the micro-batch of those that the auxiliary loss and the statistics are of.
        are_spent: a backward pass has gone through that loss.
        awaits_backward: that loss has a graph, and no backward pass has gone through it.
        sums: number of auxiliary losses so far.
        without_graph: those that will be computed again, with a graph.
        unused_losses: steps in a row without a backward pass through their losses.
    """

    open_at: object = None
    are_spent: bool = False
    awaits_backward: bool = False
    sums: int = 0
    without_graph: int = 0
    unused_losses: int = 0

    def close(self, number: int, _: Tensor) -> None:
        """A backward pass has gone through a loss: the next forward pass begins another sum."""
        self.open_at, self.awaits_backward = None, False
        self.are_spent |= number == self.sums


@validated
class MoELayer(nn.Module):
    """Drop-in replacement of a transformer's feed-forward layer: [..., D] -> [..., D].

    On its own it holds all experts and runs on one device. Under ExpertParallelStrategy its experts lie in the slots of
    a placement and tokens are dispatched to them; the results are the same.

    Args:
        d_model: width D of the tokens.
        d_expert: hidden width of an expert.
        num_experts: number E of experts.
        router: how tokens choose; a RouterConfig, or keyword arguments of one.
        activation: of the experts, see Experts.
        bias: biases in the experts.
        router_bias: a learned bias in the router's logits.
        selection_bias: a bias in the choice of experts although nothing updates it; for pretrained routers.
        num_shared_experts: experts that every token passes, as one dense layer of that many times `d_expert`.
        init_std: standard deviation of the weights; `down_init_std` of the output matrices (default: the same).

    Attributes:
        auxiliary_loss: weighted auxiliary losses of the micro-batch, differentiable: the sum over its forward passes in
            training that no backward pass has gone through yet, as where several inputs pass one layer. Passes in
            evaluation, or under torch.no_grad(), beside these change nothing. None where there are none.
        statistics: counts of the same passes, None in a micro-batch without one; of the last pass where no strategy
            begins micro-batches.
        shadow_transfers: weights and gradients of shadow experts in the running step; None without shadows.
        ended: experts kept from a Trainer that has ended; None while it runs, and in a layer that was never placed.
        overlap_fn: called by every forward pass in training while the tokens travel, after `statistics` are set; not
            called in a world of one rank.

    Raises:
        ConfigurationError: a size below its least value, or a router that cannot serve so many experts.
    """

    def __init__(
        self,
        d_model: PositiveInt,
        d_expert: PositiveInt,
        num_experts: PositiveInt,
        router: RouterConfig | dict[str, object] | None = None,
        *,
        activation: Activation = "gelu",
        bias: bool = False,
        num_shared_experts: NonNegativeInt = 0,
        router_bias: bool = False,
        selection_bias: bool = False,
        init_std: Coefficient = 0.02,
        down_init_std: Coefficient | None = None,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        config = build_config(RouterConfig, router)
        self.experts = Experts(
            num_experts,
            d_model,
            d_expert,
            activation=activation,
            bias=bias,
            init_std=init_std,
            down_init_std=down_init_std,
        )
        self.router: TokenRouter = ROUTERS.make(
            config.name,
            d_model,
            num_experts,
            config,
            init_std=init_std,
            bias=router_bias,
            selection_bias=selection_bias,
        )
        self.shared_expert = (
            FeedForward(
                d_model, num_shared_experts * d_expert, activation, bias, init_std=init_std, down_init_std=down_init_std
            )
            if num_shared_experts
            else None
        )
        self.dispatcher = Dispatcher.local(num_experts)
        self.auxiliary_loss: Tensor | None = None
        self.statistics: LayerStatistics | None = None
        self._passes = _Passes()
        self.shadow_transfers: ShadowTransfers | None = None
        self.ended: EndedWorld | None = None
        self.overlap_fn: Callable[[], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """Copy with the same placement, without the state of a batch."""
        kept = {**self.__dict__, **dict.fromkeys(("auxiliary_loss", "statistics", "shadow_transfers", "overlap_fn"))}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(kept, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a layer with all experts on one process.

        Raises:
            ConfigurationError: experts lie on other ranks.
        """
        passing = ("auxiliary_loss", "statistics", "shadow_transfers", "overlap_fn", "ended")
        state = {**self.__dict__, **dict.fromkeys(passing), "dispatcher": Dispatcher.local(self.num_experts)}
        if not self.is_whole:
            state["_modules"] = {**state["_modules"], "experts": self.experts.filled(self.whole_stacks())}
        return state

    @property
    def is_whole(self) -> bool:
        """True if this process holds every expert in its place, as before any placement."""
        return self.experts.slot_experts == tuple(range(self.num_experts))

    def whole_stacks(self) -> Mapping[str, Tensor]:
        """The parameters of all experts, [E, ...] by name.

        Raises:
            ConfigurationError: some lie on ranks of a Trainer, and were not kept here.
        """
        held = self.experts.slot_experts
        if set(held) >= set(range(self.num_experts)):
            slots = [held.index(expert) for expert in range(self.num_experts)]
            return {name: parameter.detach()[slots] for name, parameter in self.experts.stacked_parameters().items()}
        stacks = {} if self.ended is None else self.ended.stacks(self.experts)
        if not stacks:
            raise ConfigurationError(
                f"this process holds experts {[e for e in held if e != VACANT]} of {self.num_experts} only: save a "
                "checkpoint with the Trainer that placed them (trainer.save_checkpoint)"
            )
        return stacks

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    def place(self, dispatcher: Dispatcher, device: torch.device) -> None:
        """Use this dispatcher's placement: keep the experts of this rank's slots.

        Raises:
            ConfigurationError: a plan on the device, and a layer that needs the counts on the host.
        """
        dispatcher.require_host_plan(self.router.config.capacity_factor is not None, "capacity_factor")
        dispatcher.require_host_plan("b_up" in self.experts.stacked_parameters(), "biases of experts")
        self.experts.place(
            dispatcher.slot_experts, device, {} if self.ended is None else self.ended.stacks(self.experts)
        )
        self.dispatcher = dispatcher
        self.ended = None

    def dispatch_by(self, dispatcher: Dispatcher) -> None:
        """Use another dispatcher of the present slots."""
        self.dispatcher = dispatcher

    def leave_ranks(self) -> None:
        """Release the dispatcher, which holds process groups; the rows of experts stay."""
        self.dispatcher = Dispatcher.local(self.num_experts)

    def start_shadows(self, plan: ShadowPlan, transfers: ShadowTransfers) -> None:
        """Have these shadow experts in the running step; raises as `Dispatcher.set_shadows`."""
        self.dispatcher.set_shadows(plan)
        self.shadow_transfers = transfers

    def drop_shadows(self) -> None:
        """End the shadow experts of a step."""
        self.dispatcher.set_shadows(None)
        self.shadow_transfers = None

    def forget_step(self) -> None:
        """Release what an aborted step has left: shadow experts, losses with their graphs, counts."""
        self.drop_shadows()
        self.begin_micro_batch()
        self._passes.awaits_backward = False

    def begin_micro_batch(self) -> None:
        """Release the loss and the counts of the micro-batch before: this one may not call the layer."""
        self.auxiliary_loss = self.statistics = None

    def join_micro_batches(self, statistics: Sequence[LayerStatistics], losses: list[Tensor]) -> None:
        """Count several micro-batches as one, whose auxiliary loss is the sum of these values."""
        self.statistics = reduce(operator.add, statistics)
        self.auxiliary_loss, self._passes.are_spent = torch.stack(losses).sum() if losses else None, True

    @property
    def is_spent(self) -> bool:
        """True if a backward pass has gone through `auxiliary_loss`, which belongs to no later loss."""
        return self._passes.are_spent

    def release_graph(self) -> None:
        """Keep no more than the value of `auxiliary_loss`. Hooks of callbacks on its graph may lead to this layer."""
        if self.auxiliary_loss is not None:
            self.auxiliary_loss = self.auxiliary_loss.detach()

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return `auxiliary_loss`, which is None afterwards."""
        loss, self.auxiliary_loss, self._passes.awaits_backward = self.auxiliary_loss, None, False
        return loss

    def end_world(self, num_ranks: int, stacks: Mapping[str, Tensor] | None) -> None:
        """Compute without the other ranks, if possible, once the Trainer has ended; see `EndedWorld`."""
        self.ended = EndedWorld(self.experts, num_ranks, stacks)

    def resume_world(self) -> None:
        """Compute with the other ranks again."""
        self.ended = None

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """[..., D] -> [..., D].

        Args:
            x: the rows.
            is_token: bool [...], False for padding, which no expert gets and no statistic counts; None: there is none.

        Raises:
            ConfigurationError: rows of another width, or is_token has another shape than x without its last size.
        """
        if x.shape[-1] != self.d_model:
            raise ConfigurationError(
                f"an input of shape {tuple(x.shape)} has rows of {x.shape[-1]} features, and this MoELayer has "
                f"d_model={self.d_model}: give MoELayer d_model={x.shape[-1]}, or the layer rows of {self.d_model}"
            )
        x_TD = x.reshape(-1, x.shape[-1])
        is_token_T = None if is_token is None else _flat_mask(is_token, x)
        dispatcher, stacks = self._where(x.device)
        routing = self.router(x_TD, is_token_T)
        x_TD = x_TD if routing.x_TD is None else routing.x_TD
        tokens_NE = self._gathered(routing.tokens_per_expert_E, dispatcher)
        computed_NE = self._after_drops(tokens_NE)
        is_counted = self._account(routing, tokens_NE, computed_NE, is_token_T)
        rows_TD = x_TD
        if self.router.config.weigh_inputs:
            rows_TD = x_TD * routing.weights_TK.to(x_TD.dtype)
            routing = replace(routing, weights_TK=torch.ones_like(routing.weights_TK))
        if self.shadow_transfers is None and dispatcher.world.size == 1 and self.experts.takes_tokens(rows_TD):
            drops_none = dispatcher.plans_on_device and is_token_T is None and not self.router.stream.is_dummy_batch
            num_rows = routing.expert_ids_TK.numel() if drops_none else None
            sort = dispatcher.sorted_by_slot(routing.expert_ids_TK, num_rows=num_rows)
            out_TD: Tensor = self.experts(
                rows_TD, sort.tokens_per_expert_E, stacks, sort=sort, weights_TK=routing.weights_TK
            )
        else:
            out_TD = self._sent(rows_TD, routing, computed_NE, dispatcher, stacks)
            if is_counted and self.statistics is not None:
                self.statistics = self.statistics.with_loads(dispatcher.last_rank_loads)
        if self.shared_expert is not None:
            out_TD = out_TD + self.shared_expert(x_TD)
        return out_TD.view(*x.shape[:-1], out_TD.shape[-1])

    def _sent(
        self,
        x_TD: Tensor,
        routing: Routing,
        computed_NE: Tensor,
        dispatcher: Dispatcher,
        stacks: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """Dispatch tokens in the dtype that experts compute in, compute experts, combine results."""
        overlap_fn = self.overlap_fn if self.training else None
        ids_TK = routing.expert_ids_TK
        x_TD = x_TD.to(computed_in(x_TD))
        transfers = self.shadow_transfers if self.training else None
        if transfers is not None:
            transfers.require_precision(x_TD.dtype)
        sent = dispatcher.dispatch(x_TD, ids_TK, computed_NE, overlap_fn, is_training=self.training)
        if transfers is not None:
            transfers.start_next(early=True)
        out_TD = dispatcher.combine(self._compute(sent, stacks), sent, routing.weights_TK)
        if transfers is not None:
            transfers.start_next()
        return out_TD

    def _where(self, device: torch.device) -> tuple[Dispatcher, Mapping[str, Tensor] | None]:
        """Return the dispatcher, and the experts' weights where they are not this layer's parameters."""
        whole = None if self.ended is None else self.ended.whole(self.experts, device)
        return (self.dispatcher, None) if whole is None else whole

    def _gathered(self, counts_E: Tensor, dispatcher: Dispatcher) -> Tensor:
        try:
            return dispatcher.gather_counts(counts_E)
        except RuntimeError as error:
            if self.ended is None:
                raise
            raise self.ended.ranks_are_gone() from error

    def _compute(self, sent: Dispatched, stacks: Mapping[str, Tensor] | None) -> Tensor:
        """Compute residents first, while shadows are still in flight; in backward shadows come first, so that their
        gradients leave early.
        """
        if sent.tokens_per_shadow_H is None or self.shadow_transfers is None:
            return self.experts(sent.rows_MD, sent.tokens_per_slot_S, stacks)  # type: ignore[no-any-return]
        sizes = [sent.resident_rows, len(sent.rows_MD) - sent.resident_rows]
        resident_MD, shadow_MD = torch.split(sent.rows_MD, sizes)
        resident_MD = self.experts(resident_MD, sent.tokens_per_slot_S)
        shadow_MD = self.experts(shadow_MD, sent.tokens_per_shadow_H, self.shadow_transfers.weights())
        return torch.cat([resident_MD, shadow_MD])

    def _after_drops(self, tokens_NE: Tensor) -> Tensor:
        """Every rank keeps min(limit, count) of each expert, so the counts after drops need no second gather."""
        config = self.router.config
        if config.capacity_factor is None:
            return tokens_NE
        limits = [config.capacity(int(total), self.num_experts) for total in tokens_NE.sum(dim=1)]
        return torch.minimum(tokens_NE, torch.tensor(limits, device=tokens_NE.device)[:, None])

    def _account(self, routing: Routing, tokens_NE: Tensor, computed_NE: Tensor, is_token_T: Tensor | None) -> bool:
        """Leave the auxiliary losses and the statistics for whoever asks; True if the pass is part of them."""
        now, is_again = self._micro_batch(), private_torch.is_in_backward()
        if self.training:
            self._count_for_bias(tokens_NE, is_again=is_again)
        loss = self._auxiliary_loss(routing, tokens_NE, is_token_T) if self.training else None
        if is_again:  # by activation checkpointing, which needs the same operations; what they give is known
            return False
        is_trained = self.training and torch.is_grad_enabled()
        # Where no micro-batch is counted, a sum is closed by the backward pass through it, or by an update.
        is_open = self.router.stream.micro_batch is not None or (loss is not None and loss.requires_grad)
        is_further = self._passes.open_at == now
        counts = LayerStatistics(tokens_NE=tokens_NE, computed_NE=computed_NE)
        if is_trained and is_further:
            if loss is not None and self.auxiliary_loss is not None:
                loss = self.auxiliary_loss + loss
            if self.statistics is not None and self.router.stream.micro_batch is not None:
                counts = self.statistics + counts
        elif is_trained and loss is not None:
            self._passes.unused_losses = self._passes.unused_losses + 1 if self._passes.awaits_backward else 0
            if self._passes.unused_losses == _MOST_UNUSED_LOSSES and self.dispatcher.world.rank == 0:
                warn_of_unused_loss(_MOST_UNUSED_LOSSES)
        if is_trained or not is_further:
            self.statistics, self.auxiliary_loss, self._passes.are_spent = counts, loss, False
            self._passes.open_at = now if is_trained and is_open else None
            self._passes.sums += 1
            self._passes.awaits_backward = loss is not None and loss.requires_grad
            if loss is not None and loss.requires_grad:
                # Not a method of the layer, which holds the loss: no collector sees a cycle through a graph.
                loss.register_hook(partial(self._passes.close, self._passes.sums))  # type: ignore[no-untyped-call]
        return is_trained or not is_further

    def _micro_batch(self) -> object:
        """Return a value of this micro-batch alone: its number, or the version of what is trained where none is
        counted.
        """
        number = self.router.stream.micro_batch
        if number is not None:
            return number
        return tuple(private_torch.version_of(p) for p in self.parameters() if p.requires_grad)

    def _count_for_bias(self, tokens_NE: Tensor, *, is_again: bool) -> None:
        """Count a pass once: not when it is computed again, unless its first pass had no graph, as in reentrant
        activation checkpointing; and not where it trains nothing, as in sampling under torch.no_grad().
        """
        if not torch.is_grad_enabled():
            self._passes.without_graph += not is_again
            return
        if is_again:
            if not self._passes.without_graph:
                return
            self._passes.without_graph -= 1
        else:
            self._passes.without_graph = 0
        self.router.count_for_bias(tokens_NE.sum(dim=0) if len(tokens_NE) > 1 else tokens_NE[0])

    def _auxiliary_loss(self, routing: Routing, tokens_NE: Tensor, is_token_T: Tensor | None) -> Tensor | None:
        config = self.router.config
        real = None if is_token_T is None else self._real_tokens(is_token_T, tokens_NE)
        losses = []
        if config.aux_loss_coef:
            tokens_E = tokens_NE.sum(dim=0) if len(tokens_NE) > 1 else tokens_NE[0]
            counts_E = tokens_E if config.aux_loss_scope == "global" else routing.tokens_per_expert_E
            losses.append(config.aux_loss_coef * load_balancing_loss(routing.scores_TE, counts_E, real))
        if config.z_loss_coef:
            losses.append(config.z_loss_coef * router_z_loss(routing.logits_TE, real))
        if not losses:
            return None
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _real_tokens(self, is_token_T: Tensor, tokens_NE: Tensor) -> RealTokens:
        stream, num_ranks = self.router.stream, self.dispatcher.world.size
        is_known = stream.total_samples > 0
        samples, of = (stream.num_samples, stream.total_samples * stream.parts) if is_known else (1, num_ranks)
        # Each product and quotient of integers is exact, so that without padding the divisor is this rank's rows.
        divisor = tokens_NE.sum().double() / self.router.config.top_k * samples / of
        return RealTokens(is_token_T=is_token_T, divisor=divisor.to(is_token_T.device))


def _flat_mask(is_token: Tensor, x: Tensor) -> Tensor:
    if is_token.shape != x.shape[:-1]:
        raise ConfigurationError(
            f"is_token has the shape {list(is_token.shape)}, but x of {list(x.shape)} needs {list(x.shape[:-1])}"
        )
    return is_token.reshape(-1).bool()


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """Return the MoE layers of a model in the order of its modules: those of this rank, in a pipeline of its stages
    only, so that an entry's index is the layer's number in the whole model only without one.
    """
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict of a model that no strategy holds, with all experts.

    Raises:
        ConfigurationError: experts lie on ranks of a Trainer that has ended, and were not kept here.
    """
    state: dict[str, Any] = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and not module.is_whole:
            prefix = f"{name}.experts." if name else "experts."
            state |= {prefix + key: stack for key, stack in module.whole_stacks().items()}
    return state
