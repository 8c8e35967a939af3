"""What pipelines refuse in elastic runs."""

from __future__ import annotations

import pytest

from moe_lightning.algorithms.mesh_shape import MeshShape
from moe_lightning.errors import ConfigurationError
from moe_lightning.strategies.pipeline_checks import check_for_recovery


@pytest.mark.parametrize(
    ("axes", "dense", "named"),
    [
        (MeshShape(pp=2, tp=2), "ddp", "mesh.tp=2"),
        (MeshShape(pp=2, cp=2), "ddp", "mesh.cp=2"),
        (MeshShape(pp=2), "fsdp", "dense=fsdp"),
    ],
)
def test_what_worlds_cannot_bring_across_is_named(axes: MeshShape, dense: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"mesh.pp=2 beside {named} cannot yet change its world"):
        check_for_recovery(axes, dense)


def test_what_they_can_is_not() -> None:
    check_for_recovery(MeshShape(pp=2), "ddp")
    check_for_recovery(MeshShape(tp=2), "ddp")
    check_for_recovery(MeshShape(cp=2), "fsdp")
