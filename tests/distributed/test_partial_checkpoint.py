"""PartialExpertsCheckpoint and DynamicK in real trainings: exact resuming, kill -9, counted losses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.callbacks.load_balancer import LoadBalancer
from moe_lightning.callbacks.lost_tokens import DynamicK
from moe_lightning.checkpoint import agent_handle
from moe_lightning.checkpoint.agent_handle import AgentStatus, agent_alive, request_stop
from moe_lightning.checkpoint.arena import arenas_name
from moe_lightning.checkpoint.directory import checkpoints, newest_world, run_of
from moe_lightning.checkpoint.loader import Checkpoint, find_newest
from moe_lightning.checkpoint.session import CheckpointSession
from moe_lightning.cli.run_metrics import metrics_files, read_metrics
from moe_lightning.dispatch.placement import Placement
from moe_lightning.moe.layer import moe_layers
from tests.agents import START_AGENT, agent_ahead
from tests.distributed.harness import RankFailure, run_pooled, run_ranks, run_refused
from tests.distributed.training import TINY, DrawNoise, RandomTokens, make_trainer, train
from tests.forks import wait_until
from tests.parameters import slow

EXPERTS, LAYERS = 6, 2
WITH_CHECKPOINTS = {"enable_checkpointing": True}
PIPELINE: dict[str, Any] = {"mesh": {"pp": 2}, "micro_batches": 4}


class Log(pl.Callback):
    """Appends what a function of the Trainer returns in each step to a file, as JSON (rank 0).

    Args:
        hook: that calls it; by default at the end of the step.
    """

    def __init__(self, path: Path, look: Callable[[pl.Trainer], Any], hook: str = "on_train_batch_end") -> None:
        self.path, self.look = path, look
        setattr(self, hook, self.append)

    def append(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and (found := self.look(trainer)) is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(found) + "\n")


def session_of(trainer: pl.Trainer) -> Any:
    return next(c for c in trainer.callbacks if isinstance(c, PartialExpertsCheckpoint)).session  # type: ignore[attr-defined]


def counts(trainer: pl.Trainer) -> Any:
    """The step and the counts of each expert in it: the brute-force ledger."""
    layers = moe_layers(trainer.lightning_module)
    return [trainer.global_step, [layer.statistics.computed_NE.sum(dim=0).tolist() for layer in layers]]  # type: ignore[union-attr]


def chosen_k(trainer: pl.Trainer) -> int | None:
    session = session_of(trainer)
    return session and session.contents.k_persist


class KillAt(pl.Callback):
    """kill -9 of this rank at the end of a step, once the snapshot of an earlier step is published."""

    def __init__(self, step: int, ranks: tuple[int, ...]) -> None:
        self.step, self.ranks = step, ranks

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    world_size: int,
    callbacks: list[pl.Callback],
    *,
    function: Callable[..., Any] = train,
    pooled: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Results of all ranks.

    Args:
        pooled: as of `run_ranks`; ranks that are killed or fail need none that others can use.
    """
    training = partial(function, callbacks=callbacks, trainer=WITH_CHECKPOINTS, **options)
    results: list[dict[str, Any]] = run_ranks(world_size, training, pooled=pooled)
    return results


