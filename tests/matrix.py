"""The slow matrix: every case marked slow, in parts of at most an hour, with one table at the end. Further seeds of
random tests, marked soak, are left to `pytest -m soak`.

    python -m tests.matrix --part 1/4 --results slow.jsonl     # the same command again runs what is missing
    python -m tests.matrix --table --results slow.jsonl        # of all parts; --record keeps the durations

Parts are cut by the durations in `matrix_seconds.json` (seconds of a case, by file). A part ends after `--minutes`,
whatever the durations were, and after a crash it goes on behind the case that crashed.

Each line of the results is a JSON object: the cases of a part, the start or the outcome of a case, or the wall time
of a run. Results of parts that ran on several machines are joined by `cat`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = Path(__file__).with_name("matrix_seconds.json")
OUTCOMES = ("passed", "failed", "skipped")
_UNKNOWN_S = 10.0
"""Estimate for a case of a file that has not been recorded."""
_JOB = "MOE_LIGHTNING_MATRIX"
"""Variable with the `Job` of a run of pytest."""
_CRASHES = 20
"""Crashes of the whole test process after which a part gives up."""


def estimate(case: str, seconds: Mapping[str, float]) -> float:
    return seconds.get(case.partition("::")[0], _UNKNOWN_S)


def cut(cases: Sequence[str], parts: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Cut cases into parts of equal estimated duration.

    Cases of a file stay together, because they share fixtures, unless they are more than a quarter of a part.
    """
    most = sum(estimate(case, seconds) for case in cases) / parts / 4
    blocks: list[list[str]] = []
    lengths: list[float] = []
    for case in cases:
        longer = estimate(case, seconds)
        same_file = blocks and blocks[-1][0].partition("::")[0] == case.partition("::")[0]
        if not same_file or lengths[-1] + longer > most:
            blocks.append([])
            lengths.append(0.0)
        blocks[-1].append(case)
        lengths[-1] += longer
    found: list[list[str]] = [[] for _ in range(parts)]
    totals = [0.0] * parts
    for index in sorted(range(len(blocks)), key=lambda i: (-lengths[i], i)):
        part = totals.index(min(totals))
        found[part] += blocks[index]
        totals[part] += lengths[index]
    order = {case: i for i, case in enumerate(cases)}
    return [sorted(part, key=order.__getitem__) for part in found]


# --- Inside pytest, which loads this file as a plug-in.


@dataclass(frozen=True)
class Job:
    """Request to a run of pytest.

    Args:
        collected: file that gets the names of all cases, which are not run.
        wanted: file with the names of the cases to run.
        results: file to which a line for each of them is added.
        part: name that those lines carry.
        until: time.time() after which no further case begins.
    """

    collected: str = ""
    wanted: str = ""
    results: str = ""
    part: str = ""
    until: float = 0.0


