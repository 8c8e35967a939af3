"""The cost of a change of the world: its groups are those of a real one, and every part follows the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lightning.cli.sim import main
from moe_lightning.parallel.mesh import MeshShape
from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.world_change import (
    communicator_s,
    named_groups,
    store_requests,
    world_change_s,
    world_groups,
)
from tests.unit.simulated import scenario


@pytest.mark.parametrize(
    ("axes", "dense", "more"),
    [
        ({}, "ddp", ()),
        ({"tp": 2}, "zero1", ()),
        ({"pp": 2, "tp": 2}, "ddp", ()),
        ({"pp": 2, "cp": 2, "tp": 2}, "ddp", ()),
        ({"tp": 2}, "fsdp", (8,)),
        ({"pp": 2}, "hsdp", (4, 2)),
    ],
)
def test_groups_are_those_of_the_mesh(axes: dict[str, int], dense: str, more: tuple[int, ...]) -> None:
    """Brute force over 16 ranks in nodes of 4: those that a rank is in, and all that every rank names."""
    shape = MeshShape(**axes).over(16)
    expected = [shape.groups({axis}) for axis in axes] + [(tuple(range(16)),)] * 3
    if "pp" in axes:
        expected += [shape.stages] * 3
    found = world_groups(MeshSpec(**axes, dense=dense), 16, 4)  # type: ignore[arg-type]
    own = [len(next(group for group in groups if 5 in group)) for groups in expected]
    assert sorted(found) == sorted([*own, *more])
    assert named_groups(found, 16) == sum(map(len, expected)) + sum(16 // size for size in more)


def test_communicators_follow_what_was_published() -> None:
    """`ncclCommShrink` of 32 to 1,024 ranks, within the scatter of those figures, and beyond on the same line."""
    published = {32: 1.53, 64: 1.38, 128: 1.44, 256: 1.67, 512: 2.03, 1024: 2.02}
    assert all(abs(communicator_s(ranks) - seconds) < 0.19 for ranks, seconds in published.items())
    assert communicator_s(1) == 0
    assert communicator_s(2) == communicator_s(8) == 0.51
    assert communicator_s(4096) - communicator_s(2048) == pytest.approx(communicator_s(1024) - communicator_s(512))


def test_parts_grow_with_ranks_layers_and_axes() -> None:
    plain = scenario()
    sizes = [world_change_s(plain, ranks) for ranks in (512, 4096, 16384)]
    for part in ("membership", "store", "communicators", "plans"):
        values = [seconds[part] for seconds in sizes]
        assert values == sorted(set(values)), part
    own, cut = (world_groups(mesh, 4096, 1) for mesh in (MeshSpec(), MeshSpec(tp=8)))
    assert store_requests(own, 4096) == 5 * 4096
    assert named_groups(cut, 4096) - named_groups(own, 4096) == 512
    tensor_s = world_change_s(replace(plain, mesh=MeshSpec(tp=8)), 4096)["communicators"]
    assert tensor_s == pytest.approx(sizes[1]["communicators"] + communicator_s(8))
    work = plain.workload
    assert sizes[0]["transfer"] >= work.expert_state_bytes / plain.hardware.link_bytes_per_s
    deep = replace(plain, workload=replace(work, num_layers=2 * work.num_layers))
    assert world_change_s(deep, 512)["plans"] == pytest.approx(2 * sizes[0]["plans"])


def test_moe_sim_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=moe_gpt_s", "nodes=8", "hours=0.1"]
    assert main([*small, "world_sizes=[512,4096,16384]"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["512", "4,096", "16,384"]
    assert main([*small, "mesh.pp=3", "world_sizes=[512]", "model.num_layers=6"]) == 2
    assert "needs a multiple of 3 ranks, not" in capsys.readouterr().err
    assert main([*small, "world_sizes=[1]"]) == 2
    assert "world_sizes" in capsys.readouterr().err
