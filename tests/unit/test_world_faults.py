"""Exceptions of lost peers are told from mistakes of the process, and leave nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from moe_lightning.elastic.failure import RunFinished
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.world_faults import is_worlds_fault, reason_of, scrub


@pytest.mark.parametrize(
    ("error", "known", "is_worlds"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), None, True),
        (RuntimeError("Socket Timeout"), None, True),
        (ValueError("The process group is not registered"), None, True),
        (dist.DistBackendError("NCCL communicator was aborted"), None, True),
        (ConnectionError("cut"), None, True),
        (TimeoutError(), None, True),
        (RuntimeError("shape mismatch"), None, False),
        (KeyError("Connection closed by peer"), None, False),
        (ZeroDivisionError(), None, False),
        (ZeroDivisionError(), "rank 1 was killed", True),  # on half a world anything may go wrong
        (ConfigurationError("batch_size=0"), "rank 1 was killed", False),
        (RunFinished("too late"), "rank 1 was killed", False),
    ],
)
def test_only_faults_of_the_world_are_recovered_from(error: Exception, known: str | None, is_worlds: bool) -> None:
    assert is_worlds_fault(error, known) is is_worlds


def test_what_is_known_is_said_before_what_an_exception_says() -> None:
    broken = RuntimeError("gloo: connection reset")
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
    scrub(kept)
    gc.collect()
    assert seen[0]() is None
