"""REFT: survival of parameters, loading and overheads (REFT 5, 7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations

from benchmarks.paper_table import PaperTable, Row, Sources
from moe_lightning.checkpoint.protection import arc_layout
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import line_chart

_DEVICES, _GROUP = 3072, 6
_HARDWARE_RATE, _SOFTWARE_RATE = 1e-4, 1e-5


def node_survival(time: float, *, rate: float, shape: float) -> float:
    """exp(-rate * time^shape): a device or node has not failed until then (REFT 5)."""
    return math.exp(-rate * time**shape)


def protected_survival(time: float, *, devices: int, group_size: int, rate: float, shape: float) -> float:
    """Eq. 5 with P_re = 1: no group of `group_size` has lost more than one member."""
    alive = node_survival(time, rate=rate, shape=shape)
    group = alive**group_size + group_size * (1 - alive) * alive ** (group_size - 1)
    return float(group ** (devices / group_size))


def unprotected_survival(time: float, *, devices: int, rate: float, shape: float) -> float:
    """Eq. 6: no device has failed; the rate is that of hardware and software together."""
    return node_survival(time, rate=rate, shape=shape) ** devices


def time_to(threshold: float, survival: Callable[[float], float], *, longest: float = 1e6) -> float:
    """The time at which a falling survival curve passes a threshold, by bisection.

    Raises:
        ConfigurationError: a threshold that is no probability, or one not reached within `longest`.
    """
    if not 0 < threshold < 1 or survival(longest) > threshold:
        raise ConfigurationError(f"threshold={threshold} is not crossed before {longest}: use one between 0 and 1")
    low, high = 0.0, longest
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle) > threshold else (low, middle)
    return low


def survival(_: Sources) -> PaperTable:
    """Fig. 8: how long parameters survive with 90 percent, with erasure coding and with checkpoints only."""
    protected = partial(protected_survival, devices=_DEVICES, group_size=_GROUP, rate=_HARDWARE_RATE, shape=1.3)
    hardware = partial(unprotected_survival, devices=_DEVICES, rate=_HARDWARE_RATE, shape=1.3)
    both = partial(unprotected_survival, devices=_DEVICES, rate=_HARDWARE_RATE + _SOFTWARE_RATE, shape=1.3)
    nodes = partial(protected_survival, devices=384, group_size=_GROUP, rate=_HARDWARE_RATE, shape=1.3)
    holders = arc_layout(range(6)).holders
    ring = sum(all({*holders[lost]} - {*pair} for lost in pair) for pair in combinations(range(6), 2))
    rows = (
        Row(what="days at 0.9, REFT", printed=16.22, ours=time_to(0.9, protected), unit="d"),
        Row(
            what="days at 0.9, checkpoints, hardware faults",
            printed=0.5,
            ours=time_to(0.9, hardware),
            unit="d",
            why="printed to one digit",
        ),
        Row(
            what="days at 0.9, checkpoints, all faults",
            printed=0.5,
            ours=time_to(0.9, both),
            unit="d",
            why="printed to one digit",
        ),
        Row(what="days at 0.9, if k were 384 nodes", printed=None, ours=time_to(0.9, nodes), unit="d"),
        Row(what="pairs of 6 nodes that a ring of copies survives", printed=None, ours=ring, unit="of 15"),
    )
    days = [index / 4 for index in range(1, 161)]
    curves = {"REFT": protected, "checkpoints": both}
    lines = {name: [(day, curve(day)) for day in days] for name, curve in curves.items()}
    return PaperTable(
        title="REFT Fig. 8: survival of parameters, shape 1.3",
        rows=rows,
        assumptions=("k = 3072 devices, groups of 6, t in days, snapshot processes survive (P_re = 1)",),
        chart=partial(line_chart, lines, "REFT Fig. 8", "days", "probability"),
    )


def measured(_: Sources) -> PaperTable:
    """What REFT concludes from its measurements, and the sizes of its models."""
    rows = [
        Row(what="loading: storage over AEC", printed=12.36, ours=9.27 / 0.75, unit="x"),
        Row(what="loading: storage over ARC", printed=None, ours=9.27 / 0.84, unit="x"),
        Row(what="overhead of ARC", printed=1, ours=100 * (6.32 / 6.26 - 1), unit="%"),
        Row(what="overhead of AOR", printed=0.6, ours=100 * (6.63 / 6.59 - 1), unit="%"),
    ]
    models = (  # layers, width, width of key and value, feed-forward
        (1.3, 24, 2048, 2048, 5504),
        (2.7, 32, 2560, 2560, 6912),
        (6.7, 32, 4096, 4096, 11008),
        (34, 48, 8192, 1024, 22016),
    )
    for printed, layers, width, kv, hidden in models:
        each = 2 * width * width + 2 * width * kv + 3 * width * hidden + 2 * width
        total = 2 * 32000 * width + layers * each + width
        rows.append(
            Row(what=f"Llama-2 {printed}B", printed=printed, ours=total / 1e9, unit="1e9", why="printed to two digits")
        )
    return PaperTable(
        title="REFT 7: loading, overheads, models",
        rows=tuple(rows),
        assumptions=("the seconds are the paper's: only its quotients are computed", "34B with 8 key-value heads"),
    )


PAPERS = {"reft-survival": survival, "reft-measured": measured}
