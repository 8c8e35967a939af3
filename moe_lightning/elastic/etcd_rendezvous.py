"""Rendezvous host that etcd makes safe: the launchers of a run elect the one that hosts it, and any of them may die.

Each launcher opens an `EtcdRendezvous`. One of them leads: it serves the rendezvous host, whose address is in etcd for
as long as its lease lasts. When it dies the others elect another one, and reconnect there. Members reach the host
through their own launcher, which watches etcd.

etcd holds, under `/moe-lightning/RUN/`:

    secret            of the run, unless it is in a file
    launchers/TOKEN   one key for each launcher, with its lease
    leader            address and launcher of the host, with its lease
    world             number, predecessor and members of the newest world
    ended             number of the last world, once ranks have finished the run; kept for a day

A world is announced only after a transaction has written it, on the conditions that the leader is still the same and
that the world before is its predecessor. So a leader that was paused or cut off forms none beside its successor, and a
successor that takes over in the middle knows which world was formed. No transaction is needed while nothing changes:
training goes on without etcd.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moe_lightning.elastic.etcd import (
    EtcdAccess,
    EtcdClient,
    EtcdError,
    EtcdRefused,
    LeaseEnded,
    delete,
    get,
    is_empty,
    put,
    unchanged,
)
from moe_lightning.elastic.membership import ElasticSettings, new_token
from moe_lightning.elastic.protocol import Address, WireError, read_secret
from moe_lightning.elastic.rendezvous_state import CurrentWorld, RendezvousState
from moe_lightning.elastic.server import RendezvousService, ServerThread, listen
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import PrivateFolder

_LOOK_S = 0.05
_RETRY_S = 0.1
_PROBE_S = 0.3
_REMEMBERED_S = 86400
_RETURN_S = 1.5  # from a leader's silence to its successor, members that reach that are back within so long

logger = logging.getLogger(__name__)


def lease_s(silence_s: float) -> int:
    """Return the duration of a launcher's lease: a leader that is silent is replaced well before members are evicted.

    etcd has no leases below two seconds.
    """
    return max(2, int(silence_s / 2))


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Launcher that hosts the rendezvous.

    Attributes:
        address: of its host.
        launcher: its token.
        revision: of its election.
    """

    address: Address
    launcher: str
    revision: int


