"""The doctor names seeded bugs, and says nothing of runs without any."""

from __future__ import annotations

from typing import Any

import pytest

from moe_lightning.callbacks.parity_doctor import ParityDoctor
from moe_lightning.errors import ParityError
from tests.distributed.harness import run_ranks
from tests.distributed.same_training import CASES
from tests.distributed.seeded_bugs import BUGS
from tests.distributed.training import train
from tests.parameters import slow

QUICK = ["expert_gradient_times_ranks", "replicas_not_summed", "dropped_token", "learning_rate_of_a_group"]
UNTIED = {"model": {"tie_embeddings": False}}
MESHES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "plain", {"copies": 2}),
    (2, "plain", {"dense": "zero1"}),
    (2, "uneven", {"copies": 2}),
    (2, "own", {}),
    (2, "noisy", {"copies": 2}),
    (2, "llama", {"dense": "fsdp"}),
    (2, "bf16", {"dense": "fsdp"}),
    (2, "accumulate", {"copies": 2}),
    (2, "skewed", {}),
    (2, "plain", {"mesh": {"cp": 2}}),
    (2, "plain", {"mesh": {"tp": 2}}),
    (2, "untied", {"mesh": {"pp": 2}}),
    (3, "uneven", {"dense": "fsdp"}),
    (3, "noisy", {"dense": "zero1"}),
    (4, "plain", {"dense": "hsdp", "shard_size": 2}),
    (4, "plain", {"ep_size": 2}),
    (4, "skewed", {"copies": 4, "dense": "zero1"}),
    (4, "untied", {"mesh": {"pp": 2}, "micro_batches": 3}),
    (4, "untied", {"mesh": {"pp": 2, "tp": 2}}),
    (4, "swiglu", {"mesh": {"cp": 2, "tp": 2}}),
    (4, "llama", {"mesh": {"cp": 2}, "dense": "fsdp"}),
]


def examine(rank: int, world_size: int, names: list[str]) -> list[tuple[str, str, str, int]]:
    """(kind, name, sentence, step) of what the doctor finds of each bug."""
    found = []
    for name in names:
        doctor, bug = ParityDoctor(), BUGS[name]
        try:
            train(rank, world_size, steps=6, callbacks=[bug.seed(), doctor], **bug.options)
        except ParityError as error:
            first = doctor.comparison.partings[0] if doctor.comparison is not None else None
            found.append((first.kind, first.name, str(error), first.step) if first else ("", "", str(error), 0))
        else:
            found.append(("", "", "the same", 0))
    return found


def is_named(name: str, found: tuple[str, str, str, int]) -> bool:
    kind, tensor, told, step = found
    bug = BUGS[name]
    return kind == bug.kind and bug.name in tensor and bug.words in told and step == bug.step


def test_the_commonest_bugs_are_named_at_once() -> None:
    first, second = run_ranks(2, examine, QUICK)
    for name, found, elsewhere in zip(QUICK, first, second, strict=True):
        assert is_named(name, found), f"{name}: {found}"
        assert elsewhere[2] == found[2], "every rank says the same"


@pytest.mark.slow
def test_19_of_20_bugs_are_named() -> None:
    names = list(BUGS)
    missed = {n: f for n, f in zip(names, run_ranks(2, examine, names)[0], strict=True) if not is_named(n, f)}
    assert len(missed) * 20 <= len(names), missed


def healthy(rank: int, world_size: int, case: str, strategy: dict[str, Any]) -> tuple[int, int, int]:
    doctor = ParityDoctor()
    options = {**(UNTIED if case == "untied" else CASES[case]), "steps": 6}
    losses = train(rank, world_size, strategy=strategy, callbacks=[doctor], **options)["losses"]
    assert doctor.comparison is not None
    return doctor.comparison.steps, doctor.comparison.tensors, len(losses)


@pytest.mark.parametrize(("world_size", "case", "strategy"), [MESHES[0], *(slow(*row) for row in MESHES[1:])])
def test_a_healthy_run_is_the_same(world_size: int, case: str, strategy: dict[str, Any]) -> None:
    steps, tensors, losses = run_ranks(world_size, healthy, case, strategy)[0]
    assert steps == 3
    assert tensors > 20
    micros = CASES.get(case, {}).get("trainer", {}).get("accumulate_grad_batches", 1)
    assert losses == steps * micros, "the training ends with the doctor"
