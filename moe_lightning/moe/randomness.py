"""Random numbers keyed by the position of a sample in the global stream (law L1).

Noise of routers, jitter and dropout are functions of (seed, step, layer tag, sample, position in it): slicing the batch
over more ranks or micro-batches, or padding it to another length, changes none of them. The numbers come from a
counter-based hash (splitmix64's finalizer), so no generator state exists to be saved. `remembering` restores what
modules read beside their inputs when a backward pass computes them again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor, nn

from moe_lightning import kernels as ops
from moe_lightning.config import Probability, validated
from moe_lightning.kernels import torch_kernels


class NoiseSource(IntEnum):
    """Sources of keyed noise inside a module. A new one is one line at the end: `NAME = auto()`."""

    JITTER = 0  # of the router's input
    SELECTION = auto()  # of the router's logits, or of the choice that forced routing makes instead
    DROPOUT = auto()
    DROP_PATH = auto()  # stochastic depth

    def key(self, tag: int) -> int:
        """Return the tag of draws from this source in the module with this tag; no two pairs have the same.

        The first four keep the numbers that recorded losses depend on.
        """
        if self <= NoiseSource.DROPOUT:
            return 3 * tag + self
        return -1 - tag if self is NoiseSource.DROP_PATH else (self << 32) + tag


class SampleStream:
    """Position of the running batch in the global stream of samples; the strategy advances it, modules only read it.

    A stream that nobody advances (a module used without the strategy) draws a number from torch's generator of the CPU
    for each tensor of noise instead, which torch.utils.checkpoint restores for the recomputation.

    Attributes:
        seed: of the run.
        step: optimizer step of the running batch; where a module optimizes manually, the number of the batch; 0 where
            no strategy begins batches.
        first_sample: position of this rank's first sample inside the step's global batch.
        num_samples: samples of this rank in the running micro-batch; 0 when unknown (rows are then counted from
            first_sample).
        total_samples: of all ranks in the running micro-batch; 0 when unknown.
        part, parts: which of equal parts of each sample's rows this rank computes, where several share a sample.
        is_dummy_batch: the batch is no sample of this rank, and only lets it take part in collectives: its tokens are
            routed to no expert.
        micro_batch: number of the running micro-batch in this process; None where no strategy begins them.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.first_sample = 0
        self.num_samples = self.total_samples = 0
        self.part, self.parts = 0, 1
        self.is_dummy_batch = False
        self.micro_batch: int | None = None
        self._is_driven = False

    def __deepcopy__(self, memo: dict[int, object]) -> SampleStream:
        """The copy of a module that a strategy drives follows the same samples; any other draws for itself."""
        if self._is_driven:
            return self
        copied = SampleStream(self.seed)
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """In another process nobody drives it."""
        return {**self.__dict__, "_is_driven": False, "micro_batch": None, "is_dummy_batch": False}

    def begin_run(self, seed: int) -> None:
        """Draw numbers of this seed from now on."""
        self.seed = seed

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, whether the positions of its samples are known or not."""
        self.micro_batch = 1 + (self.micro_batch or 0)

    def advance(self, *, step: int, first_sample: int, num_samples: int, total_samples: int = 0) -> None:
        """Enter a micro-batch; one of no samples is a dummy."""
        self.step, self.first_sample, self.num_samples = step, first_sample, num_samples
        self.total_samples = total_samples
        self.is_dummy_batch = num_samples == 0
        self._is_driven = True

    def release(self, *, step: int) -> None:
        """Enter a micro-batch whose samples have no known positions."""
        self.step = step
        self.first_sample = self.num_samples = self.total_samples = 0
        self.is_dummy_batch = self._is_driven = False

    def draw(self, tag: int, num_rows: int) -> ops.Draw:
        """The numbers keyed by (seed, step, tag, global row, column); in a stream that nobody drives, by one of torch's
        generator in the place of the step.
        """
        step = self.step if self._is_driven else int(torch.randint(0, 1 << 62, (1,), device="cpu"))
        key = torch_kernels.mixed(self.seed * 0x632BE59BD9B4E019 + tag * 0x9FB21C651E98DF25 + step + 1)
        here = max(1, num_rows // self.num_samples) if self.num_samples else 1  # fewer rows: of a part of the samples
        return ops.Draw(key=key, first=self.first_sample, here=here, part=self.part)

    def uniform(self, tag: int, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
        """float32 [num_rows, num_columns] in the open interval (0, 1), keyed by (seed, step, tag, global row,
        column).
        """
        return torch_kernels.uniform(self.draw(tag, num_rows), num_rows, num_columns, device)

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
        draw = self.stream.draw(NoiseSource.DROPOUT.key(self.tag), len(rows))
        return ops.keyed_dropout(rows, self.p, draw).view_as(x)


def attach_stream(model: nn.Module, stream: SampleStream) -> None:
    """Make every module of the model that draws keyed randomness read this stream, numbered within its class."""
    seen: Counter[type[nn.Module]] = Counter()
    for module in model.modules():
        if isinstance(getattr(module, "stream", None), SampleStream):
            module.stream = stream  # type: ignore[assignment]
            module.tag = seen[type(module)]  # type: ignore[assignment]
            seen[type(module)] += 1


Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def remembering(modules: Iterable[nn.Module], *attributes: str) -> Contexts:
    """Return the `context_fn` of torch's checkpoint: contexts of the first pass, which begins now, and of its
    recomputation, where the modules find their keyed noise and these attributes as they are now.
    """
    saved: dict[int, tuple[object, dict[str, Any]]] = {}
    for module in modules:
        own = vars(module)
        if isinstance(stream := own.get("stream"), SampleStream):
            saved[id(stream)] = stream, dict(vars(stream))
        if found := {name: own[name] for name in attributes if name in own}:
            saved[id(module)] = module, found
    return nullcontext(), _as_before(list(saved.values()))


@contextmanager
def _as_before(saved: list[tuple[object, dict[str, Any]]]) -> Generator[None, None, None]:
    now = [(thing, {name: vars(thing)[name] for name in before}) for thing, before in saved]
    for thing, before in saved:
        vars(thing).update(before)
    try:
        yield
    finally:
        for thing, after in now:
            vars(thing).update(after)
