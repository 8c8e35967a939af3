"""Objects between ranks: whatever sends them, nothing that arrives is unpickled, and a stranger ends nothing but the
run."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import distributed_c10d as c10d

from moe_lightning import ExpertParallelStrategy
from moe_lightning.checkpoint.loader import Checkpoint, DamagedFile
from moe_lightning.errors import CheckpointError, ConfigurationError, ForeignMessageError, MissingCheckpointError
from moe_lightning.parallel.collectives import (
    MAX_BYTES,
    all_gather_json,
    broadcast_object,
    carry_objects_without_pickle,
    check_versions,
    failing_together,
)
from moe_lightning.parallel.context import World, all_reduce_, broadcast_
from moe_lightning.strategies.checkpoints import verified_together
from tests.distributed.harness import connect, run_pooled, run_ranks
from tests.distributed.training import OwnModule, RandomTokens, make_trainer
from tests.unit.test_codec import Weapon

CPU = torch.device("cpu")


def outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ConfigurationError, ForeignMessageError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail(rank: int, world_size: int) -> list[str]:
    """Rank 1 fails in each way, rank 2 in another one; then none does."""
    world, found = connect(), []
    for error in (OSError(13, "Permission denied", "/x"), ConfigurationError("a"), MissingCheckpointError("b"), None):
        own = (None, error, error and CheckpointError("c"))[rank]
        try:
            with failing_together(world):
                if own is not None:
                    raise own
            found.append("none")
        except (ConfigurationError, CheckpointError) as caught:
            found.append(f"{type(caught).__name__}: {caught}")
    return found


def verify(rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 1 cannot read a checkpoint, in two ways; then it can."""
    world, found = connect(), []
    for error in (ConfigurationError("no package"), CheckpointError("no file"), None):

        def damages(self: Checkpoint, error: Exception | None = error, **_: Any) -> list[DamagedFile]:
            if rank == 1 and error is not None:
                raise error
            return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "damages", damages)
            patch.setattr(Checkpoint, "__init__", lambda self, path: setattr(self, "path", path))
            try:
                verified_together(lambda damages_of: damages_of(Checkpoint(Path(folder))), world, range(world_size))
                found.append("none")
            except (ConfigurationError, CheckpointError) as caught:
                found.append(f"{type(caught).__name__}: {caught}")
    return found


def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_of_all(tmp_path: Path) -> None:
    for found in run_pooled(2, verify, str(tmp_path)):
        assert [line.partition(":")[0] for line in found] == ["ConfigurationError", "CheckpointError", "none"]
        assert "no package" in found[0]


def test_all_ranks_raise_the_error_of_the_first_that_fails() -> None:
    expected = [
        "CheckpointError: /x cannot be used (Permission denied)",
        "ConfigurationError: a",
        "MissingCheckpointError: b",
        "none",
    ]
    assert run_pooled(3, fail) == [expected] * 3


# ---------------------------------------------------------------------- among ourselves


def share(rank: int, world_size: int) -> list[Any]:
    values = [{"rank": rank, "tensor": torch.full((2,), float(rank)), ("a", 1): {None}}, Path("x"), float("inf"), ""]
    return [
        broadcast_object(value, source, World.before_setup(CPU)) for value in values for source in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_sources_object_arrives_everywhere(world_size: int) -> None:
    results = run_pooled(world_size, share)
    for received in results:
        assert [entry["rank"] for entry in received[:world_size]] == list(range(world_size))
        assert [entry["tensor"].tolist() for entry in received[:world_size]] == [
            [float(r)] * 2 for r in range(world_size)
        ]
        assert received[0]["a", 1] == {None}
        assert received[world_size:] == [Path("x")] * world_size + [float("inf")] * world_size + [""] * world_size


def refuse(rank: int, world_size: int) -> list[str]:
    refused = outcome(broadcast_object, object() if rank == 1 else None, 1, World.before_setup(CPU))
    return [refused, str(broadcast_object("still in step", 0, World.before_setup(CPU)))]


def test_what_cannot_travel_is_refused_on_every_rank() -> None:
    (other, step), (source, _), _ = run_pooled(3, refuse)
    assert "rank 1 has an object that cannot be sent to other ranks" in other
    assert "an object of type builtins.object cannot be sent to other ranks" in source
    assert step == "still in step"


def gather_by_torch(rank: int, world_size: int) -> list[Any]:
    carry_objects_without_pickle()
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "boxes": torch.ones(rank)})
    told: list[Any] = [("x", rank)]
    dist.broadcast_object_list(told, src=1)
    return [[entry["rank"] for entry in gathered], told, outcome(dist.all_gather_object, gathered, object())]


def test_torchs_own_collectives_carry_the_same() -> None:
    for ranks, told, refused in run_pooled(2, gather_by_torch):
        assert (ranks, told) == ([0, 1], [("x", 1)])
        assert "an object of type builtins.object cannot be sent to other ranks" in refused


# ---------------------------------------------------------------------- a stranger in a rank's place


