"""Axes of the mesh with each other and with shared dense parameters: losses, norms and checkpoints of one rank."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.mesh_checkpoints import assert_read_to_the_bit, write
from tests.distributed.same_training import CASES as KNOWN
from tests.distributed.same_training import assert_same_training
from tests.distributed.test_tensor_parallel import TIED, load, run, save, weigh
from tests.distributed.training import BRIEF_ACCUMULATION
from tests.parameters import slow

TP2, CPTP = {"tp": 2}, {"cp": 2, "tp": 2}
NOISY = KNOWN["noisy"]["model"]
EIGHT_HEADS = TIED | {"num_heads": 8, "num_kv_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model": {"num_heads": 4, "moe_every": 2}, "validate": True, "trainer": {"val_check_interval": 4}},
    "gpt2 uneven": {"model": NOISY, "batch_size": 13},
    "llama noisy": {"model": EIGHT_HEADS | NOISY, "batch_size": 7, "validate": True},
    "llama accumulated": {"model": TIED, **BRIEF_ACCUMULATION},
}


@cache
def reference(key: str) -> dict[str, Any]:
    return run(1, **CASES[key])[0]


@pytest.mark.parametrize(
    ("key", "ranks", "strategy"),
    [
        ("llama noisy", 4, {"mesh": CPTP}),
        ("llama accumulated", 4, {"mesh": TP2, "dense": "fsdp"}),
        slow("gpt2", 4, {"mesh": TP2, "dense": "zero1"}),
        pytest.param("llama noisy", 4, {"mesh": TP2, "dense": "zero1"}, marks=pytest.mark.slow),
        pytest.param("llama accumulated", 4, {"mesh": CPTP, "dense": "zero1"}, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, {"mesh": CPTP, "replicas": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2 uneven", 4, {"mesh": CPTP}, marks=pytest.mark.slow),
        pytest.param("llama accumulated", 4, {"mesh": CPTP}, marks=pytest.mark.slow),
        pytest.param("llama noisy", 8, {"mesh": CPTP, "replicas": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, {"mesh": TP2, "dense": "fsdp", "replicas": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, {"mesh": CPTP, "dense": "fsdp"}, marks=pytest.mark.slow),
        pytest.param("gpt2 uneven", 4, {"mesh": TP2, "dense": "hsdp"}, marks=pytest.mark.slow),
        pytest.param("llama noisy", 8, {"mesh": TP2, "dense": "hsdp"}, marks=pytest.mark.slow),
        pytest.param("llama accumulated", 8, {"mesh": CPTP, "dense": "fsdp"}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_one_rank(key: str, ranks: int, strategy: dict[str, Any]) -> None:
    assert_same_training(reference(key), run(ranks, strategy=strategy, **CASES[key]))


def test_a_rank_holds_rows_of_its_parts() -> None:
    (whole,) = run_ranks(1, partial(weigh, strategy={}))
    for found in run_ranks(4, partial(weigh, strategy={"mesh": TP2, "dense": "fsdp"})):
        for kind, nbytes in found.items():
            assert nbytes == pytest.approx(whole[kind] / 4, rel=0.05), kind


# ---------------------------------------------------------------------- checkpoints

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (3, {"dense": "fsdp"}),
    "cp2 tp2": (4, {"mesh": CPTP}),
    "tp2 zero1": (4, {"mesh": TP2, "dense": "zero1"}),
    "tp2 fsdp": (4, {"mesh": TP2, "dense": "fsdp"}),
    "tp2 hsdp": (8, {"mesh": TP2, "dense": "hsdp"}),
}


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        pytest.param("tp2 zero1", ["one", "tp2 fsdp", "cp2 tp2"], marks=pytest.mark.slow),
        pytest.param("tp2 fsdp", ["one", "tp2 zero1", "cp2 tp2", "tp2 hsdp"], marks=pytest.mark.slow),
        pytest.param("cp2 tp2", ["one", "fsdp", "tp2 fsdp", "tp2 zero1"], marks=pytest.mark.slow),
        pytest.param("fsdp", ["tp2 fsdp", "tp2 hsdp"], marks=pytest.mark.slow),
        pytest.param("tp2 hsdp", ["one", "cp2 tp2", "tp2 fsdp"], marks=pytest.mark.slow),
    ],
)
def test_any_mesh_reads_what_any_wrote_to_the_bit(writer: str, readers: list[str], tmp_path: Path) -> None:
    written = write(MESHES, writer, save, tmp_path)
    assert sum(name.endswith("/exp_avg") for name in written) > 10
    assert_read_to_the_bit(MESHES, readers, load, tmp_path, written)
