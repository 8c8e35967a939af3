"""Copies of a device into an arena, with races found, and some of them given up half-way."""

from __future__ import annotations

import torch

from moe_lightning.checkpoint import snapshotter
from tests.distributed.harness import run_ranks

CHUNK = 64


def run(rank: int, ranks: int) -> list[int]:
    """Bytes that arrived; each copy has a stream of its own, as snapshots have."""
    from tests.gpu.fake_device import FakeDevice, set_up
    from tests.gpu.fake_streams import assert_no_races

    device = set_up()
    snapshotter.CHUNK_BYTES = CHUNK
    arena = torch.zeros(3 * CHUNK, dtype=torch.uint8)
    with FakeDevice():
        source = torch.full((3 * CHUNK,), 7, dtype=torch.uint8, device=device)
        stage = snapshotter.Staging()
        for admitted in (1, 2, 3):
            chunks = iter(range(admitted))

            def admit(num_bytes: int, chunks: object = chunks) -> None:
                if next(chunks, None) is None:  # type: ignore[call-overload]
                    raise InterruptedError

            try:
                stage.copy(arena.data_ptr(), source, snapshotter.side_stream(device), admit)
                stage.finish()
            except InterruptedError:
                stage.forget()
        stage.forget()
        del source
        assert_no_races()
    return arena.tolist()


def test_a_copy_after_one_that_was_given_up_waits_for_its_buffers() -> None:
    (found,) = run_ranks(1, run)
    assert found == [7] * 3 * CHUNK


def test_a_device_that_has_failed_is_not_waited_for() -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    stage = snapshotter.Staging.__new__(snapshotter.Staging)
    stage._arriving = Failed(), torch.zeros(1), 0, 1
    stage.forget()
    assert stage._arriving is None