def meet_and_send_pickle(weapon: Weapon) -> None:
    """Meet as a rank of ours does, then speak as stock Lightning's and torch's rank 0 would."""
    all_gather_json(0, World.before_setup(torch.device("cpu")))  # the node of each rank
    check_versions(connect())
    send_pickle(weapon)


def send_pickle(weapon: Weapon) -> None:
    assert c10d._pickler is pickle.Pickler
    dist.broadcast_object_list([weapon], src=0)


def fit_behind_a_stranger(rank: int, world_size: int, folder: Path, callbacks: str) -> str:
    if rank == 0:
        meet_and_send_pickle(Weapon(folder / "made"))
        return ""
    saving = {"callbacks": [ModelCheckpoint()], "enable_checkpointing": True} if callbacks else {"logger": True}
    trainer = make_trainer(rank, world_size, max_steps=1, default_root_dir=folder, **saving)
    loader = torch.utils.data.DataLoader(RandomTokens(24), batch_size=12)
    return outcome(trainer.fit, OwnModule(), loader)


@pytest.mark.parametrize("callbacks", ["", "checkpoints"])
def test_a_stranger_who_became_rank_0_runs_no_code(tmp_path: Path, callbacks: str) -> None:
    _, said = run_ranks(2, fit_behind_a_stranger, tmp_path, callbacks)
    assert not (tmp_path / "made").exists()
    assert said.startswith("ForeignMessageError: a message of rank 0 is not one of moe-lightning's")
    assert "\n" not in said


def users_collective(rank: int, world_size: int, folder: Path) -> str:
    if rank == 0:
        meet_and_send_pickle(Weapon(folder / "made"))
        return ""
    make_trainer(rank, world_size).strategy.setup_environment()
    return outcome(dist.broadcast_object_list, [None], 0)


def test_a_users_own_collective_runs_none_either(tmp_path: Path) -> None:
    _, said = run_ranks(2, users_collective, tmp_path)
    assert not (tmp_path / "made").exists()
    assert "is not one of moe-lightning's" in said


def meet_one_who_does_not(rank: int, world_size: int, folder: Path) -> tuple[str, float]:
    if rank == 0:  # in a thread: rank 1 never listens
        threading.Thread(target=send_pickle, args=(Weapon(folder / "made"),), daemon=True).start()
        return "", 0.0
    strategy, begin = make_trainer(rank, world_size, {"timeout_s": 2.0}).strategy, time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        strategy.setup_environment()
    return str(raised.value), time.monotonic() - begin


def test_a_stranger_who_does_not_meet_is_waited_for_no_longer_than_configured(tmp_path: Path) -> None:
    _, (said, waited) = run_ranks(2, meet_one_who_does_not, tmp_path)
    assert not (tmp_path / "made").exists()
    assert "timed out" in said.lower(), said
    assert waited < 30.0  # 2 s, on a busy machine


def announce(rank: int, world_size: int, size: int) -> str:
    if rank == 0:
        dist.broadcast(torch.tensor([size]), 0)
        return ""
    return outcome(broadcast_object, None, 0, World.before_setup(CPU))


@pytest.mark.parametrize("size", [0, -7, MAX_BYTES + 1, (1 << 63) - 1])
def test_nothing_is_allocated_for_an_absurd_size(size: int) -> None:
    assert f"announces a message of {size} bytes" in run_pooled(2, announce, size)[1]


def send_no_json(rank: int, world_size: int) -> str:
    world = connect()
    if rank == 1:
        return outcome(all_gather_json, [1], world)
    payload = torch.frombuffer(bytearray(pickle.dumps(1)), dtype=torch.uint8)
    sizes = torch.empty(2, 1, dtype=torch.int64)
    dist.all_gather(list(sizes.unbind()), torch.tensor([payload.numel()]), group=world.background)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    dist.all_gather([torch.empty_like(padded), torch.empty_like(padded)], padded, group=world.background)
    return ""


def test_what_should_be_json_and_is_not_is_named() -> None:
    assert run_pooled(2, send_no_json)[1].startswith("ForeignMessageError: rank 0 sent something else than JSON")


def test_one_rank_sends_nothing_and_takes_everything() -> None:
    strategy = ExpertParallelStrategy()
    pl.Trainer(strategy=strategy, devices=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    value = object()
    assert strategy.broadcast(value) is value


# ----------------------------------------------------------------------
# JSON of all ranks, broadcasts and sums.


def gather_words(rank: int, world_size: int) -> list[object]:
    return list(all_gather_json({"rank": rank, "words": ["ä" * 100 * rank]}, connect()))


def test_json_of_different_lengths() -> None:
    expected = [{"rank": r, "words": ["ä" * 100 * r]} for r in range(3)]
    assert run_pooled(3, gather_words) == [expected] * 3


def share_json(rank: int, world_size: int) -> tuple[float, float]:
    world, value, total = connect(), torch.tensor(float(rank)), torch.tensor(float(rank))
    broadcast_(value, 1, world)
    all_reduce_(total, world)
    world.close()
    return float(value), float(total)


def test_broadcast_sum_and_close() -> None:
    assert run_pooled(3, share_json) == [(1.0, 3.0)] * 3
