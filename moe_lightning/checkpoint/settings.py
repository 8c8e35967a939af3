"""How a run is checkpointed, as the user says it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moe_lightning.algorithms.selection import SCOPES, parse_scopes
from moe_lightning.checkpoint.plan import Order
from moe_lightning.config import Coefficient, PositiveInt, validated
from moe_lightning.errors import ConfigurationError


@validated
@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How a run is checkpointed.

    Attributes:
        k_snapshot: experts of each layer copied into memory; None: all, "auto": as many as hide under forward and
            backward.
        k_persist: experts of each layer written to storage; None: as many as are copied.
        order: which experts are next: "sequential", "load_aware" (PEC Alg. 1 as printed) or "load_aware_global", which
            loses fewest tokens.
        scopes: the kinds of expert state that may stay behind: a preset ("full", "moc", "weights", "none") or kinds.
            Parameters in float32 are master weights; those of lower precision are weights.
        keep_last: whole checkpoints to keep.
        verify_within: commits within which every file that checkpoints carry over is read again; what is damaged is
            written anew.
        copies_on_storage: every so many checkpoints hold all experts in files of their own, and one whole checkpoint is
            kept that shares no file with the newest; None: never, so that an expert has one copy on storage.
        failures_per_hour: expected rate of faults, for the adaptive interval.
        fallback_dir: room for snapshots where shared memory is missing or too small; None: the checkpoint directory.
        windows: when snapshots are copied: in "any" part of a step, as soon as possible, or "scheduled" by HAS (REFT
            4.1): while a stage waits for others (bubbles), while the device is idle, then during computation, then
            during exchanges, as far as each is needed.
        lossless: take windows of sparse snapshots, from which nothing is lost (`algorithms/replay_window.py`):
            `k_snapshot` experts of a layer are copied whole in each step, None or "auto": as many as hide under one.

    Raises:
        ConfigurationError: a value outside its range.
    """

    k_snapshot: PositiveInt | Literal["auto"] | None = None
    k_persist: PositiveInt | None = None
    order: Order = "sequential"
    scopes: str | Iterable[str] = "full"
    keep_last: PositiveInt = 2
    verify_within: PositiveInt = 8
    copies_on_storage: PositiveInt | None = None
    failures_per_hour: Coefficient = 0.0
    fallback_dir: str | None = None
    windows: Literal["any", "scheduled"] = "any"
    lossless: bool = False

    @property
    def adapts_k(self) -> bool:
        """Whether `k_snapshot` is chosen by measured times."""
        return self.k_snapshot == "auto" or (self.lossless and self.k_snapshot is None)

    def __post_init__(self) -> None:
        if isinstance(self.k_snapshot, int) and self.k_persist is not None and self.k_persist > self.k_snapshot:
            raise ConfigurationError(
                f"k_persist={self.k_persist} is more than k_snapshot={self.k_snapshot}: "
                "only experts that are copied can be written"
            )
        takes_all = self.k_persist is None and self.order == "sequential" and parse_scopes(self.scopes) == set(SCOPES)
        if self.lossless and not takes_all:
            raise ConfigurationError(
                f"lossless=True saves all state of every expert, popular ones last: with k_persist={self.k_persist}, "
                f"order={self.order!r} and scopes={self.scopes!r} some would be left out; leave them at their defaults"
            )
        parse_scopes(self.scopes)
