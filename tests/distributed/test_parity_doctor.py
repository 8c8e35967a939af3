"""The doctor names seeded bugs, and says nothing of runs without any."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moe_lightning.doctor.parity_doctor import ParityDoctor
from moe_lightning.errors import ParityError
from moe_lightning.user_errors import sentence_of
from tests.distributed.harness import run_pooled, run_ranks
from tests.distributed.same_training import CASES
from tests.distributed.seeded_bugs import BUGS
from tests.distributed.training import OwnModule, RandomTokens, make_trainer, quiet_trainer, train
from tests.parameters import slow
from tests.programs import TESTS, run_program

QUICK = ["sign", "one_replica_lost", "dropped_token", "learning_rate_of_a_group"]
QUICK += ["gradients_not_zeroed", "moments_lost", "targets_shifted_on_a_rank"]
QUICK += ["rows_not_summed", "scaled_stage", "bias_by_own_counts", "idle_experts_left_out"]
HERE: dict[str, dict[str, Any]] = {
    "untied": {"model": {"tie_embeddings": False}},
    "deep": {"model": {"tie_embeddings": False, "num_layers": 4, "dropout": 0.1}},
    "accumulated": {"model": {"tie_embeddings": False}, "batch_size": 16, "trainer": {"accumulate_grad_batches": 2}},
    "a_sample_an_expert": {"batch_size": 6},  # numbers per expert are no rows of samples
}
MESHES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "a_sample_an_expert", {"mesh": {"cp": 2}}),
    (2, "plain", {"replicas": 2}),
    (2, "plain", {"dense": "zero1"}),
    (2, "uneven", {"replicas": 2}),
    (2, "own", {}),
    (2, "noisy", {"replicas": 2}),
    (2, "llama", {"dense": "fsdp"}),
    (2, "bf16", {"dense": "fsdp"}),
    (2, "accumulate", {"replicas": 2}),
    (2, "skewed", {}),
    (2, "plain", {"mesh": {"cp": 2}}),
    (2, "plain", {"mesh": {"tp": 2}}),
    (2, "noisy", {"mesh": {"tp": 2}}),
    (2, "llama", {"mesh": {"tp": 2}, "dense": "fsdp"}),
    (2, "bf16", {"mesh": {"tp": 2}}),
    (2, "untied", {"mesh": {"pp": 2}}),
    (2, "deep", {"mesh": {"pp": 2}, "schedule": "interleaved"}),
    (2, "accumulated", {"mesh": {"pp": 2}}),
    (3, "uneven", {"dense": "fsdp"}),
    (3, "noisy", {"dense": "zero1"}),
    (4, "plain", {"dense": "hsdp", "shard_size": 2}),
    (4, "plain", {"ep_size": 2}),
    (4, "skewed", {"replicas": 4, "dense": "zero1"}),
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
        checked = {"check_state_every": 1, **bug.options.get("strategy", {})}  # which would end some before the doctor
        try:
            train(rank, world_size, steps=6, callbacks=[bug.seed(), doctor], **bug.options | {"strategy": checked})
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


class Plain(pl.LightningModule):
    """A user's module that knows nothing of us."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(64, 64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.embed(batch[0])).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def under_ddp(rank: int, world_size: int, trainings: list[dict[str, Any]]) -> list[str]:
    """What the doctor says of stock trainings; "" of those that are the same."""
    found = []
    for options in trainings:
        doctor = ParityDoctor()
        make_trainer(rank, world_size)  # the environment of a rank, and the seed
        common = {"strategy": "ddp", "plugins": [LightningEnvironment()], "devices": world_size, "max_epochs": 1}
        trainer = quiet_trainer(**common, callbacks=[doctor], **options)
        try:
            trainer.fit(Plain(), DataLoader(RandomTokens(48), batch_size=5, shuffle=False))
        except ParityError as error:
            found.append(str(error))
        else:
            assert doctor.comparison is not None
            found.append("")
    return found


def test_a_plain_module_under_stock_ddp() -> None:
    same, alike = run_pooled(2, under_ddp, [{"accumulate_grad_batches": 2}, {"use_distributed_sampler": False}])[0]
    assert not same
    assert "the batch (input 0) is the same on ranks 0 and 1" in alike


