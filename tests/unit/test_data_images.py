"""Images: folders of all kinds, drawn shapes, views that depend on the sample and the epoch alone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.data.images import (
    MEAN,
    STD,
    ImageData,
    ImageFiles,
    ImageViews,
    Shapes,
    ViewSampler,
    center_box,
    random_box,
    read_image_folder,
)
from moe_lightning.data.loader import StepLoader
from moe_lightning.data.sampler import DummyIndices, StepSampler
from moe_lightning.errors import ConfigurationError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install '.[images]'")


def write(
    path: Path, colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (6, 4), **options: Any
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


def folder_of(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        for number in range(count):
            write(root / name / f"{number}.png", (number, 0, 0))
    return root


def served(data: ImageData, batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data.setup()
    loader, found = data.train_dataloader(), list[tuple[torch.Tensor, torch.Tensor]]()
    while len(found) < batches:
        found += list(loader)
    return found[:batches]


# ---------------------------------------------------------------------- folders


def test_both_parts_of_a_folder(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", {"cat": 3, "ant": 2, "bee": 1})
    folder_of(tmp_path / "val", {"cat": 1, "bee": 2})
    write(tmp_path / "train" / "ant" / "deep" / "er" / "x.JPG")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    write(tmp_path / "train" / "ant" / "._0.png")
    (tmp_path / "train" / ".cache").mkdir()
    folder = read_image_folder(tmp_path, val_fraction=0.5, seed=0)
    assert folder.classes == ("ant", "bee", "cat")
    assert folder.train.paths.tolist() == [
        b"ant/0.png",
        b"ant/1.png",
        b"ant/deep/er/x.JPG",
        b"bee/0.png",
        b"cat/0.png",
        b"cat/1.png",
        b"cat/2.png",
    ]
    assert folder.train.classes.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert folder.val.classes.tolist() == [1, 1, 2]


@pytest.mark.parametrize("root", [".", "train"])
def test_a_share_of_each_class_is_held_out(root: str, tmp_path: Path) -> None:
    folder_of(tmp_path / root, {"a": 10, "b": 2, "c": 1})
    folder = read_image_folder(tmp_path, val_fraction=0.2, seed=1)
    assert np.bincount(folder.val.classes, minlength=3).tolist() == [2, 1, 0]
    assert sorted([*folder.train.paths, *folder.val.paths]) == sorted(
        read_image_folder(tmp_path, val_fraction=0.2, seed=2).train.paths.tolist()
        + read_image_folder(tmp_path, val_fraction=0.2, seed=2).val.paths.tolist()
    )
    again = read_image_folder(tmp_path, val_fraction=0.2, seed=1)
    assert again.val.paths.tolist() == folder.val.paths.tolist()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, r"does not exist: give one that holds train/CLASS/\*.jpg"),
        ({"train/a": 2}, "has 1 class folders, and a classifier needs two"),
        ({"val/a": 1, "a": 1}, "has val/ but no train/"),
        ({"train/a": 1, "train/b": 1, "val/c": 1}, "val has the class 'c', which .*train has not"),
        ({"a": 1, "b": 1}, "holds out 0 of the 2 images"),
        ({"Training/a": 2, "Training/b": 2, "Testing/a": 2}, "Testing, Training, which are parts .*: name .* train"),
        ({"train_set/a": 2, "validation_set/a": 2, "extra": 2}, "train_set, validation_set, which are parts"),
        ({"Train/a": 2, "Val/a": 2}, "Train, Val, which are parts"),
        ({"seg_train/a": 2, "seg_test/a": 2, "seg_pred/a": 1}, "seg_test, seg_train, which are parts"),
    ],
)
def test_wrong_folders(counts: dict[str, int], message: str, tmp_path: Path) -> None:
    folder_of(tmp_path / "images", counts)
    with pytest.raises(ConfigurationError, match=message):
        ImageData(path=tmp_path / "images").prepare_data()


@pytest.mark.parametrize("name", ["valid", "Validation", "val_images"])
def test_images_to_validate_on_under_another_name_are_not_passed_over_in_silence(name: str, tmp_path: Path) -> None:
    folder_of(tmp_path, {"train/a": 4, "train/b": 4, f"{name}/a": 1, "test/a": 1})
    with pytest.warns(UserWarning, match=f"{name} is not used: name it val"):
        read_image_folder(tmp_path, val_fraction=0.5, seed=0)


def test_classes_may_be_named_like_one_part(tmp_path: Path) -> None:
    folder_of(tmp_path, {"training": 2, "train2": 2, "cat": 2})
    assert read_image_folder(tmp_path, val_fraction=0.5, seed=0).classes == ("cat", "train2", "training")


def test_links_to_folders_above_are_left(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "images", {"a": 3, "b": 3})
    for link in (folder / "a" / "again", folder / "b" / "again"):
        link.symlink_to(folder / link.parent.name)
    (folder / "itself").symlink_to("itself")
    found = read_image_folder(folder, val_fraction=0.4, seed=0)
    assert (found.classes, len(found.train) + len(found.val)) == (("a", "b"), 6)


def test_folders_without_images(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", {"a": 1, "b": 1})
    (tmp_path / "val").mkdir()
    with pytest.raises(ConfigurationError, match="val has no class folders"):
        read_image_folder(tmp_path, val_fraction=0.1, seed=0)
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(ConfigurationError, match=r"train/c holds no images .*: remove it"):
        read_image_folder(tmp_path, val_fraction=0.1, seed=0)


def test_every_kind_of_image_becomes_rgb(tmp_path: Path) -> None:
    modes = {"RGB": "png", "L": "jpg", "P": "gif", "RGBA": "png", "1": "bmp", "CMYK": "tiff"}
    for mode, ending in modes.items():
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.new(mode, (5, 3)).save(tmp_path / "a" / f"{mode}.{ending}")
    folder_of(tmp_path, {"b": 1})
    folder = read_image_folder(tmp_path, val_fraction=0.5, seed=0)
    for part in (folder.train, folder.val):
        for index in range(len(part)):
            assert part.open(index)[0].mode == "RGB"


@pytest.mark.parametrize(("ending", "dtype"), [("png", np.uint16), ("tiff", np.uint16), ("tiff", np.float32)])
def test_more_than_eight_bits_are_refused(ending: str, dtype: Any, tmp_path: Path) -> None:
    """Pillow would make all above 255 white."""
    Image.fromarray((np.arange(16).reshape(4, 4) * 4000).astype(dtype)).save(tmp_path / f"0.{ending}")
    files = ImageFiles(root=tmp_path, paths=np.array([f"0.{ending}".encode()]), classes=np.zeros(1, np.int64))
    with pytest.raises(ConfigurationError, match="has more than 8 bits a channel: scale it to 8"):
        files.open(0)


@pytest.mark.parametrize("damage", ["cut", "text", "gone"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(damage: str, workers: int, tmp_path: Path) -> None:
    path = tmp_path / "0.jpg"
    write(path, size=(64, 64))
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"hello", "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    files = ImageFiles(root=tmp_path, paths=np.array([b"0.jpg"]), classes=np.zeros(1, np.int64))
    views = ImageViews(files, 8, training=False)
    loader = StepLoader.of_samples(views, global_batch_size=1, seed=0, training=False, num_workers=workers)
    with pytest.raises(ConfigurationError, match=rf"^{path} is not a readable image \([^\n]*\): fix or remove it$"):
        next(iter(loader))


# ---------------------------------------------------------------------- shapes


def test_shapes_are_drawn_from_their_number_alone() -> None:
    shapes = Shapes(count=30, side=16, seed=4, part=0)
    images = [np.array(shapes.open(index)[0]) for index in range(len(shapes))]
    again = copy.copy(shapes)
    assert all(np.array_equal(np.array(again.open(index)[0]), images[index]) for index in reversed(range(30)))
    assert [shapes.open(index)[1] for index in range(13)] == [*range(12), 0]
    others = (Shapes(count=30, side=16, seed=4, part=1), Shapes(count=30, side=16, seed=5, part=0))
    assert not any(np.array_equal(np.array(other.open(7)[0]), images[7]) for other in others)
    assert not np.array_equal(images[0], images[12])


def test_shapes_differ_in_colour() -> None:
    """The fill of a class reaches its channel: red, green and blue in turn."""
    shapes = Shapes(count=120, side=32, seed=0, part=0)
    strongest = [np.array(shapes.open(index)[0], dtype=int).std(axis=(0, 1)) for index in range(120)]
    assert len(shapes.CLASSES) == 12
    for colour in range(3):
        mean = np.mean([values for index, values in enumerate(strongest) if index % 3 == colour], axis=0)
        assert mean[colour] > 0


# ---------------------------------------------------------------------- views


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 500),
    st.integers(1, 500),
    st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
    st.integers(0, 1000),
)
def test_boxes_lie_inside_the_image(width: int, height: int, scale: tuple[float, float], seed: int) -> None:
    low, high = sorted(scale)
    image = Image.new("L", (width, height))
    for box in (random_box(width, height, (low, high), np.random.default_rng(seed)), center_box(width, height, high)):
        left, top, right, bottom = box
        assert 0 <= left <= right <= width
        assert 0 <= top <= bottom <= height
        assert (right - left) * (bottom - top) <= high * width * height * (1 + 1e-9)
        image.resize((2, 2), box=box)  # refuses a box that reaches past the image


def test_a_view_of_one_colour_is_that_colour(tmp_path: Path) -> None:
    write(tmp_path / "0.png", (0, 128, 255), size=(30, 20))
    files = ImageFiles(root=tmp_path, paths=np.array([b"0.png"]), classes=np.array([3]))
    for training in (False, True):
        x, number = ImageViews(files, 8, training=training)[0]
        assert x.shape == (3, 8, 8)
        assert x.dtype == torch.float32
        assert number == 3
        expected = [(value / 255 - mean) / std for value, mean, std in zip((0, 128, 255), MEAN, STD, strict=True)]
        torch.testing.assert_close(x[:, 3, 3], torch.tensor(expected))


def test_validation_sees_the_middle(tmp_path: Path) -> None:
    """A white square of 4 pixels in the middle of a black image of 8 x 16 fills a half of the shorter side."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[2:6, 6:10] = 255
    Image.fromarray(pixels).save(tmp_path / "0.png")
    files = ImageFiles(root=tmp_path, paths=np.array([b"0.png"]), classes=np.array([0]))
    middle, whole = (ImageViews(files, 8, training=False, center_crop=share)[0][0] for share in (0.5, 1.0))
    assert middle.min() > 0
    assert whole[0, 0, 0] < 0 < whole[0, 4, 4]


