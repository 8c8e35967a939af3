"""Averages of weights where a fault comes in the middle."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from moe_lightning.state.averages import Averages, averaged
from moe_lightning.strategies.averaging import Averaging


def test_weights_come_back_after_a_fault_between_averages_and_their_broadcast() -> None:
    """Under dense=zero1 a rank has the averages of its own parameters only, and broadcasts them."""
    module = pl.LightningModule()
    module.linear, own = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(2))
    module.own = own
    optimizer = torch.optim.SGD([own], lr=0.1)

    def fail(_: object) -> None:
        with torch.no_grad():
            module.linear.weight.fill_(7.0)  # another rank's average has arrived
        raise RuntimeError("a rank died")

    shards = SimpleNamespace(unowned=[module.linear.weight], shares_optimizers=True, broadcast_updates=fail)
    state: Any = SimpleNamespace(
        module=module,
        optimizers=[optimizer],
        shards=shards,
        before_reading=lambda: None,
        after_writing=lambda: None,
    )
    averaging, averages = Averaging(state), Averages({}, use_buffers=False)
    averages.begin(module, optimizer, lambda parameter: parameter.device)
    averaging.averages = averages
    with torch.no_grad():
        own.fill_(2.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="a rank died"):
        averaging.swap()
    averaging.withdraw()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_weight_that_changes_without_an_optimizer_is_named() -> None:
    """Averages are states of optimizers, so it has none."""
    module = pl.LightningModule()
    module.student, module.teacher, module.frozen = (nn.Linear(2, 2, bias=False) for _ in range(3))
    optimizer = torch.optim.SGD(module.student.parameters(), lr=0.1)
    state: Any = SimpleNamespace(
        module=module,
        optimizers=[optimizer],
        parameters_of=lambda _: list(module.student.parameters()),
        home_of=lambda parameter: parameter.device,
        training_state=lambda: SimpleNamespace(dense=dict(module.named_parameters()), base=frozenset()),
        shards=SimpleNamespace(unowned=[], shares_optimizers=False),
        before_reading=lambda: None,
        after_writing=lambda: None,
    )
    averaging = Averaging(state)
    averaging.averages = Averages({}, use_buffers=False)
    with averaging.hidden(optimizer):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averaging.swap()
        averaging.swap()
    module.teacher.weight.data.mul_(2)
    with pytest.warns(UserWarning, match=r"teacher\.weight changes and has no average.*Give it to the optimizer"):
        averaging.swap()
    averaging.swap()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.teacher.weight.data.mul_(2)
        averaging.swap()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_updates_that_are_left_out_before_the_first_are_counted(use_buffers: bool) -> None:
    module = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ours, stock = Averages({}, use_buffers=use_buffers), AveragedModel(module, use_buffers=use_buffers)
    for step in range(4):
        module.running_mean.fill_(step)
        if step == 2:
            ours.begin(module, optimizer, lambda parameter: parameter.device)
            nn.init.constant_(module.weight, 3.0)
        ours.update(module, [optimizer])
        stock.update_parameters(module)
    assert ours.count == int(stock.n_averaged) == 4
    assert torch.equal(averaged([optimizer])[module.weight], stock.module.weight)
    assert torch.equal(ours.buffers["running_mean"], stock.module.running_mean)
