"""Trainings on hosts, shared by the tests of a module, and the table of what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.network.hosts import Hosts, why_not
from tests.network.trainings import CALM, Training

RENDEZVOUS, STRANGER = "r", "stranger"
PACE_S = 0.15
_FAILED = pytest.StashKey[bool]()
_ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


class Shared:
    """One training for all tests of a module, as starting it is what takes long. A test finds all members in one world
    on a calm network; one that fails takes the training with it.
    """

    def __init__(self, members: str, folders: Callable[[], Path]) -> None:
        self._members, self._folders = members, folders
        self._stack = contextlib.ExitStack()
        self._training: Training | None = None

    def take(self) -> Training:
        """The training, restored or started."""
        if self._training is not None:
            self._training.restore()
            return self._training
        hosts = self._stack.enter_context(Hosts(*self._members, RENDEZVOUS, STRANGER, CALM))
        training = Training(hosts, self._folders(), list(self._members), RENDEZVOUS, STRANGER, PACE_S)
        training.begin()
        self._training = training
        return training

    def drop(self) -> None:
        """End it as it is."""
        self._training = None
        self._stack.close()


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_had() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    yield from _shared("abc", tmp_path_factory)


@pytest.fixture(scope="module")
def _four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    yield from _shared("abcd", tmp_path_factory)


@pytest.fixture
def three(request: pytest.FixtureRequest, _three: Shared) -> Iterator[Training]:
    """A training on the hosts a, b and c."""
    yield from _lent(request, _three)


@pytest.fixture
def four(request: pytest.FixtureRequest, _four: Shared) -> Iterator[Training]:
    """A training on the hosts a, b, c and d."""
    yield from _lent(request, _four)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Training]:
    """A training on the hosts a, b and c, whose rendezvous host is on a."""
    with Hosts(*"abc", STRANGER, CALM) as hosts:
        training = Training(hosts, tmp_path, list("abc"), "a", STRANGER, PACE_S)
        training.begin()
        yield training


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Adds a goal and what was measured to the table that is printed at the end."""
    rows = request.config.stash.setdefault(_ROWS, [])
    return lambda goal, value: rows.append((request.node.name.removeprefix("test_"), goal, value))


def _shared(members: str, factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(members, lambda: factory.mktemp("training"))
    try:
        yield shared
    finally:
        shared.drop()


def _lent(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Training]:
    try:
        training = shared.take()
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
