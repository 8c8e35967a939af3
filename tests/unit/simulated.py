"""A small scenario for the simulator's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_lightning.simulate.failures import Event, Failures
from moe_lightning.simulate.hardware import Hardware, preset
from moe_lightning.simulate.policy import policy
from moe_lightning.simulate.scenario import Scenario
from moe_lightning.simulate.workload import RoutingScenario, Workload, make_routing

NODES = 6
HOUR_S = 3600.0


def small_workload(**changes: Any) -> Workload:
    sizes: dict[str, Any] = {
        "dense_params": 20_000_000,
        "expert_params": 2_000_000,
        "num_layers": 4,
        "num_experts": 8,
        "top_k": 1,
        "d_model": 512,
        "dense_flops_per_token": 5e7,
        "context_length": 512,
        "rank_batch": 8,
    }
    return Workload(**(sizes | changes))


def small_hardware(**changes: Any) -> Hardware:
    return preset("rtx3090", ranks_per_node=1, **changes)


def scenario(
    name: str = "ours",
    *,
    events: Sequence[Event] | None = None,
    failures: Failures | None = None,
    seed: int = 0,
    duration_s: float = HOUR_S,
    nodes: int = NODES,
    workload: Workload | None = None,
    hardware: Hardware | None = None,
    routing: RoutingScenario | None = None,
    **changes: Any,
) -> Scenario:
    workload = workload or small_workload()
    drawn = (failures or Failures()).events(nodes, duration_s, seed)
    return Scenario(
        workload=workload,
        hardware=hardware or small_hardware(),
        policy=policy(name, **({"slots": 4} | changes)),
        routing=routing or make_routing("zipf", num_experts=workload.num_experts, num_layers=workload.num_layers),
        events=drawn if events is None else events,
        num_nodes=nodes,
        duration_s=duration_s,
    )


def require_possible(events: Sequence[Event]) -> None:
    """Check that events can happen one after the other: times ascend, and only nodes that are there leave."""
    live: set[int] = set()
    for index, event in enumerate(events):
        assert index == 0 or event.time_ns >= events[index - 1].time_ns
        assert set(event.failed) <= live
        live -= set(event.failed)
        assert not live & set(event.joined)
        live |= set(event.joined)