class Election:
    """Part of one launcher in the election of a run; all calls but `commit` come from one thread.

    Args:
        etcd: the cluster.
        prefix: of the run's keys, which ends in a slash.
        token: of this launcher.
        ttl_s: see `lease_s`.

    Attributes:
        leader_key: of the leader.
        leader: as last read; None if there is none.
        ended: number of the last world of a run that ranks had finished when this launcher was elected, else 0.
    """

    def __init__(self, etcd: EtcdClient, prefix: str, token: str, ttl_s: int) -> None:
        self._etcd, self._prefix, self._token, self._ttl_s = etcd, prefix, token, ttl_s
        self.leader_key = prefix + "leader"
        self._lease = 0
        self._renew_at = 0.0
        self.leader: Leader | None = None
        self.ended = 0

    def secret(self) -> bytes:
        """Return the run's secret; the first launcher makes it."""
        key = self._prefix + "secret"
        outcome = self._etcd.transact([unchanged(key, 0)], [put(key, secrets.token_hex(32)), get(key)], [get(key)])
        entry = outcome.found[0]
        assert entry is not None
        return entry.value.encode()

    def keep(self, now: float, *, has_changed: bool) -> None:
        """Renew the lease if it is time, and read the leader then, or if its key has changed."""
        if now >= self._renew_at:
            if not self._lease or not self._etcd.renew(self._lease):
                self._register()
            self._renew_at = now + self._ttl_s / 3
        elif not has_changed:
            return
        self.leader = self._read_leader()

    @property
    def is_won(self) -> bool:
        """True while this launcher is the leader, as last read."""
        return self.leader is not None and self.leader.launcher == self._token

    def _read_leader(self) -> Leader | None:
        (entry,) = self._etcd.transact([], [get(self.leader_key)]).found
        if entry is None:
            return None
        try:
            value = json.loads(entry.value)
            return Leader(address=Address.parse(value["address"]), launcher=value["launcher"], revision=entry.revision)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise EtcdError(f"the record {self.leader_key} in etcd is malformed, delete it") from None

    def _register(self) -> None:
        """Take part, also again; the first launcher of a run forgets the world, and the end, of one whose launchers
        were all killed.
        """
        lease = self._etcd.grant(self._ttl_s)
        registration = put(f"{self._prefix}launchers/{self._token}", "", lease)
        former = [] if self._lease else [delete(self._prefix + name) for name in ("world", "ended")]
        self._etcd.transact([is_empty(f"{self._prefix}launchers/")], [*former, registration], [registration])
        self._lease = lease

    def campaign(self, address: Address) -> tuple[int, str | None] | None:
        """Become the leader in place of the one that was last read.

        Args:
            address: of a host that listens already.

        Returns:
            Revision and text of the record of the newest world (0 and None without one); None if another one was
            quicker.
        """
        former = self.leader
        value = json.dumps({"address": str(address), "launcher": self._token})
        known = [get(self._prefix + "world"), get(self._prefix + "ended")]
        try:
            outcome = self._etcd.transact(
                [unchanged(self.leader_key, former.revision if former else 0)],
                [put(self.leader_key, value, self._lease), *known],
            )
        except LeaseEnded:
            self._renew_at = 0.0  # `keep` takes another one
            return None
        if not outcome.succeeded:
            return None
        self.leader = Leader(address=address, launcher=self._token, revision=outcome.revision)
        record, ended = outcome.found
        self.ended = int(ended.value) if ended is not None and ended.value.isdecimal() else 0
        return (0, None) if record is None else (record.revision, record.value)

    def commit(self, term: int, world_revision: int, record: str) -> int | None:
        """Write the record of the next world, if neither leader nor world has changed.

        Args:
            term: revision of the election that this launcher has won.
            world_revision: of the record of the world before.

        Returns:
            The new revision; None if another launcher leads.
        """
        key = self._prefix + "world"
        outcome = self._etcd.transact(
            [unchanged(self.leader_key, term), unchanged(key, world_revision)],
            [put(key, record)],
            [get(key)],
        )
        if outcome.succeeded:
            return outcome.revision
        (found,) = outcome.found
        if found is not None and found.value == record:  # by an earlier try, whose answer was lost
            return found.revision
        return None

    def record_end(self) -> None:
        """Record that ranks have finished the run, for launchers that are cut off or stopped now."""
        (record,) = self._etcd.transact([], [get(self._prefix + "world")]).found
        if record is not None:
            number = str(int(json.loads(record.value)["number"]))
            self._etcd.transact([], [put(self._prefix + "ended", number, self._etcd.grant(_REMEMBERED_S))])

    def resign(self) -> None:
        """Leave the run; the last launcher deletes its keys, but for the record of its end."""
        if self._lease:
            with suppress(LeaseEnded):
                self._etcd.revoke(self._lease)
        keys = [delete(self._prefix + "secret"), delete(self._prefix + "world")]
        self._etcd.transact([is_empty(f"{self._prefix}launchers/")], keys)


