"""Placements of experts for inference engines, planned from measured loads.

Formats of the files:

* sglang (v0.5, `--init-expert-location FILE`): JSON or .pt of a mapping with `physical_to_logical_map` [layers, slots
  of all ranks], or with `logical_count` [layers, experts], from which the engine plans by itself. Its layers are all
  of the model, those without experts too.
* vllm (proposed in vllm-project/vllm pull request 49572, `eplb_config.initial_expert_map_path`): JSON, the same table
  of the MoE layers as a list of lists. Releases up to v0.26 begin with every expert in its own slot and learn loads.
* vllm-ascend (v0.11 and later, `expert_map_path`): JSON of layers, in each the experts of every device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import Cluster, allocate_replicas, imbalance
from moe_lightning.balancing.replica_placement import deal_to_ranks
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_loads, read_routing_trace

Engine = Literal["sglang", "sglang-counts", "vllm", "vllm-ascend"]
ENGINES: tuple[str, ...] = get_args(Engine)

_SHARES = 10**5
"""Telemetry writes shares with so many steps."""


@dataclass(frozen=True, kw_only=True)
class ServingPlacement:
    """Experts in the slots of a serving cluster.

    Attributes:
        slots_LP: int64 [layers, slots of all ranks], the expert of each; rank r has the r-th of equal parts.
        counts_LE: int64 [layers, experts], the loads it was made for.
        imbalance_before: busiest rank over mean of plain expert parallelism with as many ranks, mean of the layers.
        imbalance_after: the same of this placement, every replica with an equal share of its expert's tokens.
    """

    slots_LP: IntArray
    counts_LE: IntArray
    imbalance_before: float
    imbalance_after: float


def measured_counts(path: Path, last: int | None = None) -> IntArray:
    """Assignments of each expert, int64 [layers, experts], of a routing trace (.npz) or in proportion to an
    expert_load.csv.

    Args:
        last: samples from the end that count; None: all.

    Raises:
        ConfigurationError: a file that is neither.
    """
    first = -(last or 0)
    if path.suffix == ".npz":
        counts, _ = read_routing_trace(path)
        whole: IntArray = counts[first:].sum(axis=(0, 2))
        return whole
    _, shares_LSE = read_loads(path)
    scaled: IntArray = np.rint(shares_LSE[:, first:].sum(axis=1) * _SHARES).astype(np.int64)
    return scaled


def plan_serving(counts_LE: IntArray, num_ranks: int, slots_per_rank: int) -> ServingPlacement:
    """Replicas by water-filling, dealt so that ranks carry alike where engines split tokens equally over replicas.

    Raises:
        ConfigurationError: fewer slots than experts, or more slots of a rank than experts.
    """
    num_experts = counts_LE.shape[1]
    if num_ranks * slots_per_rank < num_experts:
        raise ConfigurationError(
            f"{num_ranks} ranks with {slots_per_rank} slots cannot hold {num_experts} experts: raise --ranks or --slots"
        )
    if slots_per_rank > num_experts:
        raise ConfigurationError(
            f"--slots={slots_per_rank} is more than the {num_experts} experts, and a second copy on a rank is of no "
            "use: lower it"
        )
    cluster = Cluster.of(num_ranks, slots_per_rank, ranks_per_node=num_ranks)
    slots, after, before = [], [], []
    for load_E in counts_LE:
        replicas_E = allocate_replicas(
            load_E, slots=cluster.num_slots, num_nodes=1, min_replicas=1, max_replicas=num_ranks
        )
        held_EN = deal_to_ranks(replicas_E[:, None], cluster, load_E).replicas
        slots.append(np.concatenate([np.repeat(np.arange(num_experts), held_N) for held_N in held_EN.T]))
        after.append(imbalance((load_E / held_EN.sum(axis=1)) @ held_EN))
        before.append(imbalance(np.array([part.sum() for part in np.array_split(load_E, num_ranks)])))
    return ServingPlacement(
        slots_LP=np.stack(slots),
        counts_LE=counts_LE,
        imbalance_before=float(np.mean(before)),
        imbalance_after=float(np.mean(after)),
    )


def form_of(plan: ServingPlacement, engine: Engine, num_ranks: int, dense_layers: Sequence[int] = ()) -> Any:
    """Return the content of an engine's file as plain lists and mappings.

    Args:
        dense_layers: places of the model's layers without experts, for sglang: their rows are the plain placement.

    Raises:
        ConfigurationError: a place that the model does not have, or dense layers where the engine counts MoE layers.
    """
    slots_LP, counts_LE = plan.slots_LP, plan.counts_LE
    if dense_layers and not engine.startswith("sglang"):
        raise ConfigurationError(
            f"--dense-layers is for sglang: {engine} counts layers with experts only, leave it out"
        )
    for place in sorted(set(dense_layers)):
        if not 0 <= place <= len(slots_LP):
            raise ConfigurationError(f"--dense-layers {place} is no place in a model of {len(slots_LP) + 1} layers")
        plain_P = np.arange(slots_LP.shape[1]) % counts_LE.shape[1]
        slots_LP = np.insert(slots_LP, place, plain_P, axis=0)
        counts_LE = np.insert(counts_LE, place, 1, axis=0)
    if engine == "sglang":
        return {"physical_to_logical_map": slots_LP.tolist()}
    if engine == "sglang-counts":
        return {"logical_count": counts_LE.tolist()}
    if engine == "vllm":
        return slots_LP.tolist()
    devices_LNS = slots_LP.reshape(len(slots_LP), num_ranks, -1).tolist()
    layers = [
        {
            "layer_id": layer,
            "device_count": num_ranks,
            "device_list": [{"device_id": n, "device_expert": held} for n, held in enumerate(devices)],
        }
        for layer, devices in enumerate(devices_LNS)
    ]
    return {"moe_layer_count": len(layers), "layer_list": layers}


def write_form(form: Any, path: Path) -> None:
    """JSON, or for sglang a .pt that `torch.load(weights_only=True)` reads.

    Raises:
        ConfigurationError: another kind of file.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(form))
    elif path.suffix == ".pt" and isinstance(form, dict) and "layer_list" not in form:
        import torch

        torch.save({name: torch.tensor(rows) for name, rows in form.items()}, path)
    else:
        raise ConfigurationError(f"{path.name} must end with .json, or for sglang with .pt: the engine goes by it")
