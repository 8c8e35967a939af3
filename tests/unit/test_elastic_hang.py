"""A slow first step is no hang: kernels compile in it, and nothing interrupts them."""

from __future__ import annotations

import pytest

from moe_lightning.elastic.client_state import ClientState
from moe_lightning.elastic.membership import ElasticSettings, ElasticTask

SETTINGS = ElasticSettings(hang_timeout_s=0.5, build_timeout_s=0.1, start_timeout_s=3.0)


@pytest.mark.parametrize(
    ("steps", "seconds", "is_ended"),
    [(0, 0.6, False), (0, 2.9, False), (0, 3.1, True), (1, 0.4, False), (1, 0.6, True)],
)
def test_who_hangs_in_a_broken_world(steps: int, seconds: float, is_ended: bool) -> None:
    state = ClientState(ElasticTask(address="none", secret_file="none", node="a", settings=SETTINGS))
    state.start_join(is_ready=True, is_spare=False)
    state.receive({"t": "formed", "number": 1, "members": [state.member_id], "probes": [None]}, 0.0)
    assert state.world is not None
    state.guard(state.world.members)
    for _ in range(steps):
        state.record_progress()
    state.receive({"t": "broken", "number": 1, "reason": "b died", "rating": 3}, 10.0)
    assert (state.exceeded_limit_s(10.0 + seconds) is not None) == is_ended
    state.start_join(is_ready=True, is_spare=False)
    assert state.exceeded_limit_s(1000.0) is None
