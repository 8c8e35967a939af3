"""What travels beside training does not hold its stream up."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from moe_lightning.checkpoint.snapshot_protection import PendingBuffers
from moe_lightning.parallel.context import World
from tests.distributed.harness import run_ranks


def run(rank: int, ranks: int) -> tuple[list[int], bool]:
    """What arrived from the other rank, and whether the training's stream waited for it."""
    from tests.gpu import fake_streams
    from tests.gpu.fake_comms import meet_on_the_device, set_up_comms
    from tests.gpu.fake_device import FakeDevice, set_up

    device = set_up()
    set_up_comms()
    meet_on_the_device(rank, ranks)
    with FakeDevice():
        world = World.connect(device, timedelta(seconds=60))
        parcels = PendingBuffers({(0, 1)}, lambda *_: 3, lambda _: torch.full((3,), 7, dtype=torch.uint8), world)
        training, delivered = fake_streams.current_stream(), dict[int, torch.Tensor]()
        known = dict(training.known)
        thread = threading.Thread(target=_deliver, args=(parcels, delivered))
        thread.start()
        thread.join()
        has_waited = training.known != known
        del parcels
        fake_streams.assert_no_races()
        return [number for data in delivered.values() for number in data.tolist()], has_waited


def _deliver(parcels: PendingBuffers, delivered: dict[int, torch.Tensor]) -> None:
    delivered.update(parcels.wait())


def test_parcels_of_another_thread_arrive_while_training_goes_on() -> None:
    assert run_ranks(2, run) == [([], False), ([7] * 3, False)]
