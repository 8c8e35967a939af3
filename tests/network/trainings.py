"""An elastic training on hosts: one launcher each, a rendezvous host, a shared folder, and what its diaries tell."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.elastic.protocol import Address, create_secret
from tests.network.hosts import Hosts, Process, wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("script.py")
PORT = 29510
CALM = "calm"
"""The host of the run that nobody disturbs."""
SILENCE_S = 5.0
"""Of `ElasticSettings`, which the launchers are started with."""
GOES_ON_S = SILENCE_S + 1.0
"""Within which those that can go on have made the next step after a fault."""
END_S = 60.0
"""Within which a host that cannot go on has ended, by its own clock."""
BACK_S = 180.0
"""Within which a process that was started again is in the world; that is no goal: a busy machine imports slowly."""
TOLERANCE = 1e-5
COMPARED_STEPS = 450
"""Losses are compared so far. Soon after, two experts are so close for some token that the rounding of sums, which
depends on the number of ranks, decides between them; from there on runs differ, disturbed or not.
"""
_START_S = 240.0
_REFERENCE_S = 240.0
_USUAL = 20
_ASK = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], sys.argv[2].encode()).read().decode())"
"""Asks etcd on a host, in a moment: a client of ours would import torch."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of a diary.

    Attributes:
        step: optimizer steps done.
        loss: of the global batch.
        size, rank: of the world, and of the worker in it.
        world: its name.
        time: `time.monotonic()` at the step's end; hosts of one machine share that clock.
        pid: of the worker, on its host.
    """

    step: int
    loss: float
    size: int
    rank: int
    world: str
    time: float
    pid: int


@dataclass
class Training:
    """One run.

    Args:
        hosts: of the bench.
        folder: that all hosts share.
        members: hosts with a launcher and one rank each.
        rendezvous: the host of the rendezvous host.
        stranger: a host that has no part in it.
        pace_s: that each step takes at least.
        settings: of the elastic run that differ from their defaults.
        etcd: hosts of a cluster of etcd, where the launchers elect the rendezvous host; none for one on `rendezvous`.

    Attributes:
        launchers: the newest of each member.
        launches: how many were started.
        services: the newest rendezvous host or member of etcd of each host that has one.
    """

    hosts: Hosts
    folder: Path
    members: Sequence[str]
    rendezvous: str
    stranger: str
    pace_s: float = 0.05
    settings: Mapping[str, object] = field(default_factory=dict)
    etcd: Sequence[str] = ()
    launchers: dict[str, Process] = field(default_factory=dict)
    services: dict[str, Process] = field(default_factory=dict)
    launches: int = 0
    _reference: Process | None = None

    @property
    def rdzv_endpoint(self) -> str:
        """Where members meet."""
        if self.etcd:
            return ",".join(f"http://{self.hosts.address(name)}:{PORT}" for name in self.etcd)
        return f"{self.hosts.address(self.rendezvous)}:{PORT}"

    @property
    def secret_file(self) -> Path:
        return self.folder / "secret"

    def begin(self) -> None:
        """Start everything, and wait until all members have made some steps together and saved a checkpoint: more may
        be lost at once than replicas cover.
        """
        self.pace(self.pace_s)
        self.serve()
        for name in self.members:
            self.launch(name)
        self.reach(5, self.members, timeout_s=_START_S, size=len(self.members))
        wait_for(lambda: checkpoints(self.folder / "checkpoints"), _START_S, self.words, poll_s=0.2)

    def serve(self) -> None:
        """Start the rendezvous host or the members of etcd that do not run, and wait until they say something."""
        create_secret(self.secret_file)
        started = []
        for name in self.etcd or [self.rendezvous]:
            if (former := self.services.get(name)) is not None and former.poll() is None:
                continue
            output = self.folder / f"rendezvous-{name}-{time.monotonic_ns()}"
            started.append(self.start_on(name, self._service_command(name), output))
            self.services[name] = started[-1]
        wait_for(lambda: all(service.text() or service.poll() is not None for service in started), _START_S)
        for service in started:
            assert service.poll() is None, service.text()

    def _service_command(self, name: str) -> list[str]:
        if not self.etcd:
            command = [sys.executable, "-m", "moe_lightning.elastic.rendezvous_host", "--bind", self.rdzv_endpoint]
            return [*command, "--secret-file", str(self.secret_file)]
        peers = {other: f"http://{self.hosts.address(other)}:{PORT + 1}" for other in self.etcd}
        clients = f"http://{self.hosts.address(name)}:{PORT}"
        return [
            *("etcd", "--name", name, "--data-dir", str(self.folder / f"etcd-{name}")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers[name], "--initial-advertise-peer-urls", peers[name]),
            *("--initial-cluster", ",".join(f"{other}={peer}" for other, peer in peers.items())),
        ]

    def launch(self, name: str) -> Process:
        """Start the launcher of a host, for the first time or again."""
        self.launches += 1
        command = self.launcher_command(name, secret_file=self.secret_file)
        self.launchers[name] = self.start_on(name, command, self.folder / f"output-{name}-{self.launches}")
        return self.launchers[name]

    def launcher_command(self, name: str, *, secret_file: Path) -> list[str]:
        """What is run on a host to take part."""
        command = [sys.executable, "-m", "moe_lightning.elastic.run", "--ranks", "1"]
        command += ["--num-nodes", str(len(self.members))]
        command += ["--rdzv-endpoint", self.rdzv_endpoint, "--secret-file", str(secret_file), "--node", name]
        command += ["--log-dir", str(self.folder / f"logs-{name}-{self.launches}")]
        if self.etcd:
            command += ["--set", "membership=etcd", "--rdzv-id", "run"]
        for setting, value in self.settings.items():
            command += ["--set", f"{setting}={value}"]
        return [*command, str(SCRIPT), str(self.folder)]

    def start_on(self, name: str, command: Sequence[str], output: Path) -> Process:
        """Run something on a host."""
        return self.hosts[name].start(command, output=output, folder=self.folder, environment=environment())

    def leader(self) -> str:
        """The host whose launcher hosts the rendezvous."""
        key = base64.b64encode(b"/moe-lightning/run/leader").decode()
        answer = self._ask_etcd(self.rendezvous, "kv/range", {"key": key})
        address = Address.parse(json.loads(base64.b64decode(answer["kvs"][0]["value"]))["address"])
        return next(name for name in self.members if self.hosts.address(name) == address.host)

    def let_lead_etcd(self, name: str) -> None:
        """Make a member of etcd the leader of its cluster."""
        status = {member: self._ask_etcd(member, "maintenance/status", {}) for member in self.etcd}
        ids = {member: answer["header"]["member_id"] for member, answer in status.items()}
        former = next(member for member in self.etcd if ids[member] == status[name]["leader"])
        if former != name:
            self._ask_etcd(former, "maintenance/transfer-leadership", {"targetID": ids[name]})

    def _ask_etcd(self, name: str, path: str, question: Mapping[str, str]) -> dict[str, Any]:
        """The answer of a member of etcd, which is asked on its host."""
        url = f"http://{self.hosts.address(name)}:{PORT}/v3/{path}"
        return cast(
            "dict[str, Any]", json.loads(self._said(name, [sys.executable, "-c", _ASK, url, json.dumps(question)]))
        )

    def kill(self, name: str) -> None:
        """Kill the worker of a host."""
        self.hosts[name].signal(self.last(name).pid, signal.SIGKILL)

    def beside(self, *arguments: str) -> Path:
        """Run the same training under plain torchrun on the same hosts, too, once for each kind; its folder, which is
        steered as that of the run is.

        Args:
            arguments: for the script: "--ddp" for stock DDP instead of the same strategy.
        """
        folder = self.folder / "-".join(["torchrun", *arguments])
        if not folder.exists():
            folder.mkdir()
            port = 29600 + len(arguments)
            rendezvous = ["--master-addr", self.hosts.address(self.members[0]), "--master-port", str(port)]
            for rank, name in enumerate(self.members):
                command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.members))]
                command += ["--nproc-per-node", "1", "--node-rank", str(rank), *rendezvous]
                command += [str(SCRIPT), str(folder), *arguments]
                self.start_on(name, command, folder / f"output-{name}")
            diaries = [folder / f"diary-{name}.jsonl" for name in self.members]
            wait_for(lambda: all(len(steps_in(diary)) > 5 for diary in diaries), _START_S, poll_s=0.2)
        return folder

    def pace(self, seconds: float) -> None:
        """Let every step take at least so long."""
        set_pace(self.folder, seconds)

    def restore(self) -> None:
        """A calm network, everything started that has ended, and all members in one world."""
        self.hosts.calm()
        self.pace(self.pace_s)
        for host in self.hosts:
            if host.name != CALM:
                if host.is_off:
                    self.hosts.power_on(host.name)
                self.hosts.thaw(host.name)
        self.serve()
        for name in self.members:
            if self.launchers[name].poll() is not None:
                self.launch(name)
        self.go_on(self.members, timeout_s=_START_S, steps=5, size=len(self.members))

    # ------------------------------------------------------------------ what the diaries tell

    def steps(self, name: str) -> list[Step]:
        """All that a host has made."""
        return steps_in(self.folder / f"diary-{name}.jsonl")

    def last(self, name: str) -> Step:
        """The newest that a host has made."""
        return self.steps(name)[-1]

    def newest(self) -> int:
        """The highest number of a step that any host has made."""
        return self.newest_of(self.members)

    def reach(self, step: int, names: Collection[str], *, timeout_s: float, size: int | None = None) -> float:
        """Wait until hosts have made a step, in a world of a size if that is given; the seconds it took."""

        def reached() -> bool:
            self.assert_alive(names)
            return all(
                any(s.step >= step and size in (None, s.size) for s in reversed(self.steps(name))) for name in names
            )

        return wait_for(reached, timeout_s, self.words, poll_s=0.1)

    def go_on(self, names: Collection[str], *, timeout_s: float, steps: int = 10, size: int | None = None) -> float:
        """Wait until hosts have made some more steps, from what any has made by now; the seconds it took."""
        return self.reach(self.newest() + steps, names, timeout_s=timeout_s, size=size)

    def pause(self, names: Collection[str], since: float) -> float:
        """The longest time without a step on any of these hosts from `since` on, see `longest_pause`."""
        return max(longest_pause([s.time for s in self.steps(name)], since) for name in names)

    def newest_of(self, names: Collection[str]) -> int:
        """The highest number of a step that some hosts have made."""
        return max((steps[-1].step for name in names if (steps := self.steps(name))), default=0)

    def worlds_since(self, name: str, since: float) -> list[str]:
        """Names of the worlds in which a host has made steps, from the one at `since` on."""
        steps = self.steps(name)
        before = [s for s in steps if s.time <= since][-1:]
        return list(dict.fromkeys(s.world for s in [*before, *(s for s in steps if s.time > since)]))

    def by_rank(self) -> list[str]:
        """The members in the order of their ranks."""
        return sorted(self.members, key=lambda name: self.last(name).rank)

    def worlds(self, name: str) -> list[tuple[str, int]]:
        """(name, size) of the worlds in which a host has made steps, in order."""
        return list(dict.fromkeys((s.world, s.size) for s in self.steps(name)))

    # ------------------------------------------------------------------ how it ends

    def assert_alive(self, names: Collection[str]) -> None:
        for name in names:
            code = self.launchers[name].poll()
            assert code is None, f"{name} has ended with {code}: {self.words()}"

    def finish(self, names: Collection[str] | None = None, *, timeout_s: float = 60.0) -> None:
        """End the training, and expect that it ends well on these hosts with the losses of a calm run."""
        names = self.members if names is None else names
        end = self.newest() + 10
        _replace(self.folder / "end", str(end))
        self.pace(0.0)
        for name in names:
            assert self.launchers[name].wait(timeout_s) == 0, self.words()
        assert all(self.last(name).step >= end for name in names), self.words()
        self.assert_losses()

    def assert_losses(self) -> float:
        """Every step up to COMPARED_STEPS, by whomever and however often made, has the loss of the calm run; the worst
        deviation.
        """
        made = [step for name in self.members for step in self.steps(name) if step.step <= COMPARED_STEPS]
        newest = max(step.step for step in made)
        wanted = self.reference(newest)
        missing = set(range(1, newest + 1)) - {step.step for step in made}
        assert not missing, f"nobody made the steps {sorted(missing)}"
        worst = max(abs(step.loss - wanted[step.step]) for step in made)
        assert worst <= TOLERANCE, [s for s in made if abs(s.loss - wanted[s.step]) > TOLERANCE][:5]
        return worst

    def assert_ends(self, name: str, *, timeout_s: float = END_S) -> str:
        """A host that cannot go on ends with one sentence and an exit code of a failure; the sentence."""
        code = self.launchers[name].wait(timeout_s)
        text = self.launchers[name].text()
        assert code in (1, 2), f"{name} ended with {code}: {text[-3000:]}"
        assert "Traceback" not in text, text[-5000:]
        sentences = [line for line in text.splitlines() if line.startswith("elastic: error: ")]
        assert len(sentences) == 1, text[-3000:]
        return sentences[0]

    def reference(self, steps: int) -> Mapping[int, float]:
        """step -> loss of a run alone on a host that nobody disturbs, for at least so many steps; it stands still
        until more are asked for.
        """
        host = self.hosts[CALM]
        if self._reference is None:
            folder = self.folder / CALM
            folder.mkdir()
            command = [sys.executable, str(SCRIPT), str(folder)]
            self._reference = host.start(command, output=folder / "output", environment=environment())
        else:
            self._reference.send(signal.SIGCONT)
        diary = self.folder / CALM / f"diary-{CALM}.jsonl"
        wait_for(lambda: len(steps_in(diary)) >= steps, _REFERENCE_S, self._reference.tail, poll_s=0.2)
        self._reference.send(signal.SIGSTOP)
        return {step.step: step.loss for step in steps_in(diary)}

    def ended_after(self, name: str, since: float) -> float:
        """Seconds from `since` to the end of a launcher."""
        ended_at = self.launchers[name].ended_at
        assert ended_at is not None
        return ended_at - since

    # ------------------------------------------------------------------ what strangers see

    def ports(self) -> list[str]:
        """Every address that somebody listens at on any host, of UDP with `udp:` in front; loopback left out."""
        found = set()
        for name in {*self.members, self.rendezvous}:
            for kind, prefix in (("-Hltn", ""), ("-Hlun", "udp:")):
                for line in self._said(name, ["ss", kind]).splitlines():
                    host, _, port = line.split()[3].rpartition(":")
                    if not host.startswith("127."):
                        found.add(f"{prefix}{self.hosts.address(name)}:{port}")
        return sorted(found)

    def workers(self, name: str) -> int:
        """How many workers of a host are connected to their launcher."""
        return self._said(name, ["ss", "-Hx", "state", "established"]).count("/socket ")

    def descriptors(self) -> dict[str, int]:
        """host -> the most descriptors that a process on it has open."""
        command = ["bash", "-c", "for p in /proc/[0-9]*; do ls $p/fd 2>/dev/null | wc -l; done"]
        names = {*self.members, self.rendezvous}
        return {name: max(map(int, self._said(name, command).split())) for name in sorted(names)}

    def _said(self, name: str, command: Sequence[str]) -> str:
        """What a command prints on a host."""
        process = self.start_on(name, command, self.folder / f"said-{time.monotonic_ns()}")
        assert process.wait(30) == 0, process.text()
        return process.text()

    def words(self) -> str:
        """What all launchers and workers have said last."""
        files = [p for p in self.folder.rglob("*") if p.name.startswith(("output-", "rank", "rendezvous-"))]
        ends = {name: self.launchers[name].poll() for name in self.launchers}
        said = [f"--- {p.relative_to(self.folder)}: {p.read_text(errors='replace')[-400:]}" for p in sorted(files)]
        made = {name: self.worlds(name) for name in self.members}
        return "\n".join([f"newest step {self.newest()}, exit codes {ends}, worlds {made}", *said])


def set_pace(folder: Path, seconds: float) -> None:
    """Let every step of a training take at least so long."""
    _replace(folder / "pace", str(seconds))


def steps_in(diary: Path) -> list[Step]:
    """What a diary holds; the last line may be cut off by a kill."""
    lines = diary.read_text().splitlines(keepends=True) if diary.exists() else []
    return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]


def longest_pause(times: Sequence[float], since: float) -> float:
    """The longest time between two steps of which the later is after `since`, less the longest of the last ones before.

    Args:
        times: at which steps ended; ascending.
    """
    pauses = [(later, later - earlier) for earlier, later in pairwise(times)]
    usual = [pause for later, pause in pauses if later <= since][-_USUAL:]
    return max(0.0, max(pause for later, pause in pauses if later > since) - max(usual, default=0.0))


def environment(**more: str) -> dict[str, str]:
    """What processes on hosts are started with."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTEST_"))}
    return {**ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)
