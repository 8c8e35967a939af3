"""Data that changed between two starts of a run: told, and used on request only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from moe_lightning import ConfigurationError, ExpertParallelStrategy, GPTModule
from moe_lightning.data.images import ImageData
from moe_lightning.data.instructions import InstructionData
from moe_lightning.data.loader import StepDataModule, StepLoader, outline_of
from moe_lightning.data.sampler import StepSampler
from moe_lightning.data.text import TextData
from moe_lightning.strategies.step_data import require_same_data
from tests.distributed.training import TINY, RandomTokens, quiet_trainer

TEXT = "".join(f"line {i} of a text that is long enough\n" for i in range(200))
CHAT = "".join(json.dumps({"prompt": f"p{i:02d}", "response": "r"}) + "\n" for i in range(20))


def text(folder: Path, **options: Any) -> StepDataModule:
    (folder / "texts").mkdir(exist_ok=True)
    file = folder / "texts" / "a.txt"
    if not file.exists():
        file.write_text(TEXT)
    return TextData(
        source=str(folder / "texts"), cache_dir=folder / "c", context_length=16, global_batch_size=4, **options
    )


def packed(folder: Path) -> StepDataModule:
    return text(folder, packing=True, end_of_document=10)


def tokens(folder: Path) -> StepDataModule:
    file = folder / "texts.npy"
    if not file.exists():
        np.save(file, np.frombuffer(TEXT.encode(), dtype=np.uint8))
    return TextData(source=str(file), cache_dir=folder / "c", context_length=16, global_batch_size=4)


def instructions(folder: Path, **options: Any) -> StepDataModule:
    file = folder / "chat.jsonl"
    if not file.exists():
        file.write_text(CHAT)
    return InstructionData(path=file, context_length=64, global_batch_size=4, **options)


def images(folder: Path) -> StepDataModule:
    for number in range(0 if (folder / "images").is_dir() else 12):
        path = folder / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return ImageData(path=folder / "images", image_size=8, global_batch_size=4)


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def loader(data: StepDataModule) -> Any:
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        (text, lambda f: replace_in(f / "texts/a.txt", b"line 7 ", b"line 9 "), "other content"),
        (text, lambda f: (f / "texts/b.txt").write_text(TEXT), r"they had \d+ samples and have \d+"),
        (packed, lambda f: replace_in(f / "texts/a.txt", b"line 7 ", b"line 9 "), "other content"),
        (tokens, lambda f: replace_in(f / "texts.npy", b"line 7 ", b"line 9 "), "other content"),
        (instructions, lambda f: replace_in(f / "chat.jsonl", b"p07", b"p77"), "other content"),
        (instructions, lambda f: (f / "chat.jsonl").write_text(CHAT * 2), "they had 19 samples and have 38"),
        (images, lambda f: (f / "images/class0/0.png").rename(f / "images/class0/zero.png"), "other content"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_data_than_those_of_a_position_are_refused(
    tmp_path: Path, kind: Callable[[Path], StepDataModule], change: Callable[[Path], object], what: str
) -> None:
    first = loader(kind(tmp_path))
    next(iter(first)) if kind is not images else None
    state = json.loads(json.dumps(first.state_dict()))
    for path in tmp_path.rglob("*.*"):  # a copy of the same data, as on another machine
        os.utime(path, (1, 1))
    loader(kind(tmp_path)).load_state_dict(state)
    change(tmp_path)
    other = loader(kind(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"not those of the checkpoint: .*{what}.*resume_overrides=true"):
        other.load_state_dict(state)
    assert other.step_sampler.consumed == 0
    other.step_sampler.accepts_other_data = True
    other.load_state_dict(state)
    assert other.step_sampler.consumed == first.step_sampler.consumed


@pytest.mark.parametrize("loader_of", ["train_dataloader", "val_dataloader"])
def test_ranks_whose_texts_differ_in_a_letter_are_refused(tmp_path: Path, loader_of: str) -> None:
    outlines = []
    for node in ("first", "copy", "other"):
        (tmp_path / node).mkdir()
        data = text(tmp_path / node, val_fraction=0.5)
        if node == "other":
            replace_in(tmp_path / node / "texts/a.txt", b"line 7 ", b"line 9 ")
            replace_in(tmp_path / node / "texts/a.txt", b"line 187 ", b"line 189 ")
        loader(data)
        outlines.append(outline_of(getattr(data, loader_of)()))
    require_same_data(outlines[:2])
    with pytest.raises(ConfigurationError, match="or other content or indices: give every rank the whole data set"):
        require_same_data(outlines)


@pytest.mark.parametrize("key", [print, b"a", 3, np.int64(3)])
def test_a_data_key_that_is_no_text_is_another_attribute_of_the_users(key: object) -> None:
    own = StepLoader(Own(8, key), StepSampler(num_samples=8, global_batch_size=4))
    json.dumps([outline_of(own), own.state_dict()])
    assert own.step_sampler.data_key is None


@pytest.mark.parametrize(
    ("consumed", "size", "position"),
    [
        (40 + 8, 20, 20 + 8),  # the third step of the second epoch
        (40 + 32, 20, 20 + 20),  # there are only five: the end of that epoch
        (40, 100, 100),
        (8, 41, 8),
    ],
)
def test_a_position_goes_to_the_same_step_of_other_data(consumed: int, size: int, position: int) -> None:
    sampler = StepSampler(num_samples=size, global_batch_size=4)
    sampler.accepts_other_data = True
    sampler.load_state_dict({"consumed": consumed, "epoch_size": 40, "data_size": 42})
    assert sampler.consumed == position


class Own(Dataset[Any]):
    def __init__(self, size: int, data_key: object = None) -> None:
        self.samples = RandomTokens(size)
        if data_key is not None:
            self.data_key = data_key

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class OwnStream(IterableDataset[Any]):
    def __init__(self, size: int, *, is_sized: bool = True) -> None:
        self.samples = RandomTokens(size)
        if is_sized:
            self.__class__ = SizedStream

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


class SizedStream(OwnStream):
    def __len__(self) -> int:
        return len(self.samples)


def fit(folder: Path, samples: Any, steps: int, **options: Any) -> int:
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy=ExpertParallelStrategy(**options), max_steps=steps)
    saved = folder / "one.ckpt"
    trainer.fit(GPTModule(TINY), DataLoader(samples, batch_size=4), ckpt_path=saved if saved.exists() else None)
    trainer.save_checkpoint(saved)
    return trainer.global_step


class OfFirstLoader(GPTModule):
    """Trains on the first of joined loaders; takes down where the first batch of each fit ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)

    def on_fit_start(self) -> None:
        self.began_at: int | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.began_at is None:
            self.began_at = self.trainer.fit_loop._combined_loader.flattened[0].step_sampler.consumed