def train_with_fresh_agent(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    """Train, and start the agent as users' ranks do, which takes seconds."""
    agent_handle.start_agent = START_AGENT
    return train(rank, world_size, **options)


def arenas_of(root: Path) -> Path:
    return Path("/dev/shm") / ("moe-lightning-" + arenas_name(root.parent.name, run_of(root) or "", "", root))


def let_the_agent_finish(root: Path) -> None:
    """Tell the agent that no worker comes back, and wait until it has written what it holds."""
    arenas = arenas_of(root)
    wait_until(lambda: agent_alive(arenas) or bool(checkpoints(root)), "the agent did not come up")
    request_stop(arenas)
    wait_until(lambda: not agent_alive(arenas), "the agent did not leave")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "checkpoints"
    yield root
    if root.exists() and run_of(root):
        arenas = arenas_of(root)
        if arenas.exists() and agent_alive(arenas):
            let_the_agent_finish(root)
        for path in arenas.glob("*") if arenas.exists() else ():
            path.unlink()
        if arenas.exists():
            arenas.rmdir()


def saver(root: Path, **options: Any) -> PartialExpertsCheckpoint:
    return PartialExpertsCheckpoint(str(root), **{"every_n_steps": 2, **options})


@pytest.mark.slow
def test_full_checkpoints_resume_bit_for_bit_and_by_the_name_last(root: Path) -> None:
    whole = run(2, [], steps=12)[0]
    run(2, [saver(root)], steps=7, function=train_with_fresh_agent, pooled=False)
    os.umask(umask := os.umask(0o022))
    modes = {path.stat().st_mode & 0o777 for path in root.glob("step-*/*")}
    assert modes == {0o666 & ~umask}, "files of the agent's process follow the umask of the run"
    resumed = run(2, [saver(root)], steps=12, ckpt_path="last")[0]
    assert resumed["losses"] == whole["losses"][7:]
    for name, values in whole["state"].items():
        np.testing.assert_array_equal(resumed["state"][name], values, err_msg=name)


class ElasticOnly(pl.Callback):
    """Lets callbacks after this one find an elastic run."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.worlds.allow_changes()  # type: ignore[attr-defined]


def test_a_training_that_starts_anew_deletes_no_checkpoints_of_another(root: Path) -> None:
    run(2, [saver(root)], steps=1)
    before = sorted(path.name for path, _ in checkpoints(root))
    for others in ([], [ElasticOnly()]):
        anew = partial(train, callbacks=[*others, saver(root)], trainer=WITH_CHECKPOINTS, steps=1)
        for said in run_refused(2, anew):
            assert re.search(r'checkpoint of step 1, .* begins at step 0, .* ckpt_path="last" .*, or', said), said
    assert sorted(path.name for path, _ in checkpoints(root)) == before
    assert len(run(2, [saver(root)], steps=2, ckpt_path="last")[0]["losses"]) == 1


def test_only_a_training_that_resumes_or_saves_ends_the_saving_of_another(root: Path) -> None:
    run(1, [saver(root)], steps=1)
    before = newest_world(root)
    (said,) = run_refused(1, partial(train, callbacks=[saver(root)], trainer=WITH_CHECKPOINTS, steps=1))
    assert "begins at step 0" in said
    for path in (None, "last", str(root)):
        tried = {"trainer": WITH_CHECKPOINTS | {"fast_dev_run": 1}, "ckpt_path": path}
        run_ranks(1, partial(train, callbacks=[saver(root)], **tried), pooled=True)
    assert newest_world(root) == before
    run(1, [saver(root)], steps=1, ckpt_path=str(root))
    assert newest_world(root) > before, "a resumed training continues from what is committed by then"


class KillAgent(pl.Callback):
    """kill -9 of an agent before it has written anything, when training ends."""

    def on_train_start(self, *_: Any) -> None:
        agent, self._start = subprocess.Popen(["sleep", "600"]), agent_handle.start_agent
        self._agent, agent_handle.start_agent = agent, lambda *_, **__: agent

    def on_train_end(self, *_: Any) -> None:
        agent_handle.start_agent = self._start
        self._agent.kill()
        self._agent.wait()


def test_an_agent_that_was_killed_is_replaced_at_the_end(root: Path) -> None:
    run(1, [saver(root), KillAgent()], steps=1, pooled=False)
    assert [manifest.step for _, manifest in checkpoints(root)] == [1]


def test_last_is_what_was_written_last_by_any_callback(root: Path) -> None:
    files = ModelCheckpoint(root.parent / "files", every_n_train_steps=1, save_last=True)
    run(1, [saver(root, every_n_steps=100, save_on_train_end=False), files], steps=2)
    (manifest,) = root.glob("step-00000001/MANIFEST.json")
    os.utime(manifest, (1.0, 1.0))  # as if the agent had been as fast as training
    assert len(run(1, [saver(root), files], steps=3, ckpt_path="last")[0]["losses"]) == 1
    os.utime(root.parent / "files" / "last.ckpt", (1.0, 1.0))
    assert len(run(1, [saver(root), files], steps=4, ckpt_path="last")[0]["losses"]) == 1


def test_a_copy_of_one_checkpoint_stays_one_of_the_training_that_continues_it(root: Path, tmp_path: Path) -> None:
    run(1, [saver(root)], steps=2)
    copied = tmp_path / "copied" / "checkpoints"
    shutil.copytree(root / "step-00000002", copied / "step-00000002")
    run(1, [saver(copied)], steps=3, ckpt_path=str(copied))
    assert [manifest.step for _, manifest in checkpoints(copied)] == [3, 2]
    assert run_of(copied) == run_of(root)


@pytest.mark.slow
def test_partial_checkpoints_of_a_finished_run_lose_nothing_on_other_ranks(root: Path) -> None:
    whole = run(1, [], steps=10)[0]
    run(2, [saver(root, k_snapshot=4, k_persist=2)], steps=6, strategy={"dense": "zero1"})
    for ranks in (1, 4):
        resumed = run(ranks, [], steps=10, ckpt_path=str(root))[0]
        np.testing.assert_allclose(resumed["losses"], whole["losses"][6:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [slow("sequential"), "load_aware_global"])
def test_kill_9_loses_what_the_ledger_counts(root: Path, tmp_path: Path, order: str) -> None:
    counts_path, k_path = tmp_path / "counts", tmp_path / "k"
    partial_saver = partial(saver, root, every_n_steps=1, k_snapshot=2, k_persist=1, order=order)
    with pytest.raises(RankFailure):
        run(2, [partial_saver(), Log(counts_path, counts), KillAt(6, (0, 1))], steps=10, pooled=False)
    let_the_agent_finish(root)
    checkpoint = find_newest(root).checkpoint
    step, versions = checkpoint.manifest.step, checkpoint.expert_versions()
    per_step = {s: np.array(c) for s, c in map(json.loads, counts_path.read_text().splitlines())}

    lost: Any = sum(counts * ((versions < s) & (s <= step)) for s, counts in per_step.items())
    planned = per_step[1].sum(axis=1) * 10

    resumed = [partial_saver(), DynamicK(0.9), Log(k_path, chosen_k), Books()]
    losses = run(2, resumed, steps=10, ckpt_path="last")[0]["losses"]
    assert len(losses) == 10 - step
    plt, lost_reported = json.loads((root / "books.json").read_text())
    assert lost_reported == np.asarray(lost).sum(axis=1).tolist()
    assert plt == pytest.approx(float((np.asarray(lost).sum(axis=1) / planned).mean()), rel=0.05)


class Books(pl.Callback):
    """Writes what the callback's ledger says after a resume (rank 0)."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        saver_ = next(c for c in trainer.callbacks if isinstance(c, PartialExpertsCheckpoint))  # type: ignore[attr-defined]
        if trainer.global_rank == 0:
            report = [saver_.plt, saver_.lost.checkpoint_ledger.lost.tolist()]
            (saver_._root / "books.json").write_text(json.dumps(report))


@pytest.mark.slow
def test_dynamic_k_raises_k_when_a_restore_lost_tokens(root: Path, tmp_path: Path) -> None:
    k_path = tmp_path / "k"
    make = partial(saver, root, every_n_steps=1, k_snapshot=1, k_persist=1)
    with pytest.raises(RankFailure):
        run(1, [make(), KillAt(9, (0,))], steps=100, pooled=False)
    let_the_agent_finish(root)
    run(1, [make(), DynamicK(0.2), Log(k_path, chosen_k)], steps=14, ckpt_path=str(root))
    assert set(k_path.read_text().split()) <= {"1", "2", "4", "6"}
    run(1, [make(), DynamicK(0.0001), Log(k_path, chosen_k)], steps=16, ckpt_path=str(root))
    assert k_path.read_text().split()[-1] == str(EXPERTS)


@pytest.mark.slow
def test_a_dense_model_and_a_users_module_are_saved_too(root: Path, tmp_path: Path) -> None:
    for name, options in (("dense", {"model": {"num_experts": 0}}), ("own", {"own_module": True})):
        folder = root / name
        whole = run(1, [], steps=8, **options)[0]
        run(2, [saver(folder)], steps=5, **options)
        resumed = run(2, [saver(folder)], steps=8, ckpt_path=str(folder), **options)[0]
        np.testing.assert_allclose(resumed["losses"], whole["losses"][5:], rtol=0, atol=1e-5)


class NumberedCounts(pl.Callback):
    """Before the checkpoint every parameter has another count of updates; rank 0 may have no states at all."""

    def __init__(self, *, is_frozen: bool) -> None:
        self._is_frozen = is_frozen

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        state, optimizer = trainer.strategy.state.training_state(), trainer.optimizers[0]  # type: ignore[attr-defined]
        for number, parameter in enumerate(state.numbered(0)):
            if parameter in optimizer.state:
                optimizer.state[parameter]["step"].fill_(10 + number)
        if self._is_frozen and trainer.global_rank == 0:
            optimizer.state.clear()


def restored_counts(
    rank: int, world_size: int, root: str, strategy: dict[str, Any], is_frozen: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Counts of updates by parameter number, as they should be and as a checkpoint restores them."""
    callbacks = [NumberedCounts(is_frozen=is_frozen), saver(Path(root), every_n_steps=9)]
    options = {"max_steps": 1, "callbacks": callbacks, **WITH_CHECKPOINTS}
    trainer = make_trainer(rank, world_size, strategy, **options)
    module = GPTModule(TINY | {"tie_embeddings": False}, OptimizerConfig(lr=3e-3, warmup_steps=0, decay="constant"))
    trainer.fit(module, DataLoader(RandomTokens(24), batch_size=12))
    state = trainer.strategy.state.training_state()  # type: ignore[attr-defined]
    expected = {number: 10.0 + number for number, p in enumerate(state.numbered(0)) if p in trainer.optimizers[0].state}
    state.restore_optimizers(Checkpoint(checkpoints(Path(root))[0][0]))
    states = trainer.optimizers[0].state
    return expected, {n: float(states[p]["step"]) for n, p in enumerate(state.numbered(0)) if p in states}


@pytest.mark.parametrize(
    ("strategy", "is_frozen"), [({"dense": "zero1"}, False), slow(PIPELINE, False), (PIPELINE, True)]
)
def test_counts_of_updates_return_on_every_rank(root: Path, strategy: dict[str, Any], is_frozen: bool) -> None:
    results = run_pooled(2, partial(restored_counts, root=str(root), strategy=strategy, is_frozen=is_frozen))
    for expected, restored in results:
        assert restored == expected
    assert results[1][0]


def validate(
    rank: int, world_size: int, root: str, *, strategy: dict[str, Any], model: dict[str, Any], is_strict: bool
) -> float:
    """The loss of a model with the weights of a checkpoint."""
    trainer = make_trainer(rank, world_size, strategy, enable_checkpointing=False)
    module = GPTModule(TINY | model)
    module.strict_loading = is_strict
    (found,) = trainer.validate(module, DataLoader(RandomTokens(24), batch_size=12), ckpt_path=root, verbose=False)
    return found["val/loss"]


@pytest.mark.parametrize(
    ("strategy", "less"),
    [({}, {"tie_embeddings": True}), slow({}, {"num_layers": 2}), slow(PIPELINE, {"num_layers": 2})],
)
def test_a_strict_restore_leaves_no_weights_out(root: Path, strategy: dict[str, Any], less: dict[str, Any]) -> None:
    whole = {"num_layers": 4, "tie_embeddings": False}
    ranks = 2 if strategy else 1
    run(ranks, [saver(root)], steps=1, strategy=strategy, model=whole)
    evaluate = partial(validate, root=str(root), strategy=strategy)
    assert run_pooled(ranks, partial(evaluate, model=whole, is_strict=True))[0] > 0.0
    for said in run_refused(ranks, partial(evaluate, model=whole | less, is_strict=True)):
        assert re.search(r"has '[a-z]+/.*', which the model lacks \(\d+ unknown", said), said
    assert run_pooled(ranks, partial(evaluate, model=whole | less, is_strict=False))[0] > 0.0


@pytest.mark.parametrize("model", [{"num_layers": 2}, slow({"bias": False})], ids=str)
def test_a_restore_that_is_not_strict_leaves_new_weights_as_they_are(root: Path, model: dict[str, Any]) -> None:
    run(1, [saver(root)], steps=1, strategy={}, model={"num_layers": 4, "tie_embeddings": False} | model)
    evaluate = partial(validate, root=str(root), strategy={}, model={"num_layers": 4, "tie_embeddings": False})
    (said,) = run_refused(1, partial(evaluate, is_strict=True))
    assert re.search(r"has no '[a-z]+/.*': it holds", said), said
    assert run_pooled(1, partial(evaluate, is_strict=False))[0] > 0.0


@pytest.mark.slow
def test_adaptive_numbers_come_from_measured_times(root: Path, tmp_path: Path) -> None:
    k_path = tmp_path / "k"
    run(2, [saver(root, every_n_steps="auto", k_snapshot="auto", k_persist=1), Log(k_path, chosen_k)], steps=40)
    checkpoint = find_newest(root).checkpoint
    assert checkpoint.manifest.step == 40
    assert all(1 <= int(k) <= EXPERTS for k in k_path.read_text().split())


class LateCommit(pl.Callback):
    """Training learns only after `step` that a checkpoint is committed.

    Attributes:
        snapshots: steps of those that were taken by then.
        has_chosen: True once an interval is chosen.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.snapshots: set[int] = set()
        self.has_chosen = False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        session = session_of(trainer)
        if session is None:
            return
        session.finish_copy()
        if trainer.global_step <= self.step:
            session.status = AgentStatus
            self.snapshots.add(session.newest_step)
        if trainer.global_step == self.step:
            del session.status
            wait_until(lambda: session.status().committed_step is not None, "nothing is committed")
        self.has_chosen = session.adapted is not None


def train_with_late_commit(rank: int, world_size: int, *, root: Path, **options: Any) -> tuple[set[int], bool]:
    late = LateCommit(10)
    callbacks = [saver(root, every_n_steps="auto"), late]
    train(rank, world_size, callbacks=callbacks, trainer=WITH_CHECKPOINTS, steps=17, **options)
    return late.snapshots, late.has_chosen


@pytest.mark.parametrize("experts", [EXPERTS, slow(0)])
def test_an_automatic_interval_awaits_the_first_commit(root: Path, experts: int) -> None:
    options: dict[str, Any] = {"root": root, "model": {"num_experts": experts}}
    snapshots, has_chosen = run_pooled(1, partial(train_with_late_commit, **options))[0]
    assert snapshots == {1, 2, 4, 8}, "the interval grows until it is chosen"
    assert has_chosen


def test_random_generators_continue(root: Path) -> None:
    whole = run(1, [DrawNoise()], steps=5)[0]["losses"]
    run(1, [saver(root), DrawNoise()], steps=3)
    resumed = run(1, [DrawNoise()], steps=5, ckpt_path=str(root))[0]["losses"]
    assert resumed == whole[3:]


def test_experts_that_move_are_saved_under_their_own_names(root: Path) -> None:
    whole = run(1, [], steps=5)[0]
    run(2, [saver(root, every_n_steps=1), ReplaceExperts(2, elsewhere=True)], steps=3)
    resumed = run(2, [], steps=5, ckpt_path=str(root))[0]
    np.testing.assert_allclose(resumed["losses"], whole["losses"][3:], rtol=0, atol=1e-5)


class WaitForCommit(pl.Callback):
    """Ends the epoch when its last checkpoint is committed."""

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        session = session_of(trainer)
        session.finish_copy()  # type: ignore[union-attr]
        wait_until(lambda: session.status().committed_step == trainer.global_step, "it was not committed")  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_last_step_is_saved_whole_though_a_part_of_it_is_committed(root: Path) -> None:
    whole = run(1, [], steps=8)[0]
    run(2, [saver(root, every_n_steps=1, k_snapshot=1), WaitForCommit()], steps=5)
    resumed = run(2, [], steps=8, ckpt_path=str(root))[0]
    np.testing.assert_allclose(resumed["losses"], whole["losses"][5:], rtol=0, atol=1e-5)


def last_copy(trainer: pl.Trainer) -> Any:
    """The step, the session that is open, and the copied bytes of its last snapshot."""
    session = session_of(trainer)
    if session is None:
        return None
    return trainer.global_step, session._opening.session, session._snapshotter.finish().copied_bytes  # type: ignore[union-attr]


class ReplaceExperts(pl.Callback):
    """Says after a step that every expert has a new place: the one that it has, or one on another rank."""

    def __init__(self, step: int, *, elsewhere: bool) -> None:
        self.step, self.elsewhere = step, elsewhere

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step == self.step:
            turn = -1 if self.elsewhere else 1
            strategy.replace_experts([Placement(replicas=p.replicas[:, ::turn]) for p in strategy.experts.placements])


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [slow(False), True])
def test_a_rebalance_opens_no_session_and_copies_only_what_changed_hands(
    root: Path, tmp_path: Path, elsewhere: bool
) -> None:
    whole = run(1, [], steps=10)[0]
    path = tmp_path / "sessions"
    log = Log(path, last_copy, "on_before_zero_grad")
    balancer = LoadBalancer(rebalance_every=0, shadows="none", calibrate=False, speeds="even")  # there will be moves
    callbacks = [saver(root, every_n_steps=1, k_snapshot=1), balancer, ReplaceExperts(3, elsewhere=elsewhere), log]
    run(2, callbacks, steps=8)
    steps, sessions, copied = zip(*map(json.loads, path.read_text().splitlines()), strict=True)
    assert len(set(sessions)) == 1
    sizes = dict(zip(steps, copied, strict=True))
    partial_bytes = max(sizes[step] for step in (2, 4, 5, 6))
    assert partial_bytes < 0.8 * sizes[1]
    assert (sizes[3] > partial_bytes) == elsewhere
    resumed = run(2, [], steps=10, ckpt_path=str(root))[0]
    np.testing.assert_allclose(resumed["losses"], whole["losses"][8:], rtol=0, atol=1e-5)


def test_a_copied_run_writes_to_the_copy_while_the_originals_agent_lives(tmp_path: Path) -> None:
    original, copy = tmp_path / "a" / "run" / "checkpoints", tmp_path / "b" / "run" / "checkpoints"
    run(1, [saver(original)], steps=3)
    shutil.copytree(original, copy)
    agent = agent_ahead(original)  # as after a kill: it waits for the run to come back
    try:
        wait_until(lambda: agent_alive(arenas_of(original)), "the agent did not come up")
        before = sorted(original.rglob("*"))
        run(1, [saver(copy)], steps=6, ckpt_path=str(copy))
        assert sorted(original.rglob("*")) == before
        assert checkpoints(copy)[0][1].step == 6
    finally:
        agent.kill()
        agent.join()
        shutil.rmtree(arenas_of(original), ignore_errors=True)


def test_a_fit_ends_after_the_agent_that_writes_its_last_checkpoint(root: Path) -> None:
    agent = agent_ahead(root, poll_s=1.0)  # it looks once a second whether it may leave
    (alive,) = run_pooled(1, partial(fit_and_look, root=root))
    agent.join(60.0)
    assert not alive
    assert checkpoints(root)[0][1].step == 3
    assert agent.exitcode == 0


def fit_and_look(rank: int, world_size: int, root: Path) -> bool:
    """Whether an agent still serves the run when its fit has returned."""
    arenas = arenas_of(root)
    callbacks = [saver(root, every_n_steps=1, k_snapshot=1)]  # its last step is saved twice, by two sessions
    train(rank, world_size, callbacks=callbacks, trainer=WITH_CHECKPOINTS, steps=3)
    return arenas.exists() and agent_alive(arenas)


class DeleteArenas(pl.Callback):
    """Deletes the snapshots in memory as systemd does when a user logs out: after steps, or at the end."""

    def __init__(self, root: Path, *steps: int) -> None:
        self.root, self.steps = root, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.barrier()
        if trainer.global_step in self.steps and trainer.is_global_zero:
            shutil.rmtree(arenas_of(self.root))
        trainer.strategy.barrier()

    def on_train_end(self, *_: Any) -> None:
        if not self.steps:
            wait_until(lambda: [m.step for _, m in checkpoints(self.root)][:1] == [3], "the last one was not committed")
            shutil.rmtree(arenas_of(self.root))


def test_snapshots_that_were_deleted_are_taken_anew(root: Path) -> None:
    partial_saver = saver(root, every_n_steps=1, k_snapshot=1, save_on_train_end=False)
    run(2, [partial_saver, DeleteArenas(root, 2, 4)], steps=4)
    newest = Checkpoint(checkpoints(root)[0][0])
    newest.verify()
    assert (newest.expert_versions() == 4).all(), "nothing in memory was left to carry over"


def test_a_fit_ends_well_though_its_snapshots_are_deleted_after_the_last_commit(root: Path) -> None:
    run(1, [DeleteArenas(root), saver(root)], steps=3)


class Hoarder(pl.Callback):
    """Has much to remember, and more at every step."""

    def __init__(self, num_bytes: int, growth: int = 0) -> None:
        self.num_bytes, self.growth = num_bytes, growth
        self.found: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"hoard": torch.ones(self.num_bytes, dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict["hoard"].numel()

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_bytes += self.growth


def test_callbacks_with_large_states_are_saved(root: Path) -> None:
    run(1, [saver(root, every_n_steps=1), Hoarder(6 << 20, growth=1 << 20)], steps=3)
    checkpoint = find_newest(root).checkpoint
    states = checkpoint.read_object("trainer")["callbacks"]
    assert states["Hoarder"]["hoard"].numel() >= 8 << 20


def test_a_state_that_outgrows_its_room_is_one_sentence(root: Path) -> None:
    with pytest.raises(RankFailure, match=r"trainer takes .* bytes now, the arena has room for .*: keep less"):
        run(1, [saver(root, every_n_steps=1), Hoarder(1 << 20, growth=3 << 20)], steps=6, pooled=False)
    assert find_newest(root).problems == ()


class SlowCopies(pl.Callback):
    """Adds a quarter of a second to what training waits for each snapshot."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        session = session_of(trainer)
        if session is not None:
            extra_s = 0.25 * (trainer.global_step % 4 == 1)
            session.wait_before_update = lambda: CheckpointSession.wait_before_update(session) + extra_s


def test_loggers_get_what_training_waited_for_each_snapshot(root: Path, tmp_path: Path) -> None:
    callbacks = [SlowCopies(), saver(root, every_n_steps=4, save_on_train_end=False)]
    options = WITH_CHECKPOINTS | {"logger": CSVLogger(tmp_path, "csv", 0), "log_every_n_steps": 4}
    run_pooled(1, partial(train, callbacks=callbacks, trainer=options, steps=14))
    stalls_ms = read_metrics(metrics_files(tmp_path))["checkpoint/stall_ms"]
    stalls_ms.pop(1, None)  # the first snapshot may have been copied as it is logged
    assert list(stalls_ms) == [5, 9, 13]
    assert min(stalls_ms.values()) >= 250


def copied_windows(trainer: pl.Trainer) -> Any:
    """The copied bytes of the last snapshot, in all and by window."""
    session = session_of(trainer)
    if session is None or session.last_report is None:
        return None
    report = session.last_report
    return report.copied_bytes, {window.value: size for window, size in report.copied_by_window.items()}


@pytest.mark.slow
def test_scheduled_copies_are_whole_and_told_by_window(root: Path, tmp_path: Path) -> None:
    whole = run(1, [], steps=10)[0]
    path = tmp_path / "windows"
    log = Log(path, copied_windows, "on_before_zero_grad")
    run(2, [saver(root, every_n_steps=1, windows="scheduled"), log], steps=6)
    resumed = run(2, [], steps=10, ckpt_path=str(root))[0]
    np.testing.assert_allclose(resumed["losses"], whole["losses"][6:], rtol=0, atol=1e-5)
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    assert reports
    assert all(sum(sizes.values()) == copied for copied, sizes in reports)
