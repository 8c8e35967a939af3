"""GPU and CPU kernels of a Mixture-of-Experts layer: one signature for each operation, three implementations
(reference, torch, Triton).

The implementation is chosen by the device of the data and can be set with `set_backend`. All operations are
deterministic, take non-contiguous inputs, and raise `ConfigurationError` in one sentence for wrong shapes, dtypes or
devices.
"""

from moe_lightning.kernels.interface import Choice as Choice
from moe_lightning.kernels.interface import Draw as Draw
from moe_lightning.kernels.interface import ExpertSort as ExpertSort
from moe_lightning.kernels.interface import QuotaRounds as QuotaRounds
from moe_lightning.kernels.interface import Routed as Routed
from moe_lightning.kernels.operations import BACKENDS as BACKENDS
from moe_lightning.kernels.operations import BackendName as BackendName
from moe_lightning.kernels.operations import backend as backend
from moe_lightning.kernels.operations import balance as balance
from moe_lightning.kernels.operations import count_by_expert as count_by_expert
from moe_lightning.kernels.operations import expert_activation as expert_activation
from moe_lightning.kernels.operations import expert_mlp as expert_mlp
from moe_lightning.kernels.operations import fill_blocks as fill_blocks
from moe_lightning.kernels.operations import fuses_experts as fuses_experts
from moe_lightning.kernels.operations import fuses_router as fuses_router
from moe_lightning.kernels.operations import grouped_mm as grouped_mm
from moe_lightning.kernels.operations import keyed_dropout as keyed_dropout
from moe_lightning.kernels.operations import pack as pack
from moe_lightning.kernels.operations import permute as permute
from moe_lightning.kernels.operations import plan_rows as plan_rows
from moe_lightning.kernels.operations import plan_runs as plan_runs
from moe_lightning.kernels.operations import reorder_chunks as reorder_chunks
from moe_lightning.kernels.operations import route as route
from moe_lightning.kernels.operations import set_backend as set_backend
from moe_lightning.kernels.operations import sort_by_expert as sort_by_expert
from moe_lightning.kernels.operations import sum_in_rank_order as sum_in_rank_order
from moe_lightning.kernels.operations import top_k_experts as top_k_experts
from moe_lightning.kernels.operations import unpermute as unpermute
from moe_lightning.kernels.operations import xor_parity as xor_parity
from moe_lightning.kernels.torch_kernels import upload as upload
