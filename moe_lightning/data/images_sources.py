"""Where images come from: a folder with a subfolder for each class, or shapes that are drawn on the fly."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_regular

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def pillow(module: str) -> Any:
    """A module of the optional package Pillow.

    Raises:
        ConfigurationError: it is missing.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ConfigurationError("images need the package Pillow: pip install 'moe-lightning[images]'") from error


class ImageSource(Protocol):
    """Images by their numbers."""

    def __len__(self) -> int: ...

    def open(self, index: int) -> tuple[Any, int]:
        """A Pillow image in RGB, and the number of its class."""
        ...


# ---------------------------------------------------------------------- a folder


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Some images of a folder.

    Attributes:
        root: the folder.
        paths: of the files below it, as bytes: one array costs workers of a DataLoader no copy each.
        classes: the number of each one's class.
    """

    root: Path
    paths: npt.NDArray[np.bytes_]
    classes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> tuple[Any, int]:
        """Decode one image.

        Raises:
            ConfigurationError: the file is missing, damaged or no image.
        """
        path = self.root / os.fsdecode(self.paths[index])
        image_module = pillow("Image")
        try:
            check_regular(path)
            with image_module.open(path) as image:
                return image.convert("RGB"), int(self.classes[index])
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
            raise ConfigurationError(f"{path} is no image that can be read ({error}): mend or remove it") from error

    def only(self, chosen: npt.NDArray[np.int64]) -> ImageFiles:
        """Those of these numbers, in this order."""
        return ImageFiles(root=self.root, paths=self.paths[chosen], classes=self.classes[chosen])


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """A folder's classes, in the order of their names, with the images to train on and those held out."""

    classes: tuple[str, ...]
    train: ImageFiles
    val: ImageFiles


def read_image_folder(path: Path, *, val_fraction: float, seed: int) -> ImageFolder:
    """The images of PATH/train/CLASS and PATH/val/CLASS; without val/ a share of each class is held out, and without
    train/ as well the classes lie in PATH itself. Below a class any folders may follow.

    Args:
        path: the folder.
        val_fraction: share of each class that is held out where there is no val/; at least one image of a class of two.
        seed: which images these are.

    Raises:
        ConfigurationError: no such folder, fewer than two classes, a class without images, or one that only val/ has.
    """
    if not path.is_dir():
        raise ConfigurationError(f"the image folder {path} does not exist: give one that holds train/CLASS/*.jpg")
    root = path / "train"
    if not root.is_dir():
        if (path / "val").is_dir():
            raise ConfigurationError(f"{path} has val/ but no train/: name the folder of the training images train")
        root = path
    classes = _subfolders(root)
    if len(classes) < 2:
        raise ConfigurationError(
            f"{root} has {len(classes)} class folders, and a classifier needs two: put images into {root}/CLASS/"
        )
    found = _files(root, classes, classes)
    if (path / "val").is_dir() and root != path:
        held_out = _subfolders(path / "val")
        unknown = sorted(set(held_out) - set(classes))
        if unknown:
            raise ConfigurationError(
                f"{path / 'val'} has the class {unknown[0]!r}, which {root} has not: give both the same class folders"
            )
        return ImageFolder(classes=classes, train=found, val=_files(path / "val", held_out, classes))
    train, val = _split(found.classes, val_fraction, seed)
    if not len(val) or not len(train):
        raise ConfigurationError(
            f"val_fraction={val_fraction} holds out {len(val)} of the {len(found)} images of {root}, and neither part "
            "may be empty: give at least two images a class, or val/"
        )
    return ImageFolder(classes=classes, train=found.only(train), val=found.only(val))


def _subfolders(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _files(root: Path, present: tuple[str, ...], classes: tuple[str, ...]) -> ImageFiles:
    """The images of the class folders that are present, in the order of their names."""
    paths: list[bytes] = []
    numbers: list[int] = []
    for name in present:
        found = sorted(os.fsencode(path) for path in _images_below(root / name, Path(name)))
        if not found:
            raise ConfigurationError(
                f"the class folder {root / name} holds no images ({', '.join(ENDINGS)}): remove it"
            )
        paths += found
        numbers += [classes.index(name)] * len(found)
    if not paths:
        raise ConfigurationError(f"{root} has no class folders: put images into {root}/CLASS/, or remove it")
    return ImageFiles(root=root, paths=np.array(paths), classes=np.array(numbers, dtype=np.int64))


def _images_below(folder: Path, name: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # what file managers and copies from other systems leave
                continue
            if entry.is_dir():
                yield from _images_below(folder / entry.name, name / entry.name)
            elif entry.name.lower().endswith(ENDINGS):
                yield name / entry.name


def _split(
    classes: npt.NDArray[np.int64], fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers of the images to train on and of those held out, both in order; every class gives its share."""
    is_held_out = np.zeros(len(classes), dtype=bool)
    rng = np.random.default_rng(seed)
    for number in range(int(classes.max()) + 1):
        (members,) = np.nonzero(classes == number)
        count = min(len(members) - 1, max(1, round(len(members) * fraction)))
        is_held_out[rng.permutation(members)[:count]] = True
    (train,), (val,) = np.nonzero(~is_held_out), np.nonzero(is_held_out)
    return train, val


# ---------------------------------------------------------------------- shapes

_SHAPES = ("disc", "ring", "beam", "pillar")
_COLOURS = {"red": (200, 60, 60), "green": (60, 180, 70), "blue": (70, 90, 210)}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Coloured shapes on noisy grounds, anywhere and of any size: image i is drawn from (seed, part, i) alone.

    Attributes:
        count: images; as many of each class, as nearly as it can be.
        side: pixels of a side.
        seed: of the set.
        part: another number gives other images of the same kind.
    """

    CLASSES = tuple(f"{colour} {shape}" for shape, colour in product(_SHAPES, _COLOURS))

    count: int
    side: int
    seed: int
    part: int

    def __len__(self) -> int:
        return self.count

    def open(self, index: int) -> tuple[Any, int]:
        """Draw one image."""
        number = index % len(self.CLASSES)
        shape, colour = divmod(number, len(_COLOURS))
        rng = np.random.default_rng((self.seed, self.part, index))
        ground = tuple(int(value) for value in rng.integers(60, 190) + rng.integers(-30, 31, 3))
        image = pillow("Image").new("RGB", (self.side, self.side), ground)
        fill = np.clip(list(_COLOURS.values())[colour] + rng.integers(-40, 41, 3), 0, 255)
        size = self.side * rng.uniform(0.5, 0.8)
        left, top = rng.uniform(0, self.side - size, 2)
        draw = pillow("ImageDraw").Draw(image)
        _draw(draw, _SHAPES[shape], float(left), float(top), float(size), tuple(int(value) for value in fill))
        noise = rng.normal(0, 8, (self.side, self.side, 3))
        noisy = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        return pillow("Image").fromarray(noisy), number


def _draw(draw: Any, shape: str, left: float, top: float, size: float, fill: tuple[int, ...]) -> None:
    right, bottom, third = left + size, top + size, size / 3
    if shape == "disc":
        draw.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "ring":
        draw.ellipse((left, top, right, bottom), outline=fill, width=max(1, round(size / 6)))
    elif shape == "beam":
        draw.rectangle((left, top + third, right, bottom - third), fill=fill)
    else:
        draw.rectangle((left + third, top, right - third, bottom), fill=fill)
