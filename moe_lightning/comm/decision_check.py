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


def check_versions(world: World, *, others_go_on: bool = False) -> None:
    """Compare the versions of what plans; collective, when ranks have just met.

    Ranks that differ from rank 0, the oldest of the world, are refused. Another patch of a library is a warning.

    Args:
        others_go_on: whether a world without the refused ranks is built again: the others are then warned only.

    Raises:
        ConfigurationError: on every rank, or on those that are refused: the moe-lightning, Python, NumPy or torch of
            some is not rank 0's.
    """
    told: list[Mapping[str, str]] = all_gather_json(versions(), world)
    differences = [_differences(own, told[0]) for own in told]
    found = {rank: f"rank {rank} has {_told(own, told[0])}" for rank, own in enumerate(told) if differences[rank]}
    refused = [rank for rank, names in enumerate(differences) if any(names.values())]
    if refused:
        sentence = f"{'; '.join(found[rank] for rank in refused)}, and would plan otherwise: install the same on all"
        if not others_go_on or world.rank in refused:
            raise ConfigurationError(sentence)
        warnings.warn(sentence, stacklevel=2)
    elif world.rank in found:
        warnings.warn(f"{found[world.rank]}: install the same on all ranks", stacklevel=2)


def _differences(own: Mapping[str, str], first: Mapping[str, str]) -> dict[str, bool]:
    """What differs, and whether plans differ for it."""
    names = [name for name in own if own[name] != first.get(name)]
    return {name: _changes_plans(name, own[name], first.get(name, "")) for name in names}


def _told(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {own[name]} where rank 0 has {first.get(name)}" for name in _differences(own, first))


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
