"""MoC-System: composition, sizes on each rank, scaling, and lost tokens (MoC 2, 6; Fig. 2, 10, 13, 15, Table 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

import numpy as np

from benchmarks.gpt_tensors import FULL_SCOPE_ACCOUNTING, MOC_ACCOUNTING, gpt_moe_tensors, parameter_count
from benchmarks.paper_pec import layer_modules
from benchmarks.paper_table import PaperTable, Row, Sources
from moe_lightning.checkpoint.selection import (
    SCOPE_PRESETS,
    DynamicKRule,
    full_selection,
    sequential_selection,
)
from moe_lightning.checkpoint.sharding import (
    MIXED_PRECISION_BYTES,
    Accounting,
    Module,
    baseline_rank_bytes,
    checkpoint_size,
    equal_expert_writers,
    shard_checkpoint,
)
from moe_lightning.plots import bar_chart, line_chart
from moe_lightning.simulate.checkpoint_cost import save_cost
from moe_lightning.simulate.hardware import preset
from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.step_model import StepModel
from moe_lightning.simulate.workload import Workload, make_routing

_GPT = gpt_moe_tensors(width=1024, num_layers=24, num_experts=16)
_LAYERS, _EXPERTS = 12, 16
_CASES = {"Case 1": (8, 8), "Case 2": (16, 16), "Case 3": (16, 8)}
_WEIGHT, _OPTIMIZER = 2, 12


def sizes(_: Sources) -> PaperTable:
    """Fig. 2, Fig. 10a and Table 3: what a checkpoint of GPT-350M-16E consists of, and what K = 1 leaves."""
    dense, experts = (parameter_count(_GPT, experts=which) for which in (False, True))
    total = (dense + experts) * (_WEIGHT + _OPTIMIZER)
    full = checkpoint_size(_GPT, accounting=MOC_ACCOUNTING).total_bytes
    rows = [Row(what="parameters", printed=1.7, ours=(dense + experts) / 2**30, unit="2^30")]
    parts = (("expert weights", 12, experts * _WEIGHT), ("other weights", 2, dense * _WEIGHT),
             ("expert optimizer", 74, experts * _OPTIMIZER), ("other optimizer", 12, dense * _OPTIMIZER))  # fmt: skip
    rows += [Row(what=f"Fig. 2: {name}", printed=share, ours=100 * b / total, unit="%",
                 why="printed to two digits") for name, share, b in parts]  # fmt: skip
    moments = ("exp_avg", "exp_avg_sq")
    for name, printed, scopes in (("W", 0.88, ("weight",)), ("O", 0.54, moments), ("WO", 0.42, SCOPE_PRESETS["moc"])):
        books = Accounting(scope_bytes=MIXED_PRECISION_BYTES, partial=frozenset(scopes))
        ours = checkpoint_size(_GPT, accounting=books, k=1).total_bytes / full
        rows.append(Row(what=f"Table 3: size with {name}, K = 1", printed=printed, ours=ours, unit="of full"))
    saved = 100 * (1 - checkpoint_size(_GPT, accounting=MOC_ACCOUNTING, k=1).total_bytes / full)
    literal = 100 * (1 - checkpoint_size(_GPT, accounting=FULL_SCOPE_ACCOUNTING, k=1).total_bytes / full)
    rows += [
        Row(what="Fig. 10a: saved at K = 1", printed=57.7, ours=saved, unit="%"),
        Row(what="the same by eq. 6 literally", printed=57.7, ours=literal, unit="%",
            why="eq. 6 makes the fp32 copies partial too; the figure does not"),
    ]  # fmt: skip
    averages = {
        "W": (36.06, (26.92, 58.16, 49.72, 57.52, 37.84, 12.80, 24.69, 20.84)),
        "WO-2L": (36.52, (26.96, 58.49, 50.12, 61.74, 37.12, 13.20, 24.40, 20.13)),
    }
    rows += [Row(what=f"Table 3: average of {n}", printed=p, ours=fmean(v), unit="%") for n, (p, v) in averages.items()]
    bars = {
        f"K={k}": {"GB": checkpoint_size(_GPT, accounting=MOC_ACCOUNTING, k=k).total_bytes / 1e9}
        for k in (1, 2, 4, 8, 16)
    }
    return PaperTable(
        title="MoC Fig. 2, 10a and Table 3: GPT-350M-16E",
        rows=tuple(rows),
        assumptions=("2 B weights, 12 B optimizer with the fp32 copies, which are always saved whole",),
        chart=partial(bar_chart, bars, "MoC Fig. 10a: checkpoint of all ranks", "GB"),
    )


def sharding(_: Sources) -> PaperTable:
    """Fig. 10b-d: the busiest rank's bytes by case and way of sharding."""
    rows, bars = [], {}
    gains: dict[str, list[float]] = {"full": [], "K = 1": [], "AN": []}
    for case, (dp_size, ep_size) in _CASES.items():
        for label, k in (("full", _EXPERTS), ("K = 1", 1)):
            base = _baseline(dp_size, ep_size, k)
            equal, adaptive = (_sharded(dp_size, ep_size, k, adaptive=way) for way in (False, True))
            gains[label].append(100 * (1 - equal / base))
            bars[f"{case} {label}"] = {"baseline": base / 1e9, "EE+EN": equal / 1e9, "EE+AN": adaptive / 1e9}
            if k == 1:
                gains["AN"].append(100 * (1 - adaptive / equal))
    for label, (low, high) in {"full": (12, 28), "K = 1": (22, 29), "AN": (3.7, 6.1)}.items():
        what = "AN below EN at K = 1" if label == "AN" else f"sharding below baseline, {label}"
        why = "" if label == "full" else "which state K applies to on a rank is not printed"
        if label == "full":
            why = "printed to two digits, units of the embedding not printed"
        rows.append(Row(what=f"{what}, least", printed=low, ours=min(gains[label]), unit="%", why=why))
        rows.append(Row(what=f"{what}, most", printed=high, ours=max(gains[label]), unit="%", why=why))
    return PaperTable(
        title="MoC Fig. 10b-d: the busiest rank's checkpoint",
        rows=tuple(rows),
        assumptions=("the optimizer is sharded by ZeRO in both; the embedding may be cut into two units",),
        chart=partial(bar_chart, bars, "MoC Fig. 10b-d: busiest rank", "GB"),
    )


