"""Run Lightning's own tests with our strategy, and compare each outcome with that under stock Lightning:

    python -m tests.lightning_suite.run --source CHECKOUT_OF_LIGHTNING [--ranks 2] [--select trainer/test_trainer.py]

`--ranks 2` runs two processes in lockstep, each of which runs every test; stock is then DDPStrategy over the two. The
exit code is 1 where a test fails under ours only, and `expected_differences.toml` does not say why.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lightning_suite import OPTIONS

HERE = Path(__file__).parent
TESTS = Path("tests") / "tests_pytorch"
_BAD = ("failed", "hung", "crashed")


@dataclass
class Outcomes:
    """What became of each test.

    Attributes:
        of: test id -> the worst outcome of all ranks.
        texts: test id -> the failure's text.
    """

    of: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, test: str, outcome: str, text: str = "") -> None:
        """The worst one stays, and the first failure's text."""
        order = ("skipped", "passed", *_BAD)
        before = self.of.get(test)
        if before is None or order.index(outcome) > order.index(before):
            self.of[test] = outcome
        if outcome in _BAD:
            self.texts.setdefault(test, text)

    def failed(self, test: str) -> bool:
        return self.of.get(test) in _BAD


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An entry of `expected_differences.toml`."""

    tests: str
    reason: str
    error: str = ""
    ranks: int | None = None

    def explains(self, test: str, text: str, ranks: int) -> bool:
        is_meant = self.ranks in (None, ranks) and fnmatch.fnmatchcase(test, self.tests)
        return is_meant and " ".join(self.error.split()) in " ".join(text.split())


class Rank:
    """One process that runs tests when it is told to."""

    def __init__(self, folder: Path, source: Path, rank: int, options: Mapping[str, Any], log: Any) -> None:
        told, asked = os.pipe(), os.pipe()
        given = {**options, "rank": rank, "told": told[1], "asked": asked[0]}
        place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0}
        place |= {"WORLD_SIZE": options["ranks"], "LOCAL_WORLD_SIZE": options["ranks"], "MASTER_ADDR": "127.0.0.1"}
        # The folder's name keeps the tmp_path of a test the same on all ranks.
        environment = {**os.environ, OPTIONS: json.dumps(given), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        if options["ranks"] > 1:
            environment |= {key: str(value) for key, value in place.items()} | {"TORCHELASTIC_RUN_ID": "suite"}
        paths = [str(HERE.parent.parent), str(source / "tests"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.lightning_suite.plugin", "-p", "no:cacheprovider",
            "-p", "no:xdist", "-p", "no:rerunfailures", f"--basetemp={folder / f'rank{rank}'}",
            "--continue-on-collection-errors", f"--rootdir={source / 'tests'}", *options["select"],
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=source / "tests", env=environment, pass_fds=(told[1], asked[0]), stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        os.close(told[1])
        os.close(asked[0])
        self.told, self.asked = told[0], os.fdopen(asked[1], "w")
        self.ready: str | None = None
        self._begun = b""

    def heard(self) -> list[dict[str, Any]] | None:
        """Whole lines of what it has told since; None: it has ended."""
        read = os.read(self.told, 1 << 16)
        *lines, self._begun = (self._begun + read).split(b"\n")
        return [json.loads(line) for line in lines] if read else None

    def go(self, port: int) -> None:
        self.ready = None
        self.asked.write(json.dumps({"port": port}) + "\n")
        self.asked.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()
        os.close(self.told)
        with suppress(BrokenPipeError):
            self.asked.close()


class Suite:
    """All tests under one strategy.

    Args:
        source: a checkout of Lightning.
        strategy: "stock" or "ours".
        ranks: processes in lockstep.
        timeout_s: longest time of a test, or of the collection.
        select: paths or ids below tests_pytorch; empty: all.
        log: where what pytest prints goes.
    """

    def __init__(
        self, source: Path, strategy: str, *, ranks: int, timeout_s: float, select: Sequence[str], log: Path
    ) -> None:
        self.source, self.ranks, self.timeout_s, self.log = source, ranks, timeout_s, log
        chosen = [str(TESTS.relative_to("tests") / name) for name in select] or [str(TESTS.relative_to("tests"))]
        self.options = {"ranks": ranks, "strategy": strategy, "select": chosen}
        self.outcomes = Outcomes()
        self._left: list[str] | None = None

    def run(self) -> Outcomes:
        """Go on in new processes after a test that crashed or hung, with those that are left."""
        while self._left is None or self._left:
            before = self._left
            self._run_processes()
            if self._left is None or self._left == before:
                raise SystemExit(f"pytest collected nothing in {self.source / TESTS}: see {self.log}")
        return self.outcomes

    def _run_processes(self) -> None:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            log = stack.enter_context(self.log.open("a"))
            options = self.options | {"tests": self._left, "folder": str(folder / "shared")}
            ranks = [Rank(folder, self.source, rank, options, log) for rank in range(self.ranks)]
            for rank in ranks:
                stack.callback(rank.end)
            selector = stack.enter_context(selectors.DefaultSelector())
            for rank in ranks:
                selector.register(rank.told, selectors.EVENT_READ, rank)
            self._follow(ranks, selector)

    def _follow(self, ranks: Sequence[Rank], selector: selectors.BaseSelector) -> None:
        running, began = None, time.monotonic()
        while True:
            events = selector.select(timeout=max(0.0, began + self.timeout_s - time.monotonic()))
            if not events:
                self._give_up(running, "hung")
                return
            for key, _ in events:
                heard = key.data.heard()
                if heard is None:  # at its last test, or in the running one
                    self._give_up(running, "crashed")
                    return
                for told in heard:
                    self._take(key.data, told)
            waiting = {rank.ready for rank in ranks}
            if None not in waiting:
                if len(waiting) > 1:
                    raise SystemExit(f"the ranks run other tests: {sorted(map(str, waiting))}")
                running, began = waiting.pop(), time.monotonic()
                port = _free_port()
                for rank in ranks:
                    rank.go(port)
            elif running is not None and self._left is not None and running not in self._left:
                running = None

    def _take(self, rank: Rank, told: Mapping[str, Any]) -> None:
        if "collected" in told:
            self._left = list(told["collected"])
        elif "ready" in told:
            rank.ready = told["ready"]
        elif "test" in told:
            self.outcomes.add(told["test"], told["outcome"], told["text"])
        elif self._left is not None and told["finished"] in self._left:
            self._left.remove(told["finished"])

    def _give_up(self, running: str | None, outcome: str) -> None:
        if running is not None and self._left is not None and running in self._left:
            self.outcomes.add(running, outcome, outcome)
            self._left.remove(running)
        elif self._left:
            raise SystemExit(f"pytest ended between tests: see {self.log}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def read_differences(path: Path) -> list[Difference]:
    """The entries of a file as `expected_differences.toml`."""
    return [Difference(**entry) for entry in tomllib.loads(path.read_text()).get("difference", [])]


def report(stock: Outcomes, ours: Outcomes, expected: Sequence[Difference], ranks: int) -> tuple[list[str], bool]:
    """Lines of a table, and whether every failure under ours is one of stock's or explained."""
    both, explained, unknown, used = [], [], [], set[Difference]()
    for test in (test for test in ours.of if ours.failed(test)):
        text = ours.texts.get(test, "")
        if stock.failed(test):
            both.append(test)
        elif entry := next((d for d in expected if d.explains(test, text, ranks)), None):
            used.add(entry)
            explained.append((test, entry.reason))
        else:
            unknown.append((test, text))
    stale = [d for d in expected if d not in used and d.ranks in (None, ranks)]
    counts = {
        "passed": sum(outcome == "passed" for outcome in ours.of.values()),
        "skipped": sum(outcome == "skipped" for outcome in ours.of.values()),
        "failed on stock, too": len(both),
        "expected differences": len(explained),
        "unknown failures": len(unknown),
        "passed on ours only": sum(stock.failed(t) and outcome == "passed" for t, outcome in ours.of.items()),
        "stale expectations": len(stale),
    }
    lines = [f"{name:22}{count:6}" for name, count in counts.items()]
    lines += [f"expected: {test}: {reason}" for test, reason in explained]
    lines += [f"stale: {d.tests} {d.error!r}: no failure meets it: {d.reason}" for d in stale]
    lines += [f"UNKNOWN: {test}: {' '.join(text.split())[:200]}" for test, text in unknown]
    return lines, not unknown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Lightning's repository")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--select", nargs="*", default=[], help="paths below tests_pytorch; default: all")
    parser.add_argument("--timeout_s", type=float, default=180.0, help="longest time of a test")
    parser.add_argument("--expected", type=Path, default=HERE / "expected_differences.toml")
    parser.add_argument("--log", type=Path, default=Path("lightning_suite.log"), help="what pytest prints goes here")
    given = parser.parse_args(arguments)
    if not (given.source / TESTS).is_dir():
        print(
            f"{given.source} has no {TESTS}: give a checkout of https://github.com/Lightning-AI/pytorch-lightning at "
            "the installed version (packages of Lightning have no tests)", file=sys.stderr,
        )  # fmt: skip
        return 2
    how: dict[str, Any] = {"ranks": given.ranks, "timeout_s": given.timeout_s, "select": given.select, "log": given.log}
    stock, ours = (Suite(given.source.resolve(), strategy, **how).run() for strategy in ("stock", "ours"))
    lines, is_good = report(stock, ours, read_differences(given.expected), given.ranks)
    print("\n".join(lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
