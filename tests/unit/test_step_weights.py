"""What a rank says of the weight of its loss."""

from __future__ import annotations

import warnings

import torch

from moe_lightning.strategies.steps import StepWeights


def test_a_rank_whose_weights_another_stage_gives_is_not_warned_of_ignored_targets() -> None:
    weights = StepWeights()
    weights.append([3.0, 2.0], torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is the failure
        weights.warn_of_ignored_targets((torch.tensor([[1, -100], [1, 1]]),))
