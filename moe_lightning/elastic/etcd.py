"""Client of etcd 3.4 or later: transactions, leases and watches, over its JSON gateway.

The gateway is part of etcd and needs HTTP alone, so no protobuf, gRPC or event loop comes into the launcher. Users and
certificates are those of etcdctl, from the same variables: `ETCDCTL_USER` ("NAME:PASSWORD"), `ETCDCTL_CACERT`,
`ETCDCTL_CERT` and `ETCDCTL_KEY`.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from moe_lightning.config import shown
from moe_lightning.elastic.membership import LOOPBACK
from moe_lightning.elastic.protocol import Address, describe_error
from moe_lightning.errors import ConfigurationError

Json = dict[str, Any]

_CALL_S = 1.0
_OLDEST = (3, 4)
_PERMISSION_DENIED, _RESOURCE_EXHAUSTED = 7, 8  # codes of gRPC


class EtcdError(Exception):
    """etcd does not answer, or has no leader; the text is the end of a sentence."""


class EtcdRefused(EtcdError):
    """etcd refuses for good; the text is a sentence."""


class LeaseEnded(EtcdError):
    """The lease of a key has ended."""


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """Addresses of an etcd cluster and credentials.

    Attributes:
        endpoints: "http://HOST:PORT" or "https://HOST:PORT" of its members.
        user: "NAME:PASSWORD"; "" where etcd has no users.
        cacert: file with the authority of its certificates; None for those that the system trusts.
        cert, key: files with the certificate of this client and its key.
    """

    endpoints: tuple[str, ...]
    user: str = ""
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Self:
        """Return the access from endpoints, separated by commas, and the variables of etcdctl.

        Raises:
            ConfigurationError: an endpoint is malformed.
        """
        endpoints = tuple(part.strip().rstrip("/") for part in text.split(","))
        for endpoint in endpoints:
            scheme, _, rest = endpoint.partition("://")
            if scheme not in ("http", "https"):
                raise ConfigurationError(
                    f"rdzv_endpoint={shown(text)} must be http://HOST:PORT or https://HOST:PORT of each etcd member, "
                    "separated by commas"
                )
            Address.parse(rest)
        return cls(
            endpoints=endpoints,
            user=environment.get("ETCDCTL_USER", ""),
            cacert=environment.get("ETCDCTL_CACERT"),
            cert=environment.get("ETCDCTL_CERT"),
            key=environment.get("ETCDCTL_KEY"),
        )

    def check(self, secret_file: str | Path | None) -> None:
        """Raise if a run without a file for its secret would send it through the network in the clear.

        Raises:
            ConfigurationError: one sentence about it.
        """
        for endpoint in self.endpoints:
            is_local = urlsplit(endpoint).hostname in (LOOPBACK, "::1", "localhost")
            if secret_file is None and not is_local and not endpoint.startswith("https://"):
                raise ConfigurationError(
                    f"rdzv_endpoint={endpoint} is not encrypted, so etcd cannot keep the run's secret: use https://, "
                    "or give every machine the same secret_file (`umask 077; openssl rand -hex 32 > run.secret`)"
                )

    def tls(self) -> ssl.SSLContext | None:
        """Return the context for TLS; None where no endpoint has it.

        Raises:
            ConfigurationError: a certificate or key cannot be loaded.
        """
        if not any(endpoint.startswith("https://") for endpoint in self.endpoints):
            return None
        try:
            context = ssl.create_default_context(cafile=self.cacert)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(
                f"ETCDCTL_CACERT={self.cacert}, ETCDCTL_CERT={self.cert} or ETCDCTL_KEY={self.key} cannot be loaded "
                f"({error.strerror or error}): name readable files in PEM format"
            ) from None
        return context


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Value of a key.

    Attributes:
        revision: of its last change.
    """

    value: str
    revision: int


