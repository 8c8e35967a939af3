"""What a rank says of the weight of its loss."""

from __future__ import annotations

import warnings

import pytest
import torch

from moe_lightning.data.sampler import StepSampler
from moe_lightning.parallel.context import World
from moe_lightning.strategies.steps import StepWeights


def test_a_rank_whose_weights_another_stage_gives_is_not_warned_of_ignored_targets() -> None:
    weights = StepWeights()
    weights.append([3.0, 2.0], torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is the failure
        weights.warn_of_ignored_targets((torch.tensor([[1, -100], [1, 1]]),))


@pytest.mark.parametrize("num_micros", [1, 2, 3])
def test_a_step_without_any_target_trains_nothing_however_it_is_cut(num_micros: int) -> None:
    weights, device = StepWeights(), torch.device("cpu")
    sampler = StepSampler(num_samples=12, global_batch_size=6, num_micros=num_micros)
    module = torch.nn.Linear(1, 1, bias=False)
    auxiliary, position = module.weight.sum(), 0
    for _ in range(num_micros):
        here = sampler.slice_at(position)
        weights.begin(here)
        loss = weights.weigh(torch.zeros(()), 0, here, World.single(device)) + auxiliary
        (loss * weights.share(here)).backward()
        position += here.micro_total
    weights.finish(module)
    assert module.weight.grad is not None
    assert float(module.weight.grad) == 0.0