class Recorder:
    """Plug-in that runs the wanted cases and writes down each outcome as soon as it is known.

    With xdist the workers select and stop, and the process that distributes the cases writes.
    """

    def __init__(self, job: Job, is_worker: bool) -> None:
        self._job, self._is_worker = job, is_worker
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._job.collected:
            Path(self._job.collected).write_text(json.dumps([item.nodeid for item in items]))
            return
        wanted = set(json.loads(Path(self._job.wanted).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"part": self._job.part, "started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports[report.nodeid].append(report)
        if report.when == "teardown":
            self._write({"part": self._job.part, "case": report.nodeid, **outcome(self._reports.pop(report.nodeid))})

    def pytest_runtest_logfinish(self) -> None:
        if time.time() > self._job.until and self._session is not None:
            self._session.shouldstop = "the time of this part is over"

    _session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._job.results and not self._is_worker:
            append(Path(self._job.results), line)


def outcome(reports: Sequence[pytest.TestReport]) -> dict[str, Any]:
    """Outcome, seconds and first line of the error of a case, from the reports of its phases."""
    last = [report for report in reports if report.outcome != "rerun"]
    failed = next((report for report in last if report.failed), None)
    skipped = any(report.skipped for report in last)
    crash = getattr(getattr(failed, "longrepr", None), "reprcrash", None)
    message = str(crash.message if crash else failed.longrepr) if failed else ""
    return {
        "outcome": "failed" if failed else "skipped" if skipped else "passed",
        "seconds": round(sum(report.duration for report in reports), 2),
        "message": next(iter(message.strip().splitlines()), "")[:300],
        "reruns": sum(report.outcome == "rerun" for report in reports),
    }


def pytest_configure(config: pytest.Config) -> None:
    if _JOB in os.environ:
        config.pluginmanager.register(Recorder(Job(**json.loads(os.environ[_JOB])), hasattr(config, "workerinput")))


# --- Outside of it.


def run_pytest(job: Job, *arguments: str, is_quiet: bool = False) -> int:
    # -m overrides that of pyproject.toml: the last one counts.
    command = [sys.executable, "-m", "pytest", "-p", "tests.matrix", "-m", "slow and not soak", *arguments]
    out = subprocess.DEVNULL if is_quiet else None
    return subprocess.run(command, cwd=ROOT, env=os.environ | {_JOB: json.dumps(vars(job))}, stdout=out).returncode


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@dataclass
class Part:
    """What is known of a part: its cases, the outcomes so far, cases that began, and seconds spent."""

    cases: list[str] = field(default_factory=list)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    wall_s: float = 0.0

    @property
    def missing(self) -> list[str]:
        return [case for case in self.cases if case not in self.outcomes]

    def count(self, outcome: str) -> int:
        return sum(self.outcomes[case]["outcome"] == outcome for case in self.cases if case in self.outcomes)


def read(path: Path) -> dict[str, Part]:
    """Parts by name. A last line that a crash has cut short is dropped."""
    parts: dict[str, Part] = defaultdict(Part)
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        part = parts[line["part"]]
        if "cases" in line:
            part.cases = line["cases"]
        elif "started" in line:
            part.started.add(line["started"])
        elif "case" in line:
            part.outcomes[line["case"]] = line
        else:
            part.wall_s += line["wall_s"]
    return dict(sorted(parts.items(), key=lambda item: [int(n) for n in item[0].split("/")]))


def collect(*arguments: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")
        code = run_pytest(Job(collected=str(names)), "--collect-only", *arguments, is_quiet=True)
        if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise SystemExit("the tests cannot be collected: pytest --collect-only -m slow says why")
        return [str(name) for name in json.loads(names.read_text())]


def run_part(name: str, results: Path, minutes: float, seconds: Mapping[str, float], arguments: Sequence[str]) -> None:
    """Run the cases of a part that have no outcome yet."""
    number, of = map(int, name.split("/"))
    cases = cut(collect(*[a for a in arguments if not a.startswith("-n")]), of, seconds)[number - 1]
    append(results, {"part": name, "cases": cases})
    work_s = sum(estimate(case, seconds) for case in cases)
    print(f"part {name}: {len(cases)} cases, about {work_s / 60:.0f} minutes of one process", flush=True)
    until = time.time() + 60 * minutes
    for _ in range(_CRASHES):
        before = read(results)[name]
        if not before.missing:
            break
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder, "wanted")
            wanted.write_text(json.dumps(before.missing))
            began = time.monotonic()
            code = run_pytest(Job(wanted=str(wanted), results=str(results), part=name, until=until), *arguments)
            append(results, {"part": name, "wall_s": round(time.monotonic() - began, 1)})
        after = read(results)[name]
        if code in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR) or code == -2:
            break  # time is over, Ctrl-C, or nothing that another try would change
        if len(after.missing) == len(before.missing) and not after.started - before.started:
            break
        for case in after.missing:
            if case in after.started:
                message = f"the test process ended with {code} in it"
                append(results, {"part": name, "case": case, "outcome": "failed", "seconds": 0.0, "message": message})


def table(parts: Mapping[str, Part]) -> str:
    """One row for each part, then each failure with the first line of its error."""
    heads = ("part", "cases", *OUTCOMES, "not run", "time")
    counts = {name: [len(p.cases), *map(p.count, OUTCOMES), len(p.missing), int(p.wall_s)] for name, p in parts.items()}
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    texts = [heads, *((name, *c[:-1], f"{c[-1] // 60} min {c[-1] % 60:02} s") for name, c in counts.items())]
    widths = [max(len(str(row[i])) for row in texts) for i in range(len(heads))]
    lines = ["  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    for name, part in parts.items():
        for case in part.cases:
            found = part.outcomes.get(case, {})
            if found.get("outcome") == "failed":
                lines.append(f"FAILED {name} {case}: {found['message']}")
            elif found.get("reruns"):
                lines.append(f"RERUN {name} {case}: {found['outcome']} in run {found['reruns'] + 1}")
    return "\n".join(lines)


def record(parts: Mapping[str, Part]) -> dict[str, float]:
    """Mean seconds of a case, by file."""
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts.values():
        for case, line in part.outcomes.items():
            if line["outcome"] != "skipped":
                found[case.partition("::")[0]].append(line["seconds"])
    return {file: round(sum(seconds) / len(seconds), 2) for file, seconds in sorted(found.items())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--results", type=Path, required=True, help="file of the outcomes; what it has is not run again"
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--part", help="run part K of N: K/N")
    action.add_argument("--table", action="store_true", help="print one table of all parts")
    action.add_argument("--record", action="store_true", help=f"keep the durations in {SECONDS.name}")
    parser.add_argument("--minutes", type=float, default=54.0, help="no case begins after them (%(default)s)")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --; -n 2 unless given")
    given = parser.parse_args(arguments)
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    if given.part:
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", given.part)
        if match is None or int(match[1]) > int(match[2]):
            parser.error(f"--part {given.part}: give K/N with 1 <= K <= N, for example 1/4")
        others = {name.partition("/")[2] for name in read(given.results)} - {match[2]}
        if others:
            parser.error(f"--part {given.part}: {given.results} has parts of {', '.join(others)}: give another file")
        chosen = given.pytest if any(argument.startswith("-n") for argument in given.pytest) else ["-n2", *given.pytest]
        run_part(given.part, given.results.absolute(), given.minutes, known, chosen)
    parts = read(given.results)
    if not parts:
        parser.error(f"--results {given.results}: no results in it: run a part first, for example --part 1/4")
    if given.record:
        SECONDS.write_text(json.dumps(known | record(parts), indent=2, sort_keys=True) + "\n")
        return 0
    print(table(parts))
    wanted = [parts[given.part]] if given.part else list(parts.values())
    return int(any(bool(part.missing) or part.count("failed") > 0 for part in wanted))


if __name__ == "__main__":
    sys.exit(main())
