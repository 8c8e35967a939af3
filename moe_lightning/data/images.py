"""Images and their classes: what a model sees of an image, and the LightningDataModule that serves it step by step.

Shapes: S pixels of a side.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.images_sources import ImageFolder, ImageSource, Shapes, read_image_folder
from moe_lightning.data.step_data import StepDataModule
from moe_lightning.data.step_sampler import StepSampler
from moe_lightning.errors import ConfigurationError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue in [0, 1], which pretrained models expect."""

_WIDEST = 4 / 3  # of a random crop, width over height
_BICUBIC = 3  # of Pillow's resampling filters
_VIEWS = 2  # the stream of random views beside those that draw shapes


class VisitSampler(StepSampler):
    """Numbers the visits to samples: sample i in epoch e is e * num_samples + i.

    So a data set knows the epoch wherever it runs, in a worker process too, and a resumed run makes the same visits.
    """

    def indices_at(self, consumed: int) -> list[int]:
        """The visits of `slice_at(consumed)`, in the order of the global batch."""
        first = consumed // self.epoch_size * self.num_samples
        indices = super().indices_at(consumed)
        return type(indices)(first + index for index in indices)


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

    def __init__(
        self,
        source: ImageSource,
        image_size: int,
        *,
        training: bool,
        crop_scale: tuple[float, float] = (0.08, 1.0),
        flip: bool = True,
        center_crop: float = 0.875,
        max_images: int | None = None,
        seed: int = 0,
    ) -> None:
        self._length = len(source) if max_images is None else min(max_images, len(source))
        self.source = source
        self.image_size = image_size
        self.training = training
        self.crop_scale = crop_scale
        self.flip = flip
        self.center_crop = center_crop
        self.seed = seed

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
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; also of an evaluation batch.
        num_workers: DataLoader processes on each rank, which decode images.
        val_fraction: held out of each class where the folder has no val/, inside (0, 1).
        val_samples: at most so many validation images, spread evenly; None for all.
        crop_scale, flip, center_crop: see ImageViews.
        num_shapes: drawn training images; a quarter as many are held out.
        seed: of the split, of the order of the samples and of their views.

    Raises:
        ConfigurationError: from the constructor for sizes; from `prepare_data`, `setup`, `num_classes` for the folder.
    """

    sampler = VisitSampler

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
        num_shapes: Annotated[int, Interval(ge=4)] = 4096,
        seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, seed=seed)
        if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise ConfigurationError(
                f"crop_scale={list(crop_scale)} is no range of shares inside (0, 1]; give for example [0.08, 1.0]."
            )
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
        """How many classes a model must tell apart."""
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