def unchanged(key: str, revision: int) -> Json:
    """Return the condition that the last change of a key is that revision; 0: that it does not exist."""
    return {"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def is_empty(prefix: str) -> Json:
    """Return the condition that no key begins with a prefix, which ends in a slash."""
    return {**_range(prefix), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def put(key: str, value: str, lease: int = 0) -> Json:
    """Return the operation that sets a key, until the lease ends if there is one."""
    return {"request_put": {"key": _encode(key), "value": _encode(value), "lease": str(lease)}}


def get(key: str) -> Json:
    """Return the operation that reads a key."""
    return {"request_range": {"key": _encode(key)}}


def delete(key: str) -> Json:
    """Return the operation that deletes a key, or with a slash at its end all keys that begin so."""
    return {"request_delete_range": _range(key) if key.endswith("/") else {"key": _encode(key)}}


@dataclass(frozen=True, kw_only=True)
class TransactionOutcome:
    """Outcome of a transaction.

    Attributes:
        succeeded: all conditions held.
        revision: of the store after it.
        found: for each `get` of the branch that ran, in order; None for a key that does not exist.
    """

    succeeded: bool
    revision: int
    found: tuple[Entry | None, ...]


_AUTHENTICATE = "/v3/auth/authenticate"


class EtcdClient:
    """Client of an etcd cluster, for several threads. A member that does not answer is replaced by the next one.

    Args:
        access: see there.

    Raises:
        ConfigurationError: a certificate or key cannot be loaded.
    """

    def __init__(self, access: EtcdAccess) -> None:
        self._access, self._tls = access, access.tls()
        self._lock = threading.Lock()
        self._current = 0  # of the endpoints
        self._token = ""
        self._stream: socket.socket | None = None  # of the watch

    @property
    def endpoint(self) -> Address:
        """Address of the member in use."""
        return Address.parse(self._url.partition("://")[2])

    @property
    def _url(self) -> str:
        return self._access.endpoints[self._current % len(self._access.endpoints)]

    def check_version(self) -> None:
        """Raise unless etcd is new enough.

        Raises:
            EtcdError: see the class.
        """
        version = str(self._try(lambda url: self._ask(url, "/version", None)).get("etcdserver", ""))
        numbers = version.split(".")
        if len(numbers) < 2 or not all(n.isdigit() for n in numbers[:2]) or tuple(map(int, numbers[:2])) < _OLDEST:
            raise EtcdRefused(f"etcd at {self._url} has version {shown(version)}, and 3.4 is the oldest: upgrade it")

    def transact(
        self, conditions: Iterable[Json], then: Iterable[Json], otherwise: Iterable[Json] = ()
    ) -> TransactionOutcome:
        """Run operations in one transaction.

        If an error is raised, it may have run.

        Raises:
            EtcdError: see the class.
        """
        answer = self._call("kv/txn", {"compare": [*conditions], "success": [*then], "failure": [*otherwise]})
        ranges = [each["response_range"] for each in answer.get("responses", ()) if "response_range" in each]
        return TransactionOutcome(
            succeeded=answer.get("succeeded", False),
            revision=int(answer["header"]["revision"]),
            found=tuple(_entry(found) for found in ranges),
        )

    def grant(self, ttl_s: int) -> int:
        """Return a new lease, which ends after so many seconds unless it is renewed; etcd may make it longer.

        Raises:
            EtcdError: see the class.
        """
        return int(self._call("lease/grant", {"TTL": str(ttl_s)})["ID"])

    def renew(self, lease: int) -> bool:
        """Renew a lease; return False if it has ended.

        Raises:
            EtcdError: see the class.
        """
        return int(self._call("lease/keepalive", {"ID": str(lease)})["result"].get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys.

        Raises:
            EtcdError: see the class.
        """
        self._call("lease/revoke", {"ID": str(lease)})

    def watch(self, key: str, changed: Callable[[], None]) -> None:
        """Call a function once now, and at each change of a key, until `end_watch` or an error.

        Raises:
            EtcdError: see the class.
        """
        url = self._url
        with closing(self._connect(url)) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(None)
                with self._lock:
                    self._stream = connection.sock
                response = self._send(connection, "/v3/watch", {"create_request": {"key": _encode(key)}})
                while line := response.readline():
                    result = json.loads(line).get("result")
                    if result is None or result.get("canceled"):
                        raise EtcdError(f"{url} ended the watch")
                    changed()
            except (OSError, HTTPException, ValueError) as error:
                raise EtcdError(f"{url}: {describe_error(error)}") from None
            finally:
                with self._lock:
                    self._stream = None

    def end_watch(self) -> None:
        """Make a `watch` that has connected return."""
        with self._lock, suppress(OSError):  # it has ended
            if self._stream is not None:
                self._stream.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------

    def _call(self, path: str, request: Json) -> Json:
        def ask(url: str) -> Json:
            if self._access.user and not self._token:
                self._authenticate(url)
            try:
                return self._ask(url, f"/v3/{path}", request)
            except _TokenExpired:
                self._authenticate(url)
                return self._ask(url, f"/v3/{path}", request)

        return self._try(ask)

    def _try(self, ask: Callable[[str], Json]) -> Json:
        """Ask one member after another, beginning with the last that answered."""
        for attempt in range(len(self._access.endpoints)):
            used = self._current
            try:
                return ask(self._url)
            except EtcdRefused:
                raise
            except EtcdError:
                if self._current == used:  # no other thread has gone on
                    self._current = used + 1
                self.end_watch()
                if attempt == len(self._access.endpoints) - 1:
                    raise
        raise AssertionError("an etcd without endpoints")

    def _authenticate(self, url: str) -> None:
        name, _, password = self._access.user.partition(":")
        token = self._ask(url, _AUTHENTICATE, {"name": name, "password": password}).get("token")
        if not isinstance(token, str) or not token:
            raise EtcdRefused(f"etcd at {url} gives user {shown(name)} no token: see its --auth-token")
        self._token = token

    def _ask(self, url: str, path: str, request: Json | None) -> Json:
        with closing(self._connect(url)) as connection:
            try:
                response = self._send(connection, path, request)
                text = response.read()
            except ssl.SSLCertVerificationError as error:
                raise EtcdRefused(
                    f"the certificate of etcd at {url} is not trusted ({error.verify_message}): name its authority in "
                    "ETCDCTL_CACERT, and the host that it is made for in rdzv_endpoint"
                ) from None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # it was ended, as plain connections are
                raise EtcdError(f"{url}: it ended the connection") from None
            except ssl.SSLError as error:
                raise EtcdRefused(
                    f"etcd at {url} ends the TLS connection ({error.reason}): name a certificate that it accepts in "
                    "ETCDCTL_CERT and ETCDCTL_KEY"
                ) from None
            except (OSError, HTTPException) as error:
                raise EtcdError(f"{url}: {describe_error(error)}") from None
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if response.status == 200 and isinstance(answer, dict):
            return answer
        raise self._refusal(url, response.status, answer if isinstance(answer, dict) else {})

    def _refusal(self, url: str, status: int, answer: Json) -> EtcdError:
        """Return the error for an answer that is none."""
        message, code = str(answer.get("message") or answer.get("error") or ""), answer.get("code")
        name = self._access.user.partition(":")[0]
        if "invalid auth token" in message or "auth store is old" in message:
            return _TokenExpired(f"{url}: {message}")
        if "lease not found" in message:
            return LeaseEnded(f"{url}: {message}")
        if code == _PERMISSION_DENIED:
            return EtcdRefused(
                f"etcd at {url} does not let user {shown(name)} write ({message}): grant it readwrite on the prefix "
                "/moe-lightning/"
            )
        if code == _RESOURCE_EXHAUSTED and "space" in message:
            return EtcdRefused(
                f"etcd at {url} is full ({message}): compact and defragment it, raise its quota, then disarm its alarm"
            )
        if "user name is empty" in message or "authentication" in message:
            return EtcdRefused(f"etcd at {url} refuses user {shown(name)} ({message}): set ETCDCTL_USER=NAME:PASSWORD")
        if status == 404 or (not message and status < 500):  # above that a proxy before it waits for it
            return EtcdRefused(
                f"{url} does not answer as etcd (HTTP {status}): see that it is the client address of an etcd of at "
                "least version 3.4 with its gRPC gateway"
            )
        return EtcdError(f"{url}: {message or f'HTTP {status}'}")

    def _connect(self, url: str) -> HTTPConnection:
        address = Address.parse(url.partition("://")[2])
        if url.startswith("https://"):
            return HTTPSConnection(address.host, address.port, timeout=_CALL_S, context=self._tls)
        return HTTPConnection(address.host, address.port, timeout=_CALL_S)

    def _send(self, connection: HTTPConnection, path: str, request: Json | None) -> Any:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": self._token} if self._token and path != _AUTHENTICATE else {}
        )
        connection.request(
            "GET" if request is None else "POST", path, None if request is None else json.dumps(request), headers
        )
        return connection.getresponse()


class _TokenExpired(EtcdError):
    """The token of a user has expired: authenticate again."""


def _entry(found: Json) -> Entry | None:
    for each in found.get("kvs", ()):
        return Entry(value=b64decode(each.get("value", "")).decode(), revision=int(each["mod_revision"]))
    return None


def _encode(text: str) -> str:
    return b64encode(text.encode()).decode()


def _range(prefix: str) -> Json:
    """Return the range of keys with a prefix, which ends in a slash."""
    return {"key": _encode(prefix), "range_end": _encode(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
