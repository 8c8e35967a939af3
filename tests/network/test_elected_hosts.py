"""The rendezvous host is elected in etcd: its machine may be lost like any other, and a minority of etcd's."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.etcd import needs_etcd
from tests.network.conftest import PACE_S, RENDEZVOUS, STRANGER
from tests.network.hosts import Hosts, wait_for
from tests.network.trainings import BACK_S, CALM, END_S, GOES_ON_S, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_etcd]

Measured = Callable[[str, str], None]

ETCD = (RENDEZVOUS, "s", "t")
ELECTS_S = 2.0
"""Within which etcd has a leader of its own again, if that was cut off, too; from then on it keeps all leases for their
whole time.
"""


@pytest.fixture
def elected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A training on the hosts a, b and c that meet in etcd."""
    with Hosts("a", "b", "c", RENDEZVOUS, STRANGER, CALM) as hosts:
        folder = tmp_path_factory.mktemp("training")
        training = Training(hosts, folder, "abc", RENDEZVOUS, STRANGER, PACE_S, etcd=[RENDEZVOUS])
        training.begin()
        yield training


@pytest.fixture
def quorum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A training on the hosts a, b and c that meet in an etcd of three members on hosts of their own."""
    with Hosts("a", "b", "c", *ETCD, STRANGER, CALM) as hosts:
        folder = tmp_path_factory.mktemp("training")
        training = Training(hosts, folder, "abc", RENDEZVOUS, STRANGER, PACE_S, etcd=ETCD)
        training.begin()
        yield training


@pytest.mark.parametrize("how", ["killed", "power off", "cut off"])
def test_the_leaders_machine_is_lost(elected: Training, measured: Measured, how: str) -> None:
    lost = elected.leader()
    rest = [name for name in elected.members if name != lost]
    began = time.monotonic()
    match how:
        case "killed":
            elected.hosts[lost].signal(-1, signal.SIGKILL)
        case "power off":
            elected.hosts.power_off(lost)
        case "cut off":
            elected.hosts.cut(lost)
    wait_for(lambda: elected.leader() != lost, 60, elected.words)
    led = time.monotonic() - began
    elected.go_on(rest, timeout_s=60, size=2)
    pause = elected.pause(rest, began)
    measured(f"the others go on in {GOES_ON_S:g} s", f"{pause:.1f} s, another one leads after {led:.1f} s")
    assert pause <= GOES_ON_S
    assert elected.leader() in rest
    if how == "cut off":  # it waits for etcd before it forms a world of its own
        elected.assert_ends(lost, timeout_s=END_S + 10)
        assert {size for _, size in elected.worlds(lost)} == {3}
    elected.restore()
    elected.assert_losses()


def test_the_leader_is_stopped_and_comes_back(elected: Training, measured: Measured) -> None:
    """For longer than its lease: it leads no more, and no rank is evicted who makes no step."""
    lost = elected.leader()
    began = time.monotonic()
    elected.hosts.freeze(lost)
    time.sleep(3.5)
    elected.hosts.thaw(lost)
    elected.go_on(elected.members, timeout_s=BACK_S, size=3)
    pause = elected.pause(elected.members, began)
    measured("goes on when woken", f"{pause:.1f} s without a step, led by {elected.leader()} after {lost}")
    assert pause <= 3.5 + GOES_ON_S
    elected.assert_losses()


@pytest.mark.parametrize("away", [1, 2])
def test_members_of_etcd_are_cut_off(quorum: Training, measured: Measured, away: int) -> None:
    """Training goes on, and after a fault, too: at once beside a majority, else when there is one again."""
    began = time.monotonic()
    quorum.hosts.cut(*ETCD[:away])
    quorum.go_on(quorum.members, timeout_s=BACK_S, size=3, steps=40)
    pause = quorum.pause(quorum.members, began)
    able = time.monotonic()
    quorum.kill("b")
    if away == 2:
        time.sleep(10)
        able = time.monotonic()
        assert {size for _, size in quorum.worlds("a")} == {3}, "nobody forms a world without etcd"
        quorum.hosts.heal()
    quorum.go_on("ac", timeout_s=60)
    went_on = min(s.time for s in quorum.steps("a") if s.time > able and s.size == 2) - able
    measured(f"no step late by more than 1 s; goes on in {GOES_ON_S:g} s", f"{pause:.1f} s; {went_on:.1f} s")
    assert pause <= 1
    assert went_on <= GOES_ON_S
    quorum.restore()
    quorum.assert_losses()


@pytest.mark.parametrize("keeps", [True, False], ids=["etcd keeps its leader", "etcd elects one"])
@pytest.mark.parametrize("beside", [1, 2])
def test_the_leader_is_parted_from_the_others(
    quorum: Training, measured: Measured, beside: int, *, keeps: bool
) -> None:
    """With one or two members of etcd: the side of its majority goes on, the other one ends."""
    leader = quorum.leader()
    others = [name for name in quorum.members if name != leader]
    going, ending = (others, [leader]) if beside == 1 else ([leader], others)
    quorum.let_lead_etcd(ETCD[0] if keeps == (beside == 2) else ETCD[-1])
    assert quorum.leader() == leader
    began = time.monotonic()
    quorum.hosts.part([leader, *ETCD[:beside]], [*others, *ETCD[beside:]])
    quorum.go_on(going, timeout_s=60, size=len(going))
    pause = quorum.pause(going, began)
    sentences = {quorum.assert_ends(name, timeout_s=END_S + 10) for name in ending}
    limit_s = GOES_ON_S if keeps else GOES_ON_S + ELECTS_S
    goal = f"one side goes on in {limit_s:g} s, the other ends in {END_S:g} s"
    measured(goal, f"{pause:.1f} s, {max(quorum.ended_after(name, began) for name in ending):.1f} s with {sentences}")
    assert pause <= limit_s
    assert all({size for _, size in quorum.worlds(name)} == {3} for name in ending), "never two worlds"
    quorum.restore()
    quorum.assert_losses()
