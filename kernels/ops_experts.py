"""The expert MLP: grouped matmul over slots, and the fused activation with gate weights.

Legend: M rows sorted by slot, S slots, D input width, F output width, T tokens, K choices, H = F (gelu) or 2F (gated).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_lightning.kernels import backends, checks, functions, ops_rows, reference
from moe_lightning.kernels.bodies import ACTIVATIONS, ExpertSort, is_gated


def grouped_mm(
    x: Tensor,
    weight_SDF: Tensor,
    tokens_per_slot_S: Tensor | Sequence[int],
    *,
    order_M: Tensor | None = None,
    inverse_TK: Tensor | None = None,
) -> Tensor:
    """Each row times the weight of its slot: [M, F], accumulated in fp32, in the dtype of x or of autocast.

    Rows past the sum of `tokens_per_slot_S` get zeros and have no gradient; a slot without rows gets a zero gradient.

    Args:
        x: floats [M, D], sorted by slot; or tokens [T, D] where `order_M` and `inverse_TK` (from `sort_by_expert`) are
            given: then the result is that of `grouped_mm(permute(x, order_M, inverse_TK), ...)`, without that copy.
        weight_SDF: [S, D, F] in the dtype of x.
        tokens_per_slot_S: int64 [S] on the host or the device (no host synchronisation on a GPU), or plain integers.
            The sum must not exceed M (checked where the counts are on the host).
    """
    checks.matrix("x", x)
    checks.matrix("weight", weight_SDF, 3)
    checks.same_device("weight", weight_SDF, x.device)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight_SDF = x.to(dtype), weight_SDF.to(dtype)
    checks.require(
        weight_SDF.dtype == x.dtype, f"weight is {weight_SDF.dtype}, but x is {x.dtype}: use one dtype, or autocast"
    )
    num_slots, width, _ = weight_SDF.shape
    checks.require(x.shape[1] == width, f"x has {x.shape[1]} columns, but weight expects {width}")
    tokens_S = torch.as_tensor(tokens_per_slot_S)
    if not len(tokens_S):
        tokens_S = tokens_S.long()
    checks.index("tokens_per_slot", tokens_S, 1, tokens_S.device)
    checks.require(
        len(tokens_S) == num_slots, f"tokens_per_slot counts {len(tokens_S)} slots, but weight has {num_slots}"
    )
    checks.require((order_M is None) == (inverse_TK is None), "order and inverse belong together: give both or neither")
    num_rows = len(x)
    if order_M is not None and inverse_TK is not None:
        checks.index("order", order_M, 1, x.device)
        checks.index("inverse", inverse_TK, 2, x.device)
        checks.rows_fit(order_M, inverse_TK)
        checks.require(len(inverse_TK) == len(x), f"inverse is made for {len(inverse_TK)} tokens, but x holds {len(x)}")
        num_rows, order_M, inverse_TK = len(order_M), order_M.contiguous(), inverse_TK.contiguous()
    if tokens_S.device.type == "cpu":
        total = int(tokens_S.sum())
        valid = total <= num_rows and (num_slots == 0 or int(tokens_S.min()) >= 0)
        checks.require(valid, f"tokens_per_slot sum to {total}, but x holds {num_rows} rows and counts are at least 0")
    rooms = backends.bodies(x.device, x.dtype)
    if rooms is None:
        rows = x if order_M is None or inverse_TK is None else reference.permute(x, order_M, inverse_TK)
        return reference.grouped_mm(rows, weight_SDF, tokens_S.tolist())
    result: Tensor = functions.apply(
        functions.GroupedMM, x.contiguous(), weight_SDF, tokens_S, order_M, inverse_TK, (rooms.matmul, rooms.rows)
    )
    return result


def expert_mlp(
    x: Tensor,
    up_SDH: Tensor,
    down_SFD: Tensor,
    tokens_per_slot_S: Tensor | Sequence[int],
    kind: str,
    *,
    sort: ExpertSort | None = None,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """The experts of rows: activation(x @ up) @ down, by the slot of each row, as `grouped_mm` and `expert_activation`
    would compute it, in two launches where the device has bodies for that (`fuses_experts`).

    Args:
        x: floats [M, D], sorted by slot; or tokens [T, D] with `sort` and `weights_TK`.
        up_SDH, down_SFD: weights in the dtype of x; H = 2F where the kind is gated.
        tokens_per_slot_S: as for `grouped_mm`.
        kind: of the activation.
        sort: which rows the tokens have; then rows are gathered in the load, and weighed and summed behind.
        weights_TK: floats [T, K], with `sort`; differentiable.

    Returns:
        [M, D], or [T, D] with `sort`.
    """
    checks.require((sort is None) == (weights_TK is None), "sort and weights belong together: give both or neither")
    order_M, inverse_TK = (None, None) if sort is None else (sort.order_M, sort.inverse_TK)
    rooms = backends.bodies(x.device, x.dtype)
    if rooms is None or rooms.fused is None:
        h_MH = grouped_mm(x, up_SDH, tokens_per_slot_S, order_M=order_M, inverse_TK=inverse_TK)
        y_MD = grouped_mm(expert_activation(h_MH, kind), down_SFD, tokens_per_slot_S)
        return y_MD if sort is None else ops_rows.unpermute(y_MD, sort.inverse_TK, sort.order_M, weights_TK)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, up_SDH, down_SFD = x.to(dtype), up_SDH.to(dtype), down_SFD.to(dtype)
    tokens_S = _checked_experts(x, up_SDH, down_SFD, tokens_per_slot_S, kind)
    if weights_TK is not None:
        weights_TK = weights_TK.contiguous()
    result: Tensor = functions.apply(
        functions.ExpertMLP, x.contiguous(), up_SDH, down_SFD, tokens_S, kind, order_M, inverse_TK, weights_TK,
        (rooms.matmul, rooms.fused, rooms.rows),
    )  # fmt: skip
    return result


def fuses_experts(x: Tensor) -> bool:
    """Whether `expert_mlp` of such rows runs fused; else gathering in the load saves nothing."""
    rooms = backends.bodies(x.device, x.dtype)
    return rooms is not None and rooms.fused is not None


def _checked_experts(
    x: Tensor, up_SDH: Tensor, down_SFD: Tensor, tokens_per_slot_S: Tensor | Sequence[int], kind: str
) -> Tensor:
    checks.matrix("x", x)
    checks.matrix("up", up_SDH, 3)
    checks.matrix("down", down_SFD, 3)
    checks.require(kind in ACTIVATIONS, f"activation {kind!r} does not exist: use one of {', '.join(ACTIVATIONS)}")
    slots, width, hidden = up_SDH.shape
    wanted = (slots, hidden // 2 if is_gated(kind) else hidden, width)
    checks.require(
        tuple(down_SFD.shape) == wanted and x.shape[1] == width,
        f"x {list(x.shape)}, up {list(up_SDH.shape)} and down {list(down_SFD.shape)} do not fit: with {kind} down is "
        f"{list(wanted)}",
    )
    for name, weight in (("up", up_SDH), ("down", down_SFD)):
        checks.same_device(name, weight, x.device)
        checks.require(
            weight.dtype == x.dtype, f"{name} is {weight.dtype}, but x is {x.dtype}: use one dtype, or autocast"
        )
    tokens_S = torch.as_tensor(tokens_per_slot_S)
    checks.index("tokens_per_slot", tokens_S, 1, tokens_S.device)
    checks.require(len(tokens_S) == slots, f"tokens_per_slot counts {len(tokens_S)} slots, but weight has {slots}")
    return tokens_S


def expert_activation(h_MH: Tensor, kind: str, gate_weights_M: Tensor | None = None) -> Tensor:
    """The activation of an expert MLP, times a gate weight for each row.

    Computed in fp32 and rounded once. The backward keeps h only and computes the activation again.

    Args:
        h_MH: floats; [M, F] for the kinds of gelu, [M, 2F] = gate | up for those of swiglu.
        kind: "gelu" (the exact erf form), "gelu_tanh" (GPT-2's approximation of it), "swiglu" (silu(gate) * up), or
            "swiglu_clamped" (GPT-OSS: gate * sigmoid(1.702 gate) * (up + 1), gate cut at 7, up at -7 and 7).
        gate_weights_M: floats [M], or None. Differentiable.

    Returns:
        [M, F] in the dtype of h.
    """
    checks.matrix("h", h_MH)
    checks.require(kind in ACTIVATIONS, f"activation {kind!r} does not exist: use one of {', '.join(ACTIVATIONS)}")
    checks.require(
        not is_gated(kind) or h_MH.shape[1] % 2 == 0, f"{kind} halves its {h_MH.shape[1]} columns: use an even number"
    )
    if gate_weights_M is not None:
        checks.matrix("gate weights", gate_weights_M, 1)
        checks.same_device("gate weights", gate_weights_M, h_MH.device)
        checks.require(
            len(gate_weights_M) == len(h_MH), f"{len(gate_weights_M)} gate weights do not fit {len(h_MH)} rows"
        )
        gate_weights_M = gate_weights_M.contiguous()
    rooms = backends.bodies(h_MH.device, h_MH.dtype)
    if rooms is None:
        return reference.expert_activation(h_MH, kind, gate_weights_M)
    result: Tensor = functions.apply(
        functions.ExpertActivation, h_MH.contiguous(), gate_weights_M, kind, rooms.activation
    )
    return result
