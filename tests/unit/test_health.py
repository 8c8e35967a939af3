"""A node is checked before it joins: what is wrong with it is one sentence, and a calm cluster is never refused."""

from __future__ import annotations

import errno
import io
import os
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from moe_lightning.cli import train
from moe_lightning.elastic import health, launcher
from moe_lightning.elastic.connection import LauncherClient
from moe_lightning.elastic.health import NodeHealth, check_fixed_nodes, judged, read_health, refusals
from moe_lightning.elastic.launcher import ElasticLauncher
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.elastic.protocol import Message, WireError
from moe_lightning.elastic.rendezvous_host import RendezvousServer
from moe_lightning.elastic.rendezvous_state import RendezvousState
from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.collectives import versions
from tests.distributed.harness import connect, run_ranks

CPU = torch.device("cpu")
EXACT = {torch.float32: 2**24, torch.bfloat16: 2**8}
"""Up to which a type holds all whole numbers."""


def node(name: str = "n0", **facts: Any) -> NodeHealth:
    usual: dict[str, Any] = {
        "boot": name,
        "memory_gb_s": 20.0,
        "disk_mb_s": 500.0,
        "shm_gib": 8.0,
        "versions": versions(),
    }
    return NodeHealth(node=name, **usual | {"clock_offset_s": 0.0} | facts)


@pytest.mark.parametrize("dtype", EXACT)
def test_known_bits_are_those_of_integers_and_no_partial_sum_is_rounded(dtype: torch.dtype) -> None:
    inner, left, right, known = health._PRODUCTS[dtype]
    a, b = (factor.numpy() for factor in health.factors(inner, left, right))
    assert np.abs(a).max() == left
    assert np.abs(b).max() == right
    assert inner * left * right <= EXACT[dtype], "sums in any order are exact"
    assert xxhash.xxh3_64_hexdigest((a @ b).astype(np.int32).data) == known


def test_one_wrong_bit_of_a_product_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    health.check_products("n0", CPU)
    right = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = right(a, b)
        product[17, 3] += 1
        return product

    monkeypatch.setattr(torch, "mm", wrong)
    with pytest.raises(ConfigurationError, match=r"n0 computes wrong: a product .* on cpu differs .*out of service"):
        health.check_products("n0", CPU)


def test_a_disk_that_fails_or_forgets_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigurationError, match=r"n0 cannot write to .*\(No space left on device\): make room"):
            health.check_node("n0", tmp_path)

    class Forgetful(io.FileIO):
        def read(self, *_: Any) -> bytes:  # type: ignore[override]
            return bytes(os.fstat(self.fileno()).st_size)

    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: Forgetful(dir / "file", "w+"))
    with pytest.raises(ConfigurationError, match=r"n0 reads other bytes from .* than it has written: take .*out of"):
        health.check_node("n0", tmp_path)


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            {"memory_gb_s": 2.0},
            r"the memory of node n3 moves 2.0 GB/s, below 0.2 of the 20.0 GB/s .*=false",
        ),
        ({"clock_offset_s": 42.0}, r"the clock of node n3 is \+42 s off .*\(limit 10\): synchronize it"),
        ({"clock_offset_s": -11.0}, r"the clock of node n3 is -11 s off"),
        ({"versions": versions() | {"torch": "1.0.0"}}, r"node n3 has torch 1.0.0 where the others have .*: install"),
    ],
)
def test_a_node_unlike_the_others_is_one_sentence(facts: dict[str, Any], sentence: str) -> None:
    nodes = [*(node(f"n{index}") for index in range(3)), node("n3", **facts)]
    *others, found = refusals(nodes)
    assert others == ["", "", ""]
    assert re.match(sentence, found)


def test_calm_clusters_of_mixed_machines_are_never_refused() -> None:
    rng = random.Random(0)
    for size in (1, 2, 3, 16, 1000):
        for _ in range(20):
            nodes = [
                node(
                    f"n{index}", memory_gb_s=rng.choice([20.0, 40.0, 60.0]) * rng.uniform(0.7, 1.0),
                    clock_offset_s=rng.gauss(0.0, 0.5), disk_mb_s=rng.uniform(1.0, 5000.0),
                    versions=versions() | {"torch": rng.choice(["2.7.0", "2.7.1"])},
                )
                for index in range(size)
            ]  # fmt: skip
            assert not any(refusals(nodes))


class Host:
    """A rendezvous host that hears of nodes, with a clock of 1000 s."""

    def __init__(self) -> None:
        self.state = RendezvousState(wall_clock_s=lambda: 1000.0)

    def report(self, connection: int, health: NodeHealth, time_s: float = 1000.0) -> dict[int, str]:
        """The refusals that are answered."""
        about = {"time_s": time_s, **vars(health)}
        self.state.receive(
            connection, {"t": "launcher", "token": f"t{connection}", "expected": 1, "health": about}, 0.0
        )
        found = list(self.state.clients.outbox)
        self.state.clients.outbox.clear()
        return {to: message["refused"] for to, message in found if message["t"] == "health"}


