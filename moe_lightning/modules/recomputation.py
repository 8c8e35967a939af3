"""What modules read beside their inputs, for a backward pass that computes them again when other batches have come."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from moe_lightning.modules.stream import SampleStream

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def remembering(modules: Iterable[nn.Module], *attributes: str) -> Contexts:
    """What torch's checkpoint asks for as `context_fn`: contexts of the first pass, which begins now, and of its
    repetition, where the modules find their keyed noise and these attributes as they are now.
    """
    kept: dict[int, tuple[object, dict[str, Any]]] = {}
    for module in modules:
        own = vars(module)
        if isinstance(stream := own.get("stream"), SampleStream):
            kept[id(stream)] = stream, dict(vars(stream))
        if found := {name: own[name] for name in attributes if name in own}:
            kept[id(module)] = module, found
    return nullcontext(), _as_before(list(kept.values()))


@contextmanager
def _as_before(kept: list[tuple[object, dict[str, Any]]]) -> Generator[None, None, None]:
    now = [(thing, {name: vars(thing)[name] for name in before}) for thing, before in kept]
    for thing, before in kept:
        vars(thing).update(before)
    try:
        yield
    finally:
        for thing, after in now:
            vars(thing).update(after)
