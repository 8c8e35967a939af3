"""The elected rendezvous host against real etcd servers: transactions, elections, fencing, refusals."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest

from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.etcd import EtcdAccess, EtcdClient, EtcdError, EtcdRefused, delete, get, put, unchanged
from moe_lightning.elastic.etcd_rendezvous import Election, EtcdRendezvous
from moe_lightning.elastic.launcher import ElasticLauncher
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask
from moe_lightning.elastic.protocol import Address, create_secret
from moe_lightning.elastic.rendezvous_client import RendezvousClient
from moe_lightning.elastic.rendezvous_state import CurrentWorld, RendezvousState
from moe_lightning.elastic.server import RendezvousService, ServerThread, listen
from moe_lightning.elastic.worker import RunFinished
from moe_lightning.errors import ConfigurationError
from tests.distributed.relays import relayed
from tests.etcd import EtcdCluster, free_ports, needs_etcd
from tests.forks import PATIENCE_S

pytestmark = needs_etcd
QUICK = ElasticSettings(rendezvous_timeout_s=0.3)
HOST = Address(host="127.0.0.1", port=1)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("one")) as cluster:
        cluster.wait()
        yield cluster


@pytest.fixture
def etcd(one: EtcdCluster) -> Iterator[EtcdClient]:
    client = one.client()
    yield client
    assert client.transact([], [get("/moe-lightning/run/leader")]).found == (None,), "the last one removes its keys"


def wait_for(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s
        time.sleep(0.002)
    return time.monotonic() - start


def test_transactions_leases_and_watches(one: EtcdCluster) -> None:
    client, changes = one.client(), threading.Semaphore(0)

    def watch() -> None:
        with suppress(EtcdError):  # ends with the cluster
            client.watch("/x/a", changes.release)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert changes.acquire(timeout=PATIENCE_S), "the watch has begun"
    first = client.transact([unchanged("/x/a", 0)], [put("/x/a", "ä"), get("/x/a")], [get("/x/a")])
    assert changes.acquire(timeout=PATIENCE_S)
    (entry,) = first.found
    assert (first.succeeded, entry.value, entry.revision) == (True, "ä", first.revision)
    again = client.transact([unchanged("/x/a", 0)], [put("/x/a", "b")], [get("/x/a")])
    assert (again.succeeded, again.found) == (False, (entry,))
    lease = client.grant(60)
    client.transact([], [put("/x/b", "leased", lease)])
    assert client.renew(lease)
    client.revoke(lease)
    assert not client.renew(lease)
    assert client.transact([], [get("/x/b"), get("/x/a")]).found == (None, entry)
    client.transact([], [delete("/x/")])
    assert client.transact([], [get("/x/a")]).found == (None,)
    client.end_watch()
    watcher.join(PATIENCE_S)
    assert not watcher.is_alive()


@pytest.mark.usefixtures("etcd")
def test_one_launcher_leads_and_its_successor_follows_at_once(one: EtcdCluster) -> None:
    with contextlib.ExitStack() as stack:
        made = [EtcdRendezvous(one.endpoints, "run", ElasticSettings()) for _ in range(3)]
        first, second, third = (stack.enter_context(each) for each in made)
        assert len({each.secret_file.read_bytes() for each in made}) == 1
        assert {each.address for each in made} == {first.address}
        client = LauncherClient(third.address, third.secret_file, QUICK, locate=lambda: third.address)
        stack.callback(client.close)
        host = first.address
        first.__exit__(None, None, None)
        assert wait_for(lambda: second.address == third.address != host) < 1.0
        wait_for(lambda: client.is_connected)


@pytest.mark.usefixtures("etcd")
def test_a_leader_that_was_replaced_cannot_form_a_world(one: EtcdCluster) -> None:
    paused, other = (Election(one.client(), "/moe-lightning/run/", name, 60) for name in ("paused", "other"))
    paused.keep(0.0, has_changed=True)
    assert paused.campaign(HOST) == (0, None)
    other.keep(0.0, has_changed=True)
    assert other.leader.launcher == "paused"
    first = paused.leader.revision
    revision = paused.commit(first, 0, "world 1")
    assert revision is not None
    assert paused.commit(first, 0, "world 1") == revision, "the answer to the first try may be lost"
    assert paused.commit(first, 0, "world 1 again") is None, "its predecessor is another one"
    assert other.campaign(HOST) == (revision, "world 1")
    assert paused.commit(first, revision, "world 2") is None
    former = paused.leader
    paused.keep(0.0, has_changed=True)
    assert paused.leader == other.leader
    assert paused.commit(first, revision, "world 2") is None, "nor once it knows its successor"
    paused.leader = former
    assert other.commit(other.leader.revision, revision, "world 3") is not None
    assert paused.campaign(HOST) is None, "of what it read last"
    for each in (paused, other):
        each.resign()


@pytest.mark.usefixtures("etcd")
def test_a_launcher_whose_lease_ended_takes_part_again(one: EtcdCluster) -> None:
    client = one.client()
    with EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as alone:
        before = alone.address
        client.revoke(alone._election._lease)
        wait_for(lambda: alone.address != before)
        assert LauncherClient(alone.address, alone.secret_file, QUICK).close() is None


@pytest.mark.usefixtures("etcd")
def test_a_launcher_takes_part_again_when_etcd_failed_meanwhile(
    one: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its key the next launcher would forget the world, and the last one but it the secret."""
    client = one.client()
    election = Election(client, "/moe-lightning/run/", "late", 60)
    election.keep(0.0, has_changed=True)
    client.revoke(election._lease)

    def fail(*_: object) -> None:
        raise EtcdError("no answer")

    with monkeypatch.context() as failing:
        failing.setattr(client, "transact", fail)
        with pytest.raises(EtcdError):
            election.keep(100.0, has_changed=True)
    election.keep(100.1, has_changed=False)
    assert client.transact([], [get("/moe-lightning/run/launchers/late")]).found != (None,)
    election.resign()


