"""One thread for each test process, fast tests first, the same examples in every run, and nothing that a test leaves to
the next one: no launcher's variables, no process, no port, no snapshots. Workers of one run share no temporary folder.

`pytest --hypothesis-profile=explore` looks for examples that the fixed ones do not show.
"""

import contextlib
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.forks import FORKS, PRELOADED, claim_processes
from tests.races import rerun_known_races

if TYPE_CHECKING:
    from tests.object_stores import Faults

claim_processes()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ["WANDB__DISABLE_STATS"] = "true"  # by a process that outlives the training's by seconds

# How long examples take to make says how busy the machine is.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("fixed")

_ORDER = ("unit", "distributed", "integration", "chaos")
_LAUNCHED = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_LARGE = ("sympy", "scipy.stats", "matplotlib.pyplot")
"""Modules that Lightning imports, but not torch."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a fresh environment two workers compile the same modules side by side: let the second one begin with others,
    and with the last test, which the first one then finds, as it finds the first one's.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        gc.disable()
        asked = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
        tests = {test for path in asked for test in (path.rglob("test_*.py") if path.is_dir() else [path])}
        for name in (*_LARGE, *(_module(test) for test in sorted(tests, reverse=True))):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports it
                importlib.import_module(name)


def _module(test: Path) -> str:
    """Return the name by which the collection imports a file."""
    return ".".join(test.relative_to(Path(__file__).parents[1]).with_suffix("").parts)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Do not make the slow cases of a run that leaves them out: they are nearly half of all."""
    if metafunc.config.option.markexpr != "not slow":
        return
    function = metafunc.definition
    for index, mark in enumerate(function.own_markers):
        if mark.name == "parametrize" and not isinstance(mark.kwargs.get("ids"), list | tuple):
            names, values = mark.args[0], list(mark.args[1])
            kept = [v for v in values if all(m.name != "slow" for m in getattr(v, "marks", ()))]
            if function.get_closest_marker("slow"):
                kept = []
            function.own_markers[index] = pytest.mark.parametrize(names, kept or values[:1], **mark.kwargs).mark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder: pure parts, ranks, commands, kills; inside one the order stays as it is."""
    rerun_known_races(items)
    items.sort(key=lambda item: next((i for i, name in enumerate(_ORDER) if name in item.path.parts), -1))


def pytest_collectstart() -> None:
    """Leave garbage collection out of imports: what they make stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take modules and tests out of garbage collection, because every Trainer that ends collects all that is left; let
    the server of forks import all that ours need, whatever the modules of tests have set."""
    import torch  # not in the process that only hands tests to others

    torch.set_num_threads(1)  # the ranks of a distributed test share the machine's few cores
    if "lightning.fabric" in sys.modules:
        importlib.import_module("tests.entry_points")
    FORKS.set_forkserver_preload(PRELOADED)
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)  # most of what a test makes dies with it


def pytest_unconfigure() -> None:
    """Collect them after all: extension modules report as leaked what is left at the end of the process."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _not_launched() -> Iterator[None]:
    """A Trainer in the test's own process sets variables by which a later one would take itself for a launched rank,
    and a rank at which warnings are silent.
    """
    before = {name: os.environ.get(name) for name in _LAUNCHED}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    rank_zero = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if rank_zero is not None:
        rank_zero.rank_zero_only.rank = 0


@pytest.fixture(scope="session", autouse=True)
def _this_workers_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For all that asks for one: runs of one user meet, and sweep, in a folder there."""
    tmp_path_factory.getbasetemp()  # stays where it is, to be looked into afterwards
    get_temp_dir()  # multiprocessing removes it by itself, after this one
    temporary = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    with temporary as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        patch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture(scope="session", autouse=True)
def _yaml_in_c() -> Iterator[None]:
    """Hydra reads sixteen files for each composition, half of its time in Python's parser; commands that are forked
    keep that one."""
    import yaml

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        yield


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """Of an S3 server."""
    from tests.object_stores import s3_server  # few tests need what it imports

    with s3_server() as port:
        yield port


@pytest.fixture
def faults(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Faults]":
    """Of a proxy before that server, which the test and its processes speak to."""
    from tests.object_stores import faulty_s3

    with faulty_s3(s3_port, monkeypatch) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _nothing_left(_this_workers_temporary_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests of a module end what they start."""
    if sys.platform != "linux":
        yield
        return
    from tests.leftovers import Leftovers  # it imports torch

    leftovers = Leftovers(_this_workers_temporary_folder, tmp_path_factory.getbasetemp())
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # its service is meant to live as long as the process
    found = leftovers.wait_for_none()
    assert not found, "left behind:\n" + "\n".join(found)
