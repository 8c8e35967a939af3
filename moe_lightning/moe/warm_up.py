"""Warm-up of an MoE layer's kernels before other ranks wait for this one: one compiles in one to twelve seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_lightning import kernels as ops
from moe_lightning.dispatch.dispatcher import Dispatcher
from moe_lightning.dispatch.transports import AllToAllSpec, ExchangeBackend
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.losses import load_balancing_loss, router_z_loss
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.moe.router import Router, drop_overflow

ROWS_PER_SLOT = (16, 128)
"""Few and many: kernels have tiles of their own for each, see `kernels.triton.tiles`."""

logger = logging.getLogger(__name__)


def warm_up(module: nn.Module, layers: Iterable[MoELayer], device: torch.device) -> None:
    """Compute layers on numbers of no meaning, forward and backward, without a word to other ranks; nothing of the
    module changes, and no random number is drawn. Does nothing on a CPU.

    Autocast is that of the caller. A layer's slots, and the ranks that its dispatcher knows, are those of its steps.

    Args:
        module: has the layers, and dropout that follows samples, perhaps.
        layers: as they are placed.
        device: of the steps.
    """
    if device.type == "cpu":
        return
    began = time.perf_counter()
    dropout = next((part.p for part in module.modules() if isinstance(part, StreamDropout) and part.p), 0.0)
    for layer in {_kind(layer): layer for layer in layers}.values():
        dtypes = {layer.experts.dtype}
        if torch.is_autocast_enabled(device.type):
            dtypes.add(torch.get_autocast_dtype(device.type))
        for dtype in sorted(dtypes, key=str):
            for rows in ROWS_PER_SLOT:
                _compute(layer, rows, dtype, device, dropout)
        if (layer.dispatcher.placement.replicas.sum(axis=1) > 1).any():
            for length in (1024, 1023):  # sizes of gradients that memory takes in wide words, and others
                gradients = torch.zeros(2, length, dtype=layer.experts.dtype, device=device)
                ops.sum_in_rank_order(gradients, out=gradients[0].clone())
    logger.info("kernels were launched for the first time in %.1f s", time.perf_counter() - began)


def _kind(layer: MoELayer) -> Hashable:
    """Alike for layers that launch the same kernels."""
    sizes = tuple((name, p.shape, p.dtype) for name, p in layer.experts.stacked_parameters().items())
    return sizes, layer.experts.activation, layer.num_experts, repr(layer.router.config), layer.dispatcher.world.size


def _compute(layer: MoELayer, rows: int, dtype: torch.dtype, device: torch.device, dropout: float) -> None:
    experts, config, dispatcher = layer.experts, layer.router.config, layer.dispatcher
    num_tokens = -(-rows * max(1, experts.num_slots) // (16 * config.top_k)) * 16
    generator = torch.Generator().manual_seed(0)
    scores_TE = torch.rand(num_tokens, layer.num_experts, generator=generator, device="cpu").to(device)
    given_TD = (
        torch.randn(num_tokens, experts.width, generator=generator, device="cpu").to(device, dtype).requires_grad_()
    )
    router, x_TD = layer.router, given_TD
    if isinstance(router, Router) and router.is_plain:
        with torch.autocast(device.type, enabled=False):
            logits_TE, scores_TE, weights_TK, ids_TK, alike_TD = router.routed(given_TD)
        x_TD = given_TD if alike_TD is None else alike_TD
    else:
        ids_TK = router.choose(scores_TE) if isinstance(router, Router) else ops.top_k_experts(scores_TE, config.top_k)
        logits_TE, weights_TK = scores_TE.requires_grad_(), scores_TE.gather(-1, ids_TK)
    if config.capacity_factor is not None:
        limit = config.capacity(ids_TK.numel(), layer.num_experts)
        ids_TK = drop_overflow(ids_TK, weights_TK, limit, layer.num_experts, config.drop_policy)
    counts_E = ops.count_by_expert(ids_TK, layer.num_experts)
    if dispatcher.world.size > 1:
        planner = Dispatcher(
            dispatcher.placement, dispatcher.world, dispatcher.groups, "balanced", experts.slot_experts
        )
        plan, alone = planner.plan(counts_E.cpu().expand(dispatcher.world.size, -1)), _Alone(dispatcher.world)
        rows_MD, tokens_S, route = alone.dispatch(x_TD, ids_TK, plan, None)
        y_TD = alone.combine(experts(rows_MD, tokens_S), route, weights_TK)
    elif experts.takes_tokens(x_TD):
        y_TD = experts.of_tokens(x_TD, dispatcher.sorted_by_slot(ids_TK), weights_TK, None)
    else:
        sent = dispatcher.dispatch(x_TD, ids_TK, counts_E.unsqueeze(0))
        y_TD = dispatcher.combine(experts(sent.rows_MD, sent.tokens_per_slot_S), sent, weights_TK)
    if dropout:  # keys fill 64 bits
        y_TD = ops.keyed_dropout(y_TD, dropout, ops.Draw(key=1 << 62, first=0, here=1, parts=1, part=0))
    result = y_TD.sum()
    if config.aux_loss_coef:
        result = result + load_balancing_loss(scores_TE, counts_E)
    if config.z_loss_coef:
        result = result + router_z_loss(logits_TE)
    leaves = [given_TD, *(p for p in layer.parameters() if p.requires_grad)]
    torch.autograd.grad(result, leaves, allow_unused=True)


class _Alone(ExchangeBackend):
    """Exchange without peers: as many rows arrive as others would send, but they are this rank's own, and zeros."""

    def exchange(self, rows_MD: Tensor, spec: AllToAllSpec) -> Tensor:
        return F.pad(rows_MD, (0, 0, 0, sum(spec.recv_splits) - len(rows_MD)))