@pytest.mark.usefixtures("etcd")
def test_a_launcher_that_leaves_does_not_delete_the_secret_of_one_that_comes(
    one: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = Election(one.client(), "/moe-lightning/run/", "former", 60)
    former.keep(0.0, has_changed=True)
    read = EtcdRendezvous._write_secret

    def read_at_the_last_moment(self: EtcdRendezvous) -> None:
        former.secret()
        read(self)
        former.resign()

    monkeypatch.setattr(EtcdRendezvous, "_write_secret", read_at_the_last_moment)
    with EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as anew:
        (entry,) = one.client().transact([], [get("/moe-lightning/run/secret")]).found
        assert entry.value.encode() == anew.secret_file.read_bytes()


@pytest.mark.usefixtures("etcd")
def test_a_host_that_ends_for_a_defect_is_replaced(one: EtcdCluster) -> None:
    with EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as alone:
        before = alone.address
        alone._term._server._round = sys.exit  # type: ignore[method-assign]
        wait_for(lambda: alone.address != before)
        LauncherClient(alone.address, alone.secret_file, QUICK).close()


@pytest.mark.parametrize("record", ["{", "[]", '{"number": "x"}'])
@pytest.mark.usefixtures("etcd")
def test_a_malformed_record_of_a_world_is_passed_over(
    one: EtcdCluster, record: str, caplog: pytest.LogCaptureFixture
) -> None:
    others = Election(one.client(), "/moe-lightning/run/", "others", 60)
    others.keep(0.0, has_changed=True)
    one.client().transact([], [put(f"/moe-lightning/run/{name}", record) for name in ("world", "ended")])
    with EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as led:
        LauncherClient(led.address, led.secret_file, QUICK).close()
        led.record_end()
        assert "is malformed, and passed over" in caplog.text
        assert "the end of the run cannot be written" in caplog.text
        others.resign()


@pytest.mark.usefixtures("etcd")
def test_a_malformed_record_of_the_leader_is_one_sentence(one: EtcdCluster) -> None:
    leader = "/moe-lightning/run/leader"
    one.client().transact([], [put(leader, "{")])
    with pytest.raises(ConfigurationError, match=f"the record {leader} in etcd is malformed, delete it"):
        EtcdRendezvous(one.endpoints, "run", QUICK).__enter__()
    one.client().transact([], [delete(leader)])


@pytest.mark.usefixtures("etcd")
def test_a_launcher_that_comes_back_after_the_end_learns_of_it(one: EtcdCluster) -> None:
    """It must not train on alone, from where it was cut off; the next run of that name must train."""
    client, others = one.client(), Election(one.client(), "/moe-lightning/run/", "others", 60)
    with (
        EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as late,
        relayed(late, ElasticSettings(), locate=lambda: late.address) as task,
    ):
        member = RendezvousClient(task)
        number, before = member.join(is_ready=True).number, late.address
        others.keep(0.0, has_changed=True)
        record = {"number": number + 1, "members": [f"{1:020}.b.gone"], "patience": task.settings.patience}
        client.transact([], [put("/moe-lightning/run/world", json.dumps(record))])
        others.record_end()
        client.revoke(late._election._lease)
        others.resign()
        wait_for(lambda: late.address != before)
        with pytest.raises(RunFinished, match="the others have finished the run"):
            member.join(is_ready=True)
        member.close()
    with (
        EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as anew,
        relayed(anew, ElasticSettings(), locate=lambda: anew.address) as task,
    ):
        member = RendezvousClient(task)
        assert len(member.join(is_ready=True).ids) == 1
        member.close()


@pytest.mark.usefixtures("etcd")
def test_a_leader_that_cannot_commit_leads_again_with_the_record_that_is_there(one: EtcdCluster) -> None:
    client = one.client()
    with (
        EtcdRendezvous(one.endpoints, "run", ElasticSettings()) as alone,
        relayed(alone, ElasticSettings(), locate=lambda: alone.address) as task,
    ):
        record = {"number": 7, "members": [f"{1:020}.b.gone"], "patience": task.settings.patience}
        client.transact([], [put("/moe-lightning/run/world", json.dumps(record))])
        member = RendezvousClient(task)
        assert member.join(is_ready=True).number > 7
        (entry,) = client.transact([], [get("/moe-lightning/run/world")]).found
        assert json.loads(entry.value)["members"] == [member._state.member_id]
        member.close()


@pytest.mark.usefixtures("etcd")
def test_a_successor_restores_the_world_from_its_record(one: EtcdCluster) -> None:
    """Whose leader died after the record was written and before anybody learnt of it."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(EtcdRendezvous(one.endpoints, "run", ElasticSettings()))
        second = stack.enter_context(EtcdRendezvous(one.endpoints, "run", ElasticSettings()))
        task = stack.enter_context(relayed(second, ElasticSettings(), locate=lambda: second.address))
        members = [RendezvousClient(replace(task, node=name, token=name, expected=2)) for name in "ab"]
        for each in members:
            stack.callback(each.close)
        first._term._server._deliver = lambda: None  # type: ignore[method-assign]
        joined: list[int] = []
        threads = [threading.Thread(target=lambda m=m: joined.append(m.join().number)) for m in members]
        for thread in threads:
            thread.start()
        client = one.client()

        def record() -> str | None:
            (entry,) = client.transact([], [get("/moe-lightning/run/world")]).found
            return None if entry is None else entry.value

        try:
            wait_for(lambda: record() is not None)
        finally:
            del first._term._server._deliver
            first.__exit__(None, None, None)
        for thread in threads:
            thread.join(PATIENCE_S)
        number = json.loads(record() or "")["number"]
        assert joined == [number, number], "no second world"


def test_a_world_that_cannot_be_committed_is_not_announced(tmp_path: Path) -> None:
    """Its host ends, and the member waits for another one."""
    asked: list[tuple[str, ...]] = []

    def refuse(world: CurrentWorld) -> bool:
        asked.append(world.ids)
        return False

    secret = tmp_path / "secret"
    listener = listen("127.0.0.1:0")
    address = Address(host="127.0.0.1", port=listener.getsockname()[1])
    server = ServerThread(listener, create_secret(secret), RendezvousService(RendezvousState(), refuse))
    member = RendezvousClient(ElasticTask(address=str(address), secret_file=str(secret), node="a", settings=QUICK))
    with pytest.raises(ConfigurationError, match="has not answered"):
        member.join()
    assert asked == [(member._state.member_id,)]
    member.close()
    server.close()


def refused(options: dict[str, str], endpoints: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a run with these variables of etcdctl is refused."""
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as raised, EtcdRendezvous(endpoints, "run", QUICK):
        pass
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_an_etcd_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert f"etcd has not answered for 0.3 s ({url}: connection refused)" in refused({}, url, monkeypatch)


@pytest.mark.slow
def test_an_etcd_without_a_majority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdCluster(tmp_path, members=3) as cluster:
        cluster.wait()
        for member in (0, 1):
            cluster.signal(member, signal.SIGKILL)
        assert "see that most of its members run" in refused({}, cluster.endpoints, monkeypatch)


def test_an_etcd_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdCluster(tmp_path, options=["--quota-backend-bytes", "65536"]) as cluster:
        cluster.wait()
        fill = [put(f"/filler/{index}", "x" * 10_000) for index in range(100)]
        with contextlib.suppress(EtcdError):
            cluster.client().transact([], fill)
        sentence = refused({}, cluster.endpoints, monkeypatch)
        assert "is full (etcdserver: mvcc: database space exceeded): compact and defragment it" in sentence


def test_users_of_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdCluster(tmp_path) as cluster:
        cluster.wait()
        client = cluster.client()
        for path, request in [
            ("auth/user/add", {"name": "root", "password": "secret"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/role/add", {"name": "reader"}),
            ("auth/role/grant", {"name": "reader", "perm": {"permType": "READ", "key": "AA==", "range_end": "AA=="}}),
            ("auth/user/add", {"name": "guest", "password": "guest"}),
            ("auth/user/grant", {"user": "guest", "role": "reader"}),
            ("auth/enable", {}),
        ]:
            with contextlib.suppress(EtcdRefused):  # the role root is there
                client._call(path, request)
        assert "refuses user ''" in refused({}, cluster.endpoints, monkeypatch)
        assert "refuses user 'root'" in refused({"ETCDCTL_USER": "root:wrong"}, cluster.endpoints, monkeypatch)
        assert "does not let user 'guest' write" in refused(
            {"ETCDCTL_USER": "guest:guest"}, cluster.endpoints, monkeypatch
        )
        monkeypatch.setenv("ETCDCTL_USER", "root:secret")
        with EtcdRendezvous(cluster.endpoints, "run", ElasticSettings()) as one:
            one._etcd._token = "expired.1"
            one._etcd.transact([], [get("/x")])


@contextlib.contextmanager
def served(server: TCPServer) -> Iterator[str]:
    """Let a server answer inside, under the address that it yields."""
    with server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class _EndingEtcd(BaseRequestHandler):
    """A member that ends, or a proxy before it that says so."""

    def handle(self) -> None:
        if self.request.recv(4096).startswith(b"GET"):
            self.request.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize(("scheme", "why"), [("http", "HTTP 502"), ("https", "it ended the connection")])
def test_an_etcd_that_ends_is_waited_for(scheme: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(TCPServer(("127.0.0.1", 0), _EndingEtcd)) as address:
        url = f"{scheme}://{address}"
        assert f"etcd has not answered for 0.3 s ({url}: {why})" in refused({}, url, monkeypatch)


class _OldEtcd(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = b'{"etcdserver":"3.3.27","etcdcluster":"3.3.0"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def test_an_etcd_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(HTTPServer(("127.0.0.1", 0), _OldEtcd)) as address:
        url = f"http://{address}"
        assert f"etcd at {url} has version '3.3.27', and 3.4 is the oldest" in refused({}, url, monkeypatch)


def certificate(folder: Path, name: str, authority: str | None = None) -> None:
    """A key and a certificate for 127.0.0.1, of itself or of an authority."""
    signs = ["-CA", f"{folder}/{authority}.crt", "-CAkey", f"{folder}/{authority}.key"] if authority else []
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt", "-days", "1", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", *signs),
        ],
        check=True,
        capture_output=True,
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates by openssl")
def test_certificates_of_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("server", "client", "stranger"):
        certificate(tmp_path, name)
    tls = ("--cert-file", f"{tmp_path}/server.crt", "--key-file", f"{tmp_path}/server.key")
    both = "".join((tmp_path / f"{name}.crt").read_text() for name in ("client", "server"))
    (tmp_path / "both.crt").write_text(both)  # etcd's gateway is a client with the server's certificate
    mutual = ("--trusted-ca-file", f"{tmp_path}/both.crt", "--client-cert-auth")
    with EtcdCluster(tmp_path, options=[*tls, *mutual], scheme="https") as cluster:
        trusted = {"ETCDCTL_CACERT": f"{tmp_path}/server.crt"}
        ours = {"ETCDCTL_CERT": f"{tmp_path}/client.crt", "ETCDCTL_KEY": f"{tmp_path}/client.key"}
        client = cluster.client(**trusted, **ours)

        def answers() -> bool:
            try:
                client.check_version()
            except EtcdRefused:
                raise
            except EtcdError:
                return False
            return True

        wait_for(answers)
        assert "is not trusted (self" in refused({}, cluster.endpoints, monkeypatch)
        assert "ends the TLS connection" in refused(trusted, cluster.endpoints, monkeypatch)
        for name, value in ours.items():
            monkeypatch.setenv(name, value)
        with EtcdRendezvous(cluster.endpoints, "run", ElasticSettings()) as one:
            assert str(one.address).startswith("127.0.0.1:")
        monkeypatch.setenv("ETCDCTL_KEY", f"{tmp_path}/stranger.key")
        with pytest.raises(ConfigurationError, match=r"ETCDCTL_KEY=.*stranger\.key cannot be loaded"):
            EtcdRendezvous(cluster.endpoints, "run", QUICK)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs rdzv_endpoint=http"),
        ({"rdzv_endpoint": "http://127.0.0.1:1"}, "needs rdzv_endpoint=.* and rdzv_id=NAME"),
        ({"rdzv_endpoint": "10.0.0.1:2379", "rdzv_id": "a"}, r"must be http://HOST:PORT or https://HOST:PORT"),
        ({"rdzv_endpoint": "https://a:2379,https://b", "rdzv_id": "a"}, "'b' must be HOST:PORT"),
        ({"rdzv_endpoint": "http://10.0.0.1:2379", "rdzv_id": "a"}, "not encrypted, so etcd cannot keep"),
        ({"rdzv_endpoint": "http://127.0.0.1:1", "rdzv_id": "a", "secret_file": "none"}, "secret_file=none cannot"),
    ],
)
def test_wrong_options(options: dict[str, str], sentence: str, tmp_path: Path) -> None:
    settings = ElasticSettings(membership="etcd")
    with pytest.raises(ConfigurationError, match=sentence):
        ElasticLauncher(num_ranks=2, log_dir=tmp_path, settings=settings, **options).check()  # type: ignore[arg-type]


def test_an_access_takes_the_variables_of_etcdctl() -> None:
    access = EtcdAccess.parse("https://a:1, https://[::1]:2/", {"ETCDCTL_USER": "me:it", "ETCDCTL_CACERT": "ca.pem"})
    assert access == EtcdAccess(endpoints=("https://a:1", "https://[::1]:2"), user="me:it", cacert="ca.pem")


def test_two_threads_that_fail_at_one_member_ask_the_next_one() -> None:
    """And pass over no member that may answer."""
    access = EtcdAccess.parse("http://a:1,http://b:1,http://c:1", {})
    client, both = EtcdClient(access), threading.Barrier(2)

    def ask(url: str) -> dict[str, str]:
        if url == access.endpoints[0]:
            both.wait(10)
            raise EtcdError("it does not answer")
        return {"url": url}

    threads = [threading.Thread(target=client._try, args=(ask,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client._url == access.endpoints[1]


def test_a_user_without_a_token_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EtcdClient(EtcdAccess.parse("http://a:1", {"ETCDCTL_USER": "name:word"}))
    monkeypatch.setattr(client, "_ask", lambda *_: {"header": {}})
    with pytest.raises(EtcdRefused, match="etcd at http://a:1 gives user 'name' no token"):
        client.renew(1)
