"""Every Triton kernel compiles for four generations of GPUs without one, and its machine code keeps to a budget.

The interpreter shows that the kernels compute the right values; this shows that the compiler takes them, that they fit
the device, spill nothing, and use the tensor cores and wide accesses that they are written for.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.gpu.compiler import MULTIPROCESSORS, SHARED_BYTES, Compiled, Compiler
from tests.gpu.triton_modules import launching_modules
from tests.parameters import slow

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
ALL = tuple(SHARED_BYTES)
SPILLED = {80: 1024, 90: 256, 100: 1024, 120: 1024}
"""Most bytes of a thread of a router of more than 64 experts."""
SLOW = [slow(capability) for capability in ALL]
TOKENS, TOP_K, EXPERTS, WIDTH, HIDDEN = 16384, 4, 64, 1536, 512


@pytest.fixture
def compiler(request, monkeypatch, tmp_path):
    """Every launch compiles for the capability that the test was given."""
    capability = request.getfixturevalue("capability")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from moe_lightning.kernels.triton import matmul, router, tiles
    from moe_lightning.kernels.triton.tiles import Limits

    found = Limits(capability=capability, shared=SHARED_BYTES[capability], multiprocessors=MULTIPROCESSORS[capability])
    compiler = Compiler(capability)
    for room in launching_modules():
        monkeypatch.setattr(room, "launch", compiler)
    for room in (matmul, router, tiles):
        monkeypatch.setattr(room, "limits", lambda device: found)
    return compiler


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def experts(gathers: bool, kind: str = "swiglu") -> None:
    """What an expert MLP launches forward and backward."""
    from moe_lightning.kernels.triton import matmul as room

    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    order = torch.zeros(TOKENS * TOP_K, dtype=torch.int64) if gathers else None
    weights = torch.zeros(TOKENS, TOP_K) if gathers else None
    x = half(TOKENS if gathers else TOKENS * TOP_K, WIDTH)
    up, down = half(EXPERTS, WIDTH, 2 * HIDDEN if kind == "swiglu" else HIDDEN), half(EXPERTS, HIDDEN, WIDTH)
    cut = room.cut(counts, TOKENS * TOP_K, x)
    h, activation = room.up_and_activation(x, up, cut, order, TOP_K, kind)
    room.grouped_mm(activation, down, cut)
    room.down_gradient(x, down, cut, h, kind, order, weights)
    room.down_wgrad(activation, x, cut, order, TOP_K)
    room.grouped_mm(h, up.transpose(1, 2), cut)
    room.up_wgrad(x, h, cut, order, TOP_K)


def router(num_experts: int) -> None:
    """What a router launches forward and backward."""
    from moe_lightning.kernels import Choice
    from moe_lightning.kernels.triton import router as room

    choice = Choice(top_k=TOP_K, is_sigmoid=False, normalizes=True, scale=2.5)
    x, weight = half(TOKENS, WIDTH), torch.empty(num_experts, WIDTH)
    routed, terms = room.route(x, weight, None, None, choice)
    upstream = (None, routed.scores_TE, routed.weights_TK)
    grads, _ = room.logit_gradients(terms, routed.scores_TE, routed.ids_TK, upstream, choice, True, x)
    room.router_wgrad(grads, x)
    counts = torch.zeros(num_experts, dtype=torch.int64)
    room.balance(routed.scores_TE, counts)
    room.balance_gradient(routed.scores_TE, counts, torch.zeros(()))


def keeps_to_the_budget(kernel: Compiled, capability: int, most_spilled: int = 0) -> None:
    assert kernel.shared <= SHARED_BYTES[capability], kernel.name
    spills = f"{kernel.name} spills {kernel.spilled} bytes at {kernel.registers} registers"
    assert kernel.spilled <= most_spilled, spills


def is_a_good_matmul(kernel: Compiled, capability: int) -> None:
    keeps_to_the_budget(kernel, capability)
    assert kernel.count(TENSOR_CORES[capability]) > 0, f"{kernel.name} does without the tensor cores"
    if capability in (90, 100):
        assert kernel.count("HMMA") == 0, f"{kernel.name} takes the slower path of the tensor cores"
    assert kernel.count("STG.E.128") >= kernel.count("STG.E") / 2, f"{kernel.name} stores narrowly"


@pytest.mark.parametrize(
    ("capability", "gathers"),
    [slow(capability, gathers) for capability in ALL for gathers in (False, True)],
)
def test_matmuls_keep_to_their_budget(capability, gathers, compiler):
    experts(gathers)
    matmuls = [kernel for kernel in compiler.kernels if kernel.name != "_tile_kernel"]
    assert len(matmuls) == 6
    for kernel in matmuls:
        is_a_good_matmul(kernel, capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "num_experts", "most_spilled"),
    [
        (90, 64, 0),
        # Where a tile of scores fills the registers, what surrounds the products may spill.
        *(
            slow(capability, num_experts, most)
            for capability in ALL
            for num_experts, most in ((64, 0), (128, SPILLED[capability]), (256, SPILLED[capability]))
            if (capability, num_experts) != (90, 64)
        ),
    ],
)
def test_the_router_runs_on_tensor_cores(capability, num_experts, most_spilled, compiler):
    router(num_experts)
    products = [kernel for kernel in compiler.kernels if kernel.count(TENSOR_CORES[capability])]
    assert {kernel.name for kernel in products} == {"_route_kernel", "_logit_gradient_kernel", "_router_weight_kernel"}
    for kernel in compiler.kernels:
        keeps_to_the_budget(kernel, capability, most_spilled)
        if capability in (90, 100):
            assert kernel.count("HMMA") == 0, f"{kernel.name} takes the slower path of the tensor cores"


@pytest.mark.parametrize("capability", SLOW)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu_clamped"])
def test_matmuls_of_other_kinds_keep_to_their_budget(capability, kind, compiler):
    experts(True, kind)
    assert len(compiler.kernels) > 6
    for kernel in compiler.kernels:  # the longer formulas cost a few words in the epilogue of the hidden gradient
        keeps_to_the_budget(kernel, capability, most_spilled=64)


@pytest.mark.parametrize("capability", SLOW)
def test_few_rows_single_precision_and_odd_widths_fit(capability, compiler):
    from moe_lightning.kernels.triton import matmul as room

    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    for x, weight in (
        (half(512, WIDTH), half(EXPERTS, WIDTH, HIDDEN)),
        (torch.empty(8192, WIDTH), torch.empty(EXPERTS, WIDTH, HIDDEN)),
        (half(8192, 1001), half(EXPERTS, 1001, 77)),
    ):
        room.grouped_mm(x, weight, room.cut(counts, len(x), x))
    assert compiler.kernels
    for kernel in compiler.kernels:  # fp32 and odd widths take the paths that need not be fast, and may spill
        keeps_to_the_budget(kernel, capability, most_spilled=1024)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, *(slow(c) for c in (80, 100, 120))])
def test_kernels_of_rows_move_128_bits_at_once(capability, compiler):
    from moe_lightning.kernels.triton import rows as room

    order, inverse = torch.zeros(TOKENS * TOP_K, dtype=torch.int64), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    x, rows, weights = half(TOKENS, WIDTH), half(TOKENS * TOP_K, WIDTH), torch.zeros(TOKENS, TOP_K)
    room.gather(x, order, TOP_K)
    room.combine(rows, inverse, weights)
    room.spread(x, order, rows, weights, want_rows=True)
    for kernel in compiler.kernels:
        keeps_to_the_budget(kernel, capability)
        assert kernel.count("LDG.E.128", "LDG.E.ENL2.256") > 0, kernel.name
        assert kernel.count("STG.E.128", "STG.E.ENL2.256") > 0, kernel.name


def test_a_step_with_other_numbers_of_rows_compiles_nothing():
    """How many rows arrive differs from step to step, and Triton compiles anew for multiples of 16 where it may."""
    for room in launching_modules():
        for name, kernel in vars(room).items():
            if name.endswith("_kernel") and hasattr(kernel, "arg_names"):
                counts = {"num_rows", "capacity"} & set(kernel.arg_names)
                assert counts <= set(kernel.do_not_specialize), f"{name} of {room.__name__}"


@pytest.mark.parametrize("capability", SLOW)
def test_every_kernel_compiles_and_fits(capability, compiler):
    from moe_lightning.kernels import Draw, QuotaRounds
    from moe_lightning.kernels.triton import activation, plan, routing
    from moe_lightning.kernels.triton import rows as row_kernels

    ids, order = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.zeros(TOKENS * TOP_K, dtype=torch.int64)
    rows, gate = half(TOKENS * TOP_K, WIDTH), torch.zeros(TOKENS * TOP_K)
    experts(True)
    router(EXPERTS)
    routing.top_k(torch.zeros(TOKENS, EXPERTS), TOP_K)
    routing.sort_by_expert(ids, EXPERTS, num_rows=ids.numel())
    routing.chunk_order(torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), 4096)
    row_kernels.gather(half(TOKENS, WIDTH), order, TOP_K)
    row_kernels.combine(rows, ids, gate.view(ids.shape))
    row_kernels.spread(half(TOKENS, WIDTH), order, rows, gate.view(ids.shape), want_rows=True)
    for kind in ("gelu", "swiglu", "gelu_tanh", "swiglu_clamped"):
        activation.activation(rows, kind)
        activation.activation_grad(rows, rows, kind)
    row_kernels.sum_in_rank_order(torch.zeros(4, 1024), torch.zeros(1024))
    table = torch.zeros(EXPERTS, 64, dtype=torch.int64)
    plan.plan_rows(table, table, 3, QuotaRounds(rounds=48, patience=12, slack=128, one=1 << 20))
    runs = plan.runs(table, table, torch.zeros(EXPERTS, dtype=torch.int64), 4096)
    routing.fill_blocks(order, runs.send_starts, runs.send_ends, table[0, 0], 64 * 4096)
    row_kernels.dropout(rows, 0.1, Draw(key=-(1 << 60), first=3, here=8, part=0))
    most_spilled = {"_plan_kernel": 512}  # tables of int64, of which one program keeps seven
    for kernel in compiler.kernels:
        keeps_to_the_budget(kernel, capability, most_spilled.get(kernel.name, 0))
    defined = {name for room in launching_modules() for name in vars(room) if name.endswith("_kernel")}
    assert {kernel.name for kernel in compiler.kernels} == defined