class _Term:
    """Term of a launcher as the leader: its host.

    Args:
        election: won.
        listener: at the address that was published.
        secret: of the run.
        state: with the newest world.
        world_revision: of its record.
        patience: timeouts of the run.

    Attributes:
        revision: of the election.
    """

    def __init__(
        self,
        election: Election,
        listener: socket.socket,
        secret: bytes,
        state: RendezvousState,
        world_revision: int,
        patience: list[float],
    ) -> None:
        assert election.leader is not None
        self.revision = election.leader.revision
        self._election, self._patience, self._world_revision = election, patience, world_revision
        self._is_over = threading.Event()
        self._predecessor = 0 if state.world is None else state.world.number
        self._server = ServerThread(listener, secret, RendezvousService(state, self._commit))

    @property
    def has_ended(self) -> bool:
        """True if the host has ended, since it could not commit a world or for a defect."""
        return self._server.has_ended

    def close(self) -> None:
        """End the host and its connections."""
        self._is_over.set()
        self._server.close()

    def _commit(self, world: CurrentWorld) -> bool:
        """Write the record of a world, as soon as etcd answers; return False if this launcher does not lead."""
        record = json.dumps(
            {
                "number": world.number,
                "predecessor": self._predecessor,
                "members": world.ids,
                "patience": self._patience,
            }
        )
        while not self._is_over.is_set():
            try:
                revision = self._election.commit(self.revision, self._world_revision, record)
            except EtcdError as error:
                logger.info("world %d cannot be written: %s", world.number, error)
                self._is_over.wait(_RETRY_S)
                continue
            if revision is None:
                break
            self._world_revision, self._predecessor = revision, world.number
            return True
        return False


