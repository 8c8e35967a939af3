"""An S3 server on loopback, and a proxy before it that fails in all the ways in which stores do."""

from __future__ import annotations

import contextlib
import http.client
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import fsspec
import pytest
import s3fs

from moe_lightning.checkpoint.storage import objects
from tests.forks import FORKS, PATIENCE_S

BUCKET = "bucket"
FAULTS = ("error", "throttle", "drop", "cut", "stale")
_ERRORS = {"error": (500, "InternalError", "try again"), "throttle": (503, "SlowDown", "reduce your request rate")}
_HOPS = {"connection", "transfer-encoding", "content-length", "expect", "host", "keep-alive", "date", "server"}


@dataclass
class Faults:
    """What the proxy does to requests, and what it has seen.

    Attributes:
        choose: of (method, path, size of the body): the fault of a request; None for none.
        put_bytes: bodies that have arrived in the store, by path.
        done: how often each fault was made.
    """

    choose: Callable[[str, str, int], str | None] = lambda *_: None
    put_bytes: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    listings: dict[str, tuple[int, Any, bytes]] = field(default_factory=dict)

    def at_random(self, seed: int, probability: float, *kinds: str, never_cut: str | None = None) -> None:
        """Let requests fail at random, each in the way that fits it and was rarest so far.

        Args:
            never_cut: name of an object whose uploads arrive whole or not at all.
        """
        rng, lock = random.Random(seed), threading.Lock()

        def choose(method: str, path: str, nbytes: int) -> str | None:
            with lock:
                if rng.random() >= probability:
                    return None
            is_cut_well = method == "PUT" and nbytes > 100 and path.rpartition("/")[2].partition("?")[0] != never_cut
            misfits = {"cut": not is_cut_well, "stale": path not in self.listings}
            fitting = [kind for kind in kinds if not misfits.get(kind, False)]
            return min(fitting, key=lambda kind: self.done.get(kind, 0), default=None)

        self.choose = choose


def _proxy(port: int, faults: Faults) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            fault = faults.choose(self.command, self.path, len(body))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
            if fault is not None:
                faults.done[fault] = faults.done.get(fault, 0) + 1
            if fault == "drop":
                self.close_connection = True
                return None
            if fault in _ERRORS:
                status, code, message = _ERRORS[fault]
                reply = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                return self.reply(status, {"Content-Type": "application/xml"}, reply)
            if fault == "stale":
                return self.reply(*faults.listings[self.path])
            if fault == "cut":
                body = body[: len(body) // 2]
                headers = {
                    k: v for k, v in headers.items() if not k.lower().startswith(("x-amz-checksum", "content-md5"))
                }
            store = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            with contextlib.closing(store):
                store.request(self.command, self.path, body, headers)
                response = store.getresponse()
                reply = response.read()
            if self.command == "PUT" and response.status == 200:
                faults.put_bytes[self.path] = len(body)
            told = {k: v for k, v in response.getheaders() if k.lower() not in _HOPS}
            length = response.getheader("content-length")
            if "list-type" in self.path:
                faults.listings[self.path] = response.status, told, reply
            return self.reply(response.status, told, reply, length)

        def reply(self, status: int, headers: Any, body: bytes, length: str | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *_: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            return  # whoever asked was killed

    return Server(("127.0.0.1", 0), Handler)


def _serve(ready: Connection) -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    ready.send(server.get_host_and_port()[1])
    ready.poll(None)  # until the test's process is gone
    server.stop()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """The port of an S3 server in a process of its own."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "the server does not start"
        yield ours.recv()
    finally:
        process.kill()
        process.join(PATIENCE_S)


@contextlib.contextmanager
def faulty_s3(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """A proxy before the server that this process and those that it starts speak to; a bucket is there."""
    faults = Faults()
    proxy = _proxy(port, faults)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # its pauses are long
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.01)
    forget_stores()
    try:
        store = fsspec.filesystem("s3", use_listings_cache=False)
        if not store.exists(BUCKET):
            store.mkdir(BUCKET)
        faults.put_bytes.clear()
        yield faults
    finally:
        forget_stores()
        proxy.shutdown()
        proxy.server_close()
        thread.join(PATIENCE_S)


def forget_stores() -> None:
    """The next one has the environment of that moment."""
    objects._store.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