def test_the_position_of_a_loader_that_is_gone_ends_with_its_fit(tmp_path: Path) -> None:
    two = {"a": DataLoader(RandomTokens(24), batch_size=4), "b": DataLoader(RandomTokens(24), batch_size=4)}
    first = quiet_trainer(strategy=ExpertParallelStrategy(), max_steps=2)
    first.fit(OfFirstLoader(TINY), two)
    first.save_checkpoint(tmp_path / "two.ckpt")
    module, trainer = OfFirstLoader(TINY), quiet_trainer(strategy=ExpertParallelStrategy(), max_steps=3)
    trainer.fit(module, {"a": two["a"]}, ckpt_path=tmp_path / "two.ckpt")
    assert module.began_at == 3 * 4
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, {"a": two["a"]})
    assert module.began_at == 24 + 4  # the first batch of the next epoch


class StreamOfOthers(SizedStream):
    """Begins with other samples."""

    def __init__(self, size: int) -> None:
        super().__init__(size, is_sized=False)  # which is this class already

    def __iter__(self) -> Any:
        return (self.samples[index + 30] for index in range(len(self.samples)))


class StatefulStream(StreamOfOthers):
    """Continues in the middle of a pass."""

    done = 0

    def __iter__(self) -> Any:
        while self.done < len(self.samples):
            self.done += 1
            yield self.samples[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done, "size": len(self.samples)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["size"] == len(self.samples), "the state of another stream"
        self.done = state["done"]


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (Own(24), Own(20), "they had 24 samples and have 20"),
        (Own(24, "a"), Own(24, "b"), "other content"),
        (OwnStream(24), OwnStream(20), "they had 24 samples and have 20"),
        (OwnStream(24), StreamOfOthers(20), "they had 24 samples and have 20"),
        (StatefulStream(24), StatefulStream(20), "they had 24 samples and have 20"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_data_sets_of_the_users(tmp_path: Path, before: Any, after: Any, what: str) -> None:
    assert fit(tmp_path, before, 2) == 2
    with pytest.raises(ConfigurationError, match=what):
        fit(tmp_path, after, 4)
    assert fit(tmp_path, before, 3) == 3
    assert fit(tmp_path, after, 4, resume_overrides=True) == 4
    assert fit(tmp_path, after, 5) == 5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_limits_of_a_stream_without_a_length_are_no_other_data(tmp_path: Path) -> None:
    fit(tmp_path, OwnStream(24, is_sized=False), 2)
    assert fit(tmp_path, OwnStream(24, is_sized=False), 4) == 4


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"seed": 1}, "other content"),
        ({"val_fraction": 0.2}, "samples and have"),
        ({"end_token": "!"}, "other content"),
    ],
)
def test_other_conversations_or_tokens_than_those_of_a_position_are_refused(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    state = loader(instructions(tmp_path)).state_dict()
    loader(instructions(tmp_path)).load_state_dict(state)
    with pytest.raises(ConfigurationError, match=rf"not those of the checkpoint: .*{what}"):
        loader(instructions(tmp_path, **options)).load_state_dict(state)


def test_another_order_than_that_of_a_position_is_refused() -> None:
    state = StepSampler(num_samples=16, global_batch_size=4, seed=1).state_dict()
    for options, order in (
        ({"seed": 2}, "shuffled with seed 2"),
        ({"shuffle": False, "seed": 1}, "in the order of the data set"),
    ):
        with pytest.raises(ConfigurationError, match=f"they were shuffled with seed 1 and are {order}"):
            StepSampler(num_samples=16, global_batch_size=4, **options).load_state_dict(state)


class Steps(LightningModule):
    """Keeps the samples of every step, with the epoch that Lightning counts, by micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[tuple[int, int], list[list[int]]] = {}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        place = self.trainer.global_step, self.trainer.current_epoch
        self.seen.setdefault(place, []).append([int(x) for x in batch])
        return self.layer(batch).mean() * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_steps(
    path: Path, steps: int | None = None, *, batch: int = 8, stock: bool = False, resume: bool = False, **options: Any
) -> dict[tuple[int, int], list[list[int]]]:
    """A run of three epochs that saves itself after `steps`, or resumes."""
    samples = TensorDataset(torch.arange(42.0)[:, None])
    collate = {"collate_fn": lambda rows: torch.stack([row for (row,) in rows])}
    loader: Any = DataLoader(samples, batch_size=batch, drop_last=True, shuffle=True, **collate)
    if not stock:
        loader = StepLoader(samples, StepSampler(num_samples=42, global_batch_size=batch), **collate)
    save = ModelCheckpoint(path, "saved", every_n_train_steps=steps, enable_version_counter=False) if steps else None
    trainer = quiet_trainer(
        strategy=ExpertParallelStrategy(), callbacks=[save] if save else [], enable_checkpointing=bool(save),
        **{"max_epochs": 3, "max_steps": steps or -1} | options,
    )  # fmt: skip
    module = Steps()
    with patch.dict(os.environ):
        trainer.fit(module, loader, ckpt_path=path / "saved.ckpt" if resume else None)
    return module.seen


def limited(first: int, later: int, done: int) -> list[tuple[int, int]]:
    """(epoch, step of five) of the steps of a run whose epochs have other numbers of steps after `done` of them."""
    epoch, inside = divmod(done, first)
    places = [divmod(step, first) for step in range(done)]
    places += [(epoch, step) for step in range(inside, later)]
    return places + [(each, step) for each in range(epoch + 1, 3) for step in range(later)]


@pytest.mark.parametrize(
    ("before", "after", "done", "limits"),
    [
        ({}, {"accumulate_grad_batches": 2}, 3, (5, 5)),
        ({}, {"accumulate_grad_batches": 2}, 5, (5, 5)),
        ({"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4}, 8, (5, 5)),
        ({"accumulate_grad_batches": 4}, {}, 3, (5, 5)),
        ({"accumulate_grad_batches": 4}, {"max_epochs": -1, "max_steps": 15}, 7, (5, 5)),
        ({"limit_train_batches": 2}, {"limit_train_batches": 4}, 3, (2, 4)),
        ({"limit_train_batches": 2}, {"limit_train_batches": 4}, 4, (2, 4)),
        ({"limit_train_batches": 4}, {"limit_train_batches": 2, "max_epochs": -1, "max_steps": 7}, 3, (4, 2)),
        ({"limit_train_batches": 4}, {"limit_train_batches": 2}, 3, (4, 2)),
        ({"limit_train_batches": 3}, {"limit_train_batches": 4, "accumulate_grad_batches": 2}, 4, (3, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_have_their_samples_whatever_cuts_them(
    tmp_path: Path, before: dict[str, int], after: dict[str, int], done: int, limits: tuple[int, int]
) -> None:
    whole = [[*chain(*micros)] for micros in fit_steps(tmp_path).values()]
    first = fit_steps(tmp_path, done, **before)
    resumed = fit_steps(tmp_path, resume=True, **after)
    assert min(step for step, _ in resumed) == done
    for (step, epoch), micros in (first | resumed).items():
        number, inside = limited(*limits, done)[step]
        assert (epoch, [*chain(*micros)]) == (number, whole[5 * number + inside]), step
        assert len(micros) == (before if step < done else after).get("accumulate_grad_batches", 1), step
    assert len(first | resumed) == len(limited(*limits, done))


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_batch_size_begins_at_a_step_that_both_have(tmp_path: Path, stock: bool) -> None:
    whole = fit_steps(tmp_path, batch=12, stock=stock)
    fit_steps(tmp_path, 3, stock=stock)
    resumed = fit_steps(tmp_path, batch=12, stock=stock, resume=True)
    assert resumed[3, 0] == [whole[2, 0][0]]
    assert [resumed[step, 1] for step in (4, 5, 6)] == [whole[step, 1] for step in (3, 4, 5)]
    fit_steps(tmp_path, 5, stock=stock)  # the end of an epoch, of 40 samples
    resumed = fit_steps(tmp_path, batch=12, stock=stock, resume=True)
    assert [resumed[step, 1] for step in (5, 6, 7)] == [whole[step, 1] for step in (3, 4, 5)]
    fit_steps(tmp_path, 2, stock=stock)
    with pytest.raises(ConfigurationError, match=r"position is 4 samples inside a step of 12.*resume with"):
        fit_steps(tmp_path, batch=12, stock=stock, resume=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_of_stock_batches_is_whole_under_another_accumulation(tmp_path: Path) -> None:
    fit_steps(tmp_path, 3, stock=True)
    with pytest.raises(ConfigurationError, match=r"position is 8 samples inside a step of 16.*resume with"):
        fit_steps(tmp_path, stock=True, resume=True, accumulate_grad_batches=2)
    fit_steps(tmp_path, 2, stock=True)
    resumed = fit_steps(tmp_path, stock=True, resume=True, accumulate_grad_batches=2)
    assert [len(micros) for micros in resumed.values()] == [2, 1, 2, 2, 1, 2, 2, 1]
