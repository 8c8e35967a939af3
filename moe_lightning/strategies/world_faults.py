"""Which exceptions come of a lost peer, what to call them, and how to let go of what they hold.

An exception is told by its type and by where it was raised. Words count only where torch or this package has written
them: a service that a user's code asks may refuse connections, too.
"""

from __future__ import annotations

import opcode
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.nn import parallel

from moe_lightning import comm
from moe_lightning.elastic.membership import Membership
from moe_lightning.elastic.worker import KILLED, PeerFailed, Preempted, RunFinished
from moe_lightning.errors import ConfigurationError, WorldCutError
from moe_lightning.strategies.leaving import WorldChanged

_COLLECTIVES = tuple(f"{Path(str(package.__file__)).parent}/" for package in (dist, parallel, comm))
"""The folders whose code talks to other ranks."""

_NETWORK_FAULT = re.compile(
    r"gloo|NCCL|TCPStore|process group|is not registered|connection (closed|reset|refused|aborted)|broken pipe|"
    r"socket (timeout|error)|timed out (waiting|after)|wait timeout",
    re.I,
)
_NATIVE_FAULT = re.compile(r"gloo|NCCL|TCPStore|process ?group", re.I)
"""In the words of compiled code that any frame may have called: a backward pass, or a `wait` in a user's code."""

_LOST_DEVICE = re.compile(
    r"CUDA error: .*(illegal memory access|illegal instruction|device-side assert|misaligned address|launch failure|"
    r"hardware stack error|invalid program counter|uncorrectable ECC|unspecified)",
    re.I,
)
"""Errors after which every call of the process to its GPU fails: what an aborted exchange left was used as an index."""


def is_worlds_fault(error: BaseException, known_reason: str | None) -> bool:
    """Whether an exception came of a lost peer or an agreed change, and not of a mistake of this process.

    Args:
        known_reason: why the world ended, where the monitor has heard of it.

    Raises:
        PeerFailed: the device context of this process is of no use any more, so a fresh process must take its place.
    """
    if _LOST_DEVICE.search(str(error)):
        raise PeerFailed(f"a rank lost its device ({str(error).splitlines()[0]}), so a process starts anew", "death")
    if isinstance(error, WorldChanged):
        return True
    if isinstance(error, ConfigurationError | PeerFailed | Preempted | RunFinished):
        return False
    if known_reason is not None:
        return True
    return is_network_fault(error)


def is_network_fault(error: BaseException | None) -> bool:
    """True if a collective, or what surrounds it, raised an exception because of its connections."""
    return any(_is_of_collective(cause) for cause in _causes(error))


def reason_of(fault: BaseException | None, known_reason: str | None) -> str:
    """The words for the console: what is known, before what an exception says."""
    if isinstance(fault, WorldChanged):
        return str(fault)
    if known_reason is not None:
        return known_reason
    if is_network_fault(fault):
        return "the connection to another rank broke"
    return f"{type(fault).__name__}: {fault}"


def _is_of_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | WorldCutError):
        return True
    place = _innermost(error.__traceback__)
    if place is None or not isinstance(error, RuntimeError | ValueError | ConnectionError | TimeoutError):
        return False
    code = place.tb_frame.f_code
    if code.co_filename.startswith(_COLLECTIVES):
        return isinstance(error, ConnectionError | TimeoutError) or bool(_NETWORK_FAULT.search(str(error)))
    # Compiled code has no frame of its own: what raised is then the instruction that called it.
    is_native = opcode.opname[code.co_code[place.tb_lasti]] != "RAISE_VARARGS"
    return is_native and isinstance(error, RuntimeError) and bool(_NATIVE_FAULT.search(str(error)))


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came of: a pipeline wraps what a stage raises."""
    found, seen = [error], set()
    while found:
        error = found.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            found += [error.__context__, error.__cause__]
            yield error


def explained(error: Exception, engine: Membership) -> Exception:
    """What to raise in the place of an error that leaves the Trainer: a lost connection is another rank's end, which a
    launcher or the rendezvous host names some moments later.
    """
    if not is_worlds_fault(error, None) or isinstance(error, WorldChanged):
        return error
    cause = engine.wait_for_cause()
    if cause is None:
        return error
    if KILLED in cause and not engine.is_finished():
        return PeerFailed(f"{cause} before it trained, so all ranks start again", "death")
    return PeerFailed(
        f"{cause}, outside the training loop, where nobody can go on without it: see to that, then give the same "
        "command again"
    )


def scrub(error: BaseException | None) -> None:
    """Let go of the frames that an exception holds: they refer to groups whose connections would stay open."""
    for cause in list(_causes(error)):
        cause.__traceback__ = cause.__context__ = cause.__cause__ = None
