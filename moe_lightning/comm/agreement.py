"""Whether ranks that decide alone decide alike: their versions when they meet, their plans as they use them.

Ranks derive placements, shadows and quotas from the same numbers without asking each other. A rank that comes to
another result (another library, another file) would send rows that nobody expects, so a hash of what it is about to do
travels with the counts that it sends anyway.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash

from moe_lightning.comm.collect import all_gather_json
from moe_lightning.comm.exchange import all_gather_counts
from moe_lightning.comm.world import World
from moe_lightning.errors import ConfigurationError

_CURE = "give all ranks the same files, settings and versions of moe-lightning, Python, NumPy and torch"


def fingerprint(*parts: np.ndarray | str) -> int:
    """A 63-bit hash of arrays, their shapes and words; of integers and truth values, so equal wherever they are."""
    digest = xxhash.xxh3_64()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
            continue
        assert part.dtype.kind in "biu", "floats that mean the same may differ in a bit"
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(np.ascontiguousarray(part).data)
    return digest.intdigest() >> 1


def require_agreement(fingerprints: Sequence[int], what: str) -> None:
    """Raise on every rank where the ranks' fingerprints differ.

    Args:
        what: they describe, with its article, for the message.

    Raises:
        ConfigurationError: naming the ranks that are fewest.
    """
    if len(set(fingerprints)) <= 1:
        return
    common = Counter(fingerprints).most_common(1)[0][0]
    others = [rank for rank, value in enumerate(fingerprints) if value != common]
    first = fingerprints.index(common)
    raise ConfigurationError(f"{what} of ranks {others} differs from that of rank {first}: {_CURE}")


def check_agreement(value: int, what: str, world: World) -> None:
    """Compare a fingerprint over all ranks; collective, raises as `require_agreement`."""
    if world.is_connected:
        told = all_gather_counts(torch.tensor([value], device=world.device), world)
        require_agreement(told[:, 0].tolist(), what)


def check_versions(world: World) -> None:
    """Compare the versions of what plans; collective, when ranks have just met.

    Ranks that differ from rank 0, the oldest of the world, are refused and raise; the others go on without them where
    they can. Another patch of a library is a warning.

    Raises:
        ConfigurationError: on a rank whose moe-lightning, Python, NumPy or torch is not rank 0's.
    """
    own = versions()
    first: Mapping[str, str] = all_gather_json(own, world)[0]
    differences = [name for name in own if own[name] != first.get(name)]
    told = ", ".join(f"{name} {own[name]} where rank 0 has {first.get(name)}" for name in differences)
    if any(_changes_plans(name, own[name], first.get(name, "")) for name in differences):
        raise ConfigurationError(f"rank {world.rank} has {told}, and would plan otherwise: install the same on all")
    if differences:
        warnings.warn(f"rank {world.rank} has {told}: install the same on all ranks", stacklevel=2)


def versions() -> dict[str, str]:
    """Of everything that takes part in a plan; builds of one torch for different devices are one version."""
    return {
        "moe-lightning": sys.modules["moe_lightning"].__version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "torch": torch.__version__.split("+")[0],
    }


def _changes_plans(name: str, one: str, other: str) -> bool:
    if name == "moe-lightning":
        return one != other
    return one.split(".")[:2] != other.split(".")[:2]
