"""Optimizer shards that live on one rank only (ZeRO-1) outlive it, because a peer repeats its updates."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_lightning.checkpoint.optimizer_replay import AdamWReplay, verify_replays
from moe_lightning.strategies.zero import DenseOptimizerShards
from tests.distributed.harness import connect, run_ranks


def sharded_training(rank: int, world_size: int) -> tuple[list[dict[int, list[str]]], dict[str, dict[str, Tensor]]]:
    """Rank r replays the shard of rank r + 1; corrections that were needed, and what the replay holds at the end."""
    world = connect()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    shards = DenseOptimizerShards(list(module.parameters()), world)
    shards.shard(optimizer)
    peer = (rank + 1) % world_size
    replay = AdamWReplay(optimizer, [{names[p]: p for p, owner in shards.owners.items() if owner == peer}])
    corrections = []
    for step in range(1, 7):
        torch.manual_seed(100 * step + rank)
        module(torch.randn(5, 6)).square().mean().backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
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
    results = run_ranks(2, sharded_training)
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
