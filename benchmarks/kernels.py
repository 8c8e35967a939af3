"""moe-bench kernels: kernels against plain torch and their reference, the expert MLP against its competitors, the plan.

On the CPU all tables are ratios inside one run. On a GPU the tables of `kernels_cuda` follow.

Shapes: T tokens, K choices, E experts, M = T*K rows, N ranks, D model width, F expert width.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernels_cuda
from benchmarks.kernel_contenders import SIZES, Contender, Shape, contenders, swiglu
from benchmarks.measuring import interleaved_medians
from moe_lightning import kernels as ops
from moe_lightning.arguments import Count, option
from moe_lightning.cli.short_training import machine
from moe_lightning.dispatch.quota import balanced_quota, dispatch_splits
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels.torch_kernels import pool
from moe_lightning.text_table import table

Call = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    tokens: Count = option("tokens T", 4096)
    d_model: Count = option("width D", 512)
    d_expert: Count = option("expert width F", 512)
    experts: Count = option("experts E", 32)
    top_k: Count = option("choices K", 2)
    dtype: Literal["float32", "bfloat16"] = option("on the CPU", "float32")
    rounds: Count = option("measurements of each", 7)
    no_reference: bool = option("leave the slow reference out", False)


def run(options: Options) -> int:
    """Print all tables for this machine."""
    shape = Shape(name="cpu", **{name: getattr(options, name) for name in SIZES})
    if min(shape.tokens, shape.d_model, shape.d_expert, options.rounds) < 1 or not 1 <= shape.top_k <= shape.experts:
        raise ConfigurationError(
            f"{shape} with {options.rounds} rounds cannot be measured: all must be at least 1, and K at most E"
        )
    dtype: torch.dtype = getattr(torch, options.dtype)
    print(f"{machine()}; medians of {options.rounds} interleaved rounds; CPU tables: {shape} {options.dtype}")
    print(operations_table(shape, dtype, options.rounds, "torch"))
    if not options.no_reference:  # its loops over tokens in Python take seconds for more
        few = replace(shape, tokens=min(shape.tokens, 256))
        print(operations_table(few, dtype, min(options.rounds, 3), "reference"))
    print(mlp_table(shape, dtype, options.rounds))
    print(plan_table(options.rounds))
    if torch.cuda.is_available():
        kernels_cuda.run(options.rounds)
    else:
        print("No GPU here: rates, memory and synchronisations of the Triton kernels were not measured.")
    return 0


def operations_table(shape: Shape, dtype: torch.dtype, rounds: int, other: str) -> str:
    """Forward and backward of each operation: ours against the obvious torch expression, or against the reference."""
    rows = []
    for name, ours, plain, leaves in _operations(shape, dtype):
        calls: dict[str, Call] = {"ours": ours, other: plain if other == "torch" else ops.backend("reference")(ours)}
        results = {key: call() for key, call in calls.items()}
        grad = torch.ones_like(results["ours"])
        backwards = {key: _gradients(result, leaves, grad) for key, result in results.items()}
        for label, functions in (("forward", calls), ("backward", backwards)):
            seconds = interleaved_medians(functions, rounds)
            cells = [f"{1e3 * seconds[key]:.3f}" for key in ("ours", other)]
            rows.append((name, label, *cells, f"{seconds[other] / seconds['ours']:.2f}"))
    headers = ("operation", "pass", "ours ms", f"{other} ms", f"{other}/ours")
    return table(headers, rows, f"{shape}, against {other}")


def _gradients(result: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)


def _operations(shape: Shape, dtype: torch.dtype) -> list[tuple[str, Call, Call, tuple[Tensor, ...]]]:
    """(name, our call, the obvious torch call, differentiated inputs)."""
    generator = torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).requires_grad_()

    top_k = shape.top_k
    scores_TE = randn(shape.tokens, shape.experts)
    ids_TK = ops.top_k_experts(scores_TE, top_k)
    sort = ops.sort_by_expert(ids_TK, shape.experts)
    order_M, inverse_TK, counts_E = sort.order_M, sort.inverse_TK, sort.tokens_per_expert_E
    num_rows = len(order_M)
    x_TD, rows_MD, weights_TK = randn(shape.tokens, shape.d_model), randn(num_rows, shape.d_model), randn(*ids_TK.shape)
    weight_EDF = randn(shape.experts, shape.d_model, shape.d_expert)
    h_MH = randn(num_rows, 2 * shape.d_expert)
    sizes = counts_E.tolist()

    return [
        (
            "top_k",
            lambda: scores_TE.gather(1, ops.top_k_experts(scores_TE, top_k)),
            lambda: scores_TE.topk(top_k, dim=1).values,
            (scores_TE,),
        ),
        (
            "permute",
            lambda: ops.permute(x_TD, order_M, inverse_TK),
            lambda: x_TD[order_M // top_k],
            (x_TD,),
        ),
        (
            "unpermute (embedding_bag)",
            lambda: ops.unpermute(rows_MD, inverse_TK, order_M, weights_TK),
            lambda: F.embedding_bag(inverse_TK, rows_MD, mode="sum", per_sample_weights=weights_TK),
            (rows_MD, weights_TK),
        ),
        (
            "grouped_mm (loop)",
            lambda: ops.grouped_mm(rows_MD, weight_EDF, counts_E),
            lambda: torch.cat([x @ weight_EDF[e] for e, x in enumerate(torch.split(rows_MD, sizes))]),
            (rows_MD, weight_EDF),
        ),
        ("swiglu", lambda: ops.expert_activation(h_MH, "swiglu"), lambda: swiglu(h_MH), (h_MH,)),
    ]


def mlp_table(shape: Shape, dtype: torch.dtype, rounds: int) -> str:
    """The whole expert MLP with routing given: forward, backward, and memory touched for the first time."""
    built, absent = contenders(shape, torch.device("cpu"), dtype)
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(shape.tokens, shape.d_model, generator=generator).to(dtype).requires_grad_()
    scores_TE = torch.rand(shape.tokens, shape.experts, generator=generator)
    ids_TK = ops.top_k_experts(scores_TE, shape.top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    inputs = (x_TD, ids_TK, weights_TK.to(dtype))
    passes = (_forward, _backward)
    times = [interleaved_medians({name: make(c, inputs) for name, c in built.items()}, rounds) for make in passes]
    memory = {name: _fresh_memory(contender, inputs) for name, contender in built.items()}
    rows = [
        (
            name,
            *(cell for of in times for cell in (f"{1e3 * of[name]:.2f}", f"{of[name] / of['ours']:.2f}")),
            f"{mib:.1f}",
        )
        for name, (_, mib) in memory.items()
    ]
    headers = ("expert MLP", "forward ms", "of ours", "backward ms", "of ours", "fresh MiB touched")
    notes = [f"ours allocates {memory['ours'][0]} large blocks in a steady step"]
    notes += [f"{name} left out: {reason}" for name, reason in absent.items()]
    title = f"{shape}; fresh: page faults of a steady forward + backward"
    return "\n".join([table(headers, rows, title), *notes])


def _forward(contender: Contender, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    return lambda: contender.forward(*inputs)


def _backward(contender: Contender, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], object]:
    return _gradients(contender.forward(*inputs), (inputs[0], *contender.parameters), torch.ones_like(inputs[0]))


def _fresh_memory(contender: Contender, inputs: tuple[Tensor, Tensor, Tensor], steps: int = 5) -> tuple[int, float]:
    """(blocks the pool allocated, MiB of memory touched for the first time), means of steady steps."""
    for _ in range(3):
        _backward(contender, inputs)()
    blocks, faults = pool.fresh, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        _backward(contender, inputs)()
    blocks = pool.fresh - blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return blocks // steps, faults * resource.getpagesize() / 2**20 / steps


def plan_table(rounds: int) -> str:
    """Quota and dispatch plan of one rank, on the host."""
    rows = []
    for num_experts, num_ranks in ((32, 16), (64, 64), (256, 1024)):
        tokens_EN, replicas_EN = _load(num_experts, num_ranks)
        total_E = tokens_EN.sum(axis=1)
        quota_EN = balanced_quota(total_E, replicas_EN)
        calls: dict[str, Callable[[], object]] = {
            "quota": functools.partial(balanced_quota, total_E, replicas_EN),
            "plan": functools.partial(dispatch_splits, tokens_EN, quota_EN, num_ranks // 2),
        }
        times = interleaved_medians(calls, rounds)
        busiest = quota_EN.sum(axis=0).max() / (total_E.sum() / num_ranks)
        milliseconds = [f"{1e3 * seconds:.2f}" for seconds in (times["quota"], times["plan"], sum(times.values()))]
        rows.append(("balanced quota + intervals", num_experts, num_ranks, *milliseconds, f"{busiest:.3f}"))
    return table(("plan", "E", "N", "quota ms", "plan ms", "sum ms", "busiest/mean"), rows)


def _load(num_experts: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Zipf tokens [E, N], and 2 to 4 experts a rank drawn by popularity [E, N]."""
    generator = np.random.default_rng(0)
    popularity = np.arange(1, num_experts + 1) ** -1.2
    popularity /= popularity.sum()
    tokens_EN = generator.multinomial(4096, popularity, size=num_ranks).T.astype(np.int64)
    replicas_EN = np.zeros((num_experts, num_ranks), dtype=np.int64)
    for rank in range(num_ranks):
        held = generator.choice(
            num_experts, size=generator.integers(2, 5), replace=False, p=0.7 * popularity + 0.3 / num_experts
        )
        replicas_EN[held, rank] = 1
    replicas_EN[replicas_EN.sum(axis=1) == 0, 0] = 1
    return tokens_EN, replicas_EN
