"""The balancer's decisions, without ranks: when it plans, what it keeps, what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_lightning.balancing.cluster import Cluster, imbalance
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.forecast import AgreedSpeeds
from moe_lightning.balancing.packing import packed_placement
from moe_lightning.balancing.planner import FIRST_REBALANCE, BalancePlanner, BalancePolicy, State, merged
from moe_lightning.balancing.rules import PLACEMENT_RULES, SHADOW_POLICIES
from moe_lightning.callbacks import load_balancer, speeds
from moe_lightning.callbacks.calibration import CostMeter
from moe_lightning.callbacks.load_balancer import LoadBalancer, balanced_ranks, min_replicas
from moe_lightning.callbacks.speeds import OwnRates, SpeedFollower, SpeedPolicy
from moe_lightning.dispatch.placement import Placement, uniform_placement
from moe_lightning.dispatch.quota import balanced_quota
from moe_lightning.errors import ConfigurationError
from tests.unit.planning_references import rebalance

EXPERTS, RANKS, LAYERS = 8, 4, 2
COSTS = BlockCosts(
    row_bytes=100, weight_bytes=10_000, gradient_bytes=10_000, bytes_per_s=1e9, rows_per_s=1e6, transfer="direct"
)


CLUSTER = Cluster.of(RANKS, 3)


def make(cluster: Cluster = CLUSTER, first: Placement | None = None, **policy: Any) -> BalancePlanner:
    placements = [first or uniform_placement(EXPERTS, cluster.num_ranks)] * LAYERS
    return BalancePlanner(BalancePolicy(**policy), cluster, placements, [COSTS] * LAYERS)


STAGE = BalancePolicy(), CLUSTER, [uniform_placement(EXPERTS, RANKS)], [COSTS]
"""Arguments of a planner for one layer of several."""


def skewed(hot: int, tokens: int = 1000) -> np.ndarray:
    """Three quarters of every rank's tokens go to one expert."""
    table = np.full((EXPERTS, RANKS), tokens // (4 * EXPERTS), dtype=np.int64)
    table[hot] += 3 * tokens // 4
    return table


def observe(planner: BalancePlanner, table: np.ndarray) -> None:
    for layer in range(LAYERS):
        planner.observe(layer, table)


def test_placements_come_early_first_and_then_as_often_as_asked() -> None:
    planner = make(rebalance_every=20)
    due: list[int] = []
    for step in range(90):
        observe(planner, skewed(hot=len(due)))  # another expert becomes hot after every placement
        placements = rebalance(planner)
        if placements is not None:
            due.append(step + 1)
            planner.moved(placements)
    assert due == [8, 24, 44, 64, 84]
    assert due[0] == FIRST_REBALANCE


@settings(deadline=None, max_examples=20)
@given(hot=st.integers(0, EXPERTS - 1), rule=st.sampled_from([name for name in PLACEMENT_RULES if name != "plain"]))
def test_a_new_placement_relieves_the_busiest_rank(hot: int, rule: str) -> None:
    planner = make(rebalance_every=1, placement_rule=rule, shadows="none")
    observe(planner, skewed(hot))
    placements = rebalance(planner)
    load = skewed(hot).sum(axis=1)
    before = imbalance(balanced_quota(load, uniform_placement(EXPERTS, RANKS).replicas).sum(axis=0))
    for placement in placements:
        assert max(len(placement.experts_on(rank)) for rank in range(RANKS)) <= 3
        assert imbalance(balanced_quota(load, placement.replicas).sum(axis=0)) < before


@settings(deadline=None, max_examples=20)
@given(
    hot=st.integers(0, EXPERTS - 1),
    rule=st.sampled_from(["auto", "packed", "spread", "mro+"]),
    nodes=st.permutations([0, 0, 1, 1, 2, 2]),
)
def test_no_placement_takes_experts_from_nodes_that_recovery_relies_on(hot: int, rule: str, nodes: list[int]) -> None:
    """Nodes in any order, as ranks are by birth: experts that two nodes hold are on two nodes afterwards."""
    cluster = Cluster(node_of=tuple(nodes), slots_per_rank=4)
    first = packed_placement(np.ones(EXPERTS, dtype=np.int64), cluster, 2)
    planner = make(cluster, first, rebalance_every=1, placement_rule=rule, min_replicas=2, shadows="none")
    table = np.full((EXPERTS, 6), 10, dtype=np.int64)
    table[hot] = 700
    observe(planner, table)
    placements = rebalance(planner)
    planner.close()
    assume(placements is not None)  # rarely is the first placement the best one
    for placement in placements or ():
        assert cluster.missing_nodes(placement.pairs, 2) == 0


@pytest.mark.parametrize("rule", ["plain", "compact"])
def test_a_rule_that_leaves_experts_on_one_node_protects_none(rule: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"placement_rule={rule} leaves .* min_replicas=1 in LoadBalancer and F"
    ):
        BalancePolicy(placement_rule=rule, min_replicas=2).require_protection()
    BalancePolicy(placement_rule=rule, min_replicas=2, rebalance_every=0).require_protection()
    BalancePolicy(placement_rule=rule, min_replicas=1).require_protection()


def test_lost_protection_is_restored_though_nobody_is_busier() -> None:
    cluster = Cluster.of(RANKS, 4)
    planner = make(cluster, rebalance_every=1, min_replicas=2, shadows="none")
    observe(planner, np.full((EXPERTS, RANKS), 50))
    fresh = rebalance(planner)
    assert all(cluster.missing_nodes(placement.pairs, 2) == 0 for placement in fresh)
    planner.close()


class KnownNodes:
    """What the balancer asks a strategy for, on ranks whose nodes alternate."""

    def __init__(self, is_elastic: bool = False, promised: int = 1, nodes: tuple[int, ...] = (0, 1, 0, 1)) -> None:
        groups, experts = SimpleNamespace(groups=[range(4)]), SimpleNamespace(num_slots=3)
        layer = SimpleNamespace(num_experts=EXPERTS, dispatcher=groups, experts=experts)
        self.experts = SimpleNamespace(layers=[layer])
        self.shadow_dtype = None
        self.world = SimpleNamespace(size=4, nodes=nodes, stage=SimpleNamespace(size=4))
        stages = SimpleNamespace(layers=[layer], numbers=(0,), without_layers=[], nodes=tuple)
        self.state = SimpleNamespace(stages=stages)
        self.worlds = SimpleNamespace(is_elastic=is_elastic)
        self.placing = SimpleNamespace(promised_replicas=promised)


def test_failure_domains_are_the_nodes_of_the_run_and_not_consecutive_ranks() -> None:
    assert balanced_ranks(KnownNodes()).node_of == (0, 1, 0, 1)  # type: ignore[arg-type]


def test_the_balancer_promises_no_less_than_recovery() -> None:
    assert min_replicas(KnownNodes(), None) == 1  # type: ignore[arg-type]
    assert min_replicas(KnownNodes(promised=2), None) == 2  # type: ignore[arg-type]
    assert min_replicas(KnownNodes(promised=2), 3) == 3  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"min_replicas=1 would move .* min_replicas=2 .* use at least 2"):
        min_replicas(KnownNodes(promised=2), 1)  # type: ignore[arg-type]


