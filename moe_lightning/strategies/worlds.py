"""The present world: this rank's place in it, its mesh, and the listeners to changes of experts or ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from moe_lightning.elastic.membership import Members
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import Mesh, World
from moe_lightning.parallel.mesh import STAGE, Groups, Layout, MeshShape


class WorldListener(Protocol):
    """Listener to changes of the rows of experts or of the ranks; add it to `strategy.worlds.listeners`, once."""

    def leave(self) -> None:
        """Called before experts move, in this world or between worlds: from now on nobody may read their rows."""

    def enter(self, world: World) -> None:
        """Called when this rank has entered another world and has its state; the fit loop resumes next. Collective."""


class Worlds:
    """The present world, for this library and for Lightning.

    Attributes:
        listeners: called in this order when experts move and when another world begins.
        members: of the present world; None where worlds do not change.
        ranks_per_node: where worlds do not change.
        shards_of: from the node of each rank of a stage to the groups that share one copy of the dense parameters.
        least_sharers: of one copy of dense parameters that are cut: the user's `shard_size`; 1 where there is none.
        axes: ranks along the axes beside dp, in every world.
        is_elastic: True if the number of ranks may change.
        node: name of this rank's failure domain in an elastic run, where several may share a machine; else empty.
    """

    def __init__(self) -> None:
        self._present: World | None = None
        self._mesh: Mesh | None = None
        self.listeners: list[WorldListener] = []
        self.members: Members | None = None
        self.ranks_per_node = 1
        self.shards_of: Callable[[Sequence[object]], Groups] = lambda nodes: ()
        self.least_sharers = 1
        self._has_warned_of_few = False
        self.axes = MeshShape()
        self.is_elastic = False
        self.node = ""

    @property
    def present(self) -> World:
        """The ranks that train together."""
        assert self._present is not None, "the strategy is not set up"
        return self._present

    @property
    def is_joined(self) -> bool:
        """True if this rank is in a world."""
        return self._present is not None

    def take_place(self, world: World, environment: ClusterEnvironment | None = None) -> None:
        """Set this process's rank and the number of ranks from a world, for Lightning too, by its environment."""
        self._present, self._mesh = world, None
        if environment is None:
            return
        is_waiting = world.size > 1 and not world.is_connected  # while others train: one of them speaks for the run
        environment.set_world_size(world.size)
        environment.set_global_rank(max(1, world.rank) if is_waiting else world.rank)
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Call the listeners before experts move."""
        for listener in self.listeners:
            listener.leave()

    def enter(self) -> None:
        """Call the listeners after this rank has entered another world."""
        for listener in self.listeners:
            listener.enter(self.present)

    def layout(self, nodes: Sequence[object]) -> Layout:
        """Return the layout of a world: its mesh shape and the groups that share dense parameters.

        Args:
            nodes: of each rank.

        Raises:
            ConfigurationError: the axes do not divide the ranks, or a user's `shard_size` does not fit them.
        """
        shape = self.shape_of(len(nodes))
        if self.is_passing(len(nodes)):
            return Layout(shape=shape)
        stages = shape.groups(STAGE)
        self._check_sharers(len(stages[0]))
        shards = [(ranks, group) for ranks in stages for group in self.shards_of([nodes[rank] for rank in ranks])]
        return Layout(shape=shape, shards=tuple(tuple(ranks[index] for index in group) for ranks, group in shards))

    def _check_sharers(self, num_ranks: int) -> None:
        """Refuse a `shard_size` above the number of ranks of a stage. In an elastic run, where more ranks may join,
        warn once instead: one copy is then sharded over all ranks.
        """
        if self.least_sharers <= num_ranks:
            self._has_warned_of_few = False
            return
        ranks = f"{num_ranks} ranks" if self.axes.pp == 1 else f"{num_ranks} ranks of a stage"
        if not self.is_elastic:
            raise ConfigurationError(
                f"shard_size={self.least_sharers} is more than the {ranks}: use at most {num_ranks}, or more ranks"
            )
        if not self._has_warned_of_few:
            rank_zero_warn(
                f"shard_size={self.least_sharers} is more than the {ranks} that are here: they share one copy of the "
                "dense parameters until more come"
            )
        self._has_warned_of_few = True

    def shape_of(self, num_ranks: int) -> MeshShape:
        """Return the mesh shape of a world of so many ranks.

        Raises:
            ConfigurationError: the axes do not divide the ranks of a run whose world does not change.
        """
        if self.is_passing(num_ranks):
            return MeshShape(dp=num_ranks)
        return MeshShape.over(num_ranks, pp=self.axes.pp, cp=self.axes.cp, tp=self.axes.tp)

    def is_passing(self, num_ranks: int) -> bool:
        """True if an elastic world of so many ranks cannot train because the axes do not divide them. Each rank then
        has all dense parameters, so that ranks may leave or join.
        """
        return self.is_elastic and num_ranks % self.axes.num_ranks != 0

    @property
    def spares(self) -> int:
        """Number of the last ranks that leave the present world so that the axes divide the others."""
        size, multiple = self.present.size, self.axes.num_ranks
        return size % multiple if self.is_elastic and size > multiple else 0

    @property
    def number(self) -> int:
        """Number of the present world, above those of all worlds before it; 0 where worlds have no numbers."""
        return int(getattr(self.members, "number", 0))

    @property
    def node_of(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        return self.mesh.node_of

    def _nodes(self) -> tuple[int, ...]:
        nodes: Sequence[object] = [rank // self.ranks_per_node for rank in range(self.present.size)]
        if self.members is not None:
            nodes = self.members.nodes
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        return tuple(numbers[node] for node in nodes)

    @property
    def mesh(self) -> Mesh:
        """This rank's coordinates in the present world; built once, because every step asks for it."""
        if self._mesh is None:
            self._mesh = Mesh.of(self.present, self._nodes())
        return self._mesh
