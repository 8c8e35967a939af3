"""One worker of an elastic training on small data that tests may kill, and what it leaves in files for them.

A worker writes as it goes, so that what it found survives it: `diary-W.jsonl` (the loss of every step),
`states-W.jsonl` (a digest of every unit of state after every step), `recoveries-W.jsonl` (a report of every recovery,
and what the process holds open after it).
"""

from __future__ import annotations

import collections
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import xxhash
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.fault_recovery import FaultRecovery
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.elastic.worker import RunFinished
from moe_lightning.parallel import exchange, sequence
from moe_lightning.state.tensors import is_sharded, local
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy
from moe_lightning.strategies.recovery import RecoveryPlanner
from moe_lightning.strategies.worlds import ExpertParallelCallback, RecoveryReport
from tests.distributed.training import TINY, RandomTokens, TokenStream, make_trainer
from tests.forks import wait_until

PLACES = (
    "opening", "forward", "exchange", "sequence exchange", "backward", "prepare", "update", "committed", "batch_end",
    "snapshot", "recovery", "movement", "arrived", "validation", "train_end",
)  # fmt: skip
"""Where a worker can be killed, in the order of a step."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill a worker the first time it comes to a place of a step.

    Attributes:
        worker: which one.
        step: optimizer steps done before.
        place: one of PLACES.
        signal: what it gets.
        visit: which time the process comes there.
        rank: in the place of `worker`, whoever has this rank in the first world.
        beside: such ranks that die at the same moment: none of them dies before all have come to their place.
    """

    worker: int
    step: int
    place: str
    signal: int = signal.SIGKILL
    visit: int = 1
    rank: int | None = None
    beside: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Do not go on from a step before the world has so many ranks, or somebody asks to be let in.

    Attributes:
        stored: wait for a checkpoint of this step, or a later one, on storage as well; 0: for none.
    """

    step: int
    ranks: int = 0
    stored: int = 0


class Diary(pl.Callback):
    """Writes the loss of every step and validation to files as they come, so that they survive the process."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._file = (folder / f"diary-{worker}.jsonl").open("a", buffering=1)
        self._validations = (folder / f"validations-{worker}.jsonl").open("a", buffering=1)
        self._epochs = (folder / f"epochs-{worker}.jsonl").open("a", buffering=1)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._epochs.write(json.dumps([trainer.current_epoch, trainer.global_step]) + "\n")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            line = [trainer.global_step, float(trainer.callback_metrics["val/loss"])]
            self._validations.write(json.dumps(line) + "\n")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        loss = float(trainer.callback_metrics["train/loss"])
        self._file.write(json.dumps([trainer.global_step, loss, trainer.world_size, time.time()]) + "\n")


def _all_exist(folder: Path, patterns: Sequence[str]) -> bool:
    return all(any(folder.glob(pattern)) for pattern in patterns)


