"""Every key of a command's configuration times values that few keys can have, and what comes of each.

Each case runs in a forked child that has imported everything and composed nothing, so that a crash, a hang or a hundred
gigabytes end the case alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VALUES: dict[str, Any] = {
    "null": None,
    "empty": "",
    "abc": "abc",
    "-1": -1,
    "0": 0,
    "nan": math.nan,
    "inf": math.inf,
    "1e30": 1e30,
    "1e14": 10**14,
    "[]": [],
    "{}": {},
}
"""What is tried: by its name in a report, the value as Hydra reads it."""

_MOST_BYTES = 24 * 2**30  # of address space: torch maps several without touching them


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case did.

    Attributes:
        kind: "accepted", "refused" (one sentence), "traceback", "hang" or "killed".
        text: the sentence, or the end of the traceback.
    """

    kind: str
    text: str = ""


def keys_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a configuration and their values: mappings before what is in them; `_target_` is a key as others
    are.
    """
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield f"{prefix}{name}", child
            yield from keys_of(child, f"{prefix}{name}.")


def outcome(case: Callable[[], object], *, timeout_s: float) -> Outcome:
    """Run a case in a child of its own, which is killed when it takes too long."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reader)
        _run(case, writer)
    os.close(writer)
    try:
        return _told(reader, timeout_s)
    finally:
        os.close(reader)
        _kill_session(child)
        os.waitpid(child, 0)


def _told(reader: int, timeout_s: float) -> Outcome:
    """What the child wrote into the pipe; its children may hold the other end for longer than it lives."""
    ready, _, _ = select.select([reader], [], [], timeout_s)
    if not ready:
        return Outcome(kind="hang", text=f"not done after {timeout_s:g} s")
    told = os.read(reader, 1 << 16)
    return Outcome(**json.loads(told)) if told else Outcome(kind="killed")


def _run(case: Callable[[], object], writer: int) -> None:
    from moe_lightning.cli.mistakes import sentence_of

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        case()
        result = Outcome(kind="accepted")
    except BaseException as error:
        sentence = sentence_of(error)
        failure = getattr(error, "failure", None)
        if failure is not None and failure.kind == "mistake":
            sentence = failure.message
        told = traceback.format_exc()[-1500:]
        result = Outcome(kind="refused", text=sentence) if sentence else Outcome(kind="traceback", text=told)
    os.write(writer, json.dumps(vars(result)).encode())
    os._exit(0)


def _kill_session(leader: int) -> None:
    """The child and what it started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # it never got as far as its own session
        os.kill(leader, signal.SIGKILL)


_PYTHON_WORDS = re.compile(
    r"NoneType|has no attribute|not supported between|unsupported operand|object is not|too large to"
)
_MAY_BE_MINUS_ONE = {
    "ranks", "trainer.devices", "trainer.max_epochs", "trainer.max_steps", "trainer.num_sanity_val_steps",
    "callbacks.checkpoint.save_top_k",
}  # fmt: skip


def judged(key: str, name: str, current: Any, result: Outcome) -> str | None:
    """What is wrong with an outcome; None for nothing.

    Args:
        key, name: of the case.
        current: the key's own value, which says what kind of value it takes.
        result: what the case did.
    """
    if result.kind not in ("accepted", "refused"):
        return f"{result.kind}: {result.text.strip().splitlines()[-1] if result.text else 'no word'}"
    if result.kind == "refused":
        ending = re.sub(r".*[.]", "", key)
        is_about = ending in result.text or key.startswith(("module.", "trainer.devices")) or "_target_" in result.text
        if _PYTHON_WORDS.search(result.text) or not is_about or len(result.text) > 600:
            return f"vague: {result.text}"
        return None
    sensible = {
        "null": True,  # the annotations say where; what comes of it is tried
        "empty": False,
        "abc": isinstance(current, str | None) or key == "resume",
        "-1": key in _MAY_BE_MINUS_ONE,
        "0": True,
        "nan": False,
        "inf": False,
        "1e30": False,
        "1e14": key in ("run_name", "trainer.limit_val_batches")
        or (isinstance(current, int | None) and not isinstance(current, bool)),
        "[]": isinstance(current, list),
        "{}": isinstance(current, Mapping | None),
    }
    return None if sensible[name] else f"nonsense is accepted (instead of {current!r})"
