"""What pipelines refuse in elastic runs."""

from __future__ import annotations

import pytest

from moe_lightning.errors import ConfigurationError
from moe_lightning.parallel.mesh import MeshShape
from moe_lightning.strategies.checks import check_for_recovery


def test_what_worlds_cannot_bring_across_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh\.pp=2 beside dense=mine cannot change its world"):
        check_for_recovery(MeshShape(pp=2), "mine")


def test_what_they_can_is_not() -> None:
    for dense in ("ddp", "zero1", "fsdp", "hsdp"):
        check_for_recovery(MeshShape(pp=2, cp=2, tp=2), dense)
    check_for_recovery(MeshShape(cp=2), "mine")
