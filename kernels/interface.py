"""Interface of the kernels: one signature for each primitive, without autograd, which `operations` adds.

`torch_kernels` and the modules of `triton` implement it.

Legend: T tokens, K choices, A = T*K assignments, M rows (A less the dropped), E experts, S slots, D model width,
F expert width, N parts, L elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

ACTIVATIONS = ("gelu", "swiglu", "gelu_tanh", "swiglu_clamped")
"""Activations of an expert's hidden layer; see `expert_activation`."""

GATED = frozenset({"swiglu", "swiglu_clamped"})
"""Activations that take gate and up side by side and halve the width."""

CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0
"""Constants of "swiglu_clamped", those of GPT-OSS."""


class ExpertSort(NamedTuple):
    """The assignments of a batch in expert-major order.

    Attributes:
        order_M: int64, flat assignment index t*K + k of each row; inside an expert in order of assignment (stable).
        inverse_TK: int64, row of each assignment, -1 where it was dropped.
        tokens_per_expert_E: int64.
        rank_in_expert_TK: int64, place of each assignment among those of its expert, -1 where it was dropped.
    """

    order_M: Tensor
    inverse_TK: Tensor
    tokens_per_expert_E: Tensor
    rank_in_expert_TK: Tensor


class RoutingKernels(Protocol):
    def top_k(self, scores_TE: Tensor, top_k: int) -> Tensor:
        """int64 [T, K]: ids of the largest scores, descending, ties to the lower id."""

    def count(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """int64 [E]: assignments of each expert, those of -1 left out."""

    def sort_by_expert(self, ids_TK: Tensor, num_experts: int, num_rows: int | None) -> ExpertSort:
        """With the number of assignments that are kept, where it is known."""

    def chunk_order(self, starts_C: Tensor, ends_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """int64 [M] each: the old place of each row, and its inverse.

        Args:
            starts_C: where each chunk began; the chunks in their new order.
            ends_C: where each ends now.
        """

    def fill_blocks(
        self, order_A: Tensor, starts_C: Tensor, ends_C: Tensor, num_routed: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """int64 [M] and [A]: the assignment of each row, and the row of each assignment."""


class Choice(NamedTuple):
    """Choice of a linear router: K, sigmoid or softmax of the logits, weights over their sum, times a factor."""

    top_k: int
    is_sigmoid: bool
    normalizes: bool
    scale: float


class Routed(NamedTuple):
    """Result of a linear router for tokens: fp32 but for the ids, which are int64.

    Attributes:
        x_TD: the tokens themselves. The gradient of who goes on with these joins the router's own in one pass over the
            tokens; None where that is nothing but a sum, or the tokens need no gradient.
    """

    logits_TE: Tensor
    scores_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    x_TD: Tensor | None = None


class RouterKernels(Protocol):
    """A linear router of bf16 rows and fp32 weights, as exact as fp32, for devices that have faster units for it."""

    MOST_EXPERTS: int

    def route(
        self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, selection_E: Tensor | None, choice: Choice
    ) -> tuple[Routed, Tensor]:
        """Return the routing, and the terms of the weights that the gradients need."""

    def logit_gradients(
        self,
        terms_3ED: Tensor,
        scores_TE: Tensor,
        ids_TK: Tensor,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        choice: Choice,
        want_rows: bool,
        grad_TD: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the logits, as the sum of [3, T, E], and that of the rows [T, D].

        Args:
            grads: of logits, scores and weights.
            grad_TD: of the rows by whatever else reads them, which is added.
        """

    def router_wgrad(self, grads_3TE: Tensor, x_TD: Tensor) -> Tensor:
        """fp32 [E, D]: the sum over tokens of gradient^T @ x."""

    def balance(self, scores_TE: Tensor, counts_E: Tensor) -> Tensor:
        """fp32 [T]: each token's part of the load-balancing loss."""

    def balance_gradient(self, scores_TE: Tensor, counts_E: Tensor, grad: Tensor) -> Tensor:
        """fp32 [T, E], of the sum over tokens, whose gradient is a scalar."""


class RowKernels(Protocol):
    """Movement of rows and bytes, sums and noise by element."""

    def gather(self, x_TD: Tensor, index_M: Tensor, divisor: int) -> Tensor:
        """[M, D]: x[index // divisor]."""

    def combine(self, rows_MD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
        """[T, D]: sum over k of weights[t, k] * rows[inverse[t, k]], accumulated in fp32, entries of -1 left out."""

    def spread(
        self, grad_TD: Tensor, order_M: Tensor, rows_MD: Tensor | None, weights_TK: Tensor, want_rows: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `combine`: rows [M, D] = weights[order] * grad[order // K], and, where rows are given, the
        row-wise products [M] = grad[order // K] . rows in fp32."""

    def dropout(self, x_MD: Tensor, p: float, draw: Draw) -> Tensor:
        """[M, D]: 0 where the number of an element is below p, else x / (1 - p)."""

    def xor(self, buffers: Sequence[Tensor], out: Tensor) -> None: ...

    def sum_in_rank_order(self, parts_NL: Tensor, out_L: Tensor) -> None: ...


class MatmulKernels(Protocol):
    def cut(self, tokens_S: Tensor, num_rows: int, x: Tensor) -> Any:
        """Return what all products of rows sorted by slot share, in a form of the implementation's own.

        Args:
            x: of the dtype and on the device of the operands.
        """

    def grouped_mm(self, x_MD: Tensor, weight_SDF: Tensor, cut: Any) -> Tensor:
        """[M, F]: x @ weight[slot of the row]; rows past the sum are zero."""

    def grouped_wgrad(self, x_MD: Tensor, grad_MF: Tensor, cut: Any) -> Tensor:
        """[S, D, F]: x^T @ grad over the rows of each slot; zero for an empty slot."""


class HiddenGradients(NamedTuple):
    """Result of the backward of a down projection.

    Attributes:
        h_MH: the gradient of h.
        activation_MF: the activation, computed again, times the row's weight where there is one.
        products_CA: fp32, pieces of each assignment's product of activation and gradient; None without weights.
    """

    h_MH: Tensor
    activation_MF: Tensor
    products_CA: Tensor | None


class FusedKernels(MatmulKernels, Protocol):
    """Matmuls with the activation behind them, for devices where a kernel of its own would cost a pass over memory.

    With gather_M the rows of `x`, or of a gradient, are those of tokens: x[gather // divisor].
    """

    def up_and_activation(
        self, x: Tensor, up_SDH: Tensor, cut: Any, gather_M: Tensor | None, divisor: int, kind: str
    ) -> tuple[Tensor, Tensor]:
        """h [M, H] = x @ up[slot of the row], and its activation [M, F]."""

    def down_gradient(
        self,
        grad: Tensor,
        down_SFD: Tensor,
        cut: Any,
        h_MH: Tensor,
        kind: str,
        gather_M: Tensor | None,
        weights_TK: Tensor | None,
    ) -> HiddenGradients:
        """The gradient of the down projection's input, passed on through the activation.

        Args:
            grad: by rows [M, D]; or by tokens [T, D], where gather_M and weights_TK say which row takes which, times
                what.
        """

    def up_wgrad(self, x: Tensor, grad_MH: Tensor, cut: Any, gather_M: Tensor | None, divisor: int) -> Tensor:
        """[S, D, H]: x^T @ grad over the rows of each slot."""

    def down_wgrad(
        self, activation_MF: Tensor, grad: Tensor, cut: Any, gather_M: Tensor | None, divisor: int
    ) -> Tensor:
        """[S, F, D]: activation^T @ grad over the rows of each slot."""


class ActivationKernels(Protocol):
    def activation(self, h_MH: Tensor, kind: str) -> Tensor: ...

    def activation_grad(self, grad_MF: Tensor, h_MH: Tensor, kind: str) -> Tensor: ...


class QuotaRounds(NamedTuple):
    """Rule by which the holders of an expert share its tokens: that of `dispatch.quota.balanced_quota` for equally fast
    ranks but for its search token by token, whose length is unknown. Weights that are not good enough go on instead.

    Attributes:
        rounds: of multiplicative weights; 0 splits evenly over replicas.
        patience: rounds without a gain after which the search ends, where what it has found is good.
        slack: the search has found something good when the busiest rank is within 1/slack of the bound.
        one: fixed-point unit of the weights.
    """

    rounds: int
    patience: int
    slack: int
    one: int


class Runs(NamedTuple):
    """A dispatch plan in runs of rows: where each begins now, and where it ends in the new order, both int64.

    Attributes:
        send_starts, send_ends: [N * (E + 1)], among the assignments sorted by expert; for each rank the rows of each
            expert, and then what fills its block.
        recv_starts, recv_ends: [(C + 1) * N], among what arrives; for each slot the rows of each rank, and then what
            fills each rank's block.
        tokens_C: rows of each slot.
    """

    send_starts: Tensor
    send_ends: Tensor
    recv_starts: Tensor
    recv_ends: Tensor
    tokens_C: Tensor


class PlanKernels(Protocol):
    def plan_rows(
        self, tokens_EN: Tensor, replicas_EN: Tensor, rank: int, sharing: QuotaRounds
    ) -> tuple[Tensor, Tensor]:
        """int64 [E, N] each: rows of each expert that the rank sends to, and receives from, every rank."""

    def runs(self, send_EN: Tensor, recv_EN: Tensor, slots_C: Tensor, block: int) -> Runs:
        """Return the layout of a plan's rows in blocks."""


SAMPLE_ROWS = 1 << 32
"""Rows between the first ones of two samples in the count of `Draw`, so that a row's number does not depend on the
length that samples are padded to."""


class Draw(NamedTuple):
    """Random numbers to draw: a key, and the position of the local rows in the global batch.

    Attributes:
        key: int64, already mixed.
        first: sample of the global batch that begins here.
        here: local rows of a sample, below `SAMPLE_ROWS`.
        part: which of the equal parts of each sample's rows is here.
    """

    key: int
    first: int
    here: int
    part: int
