"""Kernels are compiled before others wait for this rank; the fake device shows that these are all (tests/gpu)."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from moe_lightning.elastic.worker import RunFinished
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.warm_up import warm_up
from moe_lightning.strategies import elastic_worlds
from moe_lightning.strategies.elastic_worlds import ElasticWorlds, RecoveryPolicy
from moe_lightning.strategies.worlds import Worlds


def test_a_newcomer_warms_up_before_it_says_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    device = torch.device("cuda", 0)
    engine, state = MagicMock(node="node"), MagicMock(layers=[])
    state.trainer = SimpleNamespace(
        global_step=0, fit_loop=None, precision_plugin=SimpleNamespace(forward_context=lambda: nullcontext())
    )

    def join(*, is_ready: bool, **_: Any) -> None:
        done.append(f"joins, ready: {is_ready}")
        raise RunFinished("enough")

    engine.join = join
    monkeypatch.setattr(elastic_worlds, "set_up_data", lambda trainer: None)
    monkeypatch.setattr(elastic_worlds, "warm_up", lambda module, layers, of: done.append(f"warms {of} up"))
    monkeypatch.setattr(elastic_worlds, "destroy_groups", lambda: None)
    strategy: Any = SimpleNamespace(worlds=Worlds(), state=state, root_device=device, leave_world=lambda: None)
    worlds = ElasticWorlds(strategy, engine)
    worlds.is_newcomer = True
    with pytest.raises(RunFinished):
        worlds.run(RecoveryPolicy(), lambda: None)
    assert done == ["warms cuda:0 up", "joins, ready: True"]


def test_a_cpu_has_nothing_to_warm_up() -> None:
    layer = cast(Any, MoELayer(8, 8, 2))
    layer.experts.forward = MagicMock()
    warm_up(layer, [layer], torch.device("cpu"))
    layer.experts.forward.assert_not_called()
