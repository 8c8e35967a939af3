"""Measured costs survive the way to another rank, and to a world of another size."""

from __future__ import annotations

import json

import numpy as np

from moe_lightning.balancing.cost_model import BlockCosts


def test_costs_travel_as_json() -> None:
    costs = BlockCosts(
        row_bytes=1.0, weight_bytes=2.0, gradient_bytes=3.0, bytes_per_s=np.array([1e9, 3e9]), rows_per_s=5.0
    )
    data = json.loads(json.dumps(costs.to_json()))
    same = BlockCosts.from_json(data, 2)
    assert np.array_equal(same.bytes_per_s, costs.bytes_per_s)
    assert same.to_json() == costs.to_json()
    assert BlockCosts.from_json(data, 3).bytes_per_s == 2e9
