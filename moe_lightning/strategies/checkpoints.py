"""Saving and restoring the state of a run: single files as stock Lightning writes them, and checkpoint directories."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.checkpoint.directory import directories, has_manifest, newest_of
from moe_lightning.checkpoint.files import (
    CURE_OF_DAMAGE,
    PlainValues,
    advice_for,
    check_file,
    read_checkpoint,
    write_file,
)
from moe_lightning.checkpoint.full_state import (
    full_optimizer_state,
    load_local_optimizer_state,
    local_model_state,
)
from moe_lightning.checkpoint.loader import Checkpoint, DamagedFile, DamagesOf, find_usable, repaired
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage import place_of, storage_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.checkpoint.training_state import random_state, scalars_key
from moe_lightning.compat import private_lightning
from moe_lightning.compat.containers import AS_CONTAINERS
from moe_lightning.errors import CheckpointError, ConfigurationError, MissingCheckpointError, UnreadableCheckpointError
from moe_lightning.parallel.collectives import all_gather_json, broadcast_object, failing_together
from moe_lightning.parallel.context import World
from moe_lightning.state.tensors import cuts_of
from moe_lightning.strategies.averaging import CURRENT
from moe_lightning.strategies.checks import require_same_parameters
from moe_lightning.strategies.step_data import LOADERS_KEY, is_in_step, loader_states, states_of_stateful
from moe_lightning.strategies.train_state import TrainState
from moe_lightning.strategies.worlds import Worlds

T = TypeVar("T")

_SCHEDULERS_KEY = "lr_schedulers_behind"
"""Indices of schedulers that have not followed the last update."""

_LONGEST_SEARCH_S = 60.0


class Checkpoints:
    """Saver and restorer of the state of a run.

    Args:
        worlds: the present world, whose ranks hold the state.
        state: the state of this rank.

    Attributes:
        reads_objects: the user lets restores unpickle objects.
        saved: files of Lightning's own that this process has saved, or let rank 0 save; False: and deleted since.
    """

    def __init__(self, worlds: Worlds, state: TrainState) -> None:
        self._worlds, self._state = worlds, state
        self.reads_objects = False
        self.saved: dict[str, bool] = {}
        self._before_hooks: Sequence[nn.Parameter] = ()
        self._leases = ExitStack()
        self._restored: Checkpoint | None = None  # the directory that Lightning restores now
        self._without_state = False
        self._scheduler_steps: Sequence[object] = ()
        self._schedulers_behind: Sequence[int] = ()
        self._plain_values = PlainValues(AS_CONTAINERS)

    # ------------------------------------------------------------------ saving

    def model_state(self, local: Callable[[], dict[str, Any]], *, averaged: bool = False) -> dict[str, Any]:
        """Return the whole model on rank 0, with expert stacks [E, ...]; empty on the other ranks. Collective.

        Args:
            averaged: with the averages of the weights, if they are averaged.
        """
        if self._without_state:
            return {}
        stages = self._state.stages
        with self._state.averaging.weights(averaged=averaged) as differ:
            whole = stages.full_model_state(local(), self._state.experts)
            return {n: v.clone() if differ and isinstance(v, Tensor) else v for n, v in whole.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer state on rank 0 as a single process would have it; empty on the others.
        Collective.
        """
        if self._without_state:
            return {}
        state = self._state.training_state()
        return full_optimizer_state(state, self._state.number_of(optimizer), self._worlds.present)

    def add_positions(self, checkpoint: dict[str, Any]) -> None:
        """Add the position of the training data to a checkpoint: Lightning itself omits it between epochs."""
        self._add_positions(checkpoint)
        loop = _fit_loop_state(checkpoint)
        if "combined_loader" in loop:  # stock Lightning looks for the positions of loaders that have one there
            trainer = self._state.trainer
            loop["combined_loader"] = states_of_stateful(trainer.train_dataloader, is_in_step=is_in_step(trainer))

    def _add_positions(self, checkpoint: dict[str, Any]) -> None:
        """Add the positions of the training loaders; batches of a step that has not ended are not counted, and are
        repeated.
        """
        trainer = self._state.trainer
        is_open = is_in_step(trainer)
        has_left = private_lightning.has_left_epoch(trainer)
        checkpoint[LOADERS_KEY] = loader_states(trainer.train_dataloader, is_in_step=is_open, has_left_epoch=has_left)
        if is_open and checkpoint[LOADERS_KEY] and "loops" in checkpoint:
            private_lightning.leave_open_step_out(checkpoint["loops"]["fit_loop"], trainer.accumulate_grad_batches)

        if self._scheduler_steps and (behind := private_lightning.schedulers_behind(trainer, self._scheduler_steps)):
            checkpoint[_SCHEDULERS_KEY] = behind

    def begin_update(self) -> None:
        """Note the steps of the schedulers: an exception may keep some from following the update."""
        self._scheduler_steps = private_lightning.scheduler_steps(self._state.trainer)

    def restore_schedulers(self, checkpoint: Mapping[str, Any]) -> None:
        """Take from a checkpoint which schedulers are to be stepped by `begin_training`."""
        self._schedulers_behind = checkpoint.get(_SCHEDULERS_KEY, ())

    def begin_training(self) -> None:
        """Let schedulers follow the last update before the checkpoint, where an exception has kept them from it."""
        behind, self._schedulers_behind = self._schedulers_behind, ()
        private_lightning.step_schedulers(self._state.trainer, behind)

    def may_change(self, file: object) -> bool:
        """True if a file of Lightning's own may be written or deleted. False while steps of a window are repeated,
        whose state is not whole: they ran before, and files that were due were written then.
        """
        replay = self._state.window_replay
        if replay is not None:
            rank_zero_warn(
                f"{file} stays as it is: the state of step {replay.step} is whole from step {replay.last} on"
            )
        return replay is None

    def is_deleted(self, file: str) -> bool:
        """True if a file of Lightning's own is gone. A file that this process has saved may not be written yet; one of
        an earlier process is looked for, unless a plugin or a store has it.
        """
        if file in self.saved:
            return not self.saved[file]
        has_files = "://" not in file and not reads_its_own_way(self._state.trainer.strategy.checkpoint_io)
        return has_files and not os.path.exists(file)

    def training_objects(self, *, is_first: bool = False) -> dict[str, Any]:
        """Return this rank's objects, besides tensors, for a directory checkpoint; collective, as Lightning's own dump
        is.

        Args:
            is_first: what rank 0 refuses to save is raised on every rank. Later saves, which hold values of the same
                kinds, do not wait for that.

        Raises:
            ConfigurationError: as `plain`.
        """
        trainer, rank = self._state.trainer, self._worlds.present.rank
        self._without_state = True
        try:
            dump = private_lightning.dump_trainer(trainer)
        finally:
            self._without_state = False
        objects: dict[str, Any] = {}
        if rank == 0:
            tensors = ("state_dict", "optimizer_states", CURRENT)
            kept = {key: value for key, value in dump.items() if key not in tensors}
            # Lightning looks for both keys before it asks the strategy, which reads them from the directory.
            kept |= {"state_dict": {}, "optimizer_states": [{} for _ in self._state.optimizers]}
            kept[private_lightning.MONITORED] = private_lightning.monitored(trainer)  # for a recovery that returns here
            self._add_positions(kept)
            objects |= {"trainer": kept} | self._state.training_state().objects()

        def convert() -> dict[str, Any]:
            return {key: self._plain(value, "" if key == "trainer" else key) for key, value in objects.items()}

        plain = self._converted_together(convert) if is_first else convert()
        own: dict[str, Any] = {f"rng/{rank}": random_state(self._worlds.present.device)}
        if rank and (self._state.shards.shares_optimizers or self._state.stages.num_stages > 1):
            key = scalars_key(rank)  # of optimizer states that rank 0 lacks
            own[key] = self._plain(self._state.training_state().scalars(), key)
        return own | (plain or {})

    def plain(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a file as rank 0 saves it, that of another rank as it is; warns of each object that is
        found in it for the first time. Collective.

        Raises:
            ConfigurationError: on every rank; an object in it cannot be saved, or the run is elastic and its ranks
                could not read it.
        """
        return self._converted_together(lambda: self._plain(checkpoint)) or checkpoint

    def _converted_together(self, convert: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return rank 0's values as they are saved, None on the others; collective.

        Raises:
            ConfigurationError: on every rank, that of rank 0.
        """
        if not self._worlds.is_joined:  # a module that is only connected is saved by one rank
            return convert()
        converted: dict[str, Any] | None = None
        with failing_together(self._worlds.present):
            if self._worlds.present.rank == 0:
                converted = convert()
        return converted

    def _plain(self, value: Any, name: str = "") -> Any:
        is_elastic = self._worlds.is_elastic
        converted, found = self._plain_values.convert(value, name, remember=not is_elastic)
        if found and is_elastic:
            raise ConfigurationError(advice_for(found, is_elastic=True))
        if found:
            rank_zero_warn(advice_for(found))
        return converted

    # ------------------------------------------------------------------ restoring

    def begin_restoring(self, *, is_trusted: bool) -> None:
        """Forget the directory that was restored before: another checkpoint is restored next.

        Args:
            is_trusted: see `read_checkpoint`.
        """
        self._restored, self.reads_objects = None, is_trusted

    def begin_hooks(self, module: nn.Module | None) -> None:
        """Note the parameters of a module whose hook `on_load_checkpoint` runs next."""
        self._before_hooks = [] if module is None else list(module.parameters())

    def open(self, path: Place, world: World) -> dict[str, Any]:
        """Return the checkpoint that Lightning restores from a file, a checkpoint directory, or a directory of these,
        which the manifest of one of them stands for; collective.

        Args:
            world: the ranks that are connected by now.

        Raises:
            CheckpointError: it is missing, damaged, or holds objects that only unsafe unpickling could read.
        """
        if path.name == MANIFEST:  # so `ckpt_path="last"` names the newest, which may turn out to be damaged
            path = path.parent.parent if decided(partial(_is_newest, path.parent), world) else path.parent
        if isinstance(path, Path) and not decided(path.is_dir, world):
            return self._read_file(path, world)
        restored = self._newest_for_all(path, world)
        if self.reads_objects:
            restored.trust()
        self._restored = restored
        checkpoint: dict[str, Any] = restored.read_object("trainer")
        return checkpoint

    def _read_file(self, path: Path, world: World) -> dict[str, Any]:
        with failing_together(world):
            try:
                check_file(path)
            except UnreadableCheckpointError as error:
                raise CheckpointError(f"{error}; {CURE_OF_DAMAGE}") from error
        return read_checkpoint(path, is_trusted=self.reads_objects)

    def end_hooks(self, module: pl.LightningModule, *, is_set_up: bool) -> None:
        """Forget what `begin_hooks` has noted.

        Args:
            is_set_up: optimizers of the parameters that the hook may have replaced exist.

        Raises:
            ConfigurationError: the hook has replaced some of them.
        """
        before, self._before_hooks = self._before_hooks, ()
        if is_set_up:
            require_same_parameters(module, before)

    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load the module's state."""
        if self._restored is not None:
            own = self._state.training_state()
            if strict:
                with self._state.stages.whole_module():
                    own.require_no_others(self._restored)
            own.restore_model(self._restored, strict=strict)
            return
        if "state_dict" not in checkpoint:
            raise CheckpointError("the checkpoint has no 'state_dict': it was not written by Lightning")
        module, averaging = self._state.module, self._state.averaging
        keys = self._state.experts.keys(module)
        part, cuts = self._state.parts.cut.part, cuts_of(module)

        def local(full: Mapping[str, Any]) -> dict[str, Any]:
            whole = self._state.stages.own_part(full)
            return local_model_state(whole, module.state_dict(), keys, part, cuts=cuts, strict=strict)

        trains_on = checkpoint["state_dict"]
        if averaging.averages is not None and CURRENT in checkpoint:
            averaging.load(local(trains_on))
            trains_on = checkpoint[CURRENT]
        module.load_state_dict(local(trains_on), strict=strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, and from a directory those of the random generators too."""
        if self._restored is not None:
            self._state.training_state().restore_optimizers(self._restored)
            self._state.resume_from(self._restored)
            return
        states, number = checkpoint["optimizer_states"], len(self._state.optimizers)
        if len(states) != number:
            raise CheckpointError(
                f"the checkpoint holds {len(states)} optimizers, the module has {number}: "
                "use the configuration it was written with"
            )
        own = self._state.training_state()
        for index, state in enumerate(states):
            load_local_optimizer_state(own, index, state)
        self._state.averaging.place_loaded()

    def _newest_for_all(self, path: Place, world: World) -> Checkpoint:
        """Return the checkpoint that rank 0 chooses, verified on every machine, under a lease until `release`. One rank
        chooses for all because an agent may commit and prune at the same time.

        Raises:
            CheckpointError: on every rank, where there is none or one of them finds it damaged.
        """
        self.release()
        hosts = all_gather_json(socket.gethostname(), world)
        peers = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        chosen = verified_together(partial(_leased, path, report=rank_zero_warn), world, peers)
        own, self._leases = chosen or (None, ExitStack())
        place, substitutes = broadcast_object(None if own is None else [str(own.path), own.substitutes], 0, world)
        with failing_together(world):
            if own is None:
                own = Checkpoint(place_of(place), substitutes=substitutes)
                self._leases = _leases_of(own)
                if not own.has_intact_substitutes:
                    raise CheckpointError(f"rank {world.rank} finds other damage in {place} than rank 0")
        assert own is not None
        return own

    def release(self) -> None:
        """Release the lease of the checkpoint that this run was restored from: it may be pruned."""
        self._leases.close()


def decided(choose: Callable[[], T], world: World) -> T:
    """Return rank 0's result on every rank; collective.

    Args:
        choose: called on rank 0; returns plain values.

    Raises:
        ConfigurationError, CheckpointError: on every rank, the error of rank 0.
    """
    with failing_together(world):
        found = choose() if world.rank == 0 else None
    answer: T = broadcast_object(found, 0, world)
    return answer


def verified_together(choose: Callable[[DamagesOf], T], world: World, peers: Sequence[int]) -> T | None:
    """Return what rank 0 chooses, None on other ranks; meanwhile all compare files with their checksums, which would
    take one rank longer than the others may wait. Collective.

    Args:
        choose: called on rank 0 with a function for the damages of a checkpoint.
        peers: ranks with this one that read the same bytes; each compares a share of the files.

    Raises:
        ConfigurationError, CheckpointError: on every rank, the error of rank 0.
    """
    found: T | None = None

    def damages_of(checkpoint: Checkpoint) -> list[DamagedFile]:
        broadcast_object(str(checkpoint.path), 0, world)
        return _all_damages(checkpoint.path, world, peers)

    with failing_together(world):
        if world.rank == 0:
            try:
                found = choose(damages_of)
            finally:
                broadcast_object("", 0, world)
        else:
            while place := broadcast_object("", 0, world):
                with suppress(CheckpointError, ConfigurationError):  # which rank 0 raises as well
                    _all_damages(place, world, peers)
    return found


def _all_damages(path: str | Place, world: World, peers: Sequence[int]) -> list[DamagedFile]:
    """Return the damages of a checkpoint that some rank finds; collective.

    Raises:
        CheckpointError: on every rank, a rank cannot read it.
    """
    own: list[DamagedFile] = []
    with failing_together(world):
        own += Checkpoint(place_of(path)).damages(share=(peers.index(world.rank), len(peers)))
    found: dict[str, set[str]] = {}
    for damages in all_gather_json([[damage.problem, sorted(damage.keys)] for damage in own], world):
        for problem, keys in damages:
            found.setdefault(problem, set()).update(keys)
    return [DamagedFile(problem=problem, keys=frozenset(keys)) for problem, keys in found.items()]


def _fit_loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of Lightning's fit loop itself, without its parts; empty if a checkpoint has weights only."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def take_positions(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the positions of the training loaders in a checkpoint, and remove those that Lightning would restore
    again.
    """
    positions: list[dict[str, Any]] = checkpoint.get(LOADERS_KEY, [])
    if positions:
        _fit_loop_state(checkpoint).pop("combined_loader", None)  # Lightning would restore some of them once more
        if "loops" in checkpoint:
            private_lightning.correct_progress(checkpoint["loops"]["fit_loop"])
    _leave_ended_epoch(checkpoint)
    return positions


def _leave_ended_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Let a run that was saved at or after the end of an epoch continue with the first batch of the next one.

    Under `max_steps` Lightning's loop would continue to count the batches of the old epoch and end the new one after
    its first batch.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    batches, epochs = loops.get("epoch_loop.batch_progress"), loops.get("epoch_progress")
    if not batches or not epochs or not batches.get("is_last_batch"):
        return
    if batches["total"]["completed"] < batches["total"]["ready"]:
        return  # the epoch's last step has not ended
    if epochs["total"]["processed"] < epochs["total"]["ready"]:
        return  # a validation may follow on it
    for count in (epochs["total"], epochs["current"]):
        count["completed"] = count["processed"]
    for progress in (batches, loops["epoch_loop.scheduler_progress"]):
        progress["current"] = dict.fromkeys(progress["current"], 0)
    batches["is_last_batch"] = False


def _leased(
    path: Place, damages_of: DamagesOf = Checkpoint.damages, *, report: Callable[[str], None]
) -> tuple[Checkpoint, ExitStack]:
    """Return the newest usable checkpoint in a directory, or that directory itself, with leases that protect all files
    read for it from pruning.

    Raises:
        CheckpointError: there is none.
    """
    deadline = time.monotonic() + _LONGEST_SEARCH_S
    while True:
        checkpoint = _newest_usable(path, report, damages_of)
        try:
            leases = _leases_of(checkpoint)
        except FileNotFoundError as error:  # pruned in between: there is a newer one
            if time.monotonic() > deadline:
                raise CheckpointError(f"{checkpoint.path} is being deleted: name another checkpoint") from error
            time.sleep(0.01)
        else:
            return checkpoint, leases


def _leases_of(checkpoint: Checkpoint) -> ExitStack:
    """
    Raises:
        FileNotFoundError: something that is read for the checkpoint is gone.
    """
    with ExitStack() as leases:
        for directory in checkpoint.directories:
            leases.enter_context(storage_of(directory).lease(directory))
        return leases.pop_all()


def _is_newest(path: Place) -> bool:
    newest = newest_of(path.parent)
    return newest is not None and newest[0] == path


def _newest_usable(path: Place, report: Callable[[str], None], damages_of: DamagesOf) -> Checkpoint:
    if isinstance(path, Path) and not path.exists():
        cure = "give the path of a .ckpt file or of a directory of checkpoints"
        raise MissingCheckpointError(f"the checkpoint {path} does not exist: {cure}")
    found = repaired(path, damages_of=damages_of) if has_manifest(path) else find_usable(path, damages_of=damages_of)
    for problem in found.problems:
        report(problem)
    if found.checkpoint is None:
        reason = f"it has no {MANIFEST}" if storage_of(path).names(path) else "it is empty"
        if found.problems:
            more = f" ({len(found.problems) - 1} more problems)" if len(found.problems) > 1 else ""
            reason = f"{found.problems[0]}{more}"
        raise CheckpointError(
            f"{path} holds no complete checkpoint, as {reason}: name a .ckpt file or a directory of step-... "
            "directories, or start over"
        )
    return found.checkpoint


class DurableCheckpointIO(TorchCheckpointIO):
    """Checkpoint files that are on disk and sealed when a save returns, so that Lightning deletes older ones only then;
    remote places (`s3://...`) are written as in stock Lightning.

    Raises:
        CheckpointError: the storage failed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            write_file(checkpoint, Path(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror or error}): files that were there are as they were; make "
                "room or choose another place, and go on from the newest"
            ) from error


def with_durable_io(io: CheckpointIO) -> CheckpointIO:
    """Replace stock Lightning's plugin, or the one that plugins wrap, by `DurableCheckpointIO`."""
    if type(io) is TorchCheckpointIO:
        return DurableCheckpointIO()
    inner = getattr(io, "checkpoint_io", None)  # as AsyncCheckpointIO has one
    if isinstance(inner, CheckpointIO) and (durable := with_durable_io(inner)) is not inner:
        private_lightning.wrap(io, durable)
    return io


def reads_its_own_way(io: CheckpointIO) -> bool:
    """True if the user's plugin may write files in a format of its own, such as encrypted ones."""
    while isinstance(inner := getattr(io, "checkpoint_io", None), CheckpointIO):
        io = inner
    return type(io).load_checkpoint is not TorchCheckpointIO.load_checkpoint


def is_directory_of_ours(path: Any) -> bool:
    """True for a checkpoint directory, a directory of these, or a manifest for one: no plugin reads them."""
    try:
        place = place_of(path)
        return place.name == MANIFEST or has_manifest(place) or bool(directories(place))
    except (ConfigurationError, OSError):  # of a scheme or credentials that only the plugin knows
        return False
