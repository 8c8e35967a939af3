"""The present world: this rank's place in it, its mesh, and the hooks of callbacks for changes of experts or ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from moe_lightning.compat import private_lightning
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import Layout, MeshShape
from moe_lightning.strategies.dense_sharding import cut_groups

if TYPE_CHECKING:
    from moe_lightning.checkpoint.protection import ProtectionLayout
    from moe_lightning.elastic.membership import Members


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """Report of a recovery: the change from one world to the next.

    Attributes:
        reason: one sentence.
        step: optimizer steps that the run goes on from.
        steps_lost: committed steps that are run again.
        lost_ranks: ranks of the world before that are not in the one after: dead, evicted or gone on notice.
        ranks_before, ranks_after: sizes of the two worlds; 0 before for a process that was in none.
        restored: sources of the experts' state, in words with counts.
        stale_experts: experts restored to a state older than the step.
        min_replicas: nodes that hold each expert now, or ranks where there are fewer nodes than replicas wanted.
        began_at: seconds since the epoch at which this rank detected the fault.
        seconds: of each of `recovery.PHASES` that took place, and their "total".
    """

    reason: str
    step: int
    steps_lost: int
    lost_ranks: tuple[int, ...]
    ranks_before: int
    ranks_after: int
    restored: str
    stale_experts: int
    min_replicas: int
    began_at: float
    seconds: dict[str, float]


class ExpertParallelCallback(Callback):
    """Callback with hooks of `ExpertParallelStrategy` beside those of Lightning.

    The strategy calls each hook on all such callbacks in the order of `trainer.callbacks`, on every rank. Where ranks
    do not come and go only the first three are called.

    Attributes:
        repairs_replicas: True: of replicas that differ those of a minority are overwritten, instead of ending the run.
    """

    repairs_replicas = False

    def on_before_experts_move(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called before experts move between slots or ranks, in this world or to another one: until a step begins
        nobody may read their rows. Not collective.
        """

    def on_before_weights_swap(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called before weights and their averages change places, for a validation, a checkpoint or the end of
        training: nobody may read weights until a step begins. Not collective.
        """

    def on_before_recovery(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called before a recovery looks for snapshots in memory: publish one that is being copied. Not collective."""

    def on_stale_experts(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, versions: Mapping[tuple[int, int], int]
    ) -> None:
        """Called when a recovery has restored experts to older states than the rest, before ranks that join receive
        the states of callbacks; `trainer.strategy.world` is the new world. Collective.

        Args:
            versions: step of the state of each such expert, by (layer, expert).
        """

    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when this rank has entered another world, `trainer.strategy.world`, with its state; the fit loop
        resumes next. Collective.
        """

    def on_recovered(self, trainer: pl.Trainer, pl_module: pl.LightningModule, report: RecoveryReport) -> None:
        """Called after a recovery, with its report."""


def expert_parallel_callbacks(module: pl.LightningModule) -> list[ExpertParallelCallback]:
    """Return the callbacks of a module's Trainer that have the hooks, in their order; a module without one has none."""
    trainer: Any = private_lightning.trainer_of(module)
    return [c for c in ([] if trainer is None else trainer.callbacks) if isinstance(c, ExpertParallelCallback)]


def call_hook(module: pl.LightningModule, hook: Callable[..., None], *arguments: Any) -> None:
    """Call a hook of ExpertParallelCallback on all callbacks that have it, in the order of `trainer.callbacks`."""
    for callback in expert_parallel_callbacks(module):
        getattr(callback, hook.__name__)(module.trainer, module, *arguments)


class Worlds:
    """The present world, for this library and for Lightning, and the layout of the next one.

    Ask `present.is_connected` before a collective, not `size > 1` alone, which is true of a newcomer too;
    `strategy.reachable` is the world for it where Lightning may call before set-up or after a failure. Ask
    `may_have_peers` before refusing what several ranks cannot do, and `is_elastic` where ranks come and go:

        this rank                     size > 1    is_connected    may_have_peers    is_elastic
        alone                         no          no              no                no
        one of a fixed number         yes         yes             yes               no
        one of a changing number      yes         yes             yes               yes
        the last one left             no          no              yes               yes
        a newcomer, without state     yes         no              yes               yes

    Args:
        axes: ranks along the axes beside dp, in every world.
        dense: sharding of dense parameters, a name of DENSE_SHARDINGS.
        shard_size: least ranks that share one copy of sharded dense parameters; None: as the sharding chooses.

    Attributes:
        axes: as given.
        is_elastic: True if the number of ranks may change.
    """

    def __init__(self, axes: MeshShape | None = None, dense: str = "ddp", shard_size: int | None = None) -> None:
        self.axes, self._dense, self._shard_size = axes or MeshShape(), dense, shard_size
        self._present: World | None = None
        self.is_elastic = False

    def allow_changes(self) -> None:
        """Let the number of ranks change from world to world."""
        self.is_elastic = True

    @property
    def may_have_peers(self) -> bool:
        """True if this rank trains with others, or others may join."""
        return self.is_elastic or self.present.size > 1

    @property
    def present(self) -> World:
        """The ranks that train together."""
        assert self._present is not None, "the strategy is not set up"
        return self._present

    @property
    def is_joined(self) -> bool:
        """True if this rank is in a world."""
        return self._present is not None

    def set_present(self, world: World, environment: ClusterEnvironment | None = None) -> None:
        """Set this process's rank and the number of ranks from a world, for Lightning too, by its environment."""
        self._present = world
        if environment is None:
            return
        is_waiting = world.size > 1 and not world.is_connected  # while others train: one of them speaks for the run
        environment.set_world_size(world.size)
        environment.set_global_rank(max(1, world.rank) if is_waiting else world.rank)
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    def layout(self, nodes: Sequence[object]) -> Layout:
        """Return the layout of a world: its mesh shape and the groups that share dense parameters.

        Args:
            nodes: of each rank.

        Raises:
            ConfigurationError: the axes do not divide the ranks, or a user's `shard_size` does not fit them.
        """
        num_ranks, order = len(nodes), list(dict.fromkeys(nodes))
        numbers = tuple(order.index(node) for node in nodes)
        if self.cannot_train(num_ranks):
            return Layout(shape=MeshShape(dp=num_ranks), nodes=numbers)
        shape = self.axes.over(num_ranks)
        self._check_sharers(len(shape.stages[0]))
        shards = [
            tuple(ranks[index] for index in group)
            for ranks in shape.stages
            for group in cut_groups(self._dense, [nodes[rank] for rank in ranks], self._shard_size, shape.tp)
        ]
        return Layout(shape=shape, nodes=numbers, shards=tuple(shards))

    def _check_sharers(self, num_ranks: int) -> None:
        """Refuse a `shard_size` above the number of ranks of a stage; but in an elastic run, where more ranks may join,
        one copy is sharded over all of them.
        """
        if self._shard_size is not None and self._shard_size > num_ranks and not self.is_elastic:
            ranks = f"{num_ranks} ranks" if self.axes.pp == 1 else f"{num_ranks} ranks of a stage"
            raise ConfigurationError(
                f"shard_size={self._shard_size} is more than the {ranks}: use at most {num_ranks}, or more ranks"
            )

    def cannot_train(self, num_ranks: int) -> bool:
        """True if an elastic world of so many ranks cannot train because the axes do not divide them. Each rank then
        has all dense parameters, so that ranks may leave or join.
        """
        return self.is_elastic and num_ranks % self.axes.num_ranks != 0

    @property
    def spares(self) -> int:
        """Number of the last ranks that leave the present world so that the axes divide the others."""
        return self.present.size - len(self.staying(range(self.present.size)))

    def staying(self, willing: Sequence[int]) -> Sequence[int]:
        """Return the ranks that make the next world, without others that may join: of those that can stay the first
        that the axes divide, or all where they are too few to train, which keep the state.
        """
        return willing[: len(willing) // self.axes.num_ranks * self.axes.num_ranks] or willing


class FixedWorld:
    """World of a run whose ranks do not change: `ElasticWorlds` as steps and callbacks use it, without effect.

    Attributes:
        engine, step: None.
        members, is_newcomer, change_is_due, has_rolled_back, node, is_broken, leaves_on_sigterm: see there.
    """

    engine = step = None
    members: Members | None = None
    is_newcomer = change_is_due = has_rolled_back = is_broken = leaves_on_sigterm = False
    node = ""

    def prepare(self, update: Callable[[], None]) -> None:
        """Do nothing: no rank has to know that all others are ready for the update."""

    def repeat_step(self, reason: str) -> None:
        """Warn: a step cannot be repeated here, so its update is left out."""
        rank_zero_warn(f"{reason}; this step changes nothing")

    def begin_update(self) -> None:
        """Do nothing: an update that fails ends the run."""

    def commit(self) -> None:
        """Do nothing: nobody repeats the update."""

    def request_departure(self, rank: int, reason: str) -> bool:
        """Return False: no rank can leave."""
        return False

    def protection(self) -> ProtectionLayout | None:
        """Return None: no rank outlives another one, whose snapshots it could keep."""
        return None

    def record_call(self, *, is_running: bool) -> None:
        """Do nothing: nobody is evicted."""

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing: there is no membership to leave."""
