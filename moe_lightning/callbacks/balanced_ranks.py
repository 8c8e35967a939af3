"""The ranks among which a balancer spreads experts, and on how many nodes each must stay."""

from __future__ import annotations

from collections.abc import Sequence

from moe_lightning.balancing.cluster import Cluster
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy


def balanced_ranks(strategy: ExpertParallelStrategy, ranks_per_node: int | None) -> Cluster:
    """The ranks that share the experts of a layer, in a pipeline those of this rank's stages; collective there.

    Args:
        ranks_per_node: consecutive ranks that fail together; None: the nodes that the strategy knows.

    Raises:
        ConfigurationError: what cannot be balanced.
    """
    experts, stages = strategy.experts, strategy.state.stages
    sizes = {layer.num_experts for layer in strategy.state.layers}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"LoadBalancer plans all MoE layers together, but they have {sorted(sizes)} experts: give them equally many"
        )
    if stages is not None and (bare := stages.without_layers):
        raise ConfigurationError(
            f"LoadBalancer plans in every stage of mesh.pp, but the ranks of stages {bare} have no MoE layer: cut the "
            "model otherwise (mesh.pp, schedule, moe_every), or drop the callback"
        )
    room = {slots for layer in experts.room for slots in layer}
    if len(room) > 1:
        raise ConfigurationError(
            f"LoadBalancer needs as many slots on every rank, but ranks keep {sorted(room)}: "
            f"set the strategy's slots, to {max(room)} or more"
        )
    if len(experts.layers[0].dispatcher.groups) > 1:
        raise ConfigurationError("LoadBalancer needs one dispatch group: drop the strategy's ep_size")
    if ranks_per_node is not None and strategy.elastic is not None:
        raise ConfigurationError(
            f"ranks_per_node={ranks_per_node} counts consecutive ranks, but ranks of an elastic run are in order of "
            "birth and their nodes are known: leave it out (null)"
        )
    nodes: Sequence[int] = strategy.node_of
    if ranks_per_node is not None:
        nodes = [rank // ranks_per_node for rank in range(strategy.world.size)]
    # Ranks of an elastic run may have kept more room than those that came later, or from another stage.
    slots = room.pop() if strategy.elastic is None else min(all_gather_json(room.pop(), strategy.worlds.mesh.world))
    return Cluster(node_of=tuple(nodes) if stages is None else stages.nodes(nodes), slots_per_rank=slots)


def min_replicas(strategy: ExpertParallelStrategy, wanted: int | None) -> int:
    """Nodes that hold each expert: what is wanted, but never less than what recovery relies on.

    Raises:
        ConfigurationError: less is wanted.
    """
    promised = strategy.placing.promised_replicas
    if wanted is not None and wanted < promised:
        raise ConfigurationError(
            f"LoadBalancer's min_replicas={wanted} would move experts away from nodes that FaultRecovery's "
            f"min_replicas={promised} relies on: leave it out (null), or use at least {promised}"
        )
    return promised if wanted is None else wanted
