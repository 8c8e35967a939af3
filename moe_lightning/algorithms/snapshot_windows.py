"""Hierarchical asynchronous snapshotting: which part of a snapshot is copied in which window of a training step.

First a pipeline's bubbles, then other idle time (waiting for data), then computation, then communication, which may be
used only where training and snapshot take different ways (NVLink and PCIe); what is left stalls training.
Source: REFT 4.1, Alg. 1. Ours: bytes instead of elements, the third window (in the paper's text, not in
its algorithm), the rest as a stall, guards for empty snapshots and single stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SnapshotWindows:
    """Bytes of a snapshot by the window in which they are copied, and the seconds that training waits for the rest."""

    bubble_bytes: int
    idle_bytes: int
    compute_bytes: int
    communication_bytes: int
    stall_bytes: int
    stall_s: float

    @property
    def total_bytes(self) -> int:
        in_windows = self.bubble_bytes + self.idle_bytes + self.compute_bytes + self.communication_bytes
        return in_windows + self.stall_bytes


def schedule_snapshot(
    snapshot_bytes: int,
    *,
    bytes_per_s: float,
    bubble_s: float = 0.0,
    idle_s: float = 0.0,
    compute_s: float,
    communication_s: float = 0.0,
    separate_link: bool = False,
) -> SnapshotWindows:
    """Fill the windows of one step in order.

    Args:
        snapshot_bytes: to be copied until the next update; 0 needs no window.
        bytes_per_s: of the copy.
        bubble_s, idle_s, compute_s, communication_s: of a step.
        separate_link: training communicates over another link than the copy takes.

    Raises:
        ConfigurationError: no bandwidth, or a negative size or time.
    """
    for name, value in (
        ("snapshot_bytes", snapshot_bytes),
        ("bubble_s", bubble_s),
        ("idle_s", idle_s),
        ("compute_s", compute_s),
        ("communication_s", communication_s),
    ):
        if value < 0:
            raise ConfigurationError(f"{name}={value} must be 0 or more")
    if not bytes_per_s > 0:
        raise ConfigurationError(f"bytes_per_s={bytes_per_s} copies nothing: measure the bandwidth of a copy")
    left, parts = snapshot_bytes, []
    for window_s in (bubble_s, idle_s, compute_s, communication_s if separate_link else 0.0):
        parts.append(int(min(left, window_s * bytes_per_s)))
        left -= parts[-1]
    return SnapshotWindows(
        bubble_bytes=parts[0],
        idle_bytes=parts[1],
        compute_bytes=parts[2],
        communication_bytes=parts[3],
        stall_bytes=left,
        stall_s=left / bytes_per_s,
    )
