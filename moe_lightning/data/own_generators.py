"""Global random numbers that draw from a place of their own, so that others' draws neither change them nor see them."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class OwnGenerators:
    """Inside, the global generators of Python, NumPy and torch (on the host) go on where the last `with` left them."""

    def __init__(self, seed: int) -> None:
        self._words = seed
        self._own: list[Any] | None = None
        self._others: list[Any] = []

    def __enter__(self) -> OwnGenerators:
        self._others = _states()
        if self._own is None:
            self.seed(self._words)
        else:
            _restore(self._own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = _states()
        _restore(self._others)

    @staticmethod
    def seed(words: int) -> None:
        """Begin anew; called inside."""
        torch.default_generator.manual_seed(words)
        random.seed(words)
        np.random.seed(words % 2**32)  # noqa: NPY002


def _states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002


def _restore(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
