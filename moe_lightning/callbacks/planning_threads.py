"""Threads that plan beside the training, and what they promise: results do not depend on which thread ran when.

Every chain is a sequence of tasks that run one after the other, in the order in which they were given, so that a state
machine behind a chain goes through the same states as if it were called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any, ParamSpec, TypeVar

from moe_lightning.errors import ConfigurationError

_T = TypeVar("_T")
_P = ParamSpec("_P")

_WORKERS = 1
"""A search is thousands of short numpy calls: two threads hand the interpreter to and fro between them, and 61 layers
on 1,024 ranks then take 2.8 s instead of 1.5 s; on 4,096 ranks they gain nothing."""


class PlanningThreads:
    """A thread for the layers, one after the other, and one for what combines them.

    Args:
        timeout_s: longest wait for a result.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_WORKERS, "moe-plan-layer")
        self._combining = ThreadPoolExecutor(1, "moe-plan")

    def chain(self) -> Chain:
        """A new sequence of tasks."""
        return Chain(self._pool)

    def combine(self, task: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> Future[_T]:
        """Run a task that may wait for chains and call `map`."""
        return self._combining.submit(task, *arguments, **options)

    def map(self, function: Callable[[int], _T], items: Iterable[int], /) -> Iterator[_T]:
        """Like the built-in, in the layers' thread; not to be called from a chain."""
        return self._pool.map(function, items)

    def result(self, future: Future[_T]) -> _T:
        """The result of a task, waited for.

        Raises:
            ConfigurationError: it took longer than the timeout.
        """
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            raise ConfigurationError(
                f"planning has not ended within {self._timeout_s:g} s: raise the strategy's timeout_s, or plan less "
                "with shadows=none or a larger rebalance_every"
            ) from error

    def close(self) -> None:
        """Let running tasks end unheard, and drop the others."""
        for executor in (self._combining, self._pool):
            executor.shutdown(wait=False, cancel_futures=True)


class Chain:
    """Tasks that run one after the other on a pool."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._last: Future[Any] | None = None

    def then(self, task: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> Future[_T]:
        """Run a task after those before it; where one of them failed, it fails alike."""
        before = self._last

        def run() -> _T:
            if before is not None:
                before.result()  # started earlier on the same pool, so it ends without this worker
            return task(*arguments, **options)

        future = self._pool.submit(run)
        self._last = future
        return future