class _Accepted(Exception):
    """The balancer goes on to plan."""


@pytest.mark.parametrize(
    ("nodes", "is_elastic", "is_refused"),
    [((0, 0, 1, 1), False, True), ((0, 0, 0, 0), True, True), ((0, 0, 0, 0), False, False)],
)
def test_a_rule_of_one_node_is_refused_where_there_are_or_may_be_several(
    nodes: tuple[int, ...], is_elastic: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accepted(*_: Any) -> None:
        raise _Accepted

    strategy: Any = KnownNodes(is_elastic, promised=2, nodes=nodes)
    monkeypatch.setattr(load_balancer, "own_strategy", lambda *_: strategy)
    monkeypatch.setattr(CostMeter, "begin", accepted)
    trainer: Any = SimpleNamespace()
    module: Any = SimpleNamespace(automatic_optimization=True)
    refusal = pytest.raises(ConfigurationError, match="placement_rule=compact leaves experts on one node")
    with refusal if is_refused else pytest.raises(_Accepted):
        LoadBalancer(placement_rule="compact", shadows="none").on_train_start(trainer, module)


def test_even_loads_move_nothing_and_need_no_shadows() -> None:
    planner = make(rebalance_every=1)
    for _ in range(5):
        observe(planner, np.full((EXPERTS, RANKS), 50))
        assert rebalance(planner) is None
    assert planner.step_plans() is None


def test_never_rebalancing() -> None:
    planner = make(rebalance_every=0)
    for _ in range(50):
        observe(planner, skewed(0))
        assert rebalance(planner) is None


@pytest.mark.parametrize("policy", sorted(SHADOW_POLICIES))
def test_every_policy_plans_for_the_placement_that_is(policy: str) -> None:
    planner = make(rebalance_every=1, shadows=policy)
    for step in range(6):
        observe(planner, skewed(step % 2))
        placements = rebalance(planner)
        if placements is not None:
            planner.moved(placements)
        plans = planner.step_plans()
        assert (plans is not None) or policy in ("none", "search") or placements is not None
        for plan, placement in zip(plans or [], planner._placements, strict=False):
            plan.check(placement)
        assert all(0 <= share <= 1 for share in planner.early_shares())


def test_the_search_pays_under_skew_and_keeps_what_is_good_enough() -> None:
    planner = make(rebalance_every=0)
    observe(planner, skewed(0))
    first = planner.plans[0]
    assert first.shadows[0].any()
    observe(planner, skewed(0))
    assert planner.plans[0] is first
    for _ in range(10):
        observe(planner, skewed(5))
    later = planner.plans[0]
    assert later.shadows[5].any()


def test_transfers_go_under_dense_layers_first() -> None:
    planner = make(rebalance_every=0)
    observe(planner, skewed(0))
    assert planner.early_shares() == [1.0, 1.0]
    planner.set_dense_times([1.0] * LAYERS, [0.0] * LAYERS)
    assert planner.early_shares() == [0.0, 0.0]


def test_the_forecast_is_judged_by_what_comes() -> None:
    planner = make()
    observe(planner, skewed(0))
    assert [decision.forecast_error for decision in planner.decisions] == [None, None]
    observe(planner, skewed(0))
    assert [decision.forecast_error for decision in planner.decisions] == [0.0, 0.0]
    observe(planner, skewed(1))
    assert planner.decisions[0].forecast_error == pytest.approx(0.75, abs=0.02)


def test_a_restart_plans_at_once_from_what_was_known() -> None:
    planner = make(rebalance_every=200)
    for _ in range(5):
        observe(planner, skewed(2))
    restarted = make(rebalance_every=200)
    restarted.load_state_dict(planner.state_dict())
    assert restarted.state_dict() == planner.state_dict()
    placements = rebalance(restarted)
    assert len(placements[0].holders(2)) > 1


def test_a_restart_may_begin_to_place_experts() -> None:
    planner = make(rebalance_every=0)
    observe(planner, skewed(2))
    restarted = make(rebalance_every=200)
    restarted.load_state_dict(planner.state_dict())
    due = []
    for _ in range(30):
        observe(restarted, skewed(2))
        due.append(restarted.due_placements() is not None)
    assert 1 <= sum(due) <= 3


def test_a_restart_on_other_ranks_takes_the_loads_only() -> None:
    planner = make()
    observe(planner, skewed(3))
    state = planner.state_dict()
    other = make(Cluster.of(2, 5))
    other.load_state_dict(state)
    assert other.state_dict()["layers"] == {n: own | {"average": None} for n, own in state["layers"].items()}
    foreign = BalancePlanner(BalancePolicy(), Cluster.of(2, 3), [uniform_placement(4, 2)] * LAYERS, [COSTS] * LAYERS)
    with pytest.raises(ConfigurationError, match="state is of 8 experts, but the model has 4: resume"):
        foreign.load_state_dict(state)


def of(**loads: int) -> State:
    layers = {number[1:]: {"load": [load], "average": None} for number, load in loads.items()}
    return {"layers": layers, "interval": 8, "num_layers": 4}


def test_of_each_layer_those_who_plan_for_it_are_believed() -> None:
    first, second, known = of(n0=10, n2=12), of(n1=11, n3=13), of(n0=1, n1=2, n2=3, n3=4)
    assert merged([first, known]) == of(n0=10, n1=2, n2=12, n3=4)
    assert merged([None, first, second, known, None]) == of(n0=10, n1=11, n2=12, n3=13)
    assert merged([first, of(n0=20) | {"interval": 16}]) == first
    assert merged([None, {}, known]) == known
    assert merged([None]) is None


def test_planners_of_stages_go_on_with_their_part_of_the_state() -> None:
    whole, numbers = make(), ([0], [1])
    observe(whole, skewed(3))
    state = whole.state_dict()
    parts = [BalancePlanner(*STAGE, numbers=own, num_layers=LAYERS) for own in numbers]
    for part, own in zip(parts, numbers, strict=True):
        part.load_state_dict(state)
        assert list(part.state_dict()["layers"]) == [*map(str, own)]
    assert merged([part.state_dict() for part in parts]) == state
    part = BalancePlanner(*STAGE, numbers=[0], num_layers=LAYERS)
    part.load_state_dict(parts[1].state_dict())  # of a layer that this one does not plan for
    assert not any(part.state_dict()["layers"]["0"]["load"])


def test_a_fit_knows_nothing_of_the_one_before() -> None:
    balancer = LoadBalancer()
    balancer.planner = make()
    balancer._costs.known = {0: balancer.planner.costs[0]}
    trainer: Any = None
    balancer.setup(trainer, trainer, "fit")
    state = of(n0=1)
    balancer.load_state_dict(state)
    assert balancer.state_dict() == state
    assert balancer._costs.known == {}


def test_the_state_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="of 4 MoE layers, but the model has 2: resume with"):
        make().load_state_dict(of(n0=1))


