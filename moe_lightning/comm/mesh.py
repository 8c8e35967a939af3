"""Where a rank stands in its run: another coordinate for each purpose, over one mesh of ranks.

What a rank computes on (its slice of the batch), whom it exchanges tokens with, what it writes into a checkpoint and
whom it fails with are four questions. With data parallelism alone the rank in the world answers all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh

from moe_lightning.algorithms.mesh_shape import AXES, MeshShape
from moe_lightning.arrays import IntArray
from moe_lightning.comm.world import World, with_stage


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks of a run, and this rank's place among them.

    Attributes:
        shape: ranks along each axis.
        whole: all ranks: they agree, prepare and commit together, and `whole.rank` is who writes.
        world: the ranks of this rank's stage, among which experts are dispatched; `world.rank` counts in dispatch.
        node_of: failure domain of each rank of the whole, [whole.size]; numbered from 0.
    """

    shape: MeshShape
    whole: World
    world: World
    node_of: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.node_of) == self.shape.num_ranks == self.whole.size

    @classmethod
    def of(cls, world: World, node_of: tuple[int, ...]) -> Mesh:
        """As the world's groups were built."""
        shape = world.shape or MeshShape(dp=world.size)
        return cls(shape=shape, whole=world, world=world.stage or world, node_of=node_of)

    @classmethod
    def build(cls, whole: World, shape: MeshShape, node_of: tuple[int, ...], timeout: timedelta) -> Mesh:
        """Build the groups of the stages; collective over the whole, which is torch's default group."""
        return cls.of(replace(with_stage(whole, shape, timeout) if shape.pp > 1 else whole, shape=shape), node_of)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.shape.index(self.whole.rank, "pp")

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch is this rank's; ranks along the other axes share it."""
        return self.shape.index(self.whole.rank, "dp")

    @property
    def data_size(self) -> int:
        """Slices of the global batch."""
        return self.shape.dp

    def speeds_of_slices(self, speeds: IntArray) -> IntArray:
        """Of each slice of the global batch, int64 [data_size], from those of the ranks of a stage: it is as fast as
        the slowest that computes it.
        """
        slowest: IntArray = speeds.reshape(self.data_size, -1).min(axis=1)
        return slowest

    @property
    def sharers(self) -> int:
        """Ranks that compute the loss of the same samples: each counts for one of as many equal shares."""
        return self.shape.cp * self.shape.tp

    @property
    def node_peers(self) -> tuple[int, ...]:
        """The ranks of the whole that fail together with this one, ascending."""
        mine = self.node_of[self.whole.rank]
        return tuple(rank for rank, node in enumerate(self.node_of) if node == mine)

    @cached_property
    def pipe(self) -> World:
        """The ranks that hold the other stages for this rank's samples, by stage."""
        whole, group = self.whole, self.whole.axis_groups.get("pp")
        place = {"rank": self.stage, "size": self.shape.pp, "device": whole.device, "bubbles": whole.bubbles}
        return World(**place, dense=group, background=group)  # type: ignore[arg-type]

    @cached_property
    def devices(self) -> DeviceMesh:
        """torch's view of the mesh, for its parallel parts; collective over the whole the first time."""
        layout = torch.arange(self.whole.size).view(self.shape.sizes)
        return DeviceMesh(self.whole.device.type, layout, mesh_dim_names=AXES)

    def close(self) -> None:
        """Give back the groups made for this mesh and its worlds; the default group belongs to who made it."""
        self.whole.close()
