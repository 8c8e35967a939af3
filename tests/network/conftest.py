"""Trainings on hosts, shared by the tests of a module, and the table of what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.etcd import needs_etcd
from tests.network.hosts import Hosts, why_not
from tests.network.trainings import CALM, Training

RENDEZVOUS, STRANGER = "r", "stranger"
PACE_S = 0.25
_LAST_BEGIN = 150  # steps after which a test gets a new training
_FAILED = pytest.StashKey[bool]()
_ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


class Shared:
    """One training at a time for the tests of a module, as starting it is what takes long. A test finds all members in
    one world on a calm network, far from the last step whose loss is compared; one that fails takes the training with
    it.
    """

    def __init__(self, folders: Callable[[], Path]) -> None:
        self._folders = folders
        self._stack = contextlib.ExitStack()
        self._training: Training | None = None

    def take(self, members: str, rendezvous: str = RENDEZVOUS, *, uses_etcd: bool = False) -> Training:
        """The training with these members, restored or started."""
        training = self._training
        if training is not None and self._serves(training, members, rendezvous, uses_etcd):
            training.restore()
            return training
        self.drop()
        hosts = self._stack.enter_context(Hosts(*dict.fromkeys([*members, rendezvous, STRANGER, CALM])))
        etcd = [rendezvous] if uses_etcd else []
        training = Training(hosts, self._folders(), list(members), rendezvous, STRANGER, PACE_S, etcd=etcd)
        training.begin()
        self._training = training
        return training

    @staticmethod
    def _serves(training: Training, members: str, rendezvous: str, uses_etcd: bool) -> bool:
        made = (training.members, training.rendezvous, bool(training.etcd))
        return made == (list(members), rendezvous, uses_etcd) and training.newest() < _LAST_BEGIN

    def drop(self) -> None:
        """End it as it is."""
        self._training = None
        self._stack.close()


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_had() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(lambda: tmp_path_factory.mktemp("training"))
    try:
        yield shared
    finally:
        shared.drop()


@pytest.fixture(scope="module", params=["rendezvous_host", pytest.param("etcd", marks=needs_etcd)])
def uses_etcd(request: pytest.FixtureRequest) -> bool:
    """True if the launchers elect the rendezvous host in etcd, which runs in its place."""
    return bool(request.param == "etcd")


@pytest.fixture
def three(request: pytest.FixtureRequest, _shared: Shared, uses_etcd: bool) -> Iterator[Training]:
    """A training on the hosts a, b and c."""
    yield from _lent(request, _shared, "abc", uses_etcd=uses_etcd)


@pytest.fixture
def four(request: pytest.FixtureRequest, _shared: Shared, uses_etcd: bool) -> Iterator[Training]:
    """A training on the hosts a, b, c and d."""
    yield from _lent(request, _shared, "abcd", uses_etcd=uses_etcd)


@pytest.fixture
def apart(request: pytest.FixtureRequest, _shared: Shared, uses_etcd: bool) -> Iterator[Training]:
    """A training on the hosts a, b and c, whose rendezvous host is on a."""
    yield from _lent(request, _shared, "abc", "a", uses_etcd=uses_etcd)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Adds a goal and what was measured to the table that is printed at the end."""
    rows = request.config.stash.setdefault(_ROWS, [])
    return lambda goal, value: rows.append((request.node.name.removeprefix("test_"), goal, value))


def _lent(
    request: pytest.FixtureRequest, shared: Shared, members: str, rendezvous: str = RENDEZVOUS, *, uses_etcd: bool
) -> Iterator[Training]:
    try:
        training = shared.take(members, rendezvous, uses_etcd=uses_etcd)
    except BaseException:
        shared.drop()
        raise
    yield training
    if request.node.stash.get(_FAILED, True):
        shared.drop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section("networks that break")
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        for name, goal, value in rows:
            terminalreporter.write_line(f"{name:<{widths[0]}}  {goal:<{widths[1]}}  {value}")