def test_dense_times_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the first steps."""
    sent: list[Any] = []
    monkeypatch.setattr(speeds, "all_gather_json", lambda own, world: sent.append(own[2]) or [own, own])
    follower = object.__new__(SpeedFollower)
    follower._policy, follower._rates, follower._steps, follower.dense_s = SpeedPolicy(), OwnRates(), 0, []
    follower._clock = SimpleNamespace(  # type: ignore[assignment]
        end_step=lambda: None, rates=lambda: [(1.0, 1.0)], dense_times=lambda: ([1.0], [2.0])
    )
    follower._strategy = SimpleNamespace(world=None)  # type: ignore[assignment]
    follower.experts, follower.samples = AgreedSpeeds([0, 0], None), AgreedSpeeds([0, 0], None)
    follower._slow_for = np.zeros(2, dtype=np.int64)
    agreed = [(step, follower.dense_s) for step in range(1, 40) if follower.end_step() or follower.dense_s]
    assert agreed == [(9, [[1.0], [2.0]])]
    assert len(sent) == 5
    assert [each for each in sent if each] == [([1.0], [2.0])]


def test_each_rank_that_stays_slow_is_asked_to_leave_in_turn() -> None:
    """Not only in the step in which it has been slow for long enough, in which another one may be slower."""
    gone: list[int] = []
    follower = object.__new__(SpeedFollower)
    follower._policy = SpeedPolicy(stragglers="evict")
    elastic = SimpleNamespace(request_departure=lambda rank, reason: gone.append(rank) or True)
    follower._strategy = SimpleNamespace(elastic=elastic)  # type: ignore[assignment]
    follower._slow_for = np.zeros(5, dtype=np.int64)
    for step in range(45):
        speeds = np.array([100, 100, 100, 60, 50]) if step < 25 else np.array([100, 100, 100, 60, 100])
        follower.experts = follower.samples = SimpleNamespace(speeds=speeds)  # type: ignore[assignment]
        follower._look_after_stragglers()
    assert gone == [4, 3]
