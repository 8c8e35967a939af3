"""The fake device tells races between streams, and between a stream and the host, from waits."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run_ranks


def run(rank: int, ranks: int) -> dict[str, bool]:
    """Of each case without its wait and with it, whether a race was found."""
    from tests.gpu import fake_streams
    from tests.gpu.fake_device import FakeDevice, set_up

    device = set_up()
    found = {}
    with FakeDevice():
        for case in (read, overwrite, download, reuse_of_staging, free):
            for waits in (False, True):
                before = len(fake_streams.races)
                try:
                    case(device, waits)
                except fake_streams.Race:
                    assert len(fake_streams.races) == before + 1
                found[f"{case.__name__} {waits}"] = len(fake_streams.races) > before
    with pytest.raises(fake_streams.Race, match="freed on stream"):
        fake_streams.assert_no_races()
    return found


def read(device: torch.device, waits: bool) -> None:
    """What another stream writes."""
    side = torch.Stream(device=device)
    with side:
        x = torch.ones(4, device=device)
    if waits:
        torch.accelerator.current_stream(device).wait_stream(side)
    x.record_stream(torch.accelerator.current_stream(device))
    x + 1


def overwrite(device: torch.device, waits: bool) -> None:
    """What another stream reads."""
    x, side, event = torch.ones(4, device=device), torch.Stream(device=device), torch.Event(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        y = x + 1
        event.record()
    y.record_stream(torch.accelerator.current_stream(device))
    if waits:
        event.wait()
    x.add_(1)


def download(device: torch.device, waits: bool) -> None:
    """Numbers that the host reads before they have come."""
    here = torch.empty(4, pin_memory=True)
    here.copy_(torch.ones(4, device=device), non_blocking=True)
    event = torch.Event(device=device)
    event.record()
    if waits:
        event.synchronize()
    assert here.sum() == 4


def reuse_of_staging(device: torch.device, waits: bool) -> None:
    """Page-locked memory that the host fills again before it went up."""
    staged, there = torch.empty(4, pin_memory=True).fill_(1), torch.empty(4, device=device)
    there.copy_(staged, non_blocking=True)
    if waits:
        torch.accelerator.current_stream(device).synchronize()
    staged.fill_(2)


def free(device: torch.device, waits: bool) -> None:
    """Memory that another stream reads."""
    x, side = torch.ones(4, device=device), torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        x + 1
    if waits:
        x.record_stream(side)
    del x


def test_a_race_is_found_where_nobody_waits_and_none_where_one_does() -> None:
    (found,) = run_ranks(1, run)
    cases = {name.rsplit(" ", 1)[0] for name in found}
    assert len(cases) == 5
    assert found == {f"{case} {waits}": not waits for case in cases for waits in (False, True)}
