"""Classification of exceptions: lost peers and agreed changes of the world against errors of this process.

Exceptions of lost peers are recognized by their type and by the code that raised them. Messages count only where torch
or this package has written them, because a service that a user's code calls may refuse connections, too.
"""

from __future__ import annotations

import opcode
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.nn import parallel

from moe_lightning.elastic.membership import Membership
from moe_lightning.elastic.worker import KILLED, PeerFailed, Preempted, RunFinished
from moe_lightning.errors import ConfigurationError, WorldAbortedError

_PACKAGE = Path(__file__).parents[1]
_TORCH = [Path(str(package.__file__)).parent for package in (dist, parallel)]
_COLLECTIVES = tuple(f"{folder}/" for folder in (*_TORCH, _PACKAGE / "parallel", _PACKAGE / "dispatch"))
"""Folders of the code that communicates with other ranks."""

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
"""Errors after which every call of the process to its GPU fails: it used results of an aborted exchange as indices."""


MEMBERS_CHANGE = "ranks join or leave"
"""Reason of an agreed change of the world before it is known who comes and goes."""


class WorldChanged(Exception):
    """Agreement of all ranks, between two steps, to form another world."""


class MembersChange(WorldChanged):
    """The same because processes join or leave, which is no fault."""


def is_world_fault(error: BaseException, known_reason: str | None) -> bool:
    """True if an exception was caused by a lost peer or an agreed change, not by an error of this process.

    Args:
        known_reason: why the world ended, if the rendezvous host has reported it.

    Raises:
        PeerFailed: the device context of this process is unusable, so a fresh process must replace it.
    """
    if _LOST_DEVICE.search(str(error)):
        raise PeerFailed(f"a rank lost its device ({str(error).splitlines()[0]}), so a process starts over", "death")
    if isinstance(error, WorldChanged):
        return True
    if isinstance(error, ConfigurationError | PeerFailed | Preempted | RunFinished):
        return False
    if known_reason is not None:
        return True
    return is_network_fault(error)


def is_network_fault(error: BaseException | None) -> bool:
    """True if a collective, or code around it, raised an exception because of its connections."""
    return any(_raised_in_collective(cause) for cause in _causes(error))


def reason_of(fault: BaseException | None, known_reason: str | None) -> str:
    """Return the reason of a recovery for the console: the reported one before the text of an exception."""
    if isinstance(fault, WorldChanged):
        return str(fault)
    if known_reason is not None:
        return known_reason
    if is_network_fault(fault):
        return "the connection to another rank broke"
    return f"{type(fault).__name__}: {fault}"


def explain(error: Exception, engine: Membership) -> Exception:
    """Return the exception to raise instead of one that leaves the Trainer: a lost connection is another rank's end,
    and a launcher or the rendezvous host reports its cause some moments later.
    """
    if not is_world_fault(error, None) or isinstance(error, WorldChanged):
        return error
    cause = engine.wait_for_cause()
    if cause is None:
        return error
    if KILLED in cause and not engine.is_finished():
        return PeerFailed(f"{cause} before it trained, so all ranks start again", "death")
    return PeerFailed(
        f"{cause}, outside the training loop, where the others cannot continue without it: fix that, then give "
        "the same command again"
    )


def release_frames(error: BaseException | None) -> None:
    """Release the frames of an exception: they refer to groups whose connections would stay open."""
    for cause in list(_causes(error)):
        cause.__traceback__ = cause.__context__ = cause.__cause__ = None


def _raised_in_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | WorldAbortedError):
        return True
    place = _innermost(error.__traceback__)
    if place is None or not isinstance(error, RuntimeError | ValueError | ConnectionError | TimeoutError):
        return False
    code = place.tb_frame.f_code
    if code.co_filename.startswith(_COLLECTIVES):
        return isinstance(error, ConnectionError | TimeoutError) or bool(_NETWORK_FAULT.search(str(error)))
    # Compiled code has no frame of its own: the instruction that called it is then the innermost one.
    is_native = opcode.opname[code.co_code[place.tb_lasti]] != "RAISE_VARARGS"
    return is_native and isinstance(error, RuntimeError) and bool(_NATIVE_FAULT.search(str(error)))


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes: a pipeline wraps exceptions of its stages."""
    found, seen = [error], set()
    while found:
        error = found.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            found += [error.__context__, error.__cause__]
            yield error
