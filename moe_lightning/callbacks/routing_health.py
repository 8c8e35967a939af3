"""Health of routing, from the loads of experts: dead experts, entropy, drift, and what to do about a collapse."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

WINDOW = 20
"""Logging steps that a verdict looks back on."""

_DEAD = 0.01
"""An expert is dead below this fraction of an even load over the window."""

_COLLAPSED = 0.25
"""A layer has collapsed when its experts' work is as uneven as if at most this fraction of them shared it evenly."""

_QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}

_CURE = "raise model.router.aux_loss_coef or model.router.bias_update_rate, or lower optimizer.lr"


class RoutingHealth:
    """Shares of assignments that the experts of each MoE layer got at the last `WINDOW` logging steps."""

    def __init__(self) -> None:
        self._shares: dict[int, deque[FloatArray]] = {}
        self._reported: dict[int, int] = {}  # by layer, the dead experts of its last warning

    def observe(self, loads: Mapping[int, FloatArray]) -> dict[str, float]:
        """Take the shares of a logging step, float64 [E] by layer, and return its metrics by name.

        * moe/layerNN/dead_experts_count: experts with less than 1 % of an even load over the window
        * moe/layerNN/load_entropy_ratio: entropy of the shares over that of even ones: 1 is even, 0 is one of several
          experts
        * moe/layerNN/load_drift_fraction: of the assignments, those that other experts got than over the window
        * moe/dead_experts_count (sum over layers), moe/load_entropy_ratio (lowest layer), moe/load_drift_fraction
          (largest), moe/expert_imbalance_p50_ratio, _p95_ratio and _max_ratio over the layers
        """
        metrics: dict[str, float] = {}
        for layer, shares_E in loads.items():
            seen = self._shares.setdefault(layer, deque(maxlen=WINDOW))
            drift = 0.5 * float(np.abs(shares_E - _average(seen)).sum()) if seen else 0.0
            seen.append(shares_E)
            entropy = _entropy(shares_E) / math.log(len(shares_E)) if len(shares_E) > 1 else 1.0
            metrics |= {
                f"moe/layer{layer:02d}/dead_experts_count": float(len(_dead(_average(seen)))),
                f"moe/layer{layer:02d}/load_entropy_ratio": entropy,
                f"moe/layer{layer:02d}/load_drift_fraction": drift,
            }
        for name, over_layers in (
            ("dead_experts_count", sum),
            ("load_entropy_ratio", min),
            ("load_drift_fraction", max),
        ):
            values = [value for key, value in metrics.items() if key.endswith(f"/{name}")]
            if values:
                metrics[f"moe/{name}"] = over_layers(values)
        ratios = [imbalance(shares_E) for shares_E in loads.values()]
        for name, quantile in _QUANTILES.items() if ratios else ():
            metrics[f"moe/expert_imbalance_{name}_ratio"] = float(np.quantile(ratios, quantile))
        return metrics

    def warnings(self, step: int) -> Iterator[str]:
        """One sentence for each layer whose window is full and whose dead experts have doubled since its last one."""
        for layer, seen in self._shares.items():
            average_E = _average(seen)
            dead = _dead(average_E)
            if len(seen) < WINDOW or len(dead) <= 2 * self._reported.get(layer, 0):
                continue
            self._reported[layer] = len(dead)
            experts, even = len(average_E), math.exp(_entropy(average_E))
            names = ", ".join(map(str, dead[:8])) + (", ..." if len(dead) > 8 else "")
            text = (
                f"{len(dead)} of {experts} experts of MoE layer {layer} ({names}) got less than {_DEAD:.0%} of an even "
                f"load over the last {WINDOW} logging steps, up to step {step}, and learn next to nothing"
            )
            if even <= _COLLAPSED * experts:
                text += f": routing has collapsed to the work of {even:.1f} experts"
            yield f"{text}: {_CURE}"


def imbalance(loads: ArrayLike) -> float:
    """Largest load over the average load, of experts or ranks; 1 where there is no load at all."""
    each = np.asarray(loads, dtype=np.float64)
    return float(each.max() / each.mean()) if each.any() else 1.0


def _average(seen: deque[FloatArray]) -> FloatArray:
    average_E: FloatArray = np.mean(seen, axis=0)
    return average_E


def _dead(shares_E: FloatArray) -> list[int]:
    """Experts with next to no load; none of a layer that had no tokens."""
    return np.flatnonzero(shares_E < _DEAD / len(shares_E)).tolist() if shares_E.any() else []


def _entropy(shares_E: FloatArray) -> float:
    """In nats; that of even shares for a layer that had no tokens."""
    used = shares_E[shares_E > 0] / max(shares_E.sum(), 1e-300)
    return -float(used @ np.log(used)) if len(used) else math.log(len(shares_E))
