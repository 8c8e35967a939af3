"""Exceptions of lost peers are told from mistakes of the process, and leave nothing behind."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from moe_lightning import ExpertParallelStrategy, parallel
from moe_lightning.cli import training
from moe_lightning.elastic.faults import explain, is_world_fault, reason_of, release_frames
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask, Members
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.worker import FAILURE_FILE_VARIABLE, PeerFailed, Preempted, RunFinished, work
from moe_lightning.errors import ConfigurationError, WorldAbortedError
from moe_lightning.strategies import failures
from moe_lightning.strategies.elastic_worlds import ElasticWorlds
from tests.forks import wait_until

COLLECTIVE, OURS, USERS = str(dist.__file__), str(parallel.__file__), "/home/user/train.py"


def raised(error: Exception, file: str) -> Exception:
    """An exception as code of that file raises it."""
    with pytest.raises(type(error)):
        exec(compile("raise error", file, "exec"), {"error": error})
    return error


def called(error: Exception, file: str) -> Exception:
    """An exception as compiled code raises it that this file has called."""

    def raises() -> None:
        raise error

    with pytest.raises(type(error)) as told:
        exec(compile("call()", file, "exec"), {"call": raises})
    frames = told.value.__traceback__
    frames.tb_next.tb_next = None  # what stands for compiled code has a frame, which that has not
    return error


GLOO = "[gloo/transport/tcp/pair.cc] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "known", "expected"),
    [
        (raised(RuntimeError(GLOO), COLLECTIVE), None, True),
        (called(RuntimeError(GLOO), COLLECTIVE), None, True),
        (called(RuntimeError(GLOO), USERS), None, True),  # the `wait` of a collective, a backward pass
        (raised(ValueError("The process group is not registered"), COLLECTIVE), None, True),
        (dist.DistBackendError("NCCL communicator was aborted"), None, True),
        (dist.DistNetworkError("Socket Timeout"), None, True),
        (WorldAbortedError("aborted"), None, True),
        (raised(TimeoutError("only 1 of 2 ranks came"), OURS), None, True),
        (raised(RuntimeError("shape mismatch"), COLLECTIVE), None, False),
        (raised(KeyError("Connection closed by peer"), COLLECTIVE), None, False),
        # a user's own services
        (raised(RuntimeError("tokenizer service at 10.0.0.7:80: connection refused"), USERS), None, False),
        (raised(RuntimeError(GLOO), USERS), None, False),
        (called(RuntimeError("connection refused"), USERS), None, False),
        (raised(ConnectionError("connection refused"), USERS), None, False),
        (called(ConnectionRefusedError(111, "Connection refused"), USERS), None, False),
        (raised(TimeoutError("timed out after 3 s"), USERS), None, False),
        (ZeroDivisionError(), None, False),
        (ZeroDivisionError(), "rank 1 was killed", True),  # on half a world anything may go wrong
        (ConfigurationError("batch_size=0"), "rank 1 was killed", False),
        (RunFinished("too late"), "rank 1 was killed", False),
    ],
)
def test_only_faults_of_the_world_are_recovered_from(error: Exception, known: str | None, expected: bool) -> None:
    assert is_world_fault(error, known) is expected


@pytest.mark.parametrize("words", ["device-side assert triggered", "an illegal memory access was encountered"])
@pytest.mark.parametrize("known", [None, "rank 1 was killed"])
def test_a_process_whose_device_is_lost_makes_room_for_a_fresh_one(words: str, known: str | None) -> None:
    with pytest.raises(PeerFailed, match=f"CUDA error: {words}") as told:
        is_world_fault(RuntimeError(f"CUDA error: {words}\nCUDA kernel errors might be reported later"), known)
    assert told.value.kind == "death"
    assert not is_world_fault(RuntimeError("CUDA error: out of memory"), None)


class Engine:
    def __init__(self, cause: str | None, *, has_finished: bool = False) -> None:
        self.cause, self.has_finished = cause, has_finished

    def wait_for_cause(self) -> str | None:
        return self.cause

    def is_finished(self) -> bool:
        return self.has_finished


def test_outside_the_training_loop_a_lost_connection_is_the_end_of_the_rank_that_caused_it() -> None:
    lost = raised(RuntimeError(GLOO), COLLECTIVE)
    told = explain(lost, Engine("rank 1 on node b exited with code 1 (ValueError: no)"))  # type: ignore[arg-type]
    assert isinstance(told, PeerFailed)
    assert str(told).startswith("rank 1 on node b exited with code 1 (ValueError: no), outside the training loop")
    assert told.kind == "peer"


@pytest.mark.parametrize(("has_finished", "kind"), [(False, "death"), (True, "peer")])
def test_before_training_all_ranks_may_start_again_after_one_was_killed(has_finished: bool, kind: str) -> None:
    lost = raised(RuntimeError(GLOO), COLLECTIVE)
    told = explain(lost, Engine("rank 1 was killed by SIGKILL", has_finished=has_finished))  # type: ignore[arg-type]
    assert isinstance(told, PeerFailed)
    assert told.kind == kind


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (raised(RuntimeError(GLOO), COLLECTIVE), None),
        (ValueError("no"), "rank 1 was killed"),
        (ConfigurationError("batch_size=0"), "rank 1 was killed"),
    ],
)
def test_an_error_of_its_own_stays_what_it_is(error: Exception, cause: str | None) -> None:
    assert explain(error, Engine(cause)) is error  # type: ignore[arg-type]


def test_what_is_known_is_said_before_what_an_exception_says() -> None:
    broken = raised(RuntimeError("gloo: connection reset"), COLLECTIVE)
    assert reason_of(broken, None) == "the connection to another rank broke"
    assert reason_of(broken, "rank 2 was killed") == "rank 2 was killed"
    assert reason_of(ConnectionError("cut"), None) == "ConnectionError: cut"


class Group:
    """Stands for what frames hold."""


def test_scrubbed_exceptions_hold_no_frame() -> None:
    def inner() -> None:
        group = Group()
        seen.append(weakref.ref(group))
        raise ValueError("first")

    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("second") from error

    seen: list[weakref.ref[Group]] = []
    try:
        outer()
    except RuntimeError as error:
        kept = error
    gc.collect()
    assert seen[0]() is not None
    release_frames(kept)
    gc.collect()
    assert seen[0]() is None


def test_what_a_pipeline_wraps_is_looked_into_and_let_go() -> None:
    try:
        try:
            raise raised(RuntimeError("gloo: connection closed by peer"), COLLECTIVE)
        except RuntimeError as error:
            raise ValueError("Failed to run stage backward: args: ...") from error
    except ValueError as error:
        fault = error
    assert is_world_fault(fault, None)
    assert reason_of(fault, None) == "the connection to another rank broke"
    cause = fault.__cause__
    release_frames(fault)
    assert (fault.__cause__, fault.__context__, cause.__traceback__) == (None, None, None)
    assert not is_world_fault(ValueError("a mistake"), None)


def test_callbacks_save_on_the_exceptions_of_another_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = SimpleNamespace(save_on_exception=True)
    failure = SimpleNamespace(number=0, publish=lambda *_: None, savers=lambda _: [saver])
    monkeypatch.setattr(failures, "Failure", lambda *_: failure)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    worlds: Any = SimpleNamespace(is_joined=True, present=SimpleNamespace(is_connected=True))
    of_trainer, trainer = failures.TrainerFailures(worlds), SimpleNamespace()
    of_trainer.publish(ValueError("an error of one rank"), trainer)  # type: ignore[arg-type]
    assert not saver.save_on_exception
    of_trainer.restore_savers()
    assert saver.save_on_exception


SETTINGS = ElasticSettings(heartbeat_timeout_s=0.4, silence_timeout_s=1.0, build_timeout_s=0.1, hang_timeout_s=9.0)


@pytest.mark.parametrize("error", [ValueError("no"), Preempted("it shall leave")])
def test_the_others_need_not_wait_for_exit_handlers_of_a_rank_that_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """They may upload for minutes, while the connections of this process stay open."""
    with RendezvousServer() as host, ExitStack() as stack, ThreadPoolExecutor() as pool:
        where = {"address": str(host.address), "secret_file": str(host.secret_file), "node": "a"}
        task = ElasticTask(**where, expected=2, settings=SETTINGS)
        other = stack.enter_context(closing(RendezvousClient(replace(task, token="x"))))
        failing = RendezvousClient(replace(task, token="y"))
        worlds = list(pool.map(lambda client: client.join(), (other, failing)))
        other.guard(worlds[0], lambda: None)
        failing.guard(worlds[1], lambda: None)
        strategy: Any = MagicMock(spec=ExpertParallelStrategy, state=MagicMock())
        strategy.elastic = ElasticWorlds(strategy, failing)
        strategy.elastic.members = worlds[1]
        trainer: Any = MagicMock(strategy=strategy, **{"fit.side_effect": error})
        monkeypatch.setattr(training, "agreed_checkpoint", lambda *_: None)
        run = training.Run(trainer=trainer, module=MagicMock(), data=MagicMock())
        with pytest.raises(type(error)):
            training._train(run, {"task": "train"})
        assert other.reason is None, "it may end at once, and its launcher says how"
        if isinstance(error, Preempted):
            time.sleep(1.5)
            assert other.reason is None, "it has left in order"
        else:
            wait_until(lambda: other.reason is not None)
            assert other.wait_for_cause() == f"rank {worlds[1].rank} on node a failed: ValueError: no"
        assert other.join().size == 1


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), Preempted("it shall leave")])
def test_the_others_need_not_wait_for_exit_handlers_of_a_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, exits: bool
) -> None:
    """Those of a script run when `work` has returned, or has passed its SystemExit on.

    Args:
        exits: the script handles the error and exits, as Hydra does.
    """
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, str(tmp_path / "failure.json"))
    monkeypatch.setenv("RANK", "1")
    with RendezvousServer() as host, ExitStack() as stack, ThreadPoolExecutor() as pool:
        where = {"address": str(host.address), "secret_file": str(host.secret_file), "node": "a"}
        task = ElasticTask(**where, expected=2, settings=SETTINGS)
        other = stack.enter_context(closing(RendezvousClient(replace(task, token="x"))))
        failing = stack.enter_context(closing(RendezvousClient(replace(task, token="y"))))
        elastic = ElasticWorlds(MagicMock(spec=ExpertParallelStrategy, state=MagicMock(), worlds=MagicMock()), failing)

        def build(members: Members) -> Any:
            elastic.members = members
            failing.guard(members, lambda: None)
            return MagicMock()

        monkeypatch.setattr(elastic, "_build", build)
        joined = pool.submit(other.join)

        def script() -> None:
            elastic.join_first(1)
            try:
                raise error
            except Exception:
                if exits:
                    sys.exit(1)
                raise

        with pytest.raises(SystemExit) if exits else nullcontext():
            assert work("elastic", script) == (76 if isinstance(error, Preempted) else 1)
        other.guard(joined.result(), lambda: None)
        if isinstance(error, Preempted):
            assert failing._closed.is_set()
            assert other.reason is None, "it has left in order"
        else:
            wait_until(lambda: other.reason is not None)
            assert other.wait_for_cause() == f"rank {elastic.members.rank} on node a failed: ValueError: no"
