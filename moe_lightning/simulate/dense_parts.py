"""Who holds which part of the dense state on a mesh, so that a simulation knows what a lost node takes with it.

A part is an interval of [0, 1): stages cut it, tensor parts cut that, shards cut those. Parts of different meshes
overlap as their intervals do.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from moe_lightning.simulate.mesh import Mesh

Part = tuple[Fraction, Fraction]
NOTHING: Part = (Fraction(0), Fraction(0))
WHOLE: Part = (Fraction(0), Fraction(1))


@lru_cache(maxsize=64)
def parts_of_ranks(mesh: Mesh, num_ranks: int, ranks_per_node: int) -> tuple[Part, ...]:
    """Of every rank of a world: the smallest part of it that no other rank need hold."""
    shape = mesh.shape(num_ranks)
    shards = mesh.state_shards(num_ranks, ranks_per_node)
    size = Fraction(1, mesh.pp * mesh.tp * shards)
    found = []
    for rank in range(num_ranks):
        copy, tensor = divmod(rank % (num_ranks // mesh.pp), mesh.tp)
        stage = shape.index(rank, "pp")
        index = (stage * mesh.tp + tensor) * shards + copy % shards
        found.append((index * size, (index + 1) * size))
    return tuple(found)


def is_whole(parts: Iterable[Part]) -> bool:
    """Whether parts together are everything."""
    end = Fraction(0)
    for first, last in sorted(set(parts)):
        if first > end:
            return False
        end = max(end, last)
    return end == 1


def missing(needed: Part, held: Part) -> Fraction:
    """How much of a part is not in another."""
    common = min(needed[1], held[1]) - max(needed[0], held[0])
    return needed[1] - needed[0] - max(Fraction(0), common)
