"""Randomness that depends on where a sample lies in the global stream, not on which rank computes it (law L1).

Noise of routers, jitter and dropout are functions of (seed, step, layer tag, global row): slicing the batch over more
ranks or micro-batches changes none of them. The numbers come from a counter-based hash (splitmix64's finaliser), so no
generator state exists to be saved.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor, nn

from moe_lightning.values import Probability, validated

_MASK_24 = (1 << 24) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds it in."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """Bijective avalanche of int64 bit patterns; shifts are made logical by masking."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


class SampleStream:
    """Position of the running batch in the global stream of samples; the strategy advances it, modules only read it.

    A stream that nobody advances (a module used without the strategy) counts draws instead, so that noise still
    changes.

    Attributes:
        seed: of the run.
        step: optimizer step of the running batch.
        first_sample: position of this rank's first sample inside the step's global batch.
        num_samples: samples of this rank in the running micro-batch; 0 when unknown (rows are then counted from
            first_sample).
        total_samples: of all ranks in the running micro-batch; 0 when unknown.
        part, parts: which of equal parts of each sample's rows this rank computes, where several share a sample.
        is_stand_in: the batch is no sample of this rank, and only lets it take part in collectives: its tokens are
            routed to no expert.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.first_sample = 0
        self.num_samples = self.total_samples = 0
        self.part, self.parts = 0, 1
        self.is_stand_in = False
        self._is_driven = False

    def __deepcopy__(self, memo: dict[int, object]) -> SampleStream:
        """The copy of a module that a strategy drives follows the same samples; any other draws for itself."""
        if self._is_driven:
            return self
        copied = SampleStream(self.seed)
        copied.__dict__.update(self.__dict__)
        return copied

    def advance(self, *, step: int, first_sample: int, num_samples: int, total_samples: int = 0) -> None:
        """Enter a micro-batch; one of no samples is a stand-in."""
        self.step, self.first_sample, self.num_samples = step, first_sample, num_samples
        self.total_samples = total_samples
        self.is_stand_in = num_samples == 0
        self._is_driven = True

    def global_rows(self, num_rows: int, device: torch.device) -> Tensor:
        """Global index of each local row; a sample owns num_rows * parts / num_samples consecutive ones."""
        here = num_rows // self.num_samples if self.num_samples else 1
        local = torch.arange(num_rows, device=device)
        if self.parts == 1:
            return local + self.first_sample * here
        return (local // here + self.first_sample) * (here * self.parts) + local % here + self.part * here

    def uniform(self, tag: int, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
        """float32 [num_rows, num_columns] in the open interval (0, 1), keyed by (seed, step, tag, global row,
        column).
        """
        if not self._is_driven:
            self.step += 1
        key = _mix(
            torch.tensor(
                [_signed(self.seed * 0x632BE59BD9B4E019 + tag * 0x9FB21C651E98DF25 + self.step + 1)], device=device
            )
        )
        rows = _mix(self.global_rows(num_rows, device) * _GOLDEN + key)
        bits = _mix(rows[:, None] + torch.arange(1, num_columns + 1, device=device) * _GOLDEN)
        return (((bits >> 40) & _MASK_24).float() + 0.5) * 2.0**-24

    def normal(self, tag: int, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
        """Standard normal numbers of the same key (Box-Muller)."""
        pairs = self.uniform(tag, num_rows, 2 * num_columns, device)
        radius = (-2.0 * pairs[:, :num_columns].log()).sqrt()
        return radius * (2.0 * math.pi * pairs[:, num_columns:]).cos()


@validated
class StreamDropout(nn.Module):
    """Dropout whose mask follows the sample, not the rank: unlike nn.Dropout it keeps law L1.

    Args:
        p: probability of zeroing an element, in [0, 1).

    Raises:
        ConfigurationError: p is outside its range.
    """

    def __init__(self, p: Probability) -> None:
        super().__init__()
        self.p = p
        self.tag = 0
        self.stream = SampleStream()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        rows = x.reshape(-1, x.shape[-1])
        keep = self.stream.uniform(3 * self.tag + 2, rows.shape[0], rows.shape[1], x.device) >= self.p
        return x * (keep.view_as(x) / (1.0 - self.p)).to(x.dtype)


def attach_stream(model: nn.Module, stream: SampleStream) -> None:
    """Make every module of the model that draws keyed randomness read this stream, numbered within its class."""
    seen: Counter[type[nn.Module]] = Counter()
    for module in model.modules():
        if isinstance(getattr(module, "stream", None), SampleStream):
            module.stream = stream  # type: ignore[assignment]
            module.tag = seen[type(module)]  # type: ignore[assignment]
            seen[type(module)] += 1
