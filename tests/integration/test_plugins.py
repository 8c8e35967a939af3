"""The examples of the page on extending, installed as a package, train and plan; mistakes are sentences."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from moe_lightning import FaultRecovery, LoadBalancer, MoELayer, PartialExpertsCheckpoint, RouterConfig
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.rules import PlacementPolicy
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.protection import PROTECTIONS, protected_by
from moe_lightning.checkpoint.storage import place_of
from moe_lightning.cli import sim
from moe_lightning.elastic.membership import MEMBERSHIPS, ElasticTask
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies import ExpertParallelStrategy
from tests.commands import SMALL_MODEL, WORDS, users_environment, write_words
from tests.documented import ROOT, blocks
from tests.plugins import install

PAGE = ROOT / "docs" / "extending.md"
STEPS = 12
SMALL = (
    "ranks=2", "logger=csv", *WORDS, "data.val_samples=4", *SMALL_MODEL,
    f"trainer.max_steps={STEPS}", f"trainer.val_check_interval={STEPS}", "trainer.log_every_n_steps=1",
    "callbacks.partial_experts_checkpoint.every_n_steps=4", "callbacks.load_balancer.rebalance_every=4",
    "callbacks.load_balancer.calibrate=false",
)  # fmt: skip


def examples() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Entry points by kind, and the sources of the modules."""
    (project,) = blocks(PAGE, "toml")
    groups = tomllib.loads(project)["project"]["entry-points"]
    entries = {group.removeprefix("moe_lightning."): parts for group, parts in groups.items()}
    sources = {code.splitlines()[0].removeprefix("# ").removesuffix(".py"): code for code in blocks(PAGE, "python")}
    return entries, sources


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, dict[str, str]]:
    entries, sources = examples()
    install(tmp_path / "parts", monkeypatch, entries, **sources)
    return entries


def test_examples_are_short_and_complete() -> None:
    entries, sources = examples()
    assert {value.split(":")[0] for parts in entries.values() for value in parts.values()} == set(sources)
    assert all(len(source.splitlines()) <= 45 for source in sources.values())


@pytest.mark.slow
def test_one_of_each_trains(installed: Mapping[str, dict[str, str]], tmp_path: Path) -> None:
    (command,) = (block for block in blocks(PAGE, "text") if block.startswith("moe-train"))
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    told = " ".join(arguments)
    assert all(any(f"={name}" in told for name in parts) for parts in installed.values())
    run_name = f"plugins-{os.getpid()}"
    arguments = [argument.replace("sqlite://trials/", f"sqlite://{run_name}/") for argument in arguments]
    database = Path.home() / f"{run_name}.sqlite"
    write_words(tmp_path, 2000)
    try:
        with (tmp_path / "log").open("w") as log:  # a file, as a persist agent outlives the command for a while
            code = subprocess.run(
                [sys.executable, "-m", "moe_lightning.cli.train", *arguments, *SMALL, f"run_name={run_name}"],
                cwd=tmp_path,
                env=users_environment(),
                stdout=log,
                stderr=log,
                timeout=200,
                check=False,
            ).returncode
        assert code == 0, (tmp_path / "log").read_text()
        assert checkpoints(place_of(f"sqlite://{run_name}/first"))[0][1].step == STEPS
    finally:
        database.unlink(missing_ok=True)
        for path in Path("/dev/shm").glob(f"moe-lightning-{run_name}-*"):
            shutil.rmtree(path, ignore_errors=True)
    (table,) = tmp_path.glob(f"outputs/{run_name}/csv/*/metrics.csv")
    losses = [float(row["train/loss"]) for row in csv.DictReader(table.open()) if row.get("train/loss")]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


