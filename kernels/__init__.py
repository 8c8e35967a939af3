"""GPU and CPU kernels of a Mixture-of-Experts layer: one signature for each operation, three implementations
(reference, torch, Triton).

The implementation is chosen by the device of the data and can be set with `set_backend`. All operations are
deterministic, take non-contiguous inputs, and raise `ConfigurationError` in one sentence for wrong shapes, dtypes or
devices.
"""

from moe_lightning.kernels.backends import BACKENDS, BackendName, backend, set_backend
from moe_lightning.kernels.interface import Choice, Draw, ExpertSort, QuotaRounds, Routed
from moe_lightning.kernels.operations import (
    balance,
    chunk_order,
    count_by_expert,
    expert_activation,
    expert_mlp,
    fill_blocks,
    fuses_experts,
    fuses_router,
    gather_rows,
    grouped_mm,
    invert,
    keyed_dropout,
    pack,
    packed_bytes,
    permute,
    plan_rows,
    plan_runs,
    reorder_chunks,
    route,
    sort_by_expert,
    sum_in_rank_order,
    top_k_experts,
    top_k_routing,
    unpack,
    unpermute,
    xor_parity,
)

__all__ = [
    "BACKENDS",
    "BackendName",
    "Choice",
    "Draw",
    "ExpertSort",
    "Routed",
    "QuotaRounds",
    "backend",
    "balance",
    "chunk_order",
    "count_by_expert",
    "expert_activation",
    "expert_mlp",
    "fill_blocks",
    "fuses_experts",
    "fuses_router",
    "gather_rows",
    "grouped_mm",
    "invert",
    "keyed_dropout",
    "pack",
    "packed_bytes",
    "permute",
    "plan_rows",
    "plan_runs",
    "reorder_chunks",
    "route",
    "set_backend",
    "sort_by_expert",
    "sum_in_rank_order",
    "top_k_experts",
    "top_k_routing",
    "unpack",
    "unpermute",
    "xor_parity",
]
