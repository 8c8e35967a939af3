"""Images with classes: sources, transformations and the LightningDataModule.

Sources are a folder with a subfolder for each class, or shapes that are drawn on the fly. Shapes: S pixels of a side.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.documents import visible_entries, visible_files
from moe_lightning.data.loader import StepDataModule
from moe_lightning.data.sampler import DummyIndices, StepSampler
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local, check_regular

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_PART = re.compile(
    r"(?:train|test|eval|(val|valid|dev))(?:ing|idation|uation)?(?:[ _-]?(?:data|set|dataset|images))?", re.IGNORECASE
)
"""Name of a folder that is a part of a data set rather than a class; group 1: of one to validate on."""


def pillow(module: str) -> Any:
    """A module of the optional package Pillow.

    Raises:
        ConfigurationError: it is missing.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ConfigurationError("images need the package Pillow: pip install 'moe-lightning[images]'") from error


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

    @property
    def data_key(self) -> str:
        """Digest of the names and classes; nothing of the images is read."""
        return str(xxhash.xxh3_128_hexdigest(b"".join([self.paths.tobytes(), self.classes.tobytes()])))

    def open(self, index: int) -> tuple[Any, int]:
        """Decode one image.

        Raises:
            ConfigurationError: the file is missing, damaged, no image, or has more than 8 bits a channel.
        """
        path = self.root / os.fsdecode(self.paths[index])
        image_module = pillow("Image")
        try:
            check_regular(path)
            with image_module.open(path) as image:
                if image.mode[0] in "IF":  # integers of 16 or 32 bits, or floats, which `convert` would clip at 255
                    raise ValueError(f"its mode {image.mode} has more than 8 bits a channel: scale it to 8")
                return image.convert("RGB"), int(self.classes[index])
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
            raise ConfigurationError(f"{path} is not a readable image ({error}): fix or remove it") from error

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
        ConfigurationError: no such folder, fewer than two classes, parts of a data set under other names, a class
            without images, or one that only val/ has.
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
    names = _subfolders(path)
    shared = os.path.commonprefix(names)  # noqa: RUF071 - letters are meant: of seg_train and seg_test
    start = 1 + max(shared.rfind(mark) for mark in " _-")
    parts = [match for name in names if (match := _PART.fullmatch(name, start))]
    if root == path and len(parts) > 1:
        raise ConfigurationError(
            f"{path} has the folders {', '.join(part.string for part in parts)}, which are parts of a data set and no "
            "classes: name the folder of the training images train, and that of the images to validate on val"
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
    if root != path and (unused := next((part.string for part in parts if part[1]), None)):
        rank_zero_warn(f"{path / unused} is not used: name it val to validate on its images")
    train, val = _split(found.classes, val_fraction, seed)
    if not len(val) or not len(train):
        raise ConfigurationError(
            f"val_fraction={val_fraction} holds out {len(val)} of the {len(found)} images of {root}, and neither part "
            "may be empty: give at least two images a class, or val/"
        )
    return ImageFolder(classes=classes, train=found.only(train), val=found.only(val))


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(name for name, is_folder in visible_entries(folder) if is_folder)


def _files(root: Path, present: tuple[str, ...], classes: tuple[str, ...]) -> ImageFiles:
    """The images of the class folders that are present, in the order of their names."""
    paths: list[bytes] = []
    numbers: list[int] = []
    for name in present:
        images = (path for path in visible_files(root / name) if path.name.lower().endswith(ENDINGS))
        found = sorted(os.fsencode(path.relative_to(root)) for path in images)
        if not found:
            raise ConfigurationError(
                f"the class folder {root / name} holds no images ({', '.join(ENDINGS)}): remove it"
            )
        paths += found
        numbers += [classes.index(name)] * len(found)
    if not paths:
        raise ConfigurationError(f"{root} has no class folders: put images into {root}/CLASS/, or remove it")
    return ImageFiles(root=root, paths=np.array(paths), classes=np.array(numbers, dtype=np.int64))


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

    @property
    def data_key(self) -> str:
        """Key of the images that are drawn."""
        return f"shapes {self.seed} {self.part}"

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


ImageSource = ImageFiles | Shapes
"""Images by their numbers."""

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue in [0, 1], which pretrained models expect."""

_WIDEST = 4 / 3  # of a random crop, width over height
_BICUBIC = 3  # of Pillow's resampling filters
_VIEWS = 2  # the stream of random views beside those that draw shapes


class ViewSampler(StepSampler):
    """Numbers the visits to samples: sample i in epoch e is e * num_samples + i.

    So a data set knows the epoch wherever it runs, in a worker process too, and a resumed run makes the same visits.
    """

    def indices_at(self, consumed: int) -> list[int]:
        """The visits of `slice_at(consumed)`, in the order of the global batch."""
        first = consumed // self.epoch_size * self.order.num_samples
        indices = super().indices_at(consumed)
        visits = type(indices)(first + index for index in indices)
        if isinstance(indices, DummyIndices) and isinstance(visits, DummyIndices):
            visits.of_samples = [first + index for index in indices.of_samples]
        return visits


@dataclass(eq=False, repr=False)
class ImageViews(Dataset[tuple[Tensor, int]]):
    """View v of a source as x [3, S, S], float32 and normalised, and its class.

    While training, view v is of image v mod len, cropped and flipped at random by (seed, v) alone, so that every epoch
    sees other views and every world the same. Else it is the middle of image v.

    `len` is the number of images in use.

    Args:
        source: of the images.
        image_size: S.
        training: crop at random.
        crop_scale: smallest and largest share of the area that a random crop keeps; it is up to a third wider or
            higher than it is high or wide.
        flip: mirror every other training view.
        center_crop: share of the shorter side that the middle keeps.
        max_images: at most so many images, spread evenly over the source; None for all.
        seed: of the random views.
    """

    source: ImageSource
    image_size: int
    _: KW_ONLY
    training: bool
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = True
    center_crop: float = 0.875
    max_images: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        available = len(self.source)
        self._length = available if self.max_images is None else min(self.max_images, available)
        self.data_key = self.source.data_key

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, view: int) -> tuple[Tensor, int]:
        image, number = self.source.open(view % self._length * len(self.source) // self._length)
        width, height = image.size
        if self.training:
            rng = np.random.default_rng((self.seed, _VIEWS, view))
            box = random_box(width, height, self.crop_scale, rng)
            is_flipped = self.flip and rng.random() < 0.5
        else:
            box, is_flipped = center_box(width, height, self.center_crop), False
        pixels_SS3 = np.array(image.resize((self.image_size, self.image_size), _BICUBIC, box=box))
        return normalised(pixels_SS3[:, ::-1] if is_flipped else pixels_SS3), number


def random_box(
    width: int, height: int, scale: tuple[float, float], rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """A box (left, top, right, bottom) inside an image, its area a random share of the image's."""
    area = width * height * rng.uniform(*scale)
    ratio = math.exp(rng.uniform(-math.log(_WIDEST), math.log(_WIDEST)))
    box_width, box_height = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = rng.uniform(0, width - box_width), rng.uniform(0, height - box_height)
    # Rounding may carry an edge past the image, which Pillow refuses.
    return left, top, min(width, left + box_width), min(height, top + box_height)


def center_box(width: int, height: int, share: float) -> tuple[float, float, float, float]:
    """The square box (left, top, right, bottom) in the middle of an image, of this share of its shorter side."""
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def normalised(pixels_SS3: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """[3, S, S] float32 from uint8 pixels, as MEAN and STD say."""
    scaled_SS3 = (pixels_SS3 / np.float32(255) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(np.ascontiguousarray(scaled_SS3.transpose(2, 0, 1)))


@validated
class ImageData(StepDataModule):
    """A folder of images, or drawn shapes, as training, validation and prediction batches of a constant global size.

    Args:
        path: folder with train/CLASS/* and val/CLASS/*, or CLASS/* (see `read_image_folder`); None: coloured shapes,
            drawn on the fly, for whoever has no images at hand.
        image_size: pixels of a side that the model sees.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; an evaluation batch is
            as large as a micro-batch.
        num_workers: DataLoader processes on each rank, which decode images.
        val_fraction: held out of each class where the folder has no val/, inside (0, 1).
        val_samples: at most so many validation images, spread evenly; None for all.
        crop_scale, flip, center_crop: see ImageViews.
        num_shapes: drawn training images; a quarter as many are held out.
        seed: of the split, of the order of the samples and of their views.

    Raises:
        ConfigurationError: from the constructor for sizes; from `prepare_data`, `setup`, `num_classes` for the folder.
    """

    sampler = ViewSampler

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        image_size: PositiveInt = 192,
        global_batch_size: PositiveInt = 32,
        num_workers: NonNegativeInt = 0,
        val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1,
        val_samples: PositiveInt | None = None,
        crop_scale: tuple[float, float] = (0.08, 1.0),
        flip: bool = True,
        center_crop: Annotated[float, Interval(gt=0, le=1)] = 0.875,
        num_shapes: Annotated[int, Interval(ge=4, le=1e7)] = 4096,
        seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, seed=seed)
        if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise ConfigurationError(
                f"crop_scale={list(crop_scale)} is not a range of shares inside (0, 1]; give for example [0.08, 1.0]."
            )
        check_local("path", path)
        self.image_size = image_size
        self.val_samples = val_samples
        self._path = None if path is None else Path(path).expanduser()
        self._val_fraction = val_fraction
        self._num_shapes = num_shapes
        self._views: dict[str, Any] = {
            "crop_scale": (crop_scale[0], crop_scale[1]),
            "flip": flip,
            "center_crop": center_crop,
            "seed": seed,
        }

    # ------------------------------------------------------------------ what the images are

    @cached_property
    def _folder(self) -> ImageFolder | None:
        """Read at the first use; None for drawn shapes."""
        if self._path is None:
            return None
        return read_image_folder(self._path, val_fraction=self._val_fraction, seed=self.seed)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; a target is a place in this list."""
        return Shapes.CLASSES if self._folder is None else self._folder.classes

    @property
    def num_classes(self) -> int:
        """Number of classes of the images."""
        return len(self.classes)

    def summary(self) -> str:
        """One line about the images."""
        train, val = self._sources()
        where = "coloured shapes" if self._path is None else str(self._path)
        return f"{where}: {len(train):,} training and {len(val):,} validation images, {self.num_classes:,} classes"

    def _sources(self) -> tuple[ImageSource, ImageSource]:
        """Images to train on and to validate on."""
        folder = self._folder
        if folder is None:
            counts = (self._num_shapes, self._num_shapes // 4)
            train, val = (
                Shapes(count=count, side=self.image_size, seed=self.seed, part=part)
                for part, count in enumerate(counts)
            )
            return train, val
        return folder.train, folder.val

    # ------------------------------------------------------------------ Lightning's hooks

    def prepare_data(self) -> None:
        """Find the images, once on every node, so that a mistake is one message."""
        self.summary()

    def setup(self, stage: str | None = None) -> None:
        """Find the images."""
        train, val = self._sources()
        self._train = ImageViews(train, self.image_size, training=True, **self._views)
        self._val = ImageViews(val, self.image_size, training=False, max_images=self.val_samples, **self._views)
