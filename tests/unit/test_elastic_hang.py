"""A slow first step is no hang: kernels compile in it, and nothing interrupts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_lightning.elastic import rendezvous_client
from moe_lightning.elastic.membership import ElasticSettings, Members
from moe_lightning.elastic.rendezvous_client import JoinedWorld

SETTINGS = ElasticSettings(hang_timeout_s=0.5, build_timeout_s=0.1, start_timeout_s=3.0)


@pytest.mark.parametrize(
    ("steps", "seconds", "is_ended"),
    [(0, 0.6, False), (0, 2.9, False), (0, 3.1, True), (1, 0.4, False), (1, 0.6, True)],
)
def test_who_hangs_in_a_broken_world(
    steps: int, seconds: float, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(rendezvous_client, "end_hanging_process", lambda *said: ended.append(said))
    one: Any = object.__new__(rendezvous_client.RendezvousClient)
    members = Members(number=1, ids=("a", "b"), me=0)
    one._guarded = JoinedWorld(members=members, has_set_up=True, reason="b died", broken_at=10.0)
    one.settings, one._main_is_here, one._progress = SETTINGS, False, 0
    one._clock = SimpleNamespace(now=10.0 + seconds)
    for _ in range(steps):
        one.record_progress()
    one._end_if_hanging()
    assert bool(ended) == is_ended