class Killer(pl.Callback):
    """Ends its own process where it is told to."""

    def __init__(self, kills: Sequence[Kill], folder: Path, worker: int) -> None:
        self._kills = [kill for kill in kills if kill.worker == worker or kill.rank is not None]
        assert all(kill.place in PLACES for kill in kills)
        self._folder = folder
        self._step = -1
        self._visits: collections.Counter[tuple[str, int]] = collections.Counter()

    def at(self, place: str, step: int) -> None:
        self._visits[place, step] += 1
        for index, kill in enumerate(self._kills):
            who = kill.worker if kill.rank is None else f"rank-{kill.rank}"
            mark = self._folder / f"kill-{who}-{kill.step}-{kill.place}-{index}"
            is_due = (kill.place, kill.step, kill.visit) == (place, step, self._visits[place, step])
            if is_due and not mark.exists():
                mark.write_text(str(time.time()))
                marks = [f"kill-rank-{other}-{kill.step}-{kill.place}-*" for other in kill.beside]
                wait_until(partial(_all_exist, self._folder, marks))
                os.kill(os.getpid(), kill.signal)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        elastic = _elastic(trainer)
        rank = trainer.global_rank if elastic is not None and not elastic.is_newcomer else None
        self._kills = [kill for kill in self._kills if kill.rank in (None, rank)]
        if elastic is None or not self._kills:
            return
        version = lambda: elastic.step.version  # noqa: E731
        step = lambda: trainer.global_step  # noqa: E731
        self._around(elastic, "prepare", step, before="prepare", after="update")
        self._around(elastic, "commit", step, after="committed")
        self._around(elastic, "_follows_a_lost_world", step, before="opening")
        self._around(elastic, "_join_and_transfer", version, before="recovery")
        self._around(elastic._recovery, "_move", version, before="movement")
        self._around(elastic._strategy, "set_present", version, after="arrived")
        self._around(exchange, "_all_to_all", lambda: self._step, before="exchange")
        self._around(sequence, "_all_to_all", lambda: self._step, before="sequence exchange")
        saver = _saver(trainer)
        if saver is not None:
            self._around(saver, "save", step, after="snapshot")

    def _around(self, owner: Any, name: str, step: Callable[[], int], before: str = "", after: str = "") -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self.at(before, step())
            result = inner(*args, **kwargs)
            self.at(after, step())
            return result

        setattr(owner, name, outer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._step = trainer.global_step
        self.at("forward", self._step)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("backward", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("batch_end", trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("validation", trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at("train_end", trainer.global_step)


class Holder(pl.Callback):
    """Waits where the schedule says so: a run of milliseconds would be over before a fresh process has started."""

    def __init__(self, holds: Sequence[Hold], folder: Path) -> None:
        self._holds = holds
        self._gate, self._root = gate_of(folder), checkpoints_of(folder)

    def on_train_end(self, *_: Any) -> None:
        self._gate.touch()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        elastic = _elastic(trainer)
        due = [hold for hold in self._holds if trainer.global_step >= hold.step]
        if elastic is None or not due:
            return
        hold = due[-1]

        def may_go_on() -> bool:
            is_full = trainer.world_size >= hold.ranks or elastic.engine.has_newcomers()
            is_met = is_full and (not hold.stored or self._newest_stored() >= hold.stored)
            return is_met or elastic.engine.reason is not None

        wait_until(may_go_on, f"what {hold} waits for does not come")

    def _newest_stored(self) -> int:
        return max((manifest.step for _, manifest in checkpoints(self._root)), default=0)


class UntilCommitted(pl.Callback):
    """Wait after each step up to one until its checkpoint is committed: a recovery may find its state nowhere else. A
    node that has passed a step on which the others agree asks for a later one, which would never come."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        saver = _saver(trainer)
        assert saver is not None
        save = saver.save

        def save_and_wait(*args: Any, **options: Any) -> None:
            save(*args, **options)
            step = trainer.global_step
            if step <= self._step and (session := saver.session) is not None:
                session.finish_copy()
                wait_until(lambda: (session.status().committed_step or 0) >= step, f"step {step} is not committed")

        saver.save = save_and_wait  # type: ignore[method-assign]


class Witness(ExpertParallelCallback):
    """Digests of the state after every step, and what the process holds open after every recovery."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._states = (folder / f"states-{worker}.jsonl").open("a", buffering=1)
        self._recoveries = (folder / f"recoveries-{worker}.jsonl").open("a", buffering=1)
        self._versions: list[list[int]] = []
        self.k_persist: int | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _elastic(trainer) is None:
            return
        choose = RecoveryPlanner.plan

        def chosen(*args: Any, **options: Any) -> Any:
            result = choose(*args, **options)
            self._versions = result[0].versions.tolist()
            return result

        RecoveryPlanner.plan = chosen  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self._write_state(trainer, after_step=True)

    def on_recovered(self, trainer: pl.Trainer, pl_module: pl.LightningModule, report: RecoveryReport) -> None:
        self._write_state(trainer, after_step=False)
        line = {
            "report": vars(report),
            "versions": self._versions,
            "plt": _plt(trainer),
            "open": held_open(),
            "pid": os.getpid(),
        }
        self._recoveries.write(json.dumps(line) + "\n")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        saver = _saver(trainer)
        self.k_persist = saver.session.contents.k_persist if saver is not None and saver.session is not None else None

    def _write_state(self, trainer: pl.Trainer, *, after_step: bool) -> None:
        elastic = _elastic(trainer)
        world = elastic.members.name if elastic is not None and elastic.members is not None else ""
        state = {"world": world, "step": trainer.global_step, "digests": state_digests(trainer.strategy)}
        state["time"] = time.time()
        counts = [layer.statistics for layer in trainer.strategy.experts.layers]
        if after_step and all(found is not None for found in counts):
            state["counts"] = [found.computed_NE.sum(dim=0).tolist() for found in counts]
        self._states.write(json.dumps(state) + "\n")


def state_digests(strategy: ExpertParallelStrategy) -> dict[str, str]:
    """A digest of the weights and optimizer states of every expert that this rank holds, and of all dense ones, or this
    rank's part of them.
    """
    module = strategy.lightning_module
    assert module is not None
    states = collections.ChainMap(*(optimizer.state for optimizer in strategy.optimizers))
    hashes: dict[str, Any] = collections.defaultdict(xxhash.xxh3_64)
    for name, parameter in module.named_parameters():
        state = states.get(parameter, {})
        tensors = [local(parameter.detach()), *(v for _, v in sorted(state.items()) if torch.is_tensor(v) and v.ndim)]
        stack = strategy.experts.stack_of.get(parameter)
        for tensor in tensors:
            if stack is None:
                unit = "dense" if strategy.state.stages.num_stages == 1 else f"dense {name}"
                unit = f"{strategy.world.row_cut.part.name}{unit[5:]}" if is_sharded(parameter) else unit
                hashes[unit].update(tensor.contiguous().cpu().numpy().tobytes())
                continue
            for slot, expert in stack.held():
                unit = f"{name.rsplit('.', 1)[0]}/{expert}"
                hashes[unit].update(tensor[slot].contiguous().cpu().numpy().tobytes())
    return {unit: found.hexdigest() for unit, found in hashes.items()}


def held_open() -> dict[str, int]:
    """Threads, descriptors by kind, children and shared-memory mappings of this process."""
    counts: collections.Counter[str] = collections.Counter(threads=len(os.listdir("/proc/self/task")))
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.stat(f"/proc/self/fd/{name}").st_mode
        except FileNotFoundError:  # the listing's own
            continue
        counts["sockets" if stat.S_ISSOCK(mode) else "files" if stat.S_ISREG(mode) else "other"] += 1
    counts["children"] = len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    counts["mappings"] = Path("/proc/self/maps").read_text().count("/dev/shm/moe-lightning")
    return dict(counts)


def _elastic(trainer: pl.Trainer) -> ElasticWorlds | None:
    return trainer.strategy.elastic if isinstance(trainer.strategy.elastic, ElasticWorlds) else None


def _saver(trainer: pl.Trainer) -> PartialExpertsCheckpoint | None:
    return next((c for c in trainer.callbacks if isinstance(c, PartialExpertsCheckpoint)), None)  # type: ignore[attr-defined]


def _plt(trainer: pl.Trainer) -> float | None:
    saver = _saver(trainer)
    return saver.plt if saver is not None else None


def train_elastically(
    worker: int,
    expected: int,
    folder: Path,
    steps: int,
    *,
    kills: Sequence[Kill] = (),
    holds: Sequence[Hold] = (),
    strategy: dict[str, Any] | None = None,
    recovery: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    saving: dict[str, Any] | None = None,
    callbacks: Callable[[Path], list[Any]] | None = None,
    global_batch: int = 12,
    validate: bool = False,
    plateau: bool = False,
    trainer_options: dict[str, Any] | None = None,
    stream: bool = False,
    samples: Sequence[int] = (),
) -> None:
    """One worker: train the tiny model, leave losses, states and recoveries in files.

    Args:
        saving: options of a PartialExpertsCheckpoint; None: nothing is saved.
        validate: after every epoch of 96 // global_batch micro-batches.
        plateau: halve the learning rate after every validation but the first.
        stream: train on a stream without a state.
        samples: in the data of each worker; (): as many as `RandomTokens` has.
    """
    fault_recovery = FaultRecovery(**(recovery or {}))
    extra = callbacks(folder) if callbacks is not None else []
    if saving is not None:
        extra.append(PartialExpertsCheckpoint(str(checkpoints_of(folder)), **{"timeout_s": 60.0, **saving}))
    witness = Witness(folder, worker)
    watchers = [Killer(kills, folder, worker), Diary(folder, worker), Holder(holds, folder)]
    trainer = make_trainer(
        worker,
        expected,
        strategy,
        max_steps=steps,
        max_epochs=1000,
        callbacks=[*watchers, *extra, fault_recovery, witness],
        **{"enable_checkpointing": saving is not None, **(trainer_options or {})},
    )
    kind = PlateauModule if plateau else GPTModule
    module = kind({**TINY, **(model or {})}, optimizer=OptimizerConfig(**{"lr": 3e-3} | (optimizer or {})))
    held_out = DataLoader(RandomTokens(30), batch_size=10) if validate else None
    data = TokenStream() if stream else RandomTokens(*samples[worker : worker + 1])
    trainer.fit(module, DataLoader(data, batch_size=global_batch, shuffle=None if stream else True), held_out)
    reports = [vars(report) for report in fault_recovery.reports]
    result = {"steps": trainer.global_step, "reports": reports, "world_size": trainer.world_size, "plt": _plt(trainer)}
    result["k_persist"] = witness.k_persist
    (folder / f"result-{worker}.json").write_text(json.dumps(result))
    if (elastic := _elastic(trainer)) is not None:
        elastic.engine.close()


class PlateauModule(GPTModule):
    """Its learning rate follows the validation loss, which never improves enough."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss", "strict": False},
        }


def checkpoints_of(folder: Path) -> Path:
    """Where a run saves; the name of its parent begins the names of its arenas."""
    return folder / "chaos" / "checkpoints"


def gate_of(folder: Path) -> Path:
    """A file that is there when training ends."""
    return folder / "training-ends"


def worker_main(
    worker: int, expected: int, environment: dict[str, str], folder: str, steps: int, options: dict[str, Any]
) -> None:
    """The process."""
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RUST_LOG"] = "off"
    torch.set_num_threads(1)
    try:
        train_elastically(worker, expected, Path(folder), steps, **options)
    except RunFinished:
        return
    except BaseException:
        import traceback

        (Path(folder) / f"error-{worker}.txt").write_text(traceback.format_exc())
        raise
