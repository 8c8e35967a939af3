"""A small model state for checkpoint tests, in which every value says which key and step it belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from moe_lightning.checkpoint.agent import Agent
from moe_lightning.checkpoint.arena import arena_path
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.snapshotter import Snapshotter
from moe_lightning.state.pieces import StatePiece, is_expert_key

LAYERS, EXPERTS = 2, 4
SHAPES = {"weight/w1": (6, 5), "exp_avg/w1": (6, 5), "weight/b": (5,)}
EXTRA = {"num_experts": EXPERTS}


def value(key: str, step: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that no other key or step has."""
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(key)) % 1000
    size = int(torch.Size(shape).numel())
    return (torch.arange(size) % 50 + seed + 1000 * step).to(torch.float32).view(shape).to(dtype)


def whole_state(step: int) -> dict[str, torch.Tensor]:
    """Everything of the model after a step, as one process would hold it."""
    state = {
        f"expert/{layer}/{expert}/{name}": value(f"{layer}{expert}{name}", step, shape)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name, shape in SHAPES.items()
    }
    state["dense/embedding/weight"] = value("embedding", step, (11, 3))
    state["dense/norm/weight"] = value("norm", step, (3,), torch.bfloat16)
    state["dense/empty"] = torch.zeros(0, 3)
    state["dense/step"] = torch.tensor(step)
    return state


def state_of(rank: int, world_size: int, step: int) -> dict[str, torch.Tensor | StatePiece]:
    """One rank's share: experts and dense tensors dealt round, the embedding cut by rows."""
    mine: dict[str, torch.Tensor | StatePiece] = {}
    for i, (key, tensor) in enumerate(whole_state(step).items()):
        if key == "dense/embedding/weight":
            bounds = [r * 11 // world_size for r in range(world_size + 1)]
            mine[key] = StatePiece.of(key, tensor).rows(bounds[rank], bounds[rank + 1])
        elif (int(key.split("/")[2]) if is_expert_key(key) else i) % world_size == rank:
            mine[key] = tensor
    return mine


def expert_keys(experts: Collection[int]) -> set[str]:
    return {key for key in whole_state(0) if is_expert_key(key) and int(key.split("/")[2]) in experts}


class Node:
    """Snapshotters of all ranks and an agent, in this process."""

    def __init__(
        self,
        base: Path,
        *,
        world_size: int = 2,
        session: str = "1",
        run: str = "run",
        world: int = 0,
        root: Path | None = None,
        **agent: float,
    ) -> None:
        self.arenas, self.root, self.world_size = base / "arenas", root or base / "checkpoints", world_size
        self.arenas.mkdir(exist_ok=True, parents=True, mode=0o700)
        self.ranks = [
            Snapshotter(
                arena_path(self.arenas, rank),
                run=run,
                session=session,
                rank=rank,
                world_size=world_size,
                state=state_of(rank, world_size, 0),
                object_bytes=4096,
                objects=2,
                world=world,
            )
            for rank in range(world_size)
        ]
        self.agent = Agent(self.arenas, self.root, retry_s=0.0, **agent)  # type: ignore[arg-type]

    def snapshot(self, step: int, fresh: Collection[int] | None = None, persist: Collection[int] | None = None) -> None:
        """All ranks snapshot the experts `fresh` (None: all), `persist` of which are meant for storage."""
        for rank, snapshotter in enumerate(self.ranks):
            snapshotter.start(
                step,
                state_of(rank, self.world_size, step),
                fresh=None if fresh is None else expert_keys(fresh),
                persist=None if persist is None else expert_keys(persist),
                objects={f"rng/{rank}": {"state": torch.tensor([rank, step])}} | ({} if rank else {"trainer": step}),
                extra=EXTRA,
            )
        for snapshotter in self.ranks:
            snapshotter.wait_before_update()
            snapshotter.finish()

    def persist(self) -> None:
        """Let the agent do all that it can."""
        for _ in range(20):
            if not self.agent.serve_once():
                return
        raise AssertionError("the agent does not come to rest")

    def save(self, step: int, fresh: Collection[int] | None = None, persist: Collection[int] | None = None) -> None:
        """Snapshot and persist."""
        self.snapshot(step, fresh, persist)
        self.persist()

    def persist_attempts(self, rounds: int) -> None:
        """Let the agent try so many times what it may fail at."""
        for _ in range(rounds):
            self.agent.serve_once()

    def close(self) -> None:
        for snapshotter in self.ranks:
            snapshotter.close()


@contextlib.contextmanager
def node(base: Path, **options: object) -> Iterator[Node]:
    made = Node(base, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def two_checkpoints(base: Path) -> Iterator[Path]:
    """A directory with a full checkpoint of step 1 and a partial one of step 2."""
    with node(base) as made:
        made.save(1)
        made.save(2, fresh=[0])
        yield made.root


def assert_holds(checkpoint: Checkpoint, versions: dict[int, int]) -> None:
    """Every tensor equals what the model had at the version of its expert; everything else is of the checkpoint's
    step."""
    step = checkpoint.manifest.step
    for key, expected in whole_state(step).items():
        if is_expert_key(key):
            version = versions[int(key.split("/")[2])]
            expected = whole_state(version)[key]
            assert checkpoint.version(key) == version, key
        actual = checkpoint.read(key)
        assert actual.dtype == expected.dtype, key
        assert torch.equal(actual, expected), key
