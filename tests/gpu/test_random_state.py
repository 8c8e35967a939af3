"""The generator of a GPU is kept with the state of the rank that trains on it, and of no other."""

from __future__ import annotations

import pytest
import torch

from moe_lightning.checkpoint.training_state import random_state


def test_a_training_on_cpus_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def state_of(device: torch.device) -> torch.Tensor:
        asked.append(device)
        return torch.zeros(1, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": state_of(torch.device(device)))
    assert "cuda" not in random_state(torch.device("cpu"))
    assert not asked
    assert "cuda" in random_state(torch.device("cuda", 1))
    assert asked == [torch.device("cuda", 1)]
