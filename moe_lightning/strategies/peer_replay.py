"""The optimizer state of another rank's dense parameters, kept on the host by repeating its updates (REFT's AOR)."""

from __future__ import annotations

from torch.optim import Optimizer

from moe_lightning.checkpoint.optimizer_shards import AdamWReplay, verify_replays
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.strategies.rank_state import RankState


def replay_peer(state: RankState, peer: int, version: int) -> None:
    """Keep a peer's from this version on.

    Raises:
        ConfigurationError: no sharding, several optimizers, or one whose updates cannot be repeated exactly.
    """
    owners, optimizers = state.shard_owners, state.training_state().optimizers
    if not owners or len(optimizers) != 1:
        raise ConfigurationError("updates of a peer can be repeated for one optimizer under dense=zero1 only")
    names = {id(p): name for name, p in state.module.named_parameters()}
    optimizer, groups = optimizers[0]
    own = [{names[id(p)]: p.detach() for p in group if owners.get(names[id(p)]) == peer} for group in groups]
    state.replay = AdamWReplay(optimizer, own, version=version)


def replay_update(state: RankState, optimizer: Optimizer) -> None:
    """Repeat the update that a peer is about to make."""
    if state.replay is not None:
        parameters = state.module.named_parameters()
        state.replay.replay({name: p.grad for name, p in parameters if p.grad is not None}, optimizer)


def verify_replay(state: RankState, version: int, world: World) -> int:
    """Compare every repeated shard with its owner; the number of corrections. Collective."""
    if state.replay is None or version == 0:  # at first there are no states yet, and the weights are alike
        return 0
    owners, optimizer = state.shard_owners, state.optimizers[0]
    owned = {
        name: {"weight": p.detach(), **optimizer.state[p]}
        for name, p in state.module.named_parameters()
        if owners.get(name) == world.rank and p in optimizer.state
    }
    return sum(len(names) for names in verify_replays(state.replay, owned, version, world).values())