def test_the_host_compares_a_node_with_those_that_have_come() -> None:
    host = Host()
    assert host.report(0, node("n0")) == {0: ""}
    assert "n1 has torch 1.0" in host.report(1, node("n1", versions=versions() | {"torch": "1.0"}))[1]
    assert "n2 is -60 s off" in host.report(2, node("n2"), time_s=940.0)[2]
    assert host.report(3, node("n3", memory_gb_s=90.0)) == {3: ""}, "no one who trains suffers from a faster one"


def test_a_bad_node_that_came_first_is_refused_before_the_first_world_and_never_after() -> None:
    host = Host()
    host.report(0, node("n0", memory_gb_s=1.0))
    answers = host.report(1, node("n1"))
    assert answers[1] == ""
    assert "memory of node n0 moves 1.0 GB/s" in answers[0]
    assert host.report(2, node("n2")) == {2: ""}, "it has been told"

    nodes = {0: node("n0", memory_gb_s=1.0), 1: node("n1")}
    assert list(judged(nodes, 1, all_may_leave=True)) == [0, 1]
    assert list(judged(nodes, 1, all_may_leave=False)) == [1]


def test_machines_of_one_name_do_not_begin_a_run() -> None:
    host = Host()
    assert host.report(0, node("localhost")) == {0: ""}
    assert host.report(1, node("localhost")) == {1: ""}, "another launcher of it"
    refusal = host.report(2, node("localhost", boot="another"))[2]
    assert refusal.startswith("two machines are called localhost: give each a name of its own")
    for connection in (0, 1):
        host.state.disconnect(connection, 0.0)
    assert host.report(3, node("localhost", boot="another")) == {3: ""}


def test_a_node_that_has_left_is_not_compared() -> None:
    host = Host()
    host.report(0, node("n0", memory_gb_s=900.0))
    host.state.disconnect(0, 0.0)
    assert host.report(1, node("n1")) == {1: ""}


@pytest.mark.parametrize("wrong", [{"versions": {"torch": 1}}, {"memory_gb_s": "much"}, {"node": None}])
def test_a_malformed_report_ends_the_connection(wrong: Message) -> None:
    host = Host()
    with pytest.raises(WireError, match="malformed health"):
        host.report(0, replace(node(), **wrong))


@pytest.fixture
def served(tmp_path: Path) -> Any:
    with RendezvousServer(bind="127.0.0.1:0", secret_file=tmp_path / "secret") as host:
        yield host


def test_a_refused_machine_starts_no_worker_and_is_in_the_table(
    served: RendezvousServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = LauncherClient(served.address, served.secret_file, ElasticSettings(), health=node("good"))
    try:
        assert healthy.health is not None
        assert healthy.health.refused == ""
        slow = node("slow", memory_gb_s=0.5)
        monkeypatch.setattr(launcher, "check_node", lambda name, folder: slow)
        machine = ElasticLauncher(
            num_ranks=1, log_dir=tmp_path / "run" / "ranks", module="no.such.module", node="slow",
            rdzv_endpoint=str(served.address), secret_file=served.secret_file,
        )  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"the memory of node slow moves 0\.5 GB/s"):
            machine.run([])
    finally:
        healthy.close()
    train._run(["--health", str(tmp_path / "run")])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["node", "memory", "GB/s"]
    assert row.startswith("slow")
    assert "the memory of node slow moves 0.5 GB/s" in row


def test_this_machine_is_shown_and_other_words_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    train._run(["--health"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("ok")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match="--health takes the directory of a run or nothing, not a b"):
        train._run(["--health", "a", "b"])
    with pytest.raises(ConfigurationError, match="no node has left its health in none"):
        train._run(["--health", "none"])


def meet(rank: int, world_size: int, folder: str, wrong: str) -> str:
    made = replace(node(f"n{rank}"), memory_gb_s=1.0 if wrong == "slow" and rank == 2 else 20.0)

    def check(name: str, folder: Path) -> NodeHealth:
        if wrong == "computes" and rank == 1:
            raise ConfigurationError(f"node {name} computes wrong")
        return made

    health.check_node = check
    try:
        with pytest.warns(UserWarning, match="n2 moves") if rank == 0 and wrong == "slow" else nullcontext():
            check_fixed_nodes(None if rank == 3 else f"n{rank}", Path(folder), connect())
    except ConfigurationError as error:
        return str(error)
    return ""


def test_the_ranks_of_a_fixed_run_compare_their_nodes(tmp_path: Path) -> None:
    assert run_ranks(4, meet, str(tmp_path), "computes") == ["node n1 computes wrong"] * 4
    assert run_ranks(4, meet, str(tmp_path), "slow") == [""] * 4
    rows = read_health(tmp_path)
    assert [row.node for row in rows] == ["n0", "n1", "n2"]
    assert [bool(row.refused) for row in rows] == [False, False, True]
    assert all(abs(row.clock_offset_s or 0.0) < health.LARGEST_CLOCK_OFFSET_S for row in rows)