def test_views_of_later_epochs_differ() -> None:
    data = ImageData(image_size=16, num_shapes=8, global_batch_size=4)
    data.setup()
    views = data._train
    assert len(views) == 8
    first, second = views[3], views[3 + 8]
    assert first[1] == second[1]
    assert not torch.equal(first[0], second[0])
    assert torch.equal(views[3][0], first[0])
    assert torch.equal(pickle.loads(pickle.dumps(views))[11][0], second[0])  # noqa: S301


def test_a_flip_mirrors() -> None:
    shapes = Shapes(count=12, side=8, seed=0, part=0)
    plain, flipped = (ImageViews(shapes, 8, training=True, crop_scale=(1.0, 1.0), flip=flip) for flip in (False, True))
    mirrored = [view for view in range(40) if not torch.equal(plain[view][0], flipped[view][0])]
    assert 8 < len(mirrored) < 32, "about a half"
    assert all(torch.equal(plain[view][0], flipped[view][0].flip(-1)) for view in mirrored)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_world_makes_the_same_visits(workers: int) -> None:
    """Batches over two epochs are those of one process, cut; also in worker processes, also when resumed."""
    options: dict[str, Any] = {"image_size": 8, "num_shapes": 10, "global_batch_size": 4, "seed": 2}
    whole = served(ImageData(**options), 4)
    data = ImageData(**options, num_workers=workers)
    data.setup()
    loaders = [data.train_dataloader() for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.bind(rank=rank, world_size=2)
        loader.load_state_dict({"consumed": 4})  # inside the first epoch of two steps
    parts = [[*loader, *loader] for loader in loaders]
    for step in range(3):
        x, y = (torch.cat([part[step][i] for part in parts]) for i in range(2))
        assert torch.equal(x, whole[step + 1][0])
        assert torch.equal(y, whole[step + 1][1])
    assert not torch.equal(whole[0][0].sum(), whole[2][0].sum())


def test_the_sampler_counts_visits() -> None:
    options: dict[str, Any] = {"global_batch_size": 3, "seed": 1, "training": True}
    loader = StepLoader.of_samples(list(range(100, 107)), sampler=ViewSampler, **options)  # type: ignore[arg-type]
    plain = StepLoader.of_samples(list(range(7)), **options)  # type: ignore[arg-type]
    for consumed in (0, 3, 6, 9, 12):
        epoch = consumed // 6
        expected = [7 * epoch + index for index in plain.step_sampler.indices_at(consumed)]
        assert loader.step_sampler.indices_at(consumed) == expected


def test_visits_tell_samples_from_dummies() -> None:
    options: dict[str, Any] = {
        "num_samples": 3, "global_batch_size": 4, "pieces": 2, "world_size": 2, "rank": 1, "seed": 1,
        "evaluation": True, "drop_last": False,
    }  # fmt: skip
    plain, visits = (sampler(**options).indices_at(0) for sampler in (StepSampler, ViewSampler))
    assert isinstance(plain, DummyIndices)
    assert isinstance(visits, DummyIndices)
    assert list(visits.of_samples) == list(plain.of_samples)
    assert len(plain.of_samples) == 1


# ---------------------------------------------------------------------- the data module


def test_validation_images_are_spread(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", {"a": 3, "b": 3})
    folder_of(tmp_path / "val", {"a": 5, "b": 5})
    data = ImageData(path=tmp_path, image_size=4, global_batch_size=4, val_samples=4)
    data.setup()
    assert torch.cat([y for _, y in data.val_dataloader()]).tolist() == [0, 0, 1, 1]
    assert torch.cat([y for _, y in data.predict_dataloader()]).tolist() == [0, 0, 1, 1]
    assert data.num_classes == 2
    assert data.summary() == f"{tmp_path}: 6 training and 10 validation images, 2 classes"
    assert ImageData().num_classes == 12
    assert ImageData().summary() == "coloured shapes: 4,096 training and 1,024 validation images, 12 classes"


def test_pillow_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'moe-lightning\[images\]'"):
        Shapes(count=4, side=8, seed=0, part=0).open(0)