class EtcdRendezvous:
    """Rendezvous of one run for one launcher, open in a `with` block.

    Args:
        endpoints: of etcd, see `EtcdAccess`.
        run_id: name of the run, the same for all its launchers and for no other run.
        settings: timeouts.
        secret_file: with the run's secret; None to have it in etcd.

    Attributes:
        token: of this launcher.
        address: of the present or last leader's host, once entered.
        secret_file: for members and launchers.

    Raises:
        ConfigurationError: an argument is malformed; on entering, etcd does not answer for `rendezvous_timeout_s`, or
            refuses what is asked.
    """

    def __init__(
        self, endpoints: str, run_id: str, settings: ElasticSettings, secret_file: str | Path | None = None
    ) -> None:
        access = EtcdAccess.parse(endpoints, os.environ)
        access.check(secret_file)
        self.token = new_token()
        self._etcd, self._settings = EtcdClient(access), settings
        self._election = Election(
            self._etcd, f"/moe-lightning/{run_id}/", self.token, lease_s(settings.silence_timeout_s)
        )
        self._folder = PrivateFolder()
        self.address = Address()
        self.secret_file = self._folder.path / "secret" if secret_file is None else Path(secret_file).absolute()
        self._term: _Term | None = None
        self._connected: Callable[[], Address | None] = lambda: None  # address of the host, by this launcher
        self._reached: int | None = None  # revision of the leader whose host was reached
        self._changed, self._closed = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        for name, body in (("elastic-election", self._run), ("elastic-watch", self._watch)):
            self._threads.append(threading.Thread(target=body, name=name, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._changed.set()
        for thread in self._threads:
            while thread.is_alive():
                self._etcd.end_watch()
                thread.join(_RETRY_S)
        self._close()

    def record_end(self) -> None:
        """Record that this launcher's ranks have finished the run."""
        try:
            self._election.record_end()
        except (EtcdError, ValueError, LookupError, TypeError) as error:  # who comes back meanwhile trains on alone
            logger.warning("the end of the run cannot be written to etcd: %s", error)

    def attend(self, connected: Callable[[], Address | None]) -> None:
        """Take over at once when the leader's process is gone, not when its lease ends.

        Args:
            connected: returns the address of the host that this launcher is connected to, which may be that of a
                former leader; None without one.
        """
        self._connected = connected

    # ------------------------------------------------------------------

    def _start(self) -> None:
        """Take part in the election until a leader is known."""
        limit_s = self._settings.rendezvous_timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._etcd.check_version()
                self._election.keep(time.monotonic(), has_changed=True)
                self._write_secret()  # only who takes part keeps the last of former launchers from deleting it
                self._step(has_changed=True)
                if self._election.leader is not None:
                    return
            except EtcdRefused as error:
                raise ConfigurationError(str(error)) from None
            except EtcdError as error:
                if time.monotonic() > deadline:
                    raise ConfigurationError(
                        f"etcd has not answered for {limit_s:g} s ({error}): see that most of its members run and can "
                        "be reached, or correct rdzv_endpoint"
                    ) from None
            time.sleep(_RETRY_S)

    def _write_secret(self) -> None:
        if self.secret_file.parent == self._folder.path:
            self.secret_file.touch(mode=0o600)
            self.secret_file.write_bytes(self._election.secret())
        read_secret(self.secret_file)

    def _run(self) -> None:
        problem = ""
        while not self._closed.is_set():
            try:
                has_changed = self._changed.is_set()
                self._changed.clear()
                self._step(has_changed=has_changed)
                if problem:
                    print("etcd answers again", file=sys.stderr)
                problem = ""
            except EtcdError as error:
                self._changed.set()
                if not problem:
                    print(f"{error}: the run goes on, and cannot change its world before etcd answers", file=sys.stderr)
                problem = str(error)
                self._closed.wait(_RETRY_S)
            except Exception:  # the launcher must go on with its workers
                logger.exception("the election failed")
            self._changed.wait(_LOOK_S)

    def _close(self) -> None:
        """Leave the election; a lease that cannot be revoked ends by itself."""
        if self._term is not None:
            self._term.close()
        with suppress(EtcdError):
            self._election.resign()
        self._folder.close()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._etcd.watch(self._election.leader_key, self._changed.set)
            except EtcdError as error:
                logger.debug("the watch of the leader ended: %s", error)
                self._closed.wait(_RETRY_S)

    def _step(self, *, has_changed: bool) -> None:
        """Keep the lease; end the own term if another one leads or the own host has ended; campaign if nobody leads, if
        the leader is dead, or if this launcher leads without a host.
        """
        election, term = self._election, self._term
        election.keep(time.monotonic(), has_changed=has_changed)
        leader = election.leader
        if term is not None and (leader is None or leader.revision != term.revision or term.has_ended):
            term.close()
            self._term = None
        if leader is None or (election.is_won and self._term is None):
            self._campaign(None)
        elif not election.is_won and self._is_dead(leader):
            self._campaign(leader.launcher)
        if election.leader is not None:
            self.address = election.leader.address

    def _is_dead(self, leader: Leader) -> bool:
        """Return True if this launcher was connected to the leader's host, and nothing listens there any more."""
        if self._connected() == leader.address:
            self._reached = leader.revision
        elif self._reached == leader.revision:
            try:
                family, target = leader.address.resolve()
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.settimeout(_PROBE_S)
                    probe.connect(target)
            except ConnectionRefusedError:
                return True
            except OSError:  # it may be there, behind a network that fails: its lease decides
                return False
        return False

    def _campaign(self, dead: str | None) -> None:
        listener = listen(str(Address(host=self._host(), port=0)))
        try:
            self._term = self._win(listener, dead)
        finally:
            if self._term is None:
                listener.close()

    def _win(self, listener: socket.socket, dead: str | None) -> _Term | None:
        """Return the term of this launcher with a host on a listener; None if another launcher was quicker."""
        name = listener.getsockname()
        record = self._election.campaign(Address(host=name[0], port=name[1]))
        if record is None:
            self._changed.set()
            return None
        logger.info("this launcher leads")
        revision, text = record
        state = RendezvousState(ended=self._election.ended)
        if text is not None:
            silent_s = 0.0 if dead is not None else max(0.0, self._settings.silence_timeout_s - _RETURN_S)
            try:
                state.restore(json.loads(text), -silent_s)
            except (
                ValueError,
                WireError,
            ) as error:  # members report their world, and the record of the next one replaces this
                logger.warning("the record of the newest world in etcd is malformed, and passed over: %s", error)
        if dead is not None:
            state.lose_launcher(dead, "ended with its launcher", 0.0)
        secret = read_secret(self.secret_file)
        return _Term(self._election, listener, secret, state, revision, self._settings.patience)

    def _host(self) -> str:
        """Return the address of this machine on the way to etcd.

        Raises:
            EtcdError: it is not known now.
        """
        endpoint = self._etcd.endpoint
        try:
            family, target = endpoint.resolve()
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            raise EtcdError(f"there is no way to {endpoint}: {error.strerror or error}") from None
