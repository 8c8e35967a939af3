"""Health of a node, checked before it joins a run: products, memory, disk, /dev/shm, clock and versions.

What one node can judge alone is an error there: a product of whole numbers that float32 holds exactly has one right
result on every device and with every library. Clock, bandwidth and versions are judged by comparison (`refusals`): by
the rendezvous host when a launcher reports its node, or by the ranks of a run that does not change.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from moe_lightning.elastic.protocol import boot_id
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text, replace_text
from moe_lightning.parallel.collectives import all_gather_json, different_versions, failing_together, versions
from moe_lightning.parallel.context import World

MEMORY = Path("/dev/shm")
LARGEST_CLOCK_OFFSET_S = 10.0
SMALLEST_BANDWIDTH_SHARE = 0.2
"""Least share of the nodes' median bandwidth. Generations of machines differ by two to three, and a node whose other
ranks compute while it is measured by less than five."""

_FOLDER = "health"
_PRODUCTS: dict[torch.dtype, tuple[int, int, int, str]] = {
    torch.float32: (512, 11, 9, "e26170c73577b5a5"),
    torch.bfloat16: (256, 1, 1, "43f6ae8410aed723"),
}
"""Inner size, largest magnitudes of the factors and hash of the result, by type. All partial sums are exact."""

_ROWS = 512
_PRODUCTS_S = 0.1
_COPIED_BYTES = 64 << 20
_COPIES = 4
_FILE_BYTES = 4 << 20
_SHM_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class NodeHealth:
    """Health of a node.

    Attributes:
        node: its name.
        boot: name that its kernel has given itself, which tells machines of one name apart.
        memory_gb_s: bandwidth of its memory, read and written, in 1e9 bytes per second.
        disk_mb_s: of writing a file of the run and reading it back, in 1e6 bytes per second.
        shm_gib: free space of /dev/shm, which holds snapshots; 0 without one.
        versions: of the libraries that take part in a plan.
        clock_offset_s: of its clock from that of the rendezvous host, or of rank 0; None if it was not compared.
        refused: the reason why it may not join, as one sentence; "" if it may.
    """

    node: str
    boot: str
    memory_gb_s: float
    disk_mb_s: float
    shm_gib: float
    versions: Mapping[str, str]
    clock_offset_s: float | None = None
    refused: str = ""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse what `asdict` of another process has made.

        Raises:
            ValueError: it is malformed.
        """
        match value:
            case {
                "node": str(node), "boot": str(boot), "memory_gb_s": float(memory), "disk_mb_s": float(disk),
                "shm_gib": float(shm), "versions": dict(found), "clock_offset_s": None | float() as offset,
                "refused": str(refused),
            } if all(isinstance(word, str) for pair in found.items() for word in pair):  # fmt: skip
                return cls(
                    node=node, boot=boot, memory_gb_s=memory, disk_mb_s=disk, shm_gib=shm, versions=found,
                    clock_offset_s=offset, refused=refused,
                )  # fmt: skip
        raise ValueError("malformed health")


