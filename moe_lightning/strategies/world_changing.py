"""The part of the strategy that lets one world follow another: what it lets go of, what it takes up, whose states go
where."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.checkpoint.optimizer_replay import AdamWReplay, verify_replays
from moe_lightning.checkpoint.optimizer_shards import move_shards
from moe_lightning.comm.world import World
from moe_lightning.data.step_sampler import StepSlice
from moe_lightning.elastic.settings import ElasticTask
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.checkpointing import CheckpointingStrategy
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.zero import DENSE_SHARDINGS, DenseSharding


class WorldChangingStrategy(CheckpointingStrategy):
    """Leaves a world and enters the next one with the same module, optimizers and values.

    Attributes:
        before_replacing: called before experts move, so that nobody reads their rows meanwhile.
        entered_world: called when this rank has entered another world, before the fit loop goes on.
        replay: of another rank's optimizer shard; None where none is kept.
    """

    before_replacing: list[Callable[[], None]]
    entered_world: list[Callable[[], None]]
    replay: AdamWReplay | None
    _elastic: ElasticWorlds | None
    _world: World | None
    _slots: int | None
    _dense: str
    _sync_blocked: bool
    _slice: StepSlice | None

    @abstractmethod
    def after_update(self) -> None: ...

    @property
    def elastic(self) -> ElasticWorlds | None:
        """The changes of the world in a run that outlives its ranks; None where no elastic launcher started it."""
        return self._elastic

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine's ranks. An elastic launcher says how many there are, whatever the Trainer's
        `devices` would be by default.

        Raises:
            ConfigurationError: fewer GPUs than ranks.
        """
        devices = self._parallel_devices
        task = ElasticTask.from_environment()
        if task is None or not devices:
            return devices
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(devices)))
        if devices[0].type == "cpu":
            return [devices[0]] * ranks
        if len(devices) < ranks:
            raise ConfigurationError(
                f"the launcher started {ranks} ranks on this machine, but the Trainer has {len(devices)} devices: "
                f"use devices={ranks} where there are so many, or start fewer ranks"
            )
        return devices[:ranks]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The place of this rank for a sampler of Lightning's, whatever the Trainer was told of devices and nodes."""
        if self._elastic is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world.size, "rank": self.global_rank}

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        task = ElasticTask.from_environment()
        if task is not None and task.starts > 1:
            rank_zero_only.rank = max(1, self.global_rank)  # type: ignore[attr-defined]  # others train already

    def take_place(self, world: World) -> None:
        """This process's rank and the number of ranks, for us and for Lightning."""
        assert self.cluster_environment is not None
        self._world = world
        is_waiting = world.size > 1 and not world.is_connected  # while others train: one of them speaks for the run
        self.cluster_environment.set_world_size(world.size)
        self.cluster_environment.set_global_rank(max(1, world.rank) if is_waiting else world.rank)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        self._process_group_backend = self.collectives_backend

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer whose module this strategy runs."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def slots_limit(self) -> int | None:
        """Experts that a rank can hold in a layer, where the user set a limit."""
        return self._slots

    @property
    def collectives_backend(self) -> str:
        """Name of the process groups' backend."""
        backend: str = self._get_process_group_backend()
        return backend

    @property
    def collectives_timeout(self) -> timedelta:
        """Longest wait for a peer in any collective."""
        assert self._timeout is not None
        return self._timeout

    @property
    def node_peers(self) -> tuple[int, ...]:
        """The ranks of this rank's node, ascending."""
        if self._elastic is not None and self._elastic.members is not None:
            return self._elastic.node_peers
        first = self.global_rank - self.local_rank
        return tuple(range(first, first + self.num_processes))

    @property
    def node_name(self) -> str:
        """Name of this rank's failure domain in an elastic run, where several may share a machine; else empty."""
        return self._elastic.engine.node if self._elastic is not None else ""

    @property
    def world_number(self) -> int:
        """Number of the present world, above those of all worlds before it; 0 where nobody numbers them."""
        members = self._elastic.members if self._elastic is not None else None
        return int(getattr(members, "number", 0))

    @property
    def node_of(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        if self._elastic is None or self._elastic.members is None:
            return tuple(rank // self.num_processes for rank in range(self.world.size))
        nodes = self._elastic.members.nodes
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        return tuple(numbers[node] for node in nodes)

    @property
    def shards_optimizers(self) -> bool:
        """Whether one rank keeps the optimizer state of each dense parameter for all (ZeRO-1)."""
        return self._shards is not None

    @property
    def has_rolled_back(self) -> bool:
        """Whether the last change of the world went back to a saved state."""
        return self._elastic is not None and self._elastic.has_rolled_back

    def leave_world(self, own_forward: Any) -> None:
        """Let go of everything that belongs to the groups of the present world; values stay.

        Args:
            own_forward: the module's own attribute `forward`, None where it has that of its class; Lightning leaves
                its own there when DDP fails.
        """
        for settle in self.before_replacing:
            settle()
        assert self.lightning_module is not None
        self.lightning_module.__dict__.pop("forward", None)
        if own_forward is not None:
            self.lightning_module.forward = own_forward  # type: ignore[method-assign]
        self.model = self.lightning_module  # DDP's reducer holds a group
        self._sync_blocked, self._slice = False, None
        self.experts.forget_step()

    def enter_world(self, world: World) -> None:
        """Go on among other ranks, whose state is this rank's by now; collective."""
        self.take_place(world)
        module = self.lightning_module
        assert module is not None
        for parameter in module.parameters():
            parameter.grad = None
        for layer in self.experts.layers:
            layer.router.forget_counts()
        trainer = module.trainer
        loaders = (trainer.train_dataloader, trainer.val_dataloaders)
        self._step_data().enter_world(rank=world.rank, world_size=world.size, loaders=loaders)
        self.model = self._setup_model(module)
        if world.is_connected:
            self._register_ddp_hooks()
        for entered in self.entered_world:
            entered()

    def _after_closure(self, model: pl.LightningModule, optimizer: Optimizer) -> None:
        """After the gradients are summed and clipped, before the update: all ranks say that they are prepared."""
        type(self.precision_plugin)._after_closure(self.precision_plugin, model, optimizer)
        assert self._elastic is not None
        self._elastic.prepare(optimizer)
        self._replay_update(optimizer)
        if self._shards is not None:
            self._elastic.begin_update()

    def _replay_update(self, optimizer: Optimizer) -> None:
        """Repeat the update that a peer is about to make."""
        if self.replay is not None:
            parameters = self.trainer.lightning_module.named_parameters()
            self.replay.replay({name: p.grad for name, p in parameters if p.grad is not None}, optimizer)

    # ------------------------------------------------------------------ sharded optimizer states

    def _dense_sharding(self) -> DenseSharding:
        """Of the dense parameters, among the ranks of the present world."""
        assert self.lightning_module is not None
        dense = [p for p in self.lightning_module.parameters() if p.requires_grad and p not in self.experts.stack_of]
        sharding: DenseSharding = DENSE_SHARDINGS.make(self._dense, dense, self.world)
        return sharding

    def _shard_optimizers(self) -> None:
        """Leave each rank the optimizer state of its share of the dense parameters."""
        sharding = self._dense_sharding()
        if self.world.size == 1 or not sharding.owners:
            return
        self._shards = sharding
        for optimizer in self.optimizers:
            self._shards.shard(optimizer)

    @property
    def shard_owners(self) -> dict[str, int]:
        """The rank that keeps the optimizer state of each dense parameter (ZeRO-1), by name; empty without sharding."""
        if self._shards is None or self.lightning_module is None:
            return {}
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        return {names[parameter]: rank for parameter, rank in self._shards.owners.items()}

    def reshard(self, sources: Sequence[tuple[str, int]]) -> None:
        """Share the optimizer state of dense parameters among the ranks of the present world; collective.

        Args:
            sources: (name, rank) of every parameter whose state a rank has, live or replayed; the others are read
                from elsewhere by who keeps them from now on.
        """
        if not self._dense_sharding().owners:
            return
        assert self.lightning_module is not None
        dense = {name: p for name, p in self.lightning_module.named_parameters() if p not in self.experts.stack_of}
        homes = {
            p: o for o, groups in zip(self.optimizers, self._optimizer_groups, strict=True) for g in groups for p in g
        }
        mine = {name for name, rank in sources if rank == self.world.rank}
        local = {name: self._held_states(name, homes[dense[name]].state.get(dense[name])) for name in mine}
        for optimizer, groups in zip(self.optimizers, self._optimizer_groups, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = list(parameters)
        self._shards = None
        self._shard_optimizers()
        owners = self.shard_owners or dict.fromkeys(dense, 0)
        for parameter in dense.values():
            homes[parameter].state.pop(parameter, None)
        for name, states in move_shards(sources, owners, local, self.world).items():
            homes[dense[name]].state[dense[name]] = {
                scope: value if scope == "step" else value.to(dense[name].device) for scope, value in states.items()
            }
        self.replay = None  # of a rank of the former world

    def _held_states(self, name: str, live: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """A parameter's optimizer state, live or else as it was replayed for a lost peer."""
        if live or self.replay is None:
            return live or {}
        return {scope: value for scope, value in self.replay.states(name).items() if scope != "weight"}

    def replay_peer(self, peer: int, version: int) -> None:
        """Keep the optimizer state of another rank's dense parameters on the host, by repeating its updates (REFT's
        AOR).

        Raises:
            ConfigurationError: no sharding, several optimizers, or one whose updates cannot be repeated exactly.
        """
        if self._shards is None or len(self.optimizers) != 1:
            raise ConfigurationError("updates of a peer can be repeated for one optimizer under dense=zero1 only")
        owners, optimizer = self.shard_owners, self.optimizers[0]
        names = {id(p): name for name, p in self.trainer.lightning_module.named_parameters()}
        groups = [
            {names[id(p)]: p.detach() for p in group if owners.get(names[id(p)]) == peer}
            for group in self._optimizer_groups[0]
        ]
        self.replay = AdamWReplay(optimizer, groups, version=version)

    def verify_replay(self, version: int) -> int:
        """Compare every repeated shard with its owner; the number of corrections. Collective."""
        if self.replay is None or version == 0:  # at first there are no states yet, and the weights are alike
            return 0
        owners, optimizer = self.shard_owners, self.optimizers[0]
        owned = {
            name: {"weight": p.detach(), **optimizer.state[p]}
            for name, p in self.trainer.lightning_module.named_parameters()
            if owners.get(name) == self.world.rank and p in optimizer.state
        }
        return sum(len(names) for names in verify_replays(self.replay, owned, version, self.world).values())
