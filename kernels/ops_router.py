"""A linear router in one operation.

Legend: T tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_lightning.errors import ConfigurationError
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
        selection_E: added to the scores for the choice alone.

    Raises:
        ConfigurationError: what does not fit together, or rows that `fuses_router` does not take.
    """
    checks.matrix("x", x_TD)
    checks.matrix("weight", weight_ED)
    checks.same_device("weight", weight_ED, x_TD.device)
    num_experts, width = weight_ED.shape
    checks.require(x_TD.shape[1] == width, f"x {list(x_TD.shape)} does not fit weight {list(weight_ED.shape)}")
    checks.require(1 <= choice.top_k <= num_experts, f"top_k={choice.top_k} must be from 1 to {num_experts} experts")
    for name, value_E in (("bias", bias_E), ("selection", selection_E)):
        if value_E is not None:
            checks.matrix(name, value_E, 1)
            checks.same_device(name, value_E, x_TD.device)
            checks.require(len(value_E) == num_experts, f"{name} has {len(value_E)} values for {num_experts} experts")
    rooms = backends.bodies(x_TD.device, x_TD.dtype)
    if rooms is None or rooms.router is None or not fuses_router(x_TD, num_experts):
        raise ConfigurationError(
            f"no kernel routes {x_TD.dtype} rows on {x_TD.device.type} to {num_experts} experts in one operation: ask "
            "fuses_router first, or take top_k_routing"
        )
    bias_E, selection_E = (None if value is None else value.contiguous() for value in (bias_E, selection_E))
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

    Raises:
        ConfigurationError: counts of other experts.
    """
    checks.matrix("scores", scores_TE)
    checks.index("tokens_per_expert", tokens_per_expert_E, 1, tokens_per_expert_E.device)
    checks.require(
        len(tokens_per_expert_E) == scores_TE.shape[1],
        f"tokens_per_expert counts {len(tokens_per_expert_E)} experts, but scores have {scores_TE.shape[1]}",
    )
    rooms = backends.bodies(scores_TE.device, scores_TE.dtype)
    if rooms is None or rooms.router is None or scores_TE.dtype != torch.float32:
        return None
    counts_E = buffers.upload(tokens_per_expert_E, scores_TE.device).contiguous()
    loss: Tensor = functions.apply(functions.Balance, scores_TE.contiguous(), counts_E, rooms.router)
    return loss
