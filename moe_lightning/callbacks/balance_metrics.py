"""What the load balancer says of its work: numbers of each layer, and the errors of its model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from lightning.pytorch.utilities import rank_zero_info

from moe_lightning.balancing.cluster import balance_ratio, imbalance
from moe_lightning.balancing.planner import BalancePlanner
from moe_lightning.callbacks.telemetry import Metric
from moe_lightning.dispatch.placement import uniform_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.dispatch.shadow_exchange import StepVisits
from moe_lightning.moe.layer import MoELayer
from moe_lightning.strategies.placed_experts import MigrationReport

_TOLERATED_ERROR = 0.1


def layer_metrics(layers: Mapping[int, MoELayer], planner: BalancePlanner) -> Iterator[Metric]:
    """Evenness, shadows and forecasts of every layer that is planned, by its number."""
    for index, (number, layer) in enumerate(layers.items()):
        area = f"balance/layer{number:02d}"
        for name, value in _layer_numbers(layer).items():
            yield Metric(name=f"{area}/{name}", value=value)
        plan, error = planner.plans[index], planner.forecast_error[index]
        yield Metric(name=f"{area}/shadows_count", value=float(plan.num_copies if plan is not None else 0))
        if error is not None:
            yield Metric(name=f"{area}/forecast_error_ratio", value=error)


def movement_metrics(reports: Sequence[MigrationReport], visits: StepVisits | None) -> Iterator[Metric]:
    """Experts that moved since the last log, and those that visited other ranks in the last step."""
    moved = sum(report.moved_states for report in reports)
    yield Metric(name="balance/migrated_states", value=float(moved))
    yield Metric(name="balance/migrated_bytes", value=float(sum(r.sent_bytes for r in reports)), over_ranks="sum")
    migration_ms = 1e3 * sum(report.migration_s for report in reports)
    yield Metric(name="balance/migration_ms", value=migration_ms, over_ranks="max")
    sent, trans_s, agg_s = (visits.sent_bytes, visits.trans_wait_s, visits.agg_wait_s) if visits else (0, 0.0, 0.0)
    yield Metric(name="balance/shadow_bytes", value=float(sent), over_ranks="sum")
    yield Metric(name="balance/exposed_trans_ms", value=1e3 * trans_s, over_ranks="max")
    yield Metric(name="balance/exposed_agg_ms", value=1e3 * agg_s, over_ranks="max")


def tell_errors(errors: Mapping[str, float]) -> None:
    """Say where the performance model misses what was measured."""
    bad = {name: error for name, error in errors.items() if error > _TOLERATED_ERROR}
    if bad:
        listed = ", ".join(f"{name} {100 * error:.0f} %" for name, error in bad.items())
        rank_zero_info(
            f"LoadBalancer: the performance model misses measured times by more than 10 % ({listed}), so shadows may "
            "be planned where they do not pay: calibrate on an idle machine, or use shadows=none"
        )


def _layer_numbers(layer: MoELayer) -> dict[str, float]:
    """How even the last micro-batch was on plain expert parallelism and how even it is now."""
    loads = layer.dispatcher.last_rank_loads
    if layer.statistics is None or loads is None:
        return {}
    tokens_E, speeds_N = layer.statistics.computed_NE.numpy().sum(axis=0), layer.dispatcher.speeds
    plain = uniform_placement(layer.num_experts, len(loads))
    before = balanced_quota(tokens_E, plain.replicas).sum(axis=0)
    numbers = {
        "imbalance_before_ratio": imbalance(before, speeds_N),
        "imbalance_after_ratio": imbalance(loads, speeds_N),
    }
    quotient = balance_ratio(before, loads)
    return numbers | ({"rb_ratio": quotient} if math.isfinite(quotient) else {})
