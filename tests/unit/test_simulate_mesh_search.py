"""The search over meshes against trying each of them by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from moe_lightning.errors import ConfigurationError
from moe_lightning.simulate.event_loop import simulate
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.mesh import DENSE, MeshSpec
from moe_lightning.simulate.mesh_search import ROOM, search_mesh
from moe_lightning.simulate.scenario import Scenario, model_of
from tests.unit.simulated import scenario, small_hardware, small_workload

NODES, PER_NODE = 2, 4
CALM = Failures(kind="none")


def _scenario(*, failures: Failures = CALM, memory_bytes: float = 24e9, **changes: Any) -> Scenario:
    sizes: dict[str, Any] = {"num_layers": 4, "depth": 4, "num_heads": 4, "kv_heads": 2, "dense_blocks": 1}
    work = small_workload(**(sizes | {"embedding_params": 500_000, "rank_batch": 4} | changes))
    hardware = replace(small_hardware(), ranks_per_node=PER_NODE, memory_bytes=memory_bytes, link_bytes_per_s=1e9)
    return scenario(failures=failures, workload=work, hardware=hardware, nodes=NODES, slots=None)


def _brute_force(run: Scenario) -> tuple[float, int]:
    """Shortest step, and how many meshes fit: every combination of every value there could be, on its own."""
    sizes, best, fitting = (1, 2, 4, 8), float("inf"), 0
    flags = (False, True)
    for pp, cp, tp, dense, micro, chunks, redo in product(sizes, sizes, sizes, DENSE, range(1, 33), (1, 2, 4), flags):
        if micro & (micro - 1) or 8 % (pp * cp * tp) or (chunks > 1 and pp == 1):
            continue
        mesh = MeshSpec(pp=pp, cp=cp, tp=tp, dense=dense, micro_batches=micro, chunks=chunks, recompute=redo)
        try:
            model = model_of(replace(run, mesh=mesh))
        except ConfigurationError:
            continue
        if model.memory().total <= ROOM * run.hardware.memory_bytes:
            fitting += 1
            best = min(best, model.cost(NODES, 0, 0).step_s)
    return best, fitting


@pytest.mark.parametrize(("memory_bytes", "context_length"), [(24e9, 64), (0.8e9, 2048)])
def test_the_best_is_that_of_trying_all(memory_bytes: float, context_length: int) -> None:
    run = _scenario(memory_bytes=memory_bytes, context_length=context_length)
    found = search_mesh(run)
    best_s, fitting = _brute_force(run)
    assert found.best[0].step.step_s == best_s == model_of(replace(run, mesh=found.mesh)).cost(NODES, 0, 0).step_s
    assert found.fitting == fitting
    assert [each.step.step_s for each in found.best] == sorted(each.step.step_s for each in found.best)
    assert all(each.memory.total <= ROOM * memory_bytes for each in found.best)
    assert all(each.memory == model_of(replace(run, mesh=each.mesh)).memory() for each in found.best)


def test_what_is_fixed_stays() -> None:
    found = search_mesh(_scenario(), {"tp": 2, "dense": "hsdp", "shard_size": 2, "recompute": True})
    assert {(each.mesh.tp, each.mesh.dense, each.mesh.shard_size, each.mesh.recompute) for each in found.best} == {
        (2, "hsdp", 2, True)
    }
    assert search_mesh(_scenario(tied=True)).mesh.pp == 1
    uneven = search_mesh(_scenario(rank_batch=None, global_batch=31, num_heads=1), {"tp": 1, "cp": 1, "pp": 1})
    assert {each.mesh.micro_batches for each in uneven.best} == {1}


def test_failures_decide_by_goodput() -> None:
    run = _scenario(failures=Failures(kind="exponential", node_mtbf_hours=0.5, repair_s=600.0), memory_bytes=24e9)
    found = search_mesh(run)
    goodput = [simulate(replace(run, mesh=each.mesh)).goodput for each in found.best]
    assert goodput == [each.report.goodput for each in found.best if each.report]
    assert goodput == sorted(goodput, reverse=True)
    assert "samples/s" in found.table()


def test_says_why_others_do_not_fit() -> None:
    found = search_mesh(_scenario(memory_bytes=0.8e9))
    assert f"{found.fitting} meshes fit, {sum(found.refused.values())} need more than the 720 MB" in found.sentence()
    assert found.table().splitlines()[-1] == found.sentence()
    assert "all " in search_mesh(_scenario(memory_bytes=1e15)).sentence()
    with pytest.raises(
        ConfigurationError, match=r"none of \d+ meshes of nodes=2 fits the 90 MB .* add nodes, or lower"
    ):
        search_mesh(_scenario(memory_bytes=1e8))
    with pytest.raises(ConfigurationError, match="no mesh divides the 8 ranks of nodes=2"):
        search_mesh(_scenario(), {"pp": 3})


def test_of_steps_alike_the_simplest_mesh_is_chosen() -> None:
    found = search_mesh(_scenario())
    shortest = min(candidate.step.step_s for candidate in found.best)
    assert found.best[0].step.step_s <= 1.01 * shortest
    alike = [candidate for candidate in found.best if candidate.rank[:2] == found.best[0].rank[:2]]
    assert found.best[0] == min(alike, key=lambda candidate: candidate.mesh.unit)