class Predicts(pl.Callback):
    """A user's callback that calls the module between steps."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        pl_module(batch[0])


def beside_a_callback(rank: int, world_size: int) -> None:
    doctor = ParityDoctor()
    train(rank, world_size, strategy={"dense": "fsdp"}, steps=6, callbacks=[Predicts(), doctor])
    assert doctor.comparison is not None


def test_a_callback_may_have_gathered_rows() -> None:
    run_pooled(2, beside_a_callback)


def test_a_failure_is_a_sentence() -> None:
    assert sentence_of(ParityError("parity fails at step 1")) == "parity fails at step 1"


class Dropping(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 64))  # type: ignore[assignment]


def test_what_is_turned_off_is_on_again_after_the_training() -> None:
    module, trainer = Dropping(), make_trainer(0, 1, {}, callbacks=[ParityDoctor(steps=1)], max_steps=2)
    trainer.fit(module, DataLoader(RandomTokens(48), batch_size=5, shuffle=False))
    dropout: Any = module.out[0]  # type: ignore[index]
    assert dropout.p == 0.3
    assert not trainer.strategy.update.state_check.schedule.is_stopped  # type: ignore[attr-defined]


@pytest.mark.parametrize("least", [{"min_steps": 5}, {"min_epochs": 2}])
def test_the_training_ends_before_its_least_steps(least: dict[str, int]) -> None:
    trainer = make_trainer(0, 1, {}, callbacks=[ParityDoctor(steps=1)], max_steps=12, **least)
    trainer.fit(OwnModule(), DataLoader(RandomTokens(24), batch_size=4))
    assert trainer.global_step == 1
    assert least.items() <= {"min_steps": trainer.min_steps, "min_epochs": trainer.min_epochs}.items()


def test_a_root_in_a_store_makes_no_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"max_steps": 2, "default_root_dir": "memory://run"}
    trainer = make_trainer(0, 1, {}, callbacks=[ParityDoctor(steps=1)], **options)
    trainer.fit(OwnModule(), DataLoader(RandomTokens(48), batch_size=5, shuffle=False))
    assert not list(tmp_path.glob("memory:*"))


@pytest.mark.slow
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
    options = {**(HERE | CASES)[case], "steps": 6}
    losses = train(rank, world_size, strategy=strategy, callbacks=[doctor], **options)["losses"]
    return doctor.comparison.steps, doctor.comparison.tensors, len(losses)


@pytest.mark.parametrize(("world_size", "case", "strategy"), [MESHES[0], *(slow(*row) for row in MESHES[1:])])
def test_a_healthy_run_is_the_same(world_size: int, case: str, strategy: dict[str, Any]) -> None:
    steps, tensors, losses = run_pooled(world_size, healthy, case, strategy)[0]
    assert steps == 3
    assert tensors > 20
    micro_batches = {"accumulate": 3 + 1 + 3, "accumulated": 2 * 3}  # an epoch of the first ends with the second step
    assert losses == micro_batches.get(case, 3), "the training ends with the doctor"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh"), [("swiglu", {"tp": 2}), ("untied", {"pp": 2})])
def test_nothing_is_left_out(case: str, mesh: dict[str, int]) -> None:
    several, alone = (run_pooled(n, healthy, case, strategy)[0] for n, strategy in ((2, {"mesh": mesh}), (1, {})))
    assert several == alone


SCRIPT = """
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from moe_lightning.doctor.parity_doctor import ParityDoctor
from tests.distributed.training import OwnModule, RandomTokens

if __name__ == "__main__":
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        strategy="expert_parallel", accelerator="cpu", devices=2, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[ParityDoctor(tolerance=1e-15)],
    )
    trainer.fit(OwnModule(), DataLoader(RandomTokens(48), batch_size=12, shuffle=True))
"""


@pytest.mark.slow
def test_the_verdict_of_a_script_is_its_last_line(tmp_path: Path) -> None:
    """Every rank raises; one of them says why, and nobody shows a stack."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_program("script.py", folder=tmp_path, variables=TESTS)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    assert re.match(r"ParityError: parity fails at step 1: ", done.stderr.splitlines()[-1]), done.stderr
    assert done.stderr.count("ParityError") == 1
