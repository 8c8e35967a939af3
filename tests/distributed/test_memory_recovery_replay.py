"""Optimizer shards that live on one rank only (ZeRO-1) outlive it, because a peer repeats its updates."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_lightning.checkpoint.optimizer_shards import AdamWReplay, verify_replays
from moe_lightning.checkpoint.recovery_plan import RankInventory, plan_recovery
from moe_lightning.parallel.collectives import all_gather_json
from moe_lightning.state.pieces import Block
from moe_lightning.state.transfer import reshard
from moe_lightning.strategies.dense_sharding import DenseOptimizerShards
from tests.distributed.harness import connect, run_pooled


def sharded_training(rank: int, world_size: int) -> tuple[list[dict[int, list[str]]], dict[str, dict[str, Tensor]]]:
    """Rank r replays the shard of rank r + 1; corrections that were needed, and what the replay holds at the end."""
    world = connect()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    names = {parameter: name for name, parameter in module.named_parameters()}
    shards = DenseOptimizerShards(list(module.parameters()), world)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if shards.owners[p] == rank], lr=1e-2)
    peer = (rank + 1) % world_size
    replay = AdamWReplay(optimizer, [{names[p]: p for p, owner in shards.owners.items() if owner == peer}])
    corrections = []
    for step in range(1, 7):
        torch.manual_seed(100 * step + rank)
        module(torch.randn(5, 6)).square().mean().backward()
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
        gradients = {name: p.grad for p, name in names.items() if p.grad is not None}
        if not (step == 3 and rank == 0):  # one update is missed
            replay.replay(gradients, optimizer)
        if step == 5 and rank == 1 and replay.names:
            replay.states(replay.names[0])["exp_avg"].view(-1)[0] += 1  # one value is damaged
        optimizer.step()
        shards.spread_updates(list(module.parameters()))
        optimizer.zero_grad()
        if step != 2:
            owned = {
                names[p]: {"weight": p.detach(), **optimizer.state[p]}
                for p, owner in shards.owners.items()
                if owner == rank
            }
            corrections.append(verify_replays(replay, owned, step, world))
            assert replay.version == step
    own = {names[p]: {"weight": p.detach(), **optimizer.state[p]} for p, o in shards.owners.items() if o == rank}
    kept = {name: replay.states(name) for name in replay.names}
    return corrections, {"own": own, "kept": kept}  # type: ignore[dict-item]


def test_a_peer_holds_what_the_owner_holds() -> None:
    results = run_pooled(2, sharded_training)
    (corrections, first), (same, second) = results
    assert corrections == same
    missed, damaged = sorted(first["kept"]), sorted(second["kept"])[:1]
    assert [sorted(c) for c in corrections] == [[], [0], [], [1], []], "only what was disturbed had to be corrected"
    assert corrections[1][0] == missed
    assert len(corrections[3][1]) == len(damaged)
    for mine, peer in ((first, second), (second, first)):
        assert mine["kept"].keys() == peer["own"].keys()
        for name, states in mine["kept"].items():
            for scope, tensor in states.items():
                assert torch.equal(tensor, peer["own"][name][scope]), (name, scope)


def lost_owner(rank: int, world_size: int) -> tuple[str, list[int]]:
    """Rank 2 comes back as a new process; its shard is taken from the replay of rank 1, and the shards are dealt anew.
    Everybody's new shard is that of one AdamW over everything."""
    world = connect()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    whole = copy.deepcopy(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    shards = DenseOptimizerShards(list(module.parameters()), world)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if shards.owners[p] == rank], lr=1e-2)
    owners = {names[p]: owner for p, owner in shards.owners.items()}
    peer = (rank + 1) % world_size
    replay = AdamWReplay(optimizer, [{n: p for p, n in names.items() if owners[n] == peer}])
    for step in range(1, 5):
        torch.manual_seed(100 * step + rank)
        module(torch.randn(5, 6)).square().mean().backward()
        for parameter, same in zip(module.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            same.grad = parameter.grad.clone()
        replay.replay({n: p.grad for p, n in names.items() if p.grad is not None}, optimizer)
        optimizer.step()
        reference.step()
        shards.spread_updates(list(module.parameters()))
        optimizer.zero_grad()
    own = RankInventory(rank=rank, node=str(rank))
    local: dict[str, dict[str, Tensor]] = {}
    if rank != 2:
        kept = {name: replay.states(name) for name in replay.names}
        live = {n: dict(optimizer.state[p]) for p, n in names.items() if owners[n] == rank}
        local = {name: {k: t for k, t in states.items() if k != "weight"} for name, states in kept.items()} | live
        own = replace(
            own,
            live_version=4,
            sharded_dense=tuple(sorted(owners)),
            owned_dense=tuple(live),
            replayed_dense=tuple(kept),
            replay_version=replay.version,
        )
    inventories = [RankInventory.from_json(entry) for entry in all_gather_json(own.to_json(), world)]
    plan = plan_recovery(inventories, None, num_layers=0, num_experts=0)
    units = {name: (name, Block.of(p.shape)) for p, name in names.items()}
    have = {units[name]: local[name] for name, source in plan.shards if source == rank}
    mine = [name for name, owner in owners.items() if (owner + 1) % world_size == rank]
    arrived = reshard(have, {units[name]: {} for name in mine}, world)
    received = {name: arrived[units[name]] for name in mine}
    for parameter, (name, _) in zip(whole.parameters(), module.named_parameters(), strict=True):
        for scope, tensor in reference.state[parameter].items() if name in received else ():
            assert torch.equal(received[name][scope], tensor), (name, scope)
    return plan.level, sorted({source for _, source in plan.shards})


def test_a_lost_shard_is_taken_from_its_replay_to_new_owners() -> None:
    assert run_pooled(3, lost_owner) == [("live", [0, 1])] * 3
