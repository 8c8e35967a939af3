"""Which experts each token of a run took, on disk: a directory of safetensors files, one for each piece of a step.

`step-00000012.sample-000008.part-0-of-1.safetensors` holds `expert_ids`, integers [samples, positions, layers, K], of
the samples that follow the 8th one of the global batch of step 12, in its order; -1 in all K where the router shall
choose. Where several ranks share samples, each writes its part of their positions. A file may hold all samples of a
step, as an inference engine writes them; what lies twice is alike.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_lightning.errors import ConfigurationError

_NAME = re.compile(r"step-(\d+)\.sample-(\d+)\.part-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True, order=True)
class Piece:
    """Where the tokens of a micro-batch lie.

    Attributes:
        step: optimizer step.
        first_sample: in its global batch.
        part, parts: of the positions of each sample.
    """

    step: int
    first_sample: int
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """Of its file."""
        return f"step-{self.step:08d}.sample-{self.first_sample:06d}.part-{self.part}-of-{self.parts}.safetensors"


def write_piece(folder: Path, piece: Piece, expert_ids: Tensor) -> None:
    """Write [samples, positions, layers, K], whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".{piece.name}.{secrets.token_hex(6)}"
    try:
        save_file({"expert_ids": expert_ids.to(torch.int16).contiguous()}, staged)
        os.replace(staged, folder / piece.name)
    finally:
        staged.unlink(missing_ok=True)


def read_samples(folder: Path, wanted: Piece, count: int) -> Tensor:
    """[count, positions of the part, layers, K] of as many samples, from whatever pieces hold them.

    Raises:
        ConfigurationError: the folder lacks some of it, or holds a damaged file.
    """
    pieces = sorted(piece for piece in _pieces(folder) if piece.step == wanted.step)
    held: dict[int, dict[tuple[int, int], Tensor]] = {}
    last = wanted.first_sample + count
    for piece in pieces:
        if piece.first_sample < last:
            for at, sample in enumerate(_read(folder / piece.name), start=piece.first_sample):
                if wanted.first_sample <= at < last:
                    held.setdefault(at, {})[piece.part, piece.parts] = sample
    samples = [_whole(held.get(at, {})) for at in range(wanted.first_sample, last)]
    found = [sample for sample in samples if sample is not None]
    if len(found) < count:
        at = wanted.first_sample + samples.index(None)
        raise ConfigurationError(
            f"{folder} has no routing of sample {at} of step {wanted.step} in whole: record it with the same data, "
            "global batch and seed, or stop before that step"
        )
    if len({sample.shape for sample in found}) > 1 or any(len(sample) % wanted.parts for sample in found):
        raise ConfigurationError(
            f"{folder} holds samples of unlike lengths in step {wanted.step}, or such as {wanted.parts} ranks cannot "
            "share: pad them as the batches are padded"
        )
    return torch.stack([sample.chunk(wanted.parts)[wanted.part] for sample in found])


def _pieces(folder: Path) -> list[Piece]:
    if not folder.is_dir():
        raise ConfigurationError(f"the routing to replay, {folder}, is no folder: give one that was recorded")
    names = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    numbers = (tuple(map(int, name.groups())) for name in names if name is not None)
    return [Piece(step=s, first_sample=f, part=part, parts=parts) for s, f, part, parts in numbers]


def _read(path: Path) -> Tensor:
    try:
        ids = load_file(path)["expert_ids"]
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigurationError(f"{path} holds no expert_ids, or is damaged ({error}): record it anew") from error
    if ids.ndim != 4 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ConfigurationError(
            f"{path} holds expert_ids of {list(ids.shape)}, {ids.dtype}: give integers [samples, positions, layers, K]"
        )
    return ids


def _whole(parts: dict[tuple[int, int], Tensor]) -> Tensor | None:
    """A sample, from one set of parts that is complete."""
    for size in {parts_of for _, parts_of in parts}:
        if all((part, size) in parts for part in range(size)):
            return torch.cat([parts[part, size] for part in range(size)])
    return None
