"""Membership by torch's dynamic rendezvous, for platforms without a torchft wheel.

The state machine is torch's own; what is around it is not: torch's handler would open a listener on every interface
and unpickle what others wrote. Here the state lies in the store as JSON. It is slower than the lighthouse (torch polls
once a second), its heartbeats need Python's lock, and the clocks of all machines must agree within a second.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
    _RendezvousState,
)
from typing_extensions import override

from moe_lightning.elastic.membership import Members

_KEY = "rendezvous"
_KEEP_ALIVE_S = 1.0  # a waiting member beats when torch polls, once a second
_MISSES = 3
_LAST_CALL_S = 1.5  # longer than a poll, so that all who wait come into one round
_ANY = 1_000_000

logger = logging.getLogger(__name__)


class RendezvousMembership:
    """Membership by torch's dynamic rendezvous over a store that outlives the members.

    A process is waited for while its heartbeats last: three seconds after the last one it is dead.

    Args:
        member_id: from `new_member_id`.
        store: a client of its own.
    """

    def __init__(self, member_id: str, store: Store) -> None:
        self._member_id = member_id
        self._node = _NodeDesc(addr=member_id, pid=0, local_id=0)
        timeout = RendezvousTimeout(last_call=timedelta(seconds=_LAST_CALL_S))
        settings = RendezvousSettings("moe-lightning", 1, _ANY, timeout, timedelta(seconds=_KEEP_ALIVE_S), _MISSES)
        self._holder = _JsonStateHolder(store, settings)
        self._executor = _DistributedRendezvousOpExecutor(self._node, self._holder, settings)
        self._lock = threading.Lock()
        self._resting = threading.Event()  # no heartbeat beside a join, which beats itself
        self._resting.set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def member_id(self) -> str:
        """This process's name among the members."""
        return self._member_id

    def enter(self) -> None:
        """Nothing to do: who has not joined a round is not waited for beyond its last call."""

    def join(self, *, timeout_s: float) -> Members:
        """Leave the former round and wait for the next; see `Membership`."""
        deadline = time.monotonic() + timeout_s
        self._resting.set()
        try:
            with self._lock:
                self._executor.run(_RendezvousExitOp(), deadline)
                self._executor.run(_RendezvousJoinOp(), deadline)
                state = self._holder.state
                ids = tuple(node.addr for node in sorted(state.participants))
                name = f"r{state.round}"
        except RendezvousTimeoutError:
            raise TimeoutError(f"no rendezvous within {timeout_s:.1f} s") from None
        except (RendezvousError, RuntimeError) as error:
            raise ConnectionError(f"the rendezvous failed: {error}") from None
        self._beat()
        return Members(name=name, ids=ids, me=ids.index(self._member_id))

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _KEEP_ALIVE_S)

    def _beat(self) -> None:
        self._resting.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_alive, name="rendezvous-heartbeat", daemon=True)
            self._thread.start()

    def _keep_alive(self) -> None:
        while not self._closed.wait(_KEEP_ALIVE_S / 2):
            if self._resting.is_set():
                continue
            try:
                with self._lock:
                    self._executor.run(_RendezvousKeepAliveOp(), time.monotonic() + _KEEP_ALIVE_S)
            except (RendezvousError, RuntimeError) as error:
                logger.warning("a heartbeat was not taken: %s", error)


class _JsonStateHolder(_BackendRendezvousStateHolder):
    """Keeps the rendezvous' state in the store as JSON and changes it by compare-and-set."""

    def __init__(self, store: Store, settings: RendezvousSettings) -> None:
        super().__init__(backend=None, settings=settings, cache_duration=0)  # type: ignore[arg-type]
        self._store = store
        self._text = ""

    @override
    def sync(self) -> bool | None:
        """Write the changed state, or read the present one; whether a write won, None for a read."""
        has_set: bool | None = None
        if self._dirty:
            wanted = _to_json(self._state)
            self._text = self._store.compare_set(_KEY, self._text, wanted).decode()
            has_set = self._text == wanted
        elif self._store.check([_KEY]):
            self._text = self._store.get(_KEY).decode()
        self._state = _from_json(self._text) if self._text else _RendezvousState()
        self._dirty = False
        self._sanitize()
        return has_set


def _to_json(state: _RendezvousState) -> str:
    said: dict[str, Any] = {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline.timestamp() if state.deadline else None,
        "closed": state.closed,
        "participants": {node.addr: rank for node, rank in state.participants.items()},
        "wait_list": sorted(node.addr for node in state.wait_list),
        "redundancy_list": sorted(node.addr for node in state.redundancy_list),
        "last_heartbeats": {node.addr: beat.timestamp() for node, beat in state.last_heartbeats.items()},
    }
    return json.dumps(said)


def _from_json(text: str) -> _RendezvousState:
    """The state that a member wrote.

    Raises:
        RuntimeError: it is not one.
    """
    state = _RendezvousState()
    try:
        said = json.loads(text)
        state.round, state.complete, state.closed = int(said["round"]), bool(said["complete"]), bool(said["closed"])
        state.deadline = _moment(said["deadline"]) if said["deadline"] is not None else None
        state.participants = {_node(name): int(rank) for name, rank in said["participants"].items()}
        state.wait_list = set(map(_node, said["wait_list"]))
        state.redundancy_list = set(map(_node, said["redundancy_list"]))
        state.last_heartbeats = {_node(name): _moment(beat) for name, beat in said["last_heartbeats"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RuntimeError(f"the rendezvous' state in the store is damaged: {error}") from None
    return state


def _node(name: str) -> _NodeDesc:
    return _NodeDesc(addr=str(name), pid=0, local_id=0)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(float(seconds), UTC)
