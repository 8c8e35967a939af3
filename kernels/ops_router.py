"""A linear router in one operation.

Legend: T tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.kernels import backends, buffers, checks, functions
from moe_lightning.kernels.bodies import Choice, Routed


def fuses_router(x_TD: Tensor, num_experts: int) -> bool:
    """Whether `route` takes such rows: bf16, where the device has bodies for it and a program holds all experts."""
    rooms = backends.bodies(x_TD.device, x_TD.dtype)
    return (
        rooms is not None
        and rooms.router is not None
        and x_TD.dtype == torch.bfloat16
        and num_experts <= rooms.router.MOST_EXPERTS
    )


def route(
    x_TD: Tensor, weight_ED: Tensor, choice: Choice, *, bias_E: Tensor | None = None, selection_E: Tensor | None = None
) -> Routed:
    """Logits x @ weight^T + bias, their scores, the K best experts of each token and what they weigh.

    As exact as in fp32; a row's results are the same in any batch. Ties go to the lower expert id.

    Args:
        x_TD: bf16 [T, D], where `fuses_router` says so. Differentiable, as weight and bias are.
        weight_ED: floats [E, D].
        choice: how to choose.
        bias_E: added to the logits.
        selection_E: fp32, added to the scores for the choice alone.
    """
    checks.matrix("x", x_TD)
    checks.matrix("weight", weight_ED)
    checks.require(
        x_TD.shape[1] == weight_ED.shape[1], f"x {list(x_TD.shape)} does not fit weight {list(weight_ED.shape)}"
    )
    rooms = backends.bodies(x_TD.device, x_TD.dtype)
    assert rooms is not None
    assert rooms.router is not None
    routed = functions.apply(
        functions.Route, x_TD.contiguous(), weight_ED.contiguous(), bias_E, selection_E, choice, rooms.router
    )
    return Routed(*routed)


def balance(scores_TE: Tensor, tokens_per_expert_E: Tensor) -> Tensor | None:
    """E * sum_e f_e * P_e with f the fraction of assignments and P the mean over tokens of the scores' shares.

    None where no body computes it in one pass.

    Args:
        scores_TE: fp32, at least 0. Differentiable.
        tokens_per_expert_E: int64, on the host or the device.
    """
    rooms = backends.bodies(scores_TE.device, scores_TE.dtype)
    if rooms is None or rooms.router is None or scores_TE.dtype != torch.float32:
        return None
    counts_E = buffers.upload(tokens_per_expert_E, scores_TE.device).contiguous()
    loss: Tensor = functions.apply(functions.Balance, scores_TE.contiguous(), counts_E, rooms.router)
    return loss
