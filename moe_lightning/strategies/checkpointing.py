"""How the strategy's state goes into checkpoints and comes back: single files as stock Lightning writes them, and
directories.
"""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from moe_lightning.checkpoint.full_state import (
    full_model_state,
    full_optimizer_state,
    load_local_optimizer_state,
    local_model_state,
    read_checkpoint,
)
from moe_lightning.checkpoint.lease import Lease
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.manifest import MANIFEST
from moe_lightning.checkpoint.mending import find_usable, mended
from moe_lightning.checkpoint.reader import CheckpointSource
from moe_lightning.checkpoint.sealing import check_file
from moe_lightning.checkpoint.training_state import TrainingState
from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.world import World
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.strategies.placed_experts import PlacedExperts
from moe_lightning.strategies.sealed_files import sealed
from moe_lightning.strategies.step_data import StepData, loader_states, states_of_stateful
from moe_lightning.strategies.zero import DenseSharding

T = TypeVar("T")

LOADERS_KEY = "step_loaders"
"""Where a checkpoint keeps the position of each training loader."""

_LONGEST_SEARCH_S = 60.0


class CheckpointingStrategy(DDPStrategy):
    """Saves and restores experts in slots and sharded optimizer states; the part of the strategy that knows
    checkpoints.

    Attributes:
        restored_checkpoint: the directory checkpoint, or the snapshots, that this run came from last; None otherwise.
    """

    _optimizer_groups: list[list[list[nn.Parameter]]]
    _shards: DenseSharding | None
    restored_checkpoint: CheckpointSource | None = None
    _leases = ExitStack()
    _without_state = False

    @property
    @abstractmethod
    def world(self) -> World: ...

    @property
    @abstractmethod
    def experts(self) -> PlacedExperts: ...

    @abstractmethod
    def meet(self) -> None: ...

    @abstractmethod
    def _step_data(self) -> StepData: ...

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a checkpoint is cut to the slots, so the slots must exist

    def _number_of(self, optimizer: Optimizer) -> int:
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return next(i for i, known in enumerate(self.optimizers) if known is bare)

    def parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """What an optimizer updates on some rank, in an order that all ranks share."""
        return [parameter for group in self._optimizer_groups[self._number_of(optimizer)] for parameter in group]

    # ------------------------------------------------------------------ one file

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """What writes files: durably and sealed, unless the user gave another way."""
        self._checkpoint_io = sealed(super().checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0, expert stacks [E, ...]; empty on the others."""
        assert self.lightning_module is not None
        if self._without_state:
            return {}
        keys = self.experts.keys(self.lightning_module)
        return full_model_state(super().lightning_module_state_dict(), keys, self.world)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state on rank 0 as a single process would have it; empty on the others."""
        if self._without_state:
            return {}
        return full_optimizer_state(self.training_state(), self._number_of(optimizer), self.world)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write on rank 0, with the position of the training data: Lightning itself leaves it out between epochs."""
        assert self.lightning_module is not None
        loaders = self.lightning_module.trainer.train_dataloader
        checkpoint[LOADERS_KEY] = loader_states(loaders)
        loop = _fit_loop_state(checkpoint)
        if "combined_loader" in loop:  # stock Lightning looks for the positions of loaders that have one there
            loop["combined_loader"] = states_of_stateful(loaders)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint without unpickling code: a file, a checkpoint directory, or a directory of these.

        Of a directory of checkpoints the newest is taken that is whole or can be mended, and what is damaged is named.
        Rank 0 looks for all: an agent may commit and prune there meanwhile. Collective.

        Raises:
            CheckpointError: it is missing, damaged, or holds objects that only unsafe unpickling could read.
        """
        path = Path(str(checkpoint_path))
        if "://" in str(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=True)
        elif self.decide(path.is_dir):
            self.restored_checkpoint = self._newest_for_all(path)
            checkpoint = self.restored_checkpoint.read_object("trainer")
        else:
            checkpoint = self._read_file(path)
        positions = checkpoint.get(LOADERS_KEY, [])
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._step_data().restore(positions, trainer.train_dataloader)
        if positions:
            _fit_loop_state(checkpoint).pop("combined_loader", None)  # Lightning would restore some of them once more
        _leave_ended_epoch(checkpoint)
        return checkpoint

    def _read_file(self, path: Path) -> dict[str, Any]:
        problem = None
        try:
            check_file(path)
        except CheckpointError as error:
            problem = str(error)
        self._raise_together(path, problem)
        return read_checkpoint(path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.restored_checkpoint is not None:
            self.training_state().restore_model(self.restored_checkpoint)
            return
        if "state_dict" not in checkpoint:
            raise CheckpointError("the checkpoint has no 'state_dict': it was not written by Lightning")
        local = local_model_state(
            checkpoint["state_dict"],
            self.lightning_module.state_dict(),
            self.experts.keys(self.lightning_module),
            strict=strict,
        )
        self.lightning_module.load_state_dict(local, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.restored_checkpoint is not None:
            self.training_state().restore_optimizers(self.restored_checkpoint)
            _restore_random_state(self.restored_checkpoint, self.world)
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds {len(states)} optimizers, the module has {len(self.optimizers)}: "
                "use the configuration it was written with"
            )
        own = self.training_state()
        for index, state in enumerate(states):
            load_local_optimizer_state(own, index, state)

    # ------------------------------------------------------------------ directories

    def decide(self, look: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank: they meet first, where they have not met yet. Collective.

        A process that waits to join a running world looks for itself: it will get what the others have.

        Args:
            look: called on rank 0; returns plain values.

        Raises:
            ConfigurationError, CheckpointError: on every rank, what kept rank 0 from an answer.
        """
        self.meet()
        found: T | None = None
        problem: ConfigurationError | CheckpointError | None = None
        if self.is_global_zero or not dist.is_initialized():
            try:
                found = look()
            except (ConfigurationError, CheckpointError) as error:
                problem = error
            except OSError as error:
                problem = CheckpointError(f"{error.filename or 'storage'} cannot be read ({error.strerror or error})")
        told = found, None if problem is None else (isinstance(problem, ConfigurationError), str(problem))
        found, refusal = self.broadcast(told)
        if problem is not None:
            raise problem
        if refusal is not None:
            raise (ConfigurationError if refusal[0] else CheckpointError)(refusal[1])
        return found  # type: ignore[return-value]

    def _newest_for_all(self, path: Path) -> Checkpoint:
        """The checkpoint that rank 0 chooses, verified by every rank, under a lease until `release_restored`.

        Raises:
            CheckpointError: on every rank, where there is none or one of them finds it damaged.
        """
        self.release_restored()
        own: Checkpoint | None = None

        def look() -> list[Any]:
            nonlocal own
            own, self._leases = _leased(path, report=rank_zero_warn)
            return [str(own.path), own.substitutes]

        place, substitutes = self.decide(look)
        chosen, problem = Path(place), None
        if own is None:
            try:
                own, self._leases = _leased(chosen, report=lambda _: None)
                if own.substitutes != substitutes:
                    problem = f"rank {self.world.rank} finds other damage in it than rank 0"
            except CheckpointError as error:
                problem = str(error)
        self._raise_together(chosen, problem)
        assert own is not None
        return own

    def _raise_together(self, path: Path, problem: str | None) -> None:
        """Refuse what one of the ranks cannot read; collective.

        Raises:
            CheckpointError: on every rank, the first problem.
        """
        # A newcomer's world is not connected yet: it looked for itself.
        problems = all_gather_json(problem, self.world) if dist.is_initialized() else [problem]
        told = next((problem for problem in problems if problem is not None), None)
        if told is not None:
            self.release_restored()
            raise CheckpointError(told if str(path) in told else f"not every rank can read {path}: {told}")

    def release_restored(self) -> None:
        """The checkpoint that this run came from is not read any more: it may be pruned."""
        self._leases.close()

    def training_state(self) -> TrainingState:
        """The live tensors of the run under their checkpoint keys."""
        assert self.lightning_module is not None
        return TrainingState(
            self.lightning_module,
            self.experts.stacks,
            list(zip(self.optimizers, self._optimizer_groups, strict=False)),
            keepers=self._shards.owners if self._shards is not None else {},
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def training_objects(self) -> dict[str, Any]:
        """What this rank adds to a directory checkpoint beside tensors; collective, as Lightning's own dump is."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        with self._leave_state_out():
            dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        objects: dict[str, Any] = {f"rng/{self.world.rank}": _random_state()}
        if self.world.rank == 0:
            kept = {key: value for key, value in dump.items() if key not in ("state_dict", "optimizer_states")}
            # Lightning looks for both keys before it asks the strategy, which reads them from the directory.
            kept |= {"state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}
            kept[LOADERS_KEY] = loader_states(trainer.train_dataloader)
            objects |= {"trainer": kept} | self.training_state().objects()
        return objects

    @contextmanager
    def _leave_state_out(self) -> Generator[None, None, None]:
        self._without_state = True
        try:
            yield
        finally:
            self._without_state = False


def _fit_loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Of Lightning's fit loop itself, without its parts; empty where a checkpoint holds weights only."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _leave_ended_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Let a run that was saved at or after the end of an epoch go on with the first batch of the next one.

    Under `max_steps` Lightning's loop would count on in the batches of the old epoch and leave the new one after the
    first.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    batches, epochs = loops.get("epoch_loop.batch_progress"), loops.get("epoch_progress")
    if not batches or not epochs or not batches.get("is_last_batch"):
        return
    if batches["total"]["completed"] < batches["total"]["ready"]:
        return  # the epoch's last step is not done with
    if epochs["total"]["processed"] < epochs["total"]["ready"]:
        return  # a validation may follow on it
    for count in (epochs["total"], epochs["current"]):
        count["completed"] = count["processed"]
    for progress in (batches, loops["epoch_loop.scheduler_progress"]):
        progress["current"] = dict.fromkeys(progress["current"], 0)
    batches["is_last_batch"] = False


def _leased(path: Path, *, report: Callable[[str], None]) -> tuple[Checkpoint, ExitStack]:
    """The newest checkpoint in a directory that can be used, or that directory itself; all that is read for it is kept
    from being pruned.

    Raises:
        CheckpointError: there is none.
    """
    deadline = time.monotonic() + _LONGEST_SEARCH_S
    while True:
        checkpoint = _newest_usable(path, report)
        leases = ExitStack()
        try:
            for directory in checkpoint.directories:
                leases.callback(Lease(directory).release)
        except FileNotFoundError as error:  # pruned meanwhile: a newer one is there
            leases.close()
            if time.monotonic() > deadline:
                raise CheckpointError(f"{checkpoint.path} is being deleted: name another checkpoint") from error
            time.sleep(0.01)
        else:
            return checkpoint, leases


def _newest_usable(path: Path, report: Callable[[str], None]) -> Checkpoint:
    if (path / MANIFEST).exists():
        return mended(path, report=report)
    found = find_usable(path, report=report)
    if found.checkpoint is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint: name a .ckpt file or a directory of step-... directories, or start anew"
        )
    return found.checkpoint


def _random_state() -> dict[str, Any]:
    """The global random generators of this process as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(checkpoint: CheckpointSource, world: World) -> None:
    """Continue this rank's generators; a rank that the checkpoint does not know keeps its own."""
    key = f"rng/{world.rank}"
    if key not in checkpoint.keys("rng/"):
        return
    state = checkpoint.read_object(key)
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
