"""CONTRIBUTING.md: files and tests that it names are there, and its recipe for a placement rule works as written."""

from __future__ import annotations

import re

import numpy as np
import pytest

from moe_lightning.arrays import IntArray
from moe_lightning.balancing.cluster import Cluster
from moe_lightning.balancing.replica_placement import NODE_RULES
from moe_lightning.balancing.rules import PLACEMENT_RULES, NodeRule, PlacementPolicy
from moe_lightning.checkpoint.protection import PROTECTIONS
from moe_lightning.checkpoint.storage import STORAGES
from moe_lightning.dispatch.dispatcher import DISPATCH_BACKENDS
from moe_lightning.dispatch.placement import Placement
from moe_lightning.elastic.membership import MEMBERSHIPS
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.router import ROUTERS
from moe_lightning.strategies.dense_sharding import DENSE_SHARDINGS
from tests.documented import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| \[([^\]]+)\]\(#([\w-]+)\) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)

LISTED = r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| `\w+` of"


def test_every_change_has_its_row_and_its_recipe() -> None:
    headings = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert [heading.lower() for heading in headings] == [change for change, *_ in ROWS]
    assert all(anchor == change.replace(" ", "-") for change, anchor, *_ in ROWS)


def test_what_the_page_names_is_there() -> None:
    names = re.findall(r"`((?:moe_lightning|tests|conf)/[\w./-]+)`", PAGE)
    assert len(names) > 40
    assert [name for name in names if not (ROOT / name).exists()] == []
    code = {word for path in (ROOT / "moe_lightning").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    words = re.findall(r"`([A-Z]\w+|[a-z]+_[a-z_]+)(?:\.\w+)?`", PAGE)
    assert [word for word in words if word not in code] == []


LOAD = np.array([40, 10, 10, 10, 20, 10])
CLUSTER = Cluster(node_of=(0, 1, 2), slots_per_rank=3)


def hottest_first(load: IntArray, cluster: Cluster, min_replicas: int) -> Placement:
    """A rule as the recipe's first step describes it: it decides in integers and keeps to the slots."""
    replicas = np.zeros((len(load), len(cluster.node_of)), dtype=np.int64)
    for turn, expert in enumerate(np.argsort(-load, kind="stable")):
        replicas[expert, turn % len(cluster.node_of)] = 1
    return Placement(replicas=replicas)


def assert_lawful(rule: str) -> None:
    """No rank has more experts than slots, and every expert is somewhere."""
    replicas = PlacementPolicy(rule=rule).place(LOAD, CLUSTER).replicas
    assert (replicas.sum(axis=0) <= CLUSTER.slots_per_rank).all()
    assert (replicas.sum(axis=1) >= 1).all()


def test_a_placement_rule_as_in_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="hottest_first"):
        PlacementPolicy(rule="hottest_first")  # the second step, a name, is forgotten
    monkeypatch.setattr(PLACEMENT_RULES, "_members", dict(PLACEMENT_RULES._members))
    PLACEMENT_RULES.register("hottest_first")(hottest_first)
    assert_lawful("hottest_first")
    placed = PlacementPolicy(rule="hottest_first").place(LOAD, CLUSTER)
    assert placed.replicas.tolist() == hottest_first(LOAD, CLUSTER, 1).replicas.tolist()


def test_users_read_the_names_of_all_parts() -> None:
    table = (ROOT / "docs" / "extending.md").read_text()
    listed = {kind: {*re.findall(r"`([^`]+)`", names)} for kind, names in re.findall(LISTED, table, re.MULTILINE)}
    registries = {
        "router": ROUTERS,
        "placement rule": PLACEMENT_RULES,
        "dispatch backend": DISPATCH_BACKENDS,
        "dense sharding": DENSE_SHARDINGS,
        "protection of snapshots": PROTECTIONS,
        "storage of checkpoints": STORAGES,
        "membership": MEMBERSHIPS,
    }
    assert listed == {kind: {*registry._own} for kind, registry in registries.items()}


def test_a_rule_that_breaks_the_law_of_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACEMENT_RULES, "_members", dict(PLACEMENT_RULES._members))
    everywhere = Placement(replicas=np.ones((len(LOAD), 3), dtype=np.int64))
    PLACEMENT_RULES.register("everywhere")(lambda load, cluster, min_replicas: everywhere)
    with pytest.raises(ConfigurationError, match="slots"):
        PlacementPolicy(rule="everywhere").place(LOAD, CLUSTER)


def test_a_rule_of_nodes_is_an_entry_and_a_name() -> None:
    assert {name for name in PLACEMENT_RULES if isinstance(PLACEMENT_RULES[name], NodeRule)} == set(NODE_RULES)