def _baseline(dp_size: int, ep_size: int, k: int) -> float:
    dense, experts = (parameter_count(_GPT, experts=which) for which in (False, True))
    load = baseline_rank_bytes(
        dense_params=dense,
        expert_params=experts,
        weight_bytes=_WEIGHT,
        optimizer_bytes=0,
        dp_size=dp_size,
        ep_size=ep_size,
    ).astype(float)
    if k < _EXPERTS:  # the busiest rank of the first group writes its selected experts
        chosen = sequential_selection(ordinal=0, k=k, num_layers=_LAYERS, num_experts=_EXPERTS, ep_size=ep_size)
        per_rank = [0] * ep_size
        for layer in chosen.experts:
            for expert in layer:
                per_rank[expert * ep_size // _EXPERTS] += 1
        load[:] = 0
        load[:ep_size] = [count * experts * _WEIGHT / (_LAYERS * _EXPERTS) for count in per_rank]
        load[0] += dense * _WEIGHT
    return float(load.max()) + _optimizer_bytes(dp_size, k)


def _optimizer_bytes(dp_size: int, k: int) -> float:
    """ZeRO's shard of a rank: fp32 copies whole, moments of the selected experts."""
    dense, experts = (parameter_count(_GPT, experts=which) for which in (False, True))
    return (dense * _OPTIMIZER + experts * (4 + 8 * k / _EXPERTS)) / dp_size


def _sharded(dp_size: int, ep_size: int, k: int, *, adaptive: bool) -> float:
    if k < _EXPERTS:
        chosen = sequential_selection(ordinal=0, k=k, num_layers=_LAYERS, num_experts=_EXPERTS, ep_size=ep_size)
    else:
        chosen = full_selection(_LAYERS, _EXPERTS)
    each = parameter_count(_GPT, experts=True) // (_LAYERS * _EXPERTS)
    plan = shard_checkpoint(
        equal_expert_writers(chosen, dp_size=dp_size, ep_size=ep_size),
        expert_bytes=each * _WEIGHT,
        modules=_halved(layer_modules(_GPT, _WEIGHT)),
        num_ranks=dp_size,
        adaptive=adaptive,
    )
    return plan.bottleneck_bytes + _optimizer_bytes(dp_size, k)


def _halved(modules: Sequence[Module]) -> list[Module]:
    """The embedding as two units."""
    return [
        Module(name=f"{m.name}{part}", nbytes=m.nbytes // 2 if m.name == "embedding" else m.nbytes)
        for m in modules
        for part in (range(2) if m.name == "embedding" else range(1))
    ]


_GPUS = (16, 32, 64, 128, 256, 512, 1024)
_ROWS = ("baseline", "base-async", "MoC-async")


def _llama(width: int, experts: int, context: int) -> Workload:
    """The simulated LLaMA-like model: 24 layers, all MoE, feed-forward of four times the width."""
    layers, batch = 24, 16
    expert = 3 * width * 4 * width
    dense = layers * (4 * width * width + experts * width) + 2 * 32000 * width
    return Workload(
        dense_params=dense,
        expert_params=expert,
        num_layers=layers,
        num_experts=experts,
        top_k=2,
        d_model=width,
        dense_flops_per_token=2.0 * (dense - 32000 * width) + 2 * layers * context * width,
        context_length=context,
        rank_batch=batch,
        num_heads=16,
    )


def _iteration(
    gpu: str, gpus: int, *, width: int = 2048, context: int = 2048, mesh: MeshSpec | None = None
) -> dict[str, float]:
    """Seconds of an iteration with a checkpoint, the passes and the snapshots."""
    work, hardware = _llama(width, gpus, context), preset(gpu)
    plan = policy("base_async", slots=1)
    nodes = gpus // hardware.ranks_per_node
    routing = make_routing("uniform", num_experts=gpus, num_layers=24)
    cost = StepModel(work, hardware, plan, routing, nodes, mesh).cost(nodes, 0, 0)
    moc = policy("moc", slots=1)
    whole = save_cost(work, hardware, plan, gpus, gpus, gpus)
    eighth = save_cost(work, hardware, moc, gpus, max(1, gpus // 8), max(1, gpus // 8))
    return {
        "F&B": cost.overlap_s,
        "tensor": cost.axes_s.tensor_s,
        "snapshot": whole.snapshot_s,
        "MoC snapshot": eighth.snapshot_s,
        "baseline": cost.step_s + whole.snapshot_s + whole.persist_s,
        "base-async": cost.step_s + max(0.0, whole.snapshot_s - cost.overlap_s),
        "MoC-async": cost.step_s + max(0.0, eighth.snapshot_s - cost.overlap_s),
        "persist GB": whole.persist_bytes / 1e9,
        "MoC persist GB": eighth.persist_bytes / 1e9,
    }


def _least_gpus_that_hide(found: Mapping[int, Mapping[str, float]]) -> dict[str, int]:
    """GPUs from which on the passes are as long as a snapshot; twice the most where none are."""
    return {
        which: next((gpus for gpus, times in found.items() if times[which] <= times["F&B"]), 2 * _GPUS[-1])
        for which in ("snapshot", "MoC snapshot")
    }


def scaling(_: Sources) -> PaperTable:
    """Fig. 13: an iteration with a checkpoint from 16 to 1024 GPUs, by GPU, sequence length and model size."""
    rows = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for gpu in ("a800", "h100"):
        found = {gpus: _iteration(gpu, gpus) for gpus in _GPUS}
        for name in _ROWS:
            lines[f"{gpu} {name}"] = [(gpus, times[name]) for gpus, times in found.items()]
        hidden = _least_gpus_that_hide(found)
        printed = {"a800": (1024, 64), "h100": (None, None)}[gpu]
        why = "batch and network are not printed; at 25 GB/s a GPU the passes hardly grow with the GPUs"
        rows += [
            Row(what=f"{gpu}: least GPUs that hide base-async", printed=printed[0], ours=hidden["snapshot"], why=why),
            Row(what=f"{gpu}: least GPUs that hide MoC", printed=printed[1], ours=hidden["MoC snapshot"], why=why),
        ]
        for gpus in (16, 256, 1024):
            times = found[gpus]
            for name in ("base-async", "MoC-async"):
                ours = times["baseline"] / times[name]
                rows.append(Row(what=f"{gpu}, {gpus} GPUs: {name} over baseline", printed=None, ours=ours, unit="x"))
        share = found[1024]["MoC persist GB"] / found[1024]["persist GB"]
        rows.append(Row(what=f"{gpu}: MoC's persisted share at 1024 (13f)", printed=None, ours=share))
    for context in (512, 1024, 2048, 4096):
        times = _iteration("a800", 256, context=context)
        rows.append(Row(what=f"256 a800, sequence {context}: base-async over MoC", printed=None,
                        ours=times["base-async"] / times["MoC-async"], unit="x"))  # fmt: skip
    for label, width in (("small", 1024), ("medium", 2048), ("large", 3072)):
        times = _iteration("a800", 256, width=width)
        rows.append(Row(what=f"256 a800, {label}: base-async over MoC", printed=None,
                        ours=times["base-async"] / times["MoC-async"], unit="x"))  # fmt: skip
    return PaperTable(
        title="MoC Fig. 13: scaling and generalising",
        rows=tuple(rows),
        assumptions=(
            "312 / 989 TFLOP/s at 20 %, snapshots at 1 / 2 GB/s as printed; 16 sequences a GPU, top-2, gated experts",
            "one expert of each of 24 layers on every GPU; 2048 stands for more than 1024 GPUs",
            "printed: hidden from 1024 (base-async) and from 64 (MoC) on A800, base-async never on H100",
        ),
        chart=partial(line_chart, lines, "MoC Fig. 13: iteration with a checkpoint", "GPUs", "seconds"),
    )


_TENSOR = MeshSpec(tp=4)


def tensor_parallel(_: Sources) -> PaperTable:
    """Fig. 13b: the same as Fig. 13a with four ranks to a layer."""
    plain, found = ({gpus: _iteration("a800", gpus, mesh=mesh) for gpus in _GPUS} for mesh in (None, _TENSOR))
    hidden = _least_gpus_that_hide(found)
    why = "batch and network are not printed; experts lie whole on GPUs, so that the passes hardly grow with the GPUs"
    rows = [
        Row(what="least GPUs that hide base-async with TP 4", printed=1024, ours=hidden["snapshot"], why=why),
        Row(what="least GPUs that hide MoC with TP 4", printed=None, ours=hidden["MoC snapshot"]),
    ]
    for gpus in (16, 256, 1024):
        times, before = found[gpus], plain[gpus]
        rows += [
            Row(what=f"{gpus} GPUs: F&B with TP 4 over F&B without", printed=None, ours=times["F&B"] / before["F&B"],
                unit="x"),
            Row(what=f"{gpus} GPUs: tensor parallel traffic", printed=None, ours=100 * times["tensor"] / times["F&B"],
                unit="% of F&B"),
        ]  # fmt: skip
        for name in ("base-async", "MoC-async"):
            ours = times["baseline"] / times[name]
            rows.append(Row(what=f"{gpus} GPUs: {name} over baseline", printed=None, ours=ours, unit="x"))
    best = [all(times["MoC-async"] <= times[name] for name in _ROWS) for times in found.values()]
    rows.append(Row(what="GPU counts where MoC-async is the fastest", printed=len(_GPUS), ours=sum(best), unit="of 7"))
    lines = {name: [(gpus, times[name]) for gpus, times in found.items()] for name in (*_ROWS, "F&B")}
    return PaperTable(
        title="MoC Fig. 13b: scaling with tensor parallelism of degree 4",
        rows=tuple(rows),
        assumptions=(
            "as Fig. 13a: as many experts and samples, 16 sequences a GPU; attention cut over 4 GPUs of a node",
            "experts lie over all GPUs, one each, where the paper does not say whether tensor parallelism cuts them",
            "printed in words alone: base-async hidden from 1024 GPUs, MoC-async the most efficient on all of them",
        ),
        chart=partial(line_chart, lines, "MoC Fig. 13b: iteration with a checkpoint, TP 4", "GPUs", "seconds"),
    )


def lost_tokens(_: Sources) -> PaperTable:
    """Fig. 15: PLT against K_snapshot and K_persist, and Dynamic-K under repeated faults."""
    interval, steps, faults = 10, 20_000, 15
    rows, bars = [], {}
    for k_snapshot in (1, 2, 4, 8, 16):
        plt = faults * expected_plt_two_level(
            num_experts=_EXPERTS,
            k_snapshot=k_snapshot,
            k_persist=1,
            interval=interval,
            total_steps=steps,
            dead_share=0.5,
        )
        bars[f"Ks={k_snapshot}"] = {"PLT %": 100 * plt}
        rows.append(Row(what=f"PLT, K_snapshot {k_snapshot}, K_persist 1", printed=None, ours=100 * plt, unit="%"))
    printed_end = 4
    state = DynamicKRule(k0=1, num_experts=_EXPERTS)
    constant = faults * expected_plt(num_experts=_EXPERTS, k=1, interval=interval, total_steps=steps)
    stairs: dict[int, int] = {}
    for _fault in range(faults):
        stairs[state.k] = stairs.get(state.k, 0) + 1
        state.after_fault(expected_plt(num_experts=_EXPERTS, k=state.k, interval=interval, total_steps=steps))
    rows += [Row(what=f"Fig. 15b: faults at K = {k}", printed=None, ours=count) for k, count in stairs.items()]
    rows += [
        Row(what="Fig. 15b: K after the last fault", printed=printed_end, ours=state.k,
            why="faults and interval of 15b are not printed"),
        Row(what="Fig. 15b: PLT with Dynamic-K", printed=None, ours=100 * state.total, unit="%"),
        Row(what="Fig. 15b: PLT with K = 1", printed=None, ours=100 * constant, unit="%"),
        Row(what="Fig. 5 run: PLT of K = 2, interval 32, 8 experts", printed=3.75,
            ours=100 * expected_plt(num_experts=8, k=2, interval=32, total_steps=1280), unit="%"),
    ]  # fmt: skip
    return PaperTable(
        title="MoC Fig. 15: lost tokens",
        rows=tuple(rows),
        assumptions=(
            "uniform routing; a fault takes half of the experts' nodes; 15 faults, interval 10 of 20000 iterations",
        ),
        chart=partial(bar_chart, bars, "MoC Fig. 15a: PLT after 15 faults, K_persist 1", "%"),
    )


PAPERS = {
    "moc-sizes": sizes,
    "moc-sharding": sharding,
    "moc-scaling": scaling,
    "moc-tensor": tensor_parallel,
    "moc-plt": lost_tokens,
}


def staleness_sum(num_experts: int, k: int, num_checkpoints: int | None = None) -> int:
    """S(E, K, n): how many intervals old the experts of a layer are in total after n checkpoints (None: many) of K in
    turn."""
    ages = np.arange(num_experts) // min(k, num_experts)
    return int((ages if num_checkpoints is None else np.minimum(ages, num_checkpoints)).sum())


def expected_plt(
    *, num_experts: int, k: int, interval: int, total_steps: int, num_checkpoints: int | None = None
) -> float:
    """PLT of one fault under uniform routing and sequential selection; steady state is I * (E / K - 1) / (2 * I_total).

    Ours, not printed in the papers: it counts that the j-th most recently saved expert is floor(j / K) checkpoints old.
    """
    return interval * staleness_sum(num_experts, k, num_checkpoints) / (num_experts * total_steps)


def expected_plt_two_level(
    *, num_experts: int, k_snapshot: int, k_persist: int, interval: int, total_steps: int, dead_share: float
) -> float:
    """PLT of one fault in which a share of the experts was on nodes that died and the others are restored from memory
    (MoC-System 5.1)."""
    stale = dead_share * staleness_sum(num_experts, k_persist) + (1 - dead_share) * staleness_sum(
        num_experts, k_snapshot
    )
    return interval * stale / (num_experts * total_steps)
