"""The present world of a rank: its number, its nodes, and who hears of another one."""

from __future__ import annotations

import pytest
import torch

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import MeshShape
from moe_lightning.strategies.worlds import Worlds


class Listener:
    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def leave(self) -> None:
        self.heard.append(f"{self.name} leaves")

    def enter(self, world: World) -> None:
        self.heard.append(f"{self.name} enters {world.size}")


def world_of(rank: int, size: int) -> World:
    return World.offline(rank, size, torch.device("cpu"))


def test_listeners_hear_in_the_order_of_their_coming() -> None:
    worlds, heard = Worlds(), list[str]()
    worlds.listeners += [Listener("a", heard), Listener("b", heard)]
    worlds.leave()
    worlds.take_place(world_of(0, 3))
    worlds.enter()
    assert heard == ["a leaves", "b leaves", "a enters 3", "b enters 3"]


def test_a_world_that_nobody_joined_has_no_place() -> None:
    worlds = Worlds()
    assert not worlds.is_joined
    worlds.take_place(world_of(2, 4))
    assert worlds.is_joined
    assert (worlds.present.nodes, worlds.present.node_peers, worlds.present.generation) == ((0, 1, 2, 3), (2,), 0)


def test_nodes_are_numbered_by_their_names() -> None:
    layout = Worlds().layout("xyx")
    assert layout.nodes == (0, 1, 0)
    assert World.offline(2, 3, torch.device("cpu"), layout).node_peers == (0, 2)


def test_ranks_that_shall_share_a_copy_must_be_there() -> None:
    worlds = Worlds(MeshShape(pp=2), shard_size=3)
    sentence = "shard_size=3 is more than the 2 ranks of a stage"
    with pytest.raises(ConfigurationError, match=f"{sentence}: use at most 2, or more ranks"):
        worlds.layout("abcd")
    worlds.layout("abcdef")
    worlds.allow_changes()
    for _ in range(2):  # told in every world that is too small after one that was not
        with pytest.warns(UserWarning, match=sentence):
            worlds.layout("abcd")
        worlds.layout("abcd")
        worlds.layout("abcdef")


def test_axes_of_the_mesh_stay_from_world_to_world() -> None:
    worlds = Worlds(MeshShape(cp=2), lambda nodes: ((0, 1), (2, 3)))
    assert worlds.layout("abcd").shape == MeshShape(dp=2, cp=2)
    with pytest.raises(ConfigurationError, match="needs a multiple of 2 ranks, not 3"):
        worlds.layout("abc")
    worlds.allow_changes()
    passing = worlds.layout("abc")
    assert (passing.shape, passing.shards) == (MeshShape(dp=3), ()), "every rank has all, so that one may leave"
    for size, spares in ((1, 0), (2, 0), (3, 1), (4, 0)):
        worlds.take_place(world_of(0, size))
        assert worlds.spares == spares
