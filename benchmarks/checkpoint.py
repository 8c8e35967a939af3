"""moe-bench checkpoint: the stall of a snapshot and the speed of its persist, against plain copies and the usual ways
to save.

Several processes stand for the ranks of a node; each has a state of its own (experts with weights and both moments,
and some dense tensors). All contenders take turns on the same state in the same processes; a figure is the median over
rounds of the slowest rank. The competitors are spared everything that is not saving: no process group, one directory
per rank, warmed up.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from safetensors.torch import save_file

from benchmarks.checkpoint_bubbles import bubble_table
from benchmarks.checkpoint_windows import WINDOWS, room_of, window_stalls, window_table
from benchmarks.measuring import interleaved
from moe_lightning.arguments import Count, OutputFolder, option
from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.arena import arena_bytes, arena_directory, arena_path, capacity_of
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.selection import full_selection, sequential_selection
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.cli.capacity import check_processes
from moe_lightning.cli.short_training import machine
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

_LAYERS, _EXPERTS, _SCOPES = 4, 32, ("weight", "exp_avg", "exp_avg_sq")
_DENSE_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    rounds: Count = option("rounds of each contender, in turns", 5)
    ranks: Count = option("processes with a state each", 2)
    gigabytes: Annotated[float, Interval(gt=0, le=1e6)] = option("state of each rank", 0.5)
    lossless: bool = option("also lossless windows: bytes and stall of their steps, and a replay", False)
    pipeline: bool = option("also the share of snapshots that is copied in the bubbles of a pipeline", False)
    directory: OutputFolder | None = option("where to write (default: the temporary directory)", None)


def run(options: Options) -> int:
    """Print two tables: what training waits for, and how fast storage is reached."""
    check_processes(options.ranks)
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {options.ranks} ranks of {options.gigabytes:g} GB, medians of {options.rounds} rounds")
    scratch = Path(tempfile.mkdtemp(prefix="moe-bench-", dir=options.directory))
    sizes = [
        piece.tensor.nbytes for piece in room_of(_state(0, options.gigabytes), with_windows=options.lossless).values()
    ]
    needed = dict.fromkeys(range(options.ranks), arena_bytes(capacity_of(sizes), 1 << 20) + (32 << 20))
    arenas = arena_directory(f"bench-{os.getpid()}", sizes=needed, fallback=scratch)
    ranks: list[_Rank] = []
    try:
        ranks = [_Rank(rank, options, arenas, scratch) for rank in range(options.ranks)]
        _warm_up(ranks)
        print(_stall_table(ranks, options.rounds))
        print(_step_table(ranks, options.rounds))
        print(_persist_table(ranks, options.rounds, arenas, scratch))
        if options.lossless:
            print(_windows(ranks, options.rounds, arenas, scratch))
        if options.pipeline:
            print(bubble_table(options.rounds, scratch / "pipeline"))
    finally:
        for rank in ranks:
            rank.close()
        shutil.rmtree(arenas, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


# --- the parent -----------------------------------------------------------------------------------------------------


class _Rank:
    """A process with a state, which runs contenders by name."""

    def __init__(self, rank: int, options: Options, arenas: Path, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (rank, options, arenas, scratch, theirs)
        self._process = context.Process(target=_rank_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, contender: str) -> None:
        self._pipe.send(contender)

    def seconds(self) -> float:
        try:
            return float(self._pipe.recv())
        except (EOFError, ConnectionError) as error:
            raise ConfigurationError("a rank of the benchmark died: see above, and try less state") from error

    def close(self) -> None:
        self._pipe.close()  # the process ends at the end of its commands
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()


def _all(ranks: list[_Rank], contender: str) -> float:
    """All ranks at once; the seconds of the slowest."""
    for rank in ranks:
        rank.begin(contender)
    return max([rank.seconds() for rank in ranks])


def _warm_up(ranks: list[_Rank]) -> None:
    for contender in ("memmove", "snapshot", "snapshot", "snapshot", "async_save", "async_save"):
        _all(ranks, contender)


def _medians(ranks: list[_Rank], contenders: Iterable[str], rounds: int) -> dict[str, float]:
    times = interleaved({name: partial(_all, ranks, name) for name in contenders}, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def _stall_table(ranks: list[_Rank], rounds: int) -> str:
    names = {
        "memmove": "memmove into touched memory",
        "snapshot": "snapshot, all experts",
        "snapshot_quarter": "snapshot, K = E/4",
        "async_save": "dcp.async_save, until it returns",
        "torch_save": "torch.save to a file (blocking)",
    }
    medians = _medians(ranks, names, rounds)
    rows = [
        (label, f"{1e3 * medians[n]:.1f}", *(f"{medians[n] / medians[base]:.2f}" for base in ("memmove", "snapshot")))
        for n, label in names.items()
    ]
    headers = ("what training waits for", "ms", "of memmove", "of a full snapshot")
    return table(headers, rows, "stall, nothing to hide under")


def _step_table(ranks: list[_Rank], rounds: int) -> str:
    names = {"step": "no snapshot", "step_snapshot": "all experts", "step_quarter": "K = E/4"}
    medians = _medians(ranks, names, rounds)
    rows = [(label, f"{1e3 * medians[n]:.1f}", f"{medians[n] / medians['step']:.3f}") for n, label in names.items()]
    headers = ("step of matrix products on every rank", "ms", "ratio")
    return table(headers, rows, "a snapshot in every step, hidden under it")


def _persist_table(ranks: list[_Rank], rounds: int, arenas: Path, scratch: Path) -> str:
    """Full snapshots through the agent (write, fsync, commit) against raw safetensors with fsync of the same state."""
    agent = Agent(arenas, scratch / "checkpoints", keep_last=1)
    raw, ours, nbytes = [], [], 0
    for _ in range(rounds + 1):  # the first one warms up
        raw.append(_all(ranks, "safetensors"))
        _all(ranks, "snapshot")
        _persist(agent)
        ours.append(agent.status.persist_s)
        nbytes = checkpoints(scratch / "checkpoints")[0][1].payload_bytes
    raw_s, ours_s = statistics.median(raw[1:]), statistics.median(ours[1:])
    _all(ranks, "snapshot_quarter")
    _persist(agent)
    written = checkpoints(scratch / "checkpoints")[0][1].new_bytes
    experts = nbytes * (1 - _DENSE_SHARE)
    rows = [
        (name, f"{seconds:.3f}", f"{nbytes / seconds / 1e9:.2f}", f"{raw_s / seconds:.2f}")
        for name, seconds in (("safetensors and fsync", raw_s), ("agent, committed", ours_s))
    ]
    predicted = (nbytes - experts + experts / 4) / nbytes
    text = table(("", "s", "GB/s", "of raw"), rows, "persist: from the snapshot to the committed checkpoint")
    return f"{text}\nbytes of a checkpoint of K = E/4: {written / nbytes:.4f} of a full one, predicted {predicted:.4f}"


def _windows(ranks: list[_Rank], rounds: int, arenas: Path, scratch: Path) -> str:
    """Lossless windows against full snapshots."""
    _all(ranks, "window_whole")  # warms up
    medians = _medians(ranks, ("snapshot", *WINDOWS), rounds)
    _all(ranks, "window_whole")
    _persist(Agent(arenas, scratch / "windows", keep_last=1))
    return window_table(medians, checkpoints(scratch / "windows")[0][0])


def _persist(agent: Agent) -> None:
    """Let the agent work until nothing waits."""
    while agent.serve_once():
        if agent.status.error is not None:
            raise ConfigurationError(agent.status.error)


# --- a rank ---------------------------------------------------------------------------------------------------------


def _state(rank: int, gigabytes: float) -> dict[str, torch.Tensor]:
    """fp32 experts with both moments, and dense tensors of a tenth of the bytes."""
    rows = 256
    cells = gigabytes * 1e9 / 4
    width = max(1, round(cells * (1 - _DENSE_SHARE) / (_LAYERS * _EXPERTS * len(_SCOPES) * rows)))
    generator = torch.Generator().manual_seed(rank)
    state = {
        f"expert/{layer}/{rank * _EXPERTS + expert}/{scope}/w": torch.rand(rows, width, generator=generator)
        for layer in range(_LAYERS)
        for expert in range(_EXPERTS)
        for scope in _SCOPES
    }
    experts = sum(t.numel() for t in state.values())
    dense = round(experts * _DENSE_SHARE / (1 - _DENSE_SHARE) / _LAYERS)
    state |= {f"dense/{rank}.{layer}": torch.rand(dense, generator=generator) for layer in range(_LAYERS)}
    return state


def _rank_main(rank: int, options: Options, arenas: Path, scratch: Path, pipe: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    contenders = _Contenders(rank, options, arenas, scratch)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            contenders.snapshotter.close()
            return
        pipe.send(getattr(contenders, name)())


class _Contenders:
    """Ways to save one rank's state; every method returns the seconds that training would wait, `safetensors` those
    until it is on disk."""

    def __init__(self, rank: int, options: Options, arenas: Path, scratch: Path) -> None:
        self.rank, self.size, self.scratch = rank, options.ranks, scratch
        self.state = _state(rank, options.gigabytes)
        self.copy = {key: torch.zeros_like(tensor) for key, tensor in self.state.items()}
        self.step_number = 0
        self.matrix = torch.rand(1024, 1024)
        self.snapshotter = Snapshotter(
            arena_path(arenas, rank),
            run="bench",
            session="1",
            rank=rank,
            world_size=options.ranks,
            state=room_of(self.state, with_windows=options.lossless),
        )
        # Competitors are named where they are used, so that nothing else of the benchmarks depends on them.
        self.dcp = importlib.import_module("torch.distributed.checkpoint")

    def memmove(self) -> float:
        began = time.perf_counter()
        for key, tensor in self.state.items():
            ctypes.memmove(self.copy[key].data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return time.perf_counter() - began

    def snapshot(self) -> float:
        return self._snapshot(quarter=False)

    def snapshot_quarter(self) -> float:
        return self._snapshot(quarter=True)

    def _snapshot(self, *, quarter: bool) -> float:
        started = self._start(quarter=quarter)
        self.snapshotter.wait_before_update()
        stall_s = time.perf_counter() - started
        self.snapshotter.finish()
        return stall_s

    def _start(self, *, quarter: bool) -> float:
        """Start a snapshot; returns the time when it began."""
        self.step_number += 1
        chosen = (
            sequential_selection(ordinal=self.step_number, k=_EXPERTS // 4, num_layers=_LAYERS, num_experts=_EXPERTS)
            if quarter
            else full_selection(_LAYERS, _EXPERTS)
        )
        fresh = {
            f"expert/{layer}/{self.rank * _EXPERTS + expert}/{scope}/w"
            for layer, experts in enumerate(chosen.experts)
            for expert in experts
            for scope in _SCOPES
        }
        began = time.perf_counter()
        self.snapshotter.start(self.step_number, self.state, fresh=fresh)
        return began

    def window_longest(self) -> float:
        return max(self._window())

    def window_mean(self) -> float:
        return statistics.mean(self._window())

    def window_whole(self) -> float:
        return sum(self._window())

    def _window(self) -> list[float]:
        """The stall of each step of a window."""
        stalls = window_stalls(self.snapshotter, self.state, self.step_number + 1, ranks=self.size)
        self.step_number += len(stalls)
        return stalls

    def async_save(self) -> float:
        target = self.scratch / f"async{self.rank}"
        began = time.perf_counter()
        pending = self.dcp.async_save(self.state, checkpoint_id=str(target), no_dist=True)
        stall_s = time.perf_counter() - began
        pending.result()
        shutil.rmtree(target)
        return stall_s

    def torch_save(self) -> float:
        target = self.scratch / f"blocking{self.rank}.ckpt"
        began = time.perf_counter()
        torch.save(self.state, target)
        stall_s = time.perf_counter() - began
        target.unlink()
        return stall_s

    def safetensors(self) -> float:
        target = self.scratch / f"raw{self.rank}.safetensors"
        began = time.perf_counter()
        save_file(self.state, str(target))
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        elapsed_s = time.perf_counter() - began
        target.unlink()
        return elapsed_s

    def step(self) -> float:
        return self._step(lambda: 0.0)

    def step_snapshot(self) -> float:
        return self._step(self.snapshotter.wait_before_update, began=self._start(quarter=False))

    def step_quarter(self) -> float:
        return self._step(self.snapshotter.wait_before_update, began=self._start(quarter=True))

    def _step(self, wait: Callable[[], float], began: float | None = None) -> float:
        """A forward and backward of about half a second, then the wait before the update."""
        began = time.perf_counter() if began is None else began
        for _ in range(16):
            torch.mm(self.matrix, self.matrix)
        wait()
        elapsed_s = time.perf_counter() - began
        self.snapshotter.finish()
        return elapsed_s
