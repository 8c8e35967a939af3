"""Reads the files again that checkpoints carry over from each other, while nothing waits to be written.

A carried file is one inode in all checkpoints that name it: damage to it reaches every one of them, and it is never
written again by itself. So each is read back from storage within a number of commits; one that is damaged, or lost, is
named, and the next checkpoint gets its experts from memory, in a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import xxhash

from moe_lightning.checkpoint.manifest import FileRecord, Manifest
from moe_lightning.checkpoint.storage import Place
from moe_lightning.checkpoint.storages import storage_of

_DATA = re.compile(r".+\.rank(\d+)\.step(\d+)\.distcp")


class Scrubber:
    """The carried files of one node's ranks.

    Args:
        within: commits within which every carried file is read.

    Attributes:
        damaged: names of files that the newest checkpoint carries and that are not as they were written.
        problems: a sentence for each file that was ever found damaged.
    """

    def __init__(self, within: int) -> None:
        self._within = within
        self._commits = 0
        self._read_at: dict[str, int] = {}  # the commit at which a file was last known to be whole
        self._rounds: list[Iterator[None]] = []
        self.damaged: set[str] = set()
        self.problems: list[str] = []

    def committed(self, directory: Place, manifest: Manifest, ranks: Collection[int]) -> None:
        """A checkpoint is there: finish what should have been read by now, and choose what is read until the next one.

        Args:
            ranks: of this node; other nodes read the files of theirs.
        """
        while self.work():
            pass
        self._commits += 1
        carried = {name: r for name, r in manifest.files.items() if _is_carried(name, manifest.step, ranks)}
        self._read_at = {name: self._read_at.get(name, self._commits - 1) for name in carried}
        self.damaged &= carried.keys()
        share = sum(record.nbytes for record in carried.values()) / self._within
        for name in sorted(carried.keys() - self.damaged, key=lambda n: (self._read_at[n], n)):
            if share <= 0 and self._commits - self._read_at[name] < self._within:
                break
            share -= carried[name].nbytes
            self._rounds.append(self._read(directory, name, carried[name]))

    def work(self) -> bool:
        """Read a little; False where nothing is left to be read until the next commit."""
        while self._rounds:
            if next(self._rounds[0], self) is not self:
                return True
            del self._rounds[0]
        return False

    def _read(self, directory: Place, name: str, record: FileRecord) -> Iterator[None]:
        """Compare a file with its checksum, a chunk at a time."""
        path, digest, nbytes = directory / record.path, xxhash.xxh3_64(), 0
        problem: str | None = None
        storage = storage_of(directory)
        try:
            for chunk in storage.chunks(path, fresh=True):
                digest.update(chunk)
                nbytes += len(chunk)
                yield
        except FileNotFoundError:
            if not storage.is_dir(directory):
                return  # pruned: a newer checkpoint carries the file, and it is read from there
            problem = "is gone"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem is None and (nbytes, digest.hexdigest()) != (record.nbytes, record.xxh3):
            problem = "is damaged"
        if problem is None:
            self._read_at[name] = self._commits
            return
        self.damaged.add(name)
        self.problems.append(f"{path} {problem}: the next checkpoint has its experts anew")


def _is_carried(name: str, step: int, ranks: Collection[int]) -> bool:
    match = _DATA.fullmatch(name)
    return match is not None and int(match[2]) != step and int(match[1]) in ranks