def check_node(node: str, folder: Path) -> NodeHealth:
    """Check this node, in less than two seconds.

    Args:
        node: its name.
        folder: of the run, made if missing.

    Raises:
        ConfigurationError: it computes wrong, or what is written to disk or /dev/shm does not come back.
    """
    check_products(node, torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk_s = _written_and_read(node, folder, _FILE_BYTES)
    shm_gib = 0.0
    if MEMORY.is_dir():
        _written_and_read(node, MEMORY, _SHM_BYTES)
        about = os.statvfs(MEMORY)
        shm_gib = about.f_bavail * about.f_frsize / 2**30
    return NodeHealth(
        node=node,
        boot=boot_id(),
        memory_gb_s=bandwidth_gb_s(torch.device("cpu")),
        disk_mb_s=2 * _FILE_BYTES / disk_s / 1e6,
        shm_gib=shm_gib,
        versions=versions(),
    )


def check_products(node: str, device: torch.device) -> None:
    """Compute products of whole numbers for a tenth of a second and compare them with their known bits.

    Raises:
        ConfigurationError: a product differs.
    """
    for dtype, (inner, left, right, known) in _PRODUCTS.items():
        a, b = (factor.to(device, dtype) for factor in factors(inner, left, right))
        end = time.monotonic() + _PRODUCTS_S / len(_PRODUCTS)
        while True:
            if checksum(torch.mm(a, b)) != known:
                raise ConfigurationError(
                    f"node {node} computes wrong: a product of whole numbers in {dtype} on {device} differs from its "
                    "known bits: take the machine out of service"
                )
            if time.monotonic() > end:
                break


def factors(inner: int, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Return two matrices of whole numbers (R, K), (K, R) of magnitudes up to `left` and `right`."""
    row, column = torch.arange(_ROWS).unsqueeze(1), torch.arange(inner)
    a = (131 * row + 17 * column + row * column) % (2 * left + 1) - left
    b = (37 * row + 101 * column + row * column) % (2 * right + 1) - right
    return a, b.T


def checksum(product: Tensor) -> str:
    """Return a hash of a matrix of whole numbers."""
    return xxhash.xxh3_64_hexdigest(product.to("cpu", torch.int32).contiguous().numpy().data)


def bandwidth_gb_s(device: torch.device) -> float:
    """Return the bandwidth of a device's memory: the best of four copies, read and written bytes."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = min(_seconds(lambda: target.copy_(source), device) for _ in range(_COPIES))
    return 2 * _COPIED_BYTES / best_s / 1e9


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _written_and_read(node: str, folder: Path, size: int) -> float:
    """Write random bytes to a file, read them back from its disk, and return the seconds that it took.

    Raises:
        ConfigurationError: that fails, or other bytes come back.
    """
    data, began = os.urandom(size), time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            # Out of the page cache, so that the disk is read.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            is_same = file.read() == data
    except OSError as error:
        raise ConfigurationError(
            f"node {node} cannot write to {folder} ({error.strerror}): make room there, or give this user access"
        ) from None
    if not is_same:
        raise ConfigurationError(
            f"node {node} reads other bytes from {folder} than it has written: take the machine or its disk out of "
            "service"
        )
    return time.perf_counter() - began


def refusals(nodes: Sequence[NodeHealth]) -> list[str]:
    """Return for each node why it may not train with the others, as one sentence; "" if it may."""
    bandwidth = statistics.median(node.memory_gb_s for node in nodes)
    kinds = [tuple(sorted(node.versions.items())) for node in nodes]
    common = dict(Counter(kinds).most_common(1)[0][0])
    return [_refusal(node, bandwidth, common) for node in nodes]


def _refusal(node: NodeHealth, bandwidth: float, common: Mapping[str, str]) -> str:
    if others := different_versions(node.versions, common):
        return f"node {node.node} has {others}: install the same on all nodes"
    if abs(node.clock_offset_s or 0.0) > LARGEST_CLOCK_OFFSET_S:
        return (
            f"the clock of node {node.node} is {node.clock_offset_s:+.0f} s off that of the others "
            f"(limit {LARGEST_CLOCK_OFFSET_S:g}): synchronize it, with chronyd for example"
        )
    if node.memory_gb_s < SMALLEST_BANDWIDTH_SHARE * bandwidth:
        return (
            f"the memory of node {node.node} moves {node.memory_gb_s:.1f} GB/s, below "
            f"{SMALLEST_BANDWIDTH_SHARE:g} of the {bandwidth:.1f} GB/s of the others: look for another job on it or "
            "a fault, or set check_health=false"
        )
    return ""


def judged(nodes: Mapping[int, NodeHealth], newest: int, *, all_may_leave: bool) -> dict[int, NodeHealth]:
    """Return the verdict on the newest node and, before anybody trains, on nodes that are refused beside it.

    Args:
        nodes: of a run, by the connections of their launchers.
        newest: of them.
        all_may_leave: nobody trains yet, so a node that came earlier may be the one that is refused, and no machine
            has come anew before its old connection ended.
    """
    found = dict(zip(nodes, refusals(list(nodes.values())), strict=True))
    new = nodes[newest]
    if all_may_leave and any(node.node == new.node and node.boot != new.boot for node in nodes.values()):
        found[newest] = f"two machines are called {new.node}: give each a name of its own with elastic.node (--node)"
    return {
        connection: replace(nodes[connection], refused=why)
        for connection, why in found.items()
        if connection == newest or (why and all_may_leave)
    }


def check_fixed_nodes(node: str | None, folder: Path, world: World) -> None:
    """Check the nodes of a run whose ranks do not change; collective, when they have met. Clocks and bandwidths far
    from the others' are a warning.

    Args:
        node: name of this node on its first rank; None on its others.
        folder: of the run.

    Raises:
        ConfigurationError: on every rank, if a node computes wrong or does not keep what is written.
    """
    with failing_together(world):
        own = None if node is None else check_node(node, folder)
    told = all_gather_json([time.time(), None if own is None else asdict(own)], world)
    first_s = told[0][0]
    nodes = [replace(NodeHealth.parse(value), clock_offset_s=at - first_s) for at, value in told if value is not None]
    nodes = [replace(found, refused=why) for found, why in zip(nodes, refusals(nodes), strict=True)]
    if world.rank == 0:
        for found in nodes:
            write_health(found, folder)
            if found.refused:
                warnings.warn(found.refused, stacklevel=2)


def write_health(health: NodeHealth, folder: Path) -> None:
    """Write the row of a node, for `read_health`."""
    path = folder / _FOLDER / f"{health.node.replace(os.sep, '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_text(path, json.dumps(asdict(health)))


def read_health(*folders: Path) -> list[NodeHealth]:
    """Return the nodes that have joined a run or were refused, of the folders that `write_health` may have had.

    Raises:
        ConfigurationError: there is none, or a file is malformed.
    """
    found = []
    for path in sorted(path for folder in folders for path in (folder / _FOLDER).glob("*.json")):
        try:
            found.append(NodeHealth.parse(json.loads(read_text(path))))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} is no report of a node ({error}): remove it") from None
    if not found:
        raise ConfigurationError(
            f"no node has left its health in {folders[-1]}: give the directory of a run of several nodes, or none for "
            "this machine"
        )
    return found


def health_rows(nodes: Iterable[NodeHealth]) -> list[tuple[object, ...]]:
    """Return the rows of a table with `HEALTH_HEADERS`."""
    return [
        (
            node.node,
            f"{node.memory_gb_s:.1f}",
            f"{node.disk_mb_s:.0f}",
            f"{node.shm_gib:.1f}",
            "-" if node.clock_offset_s is None else f"{node.clock_offset_s:+.2f}",
            " ".join(f"{name} {version}" for name, version in node.versions.items()),
            node.refused or "ok",
        )
        for node in nodes
    ]


HEALTH_HEADERS = ("node", "memory GB/s", "disk MB/s", "/dev/shm GiB", "clock s", "versions", "verdict")