def test_rules_plan(installed: Mapping[str, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    load = np.array([1, 50, 2, 3])
    placement = PlacementPolicy(rule="hottest").place(load, Cluster.of(2, 3))
    assert placement.replicas.tolist() == [[1, 0], [1, 1], [1, 1], [0, 1]]
    assert protected_by(PROTECTIONS["next_node"], [0, 0, 1], 1).holders == ((2,), (2,), (0,))
    parts = ["policy.placement=hottest", "policy.protection=next_node", "policy.memory_interval_steps=1"]
    sim.main(["model=moe_gpt_s", "nodes=8", "hours=0.1", "failures.node_mtbf_hours=1", *parts])
    assert "samples" in capsys.readouterr().out


def test_membership_joins(installed: Mapping[str, dict[str, str]], tmp_path: Path) -> None:
    worlds = []
    for slot in range(2):
        task = ElasticTask(address="none", secret_file=str(tmp_path / "secret"), node="one", slot=slot, expected=2)
        worlds.append(MEMBERSHIPS.make("fixed", task, 1).join())
    assert [world.rank for world in worlds] == [0, 1]
    assert worlds[0].ids == worlds[1].ids
    assert worlds[0].nodes == ("one", "one")


WRONG = """
import numpy as np
from moe_lightning.dispatch.placement import Placement

def crowded(load, cluster, min_replicas):
    return Placement(replicas=np.ones((len(load), cluster.num_ranks), dtype=int))

def listed(load, cluster, min_replicas):
    return [[1]]

def at_home(node_of, failures):
    from moe_lightning.checkpoint.protection import ProtectionLayout
    return ProtectionLayout(method="at_home", node_of=tuple(node_of), holders=((0,), (0,)))

def two(load, cluster): pass

def store(scheme):
    return object()

class Half:
    def __init__(self, d_model, num_experts, config, /, *, init_std, bias, selection_bias): pass
"""


def test_mistakes_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "placement": {name: f"wrong:{name}" for name in ("crowded", "listed", "two", "gone")},
        "protection": {"at_home": "wrong:at_home"},
        "router": {"half": "wrong:Half"},
        "dispatch": {"broken": "wrong_syntax:part"},
        "dense": {"in_turn": "nowhere:part"},
        "storage": {"empty": "wrong:store"},
    }
    install(tmp_path, monkeypatch, entries, wrong=WRONG, wrong_syntax="def part(:")
    with pytest.raises(
        ConfigurationError, match=r"placement_rule='croded' is not a known .* \(did you mean 'crowded'\?\)"
    ):
        LoadBalancer(placement_rule="croded")
    with pytest.raises(ConfigurationError, match="placement_rule='gone' cannot be imported from wrong:gone"):
        LoadBalancer(placement_rule="gone")
    with pytest.raises(ConfigurationError, match=r"placement_rule='two', wrong:two, has other arg.*\(load, clus"):
        LoadBalancer(placement_rule="two")
    cluster, load = Cluster.of(2, 1), np.ones(2, dtype=np.int64)
    with pytest.raises(ConfigurationError, match="crowded put 2 experts on rank 0, which has 1 slots"):
        PlacementPolicy(rule="crowded").place(load, cluster)
    with pytest.raises(ConfigurationError, match=r"listed returned a list where a Placement of \(2, 2\)"):
        PlacementPolicy(rule="listed").place(load, cluster)
    with pytest.raises(
        ConfigurationError, match=r"protection='at_house' is not a known protection \(did you mean 'at_home'"
    ):
        FaultRecovery(protection="at_house")
    with pytest.raises(ConfigurationError, match="keeps the snapshot of rank 0 on rank 0, which fails with it"):
        protected_by(PROTECTIONS["at_home"], [0, 1], 1)
    with pytest.raises(ConfigurationError, match="name='harf' is not a known router: use one of linear, half"):
        RouterConfig(name="harf")
    with pytest.raises(ConfigurationError, match=r"the router 'half' makes a Half, which lacks .*config.* TokenRouter"):
        MoELayer(4, 8, 2, {"name": "half", "top_k": 1})
    with pytest.raises(ConfigurationError, match=r"dispatch='broken' cannot be imported from wrong_syntax:part \(Synt"):
        ExpertParallelStrategy(dispatch="broken")
    with pytest.raises(ConfigurationError, match="dense='in_turn' cannot be imported from nowhere:part"):
        ExpertParallelStrategy(dense="in_turn")
    with pytest.raises(ConfigurationError, match=r"the storage 'empty' makes a object, which lacks .* Storage names"):
        PartialExpertsCheckpoint("empty://x/y")
