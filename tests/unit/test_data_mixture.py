"""Mixtures: every source in its share, pass after pass, in one order on any ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.data.mixture import Mixture, apportion
from moe_lightning.data.sampler import StepSampler
from moe_lightning.data.text import TextData, TokenWindows
from moe_lightning.errors import ConfigurationError

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
WEIGHTS = st.floats(0.1, 10)


@given(st.integers(0, 1000), st.lists(WEIGHTS, min_size=1, max_size=6))
def test_counts_are_within_one_of_their_shares(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    assert all(abs(c - total * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))


@settings(max_examples=50)
@given(st.data(), SIZES, st.integers(0, 99))
def test_sources_are_read_in_passes_and_in_their_shares(data: st.DataObject, sizes: list[int], seed: int) -> None:
    weights = data.draw(st.none() | st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    try:
        mixture = Mixture(sizes, weights, seed)
    except ConfigurationError:
        assert min(apportion(sum(sizes), weights or sizes)) == 0
        return
    epochs = 4
    assert mixture(epochs).tolist() == Mixture(sizes, weights, seed)(epochs).tolist(), "a function of the epoch alone"
    begins = [0, *itertools.accumulate(sizes)]
    sources = [source for source, size in enumerate(sizes) for _ in range(size)]
    stream = [index for epoch in range(epochs) for index in mixture(epoch).tolist()]
    for source, size in enumerate(sizes):
        drawn = [index - begins[source] for index in stream if sources[index] == source]
        passes = [drawn[at : at + size] for at in range(0, len(drawn), size)]
        assert all(sorted(one) == list(range(size)) for one in passes if len(one) == size)
        assert all(len(set(one)) == len(one) for one in passes)
    total = sum(mixture.weights)
    for epoch in range(2):
        seen = Counter[int]()
        for number, index in enumerate(mixture(epoch).tolist(), 1):
            seen[sources[index]] += 1
            for source, weight in enumerate(mixture.weights):
                # Half a sample of its own place, half of each other one's, and what an epoch's counts are rounded by.
                assert abs(seen[source] - number * weight / total) <= 0.5 + len(sizes) / 2 + 1
    if weights is None:
        assert sorted(mixture(1).tolist()) == list(range(sum(sizes)))


def sampler(world_size: int = 1, rank: int = 0, num_micros: int = 1) -> StepSampler:
    mixture = Mixture([30, 7, 11], [1, 2, 0.5], seed=3)
    place = {"rank": rank, "world_size": world_size, "num_micros": num_micros}
    return StepSampler(num_samples=len(mixture), global_batch_size=6, order=mixture, **place)


def batches(world_size: int, num_micros: int, consumed: int, count: int) -> list[list[int]]:
    """The samples of each global batch, from what every rank gets."""
    found = []
    ranks = [sampler(world_size, rank, num_micros) for rank in range(world_size)]
    for one in ranks:
        one.load_state_dict({**one.state_dict(), "consumed": consumed})
    for _ in range(count):
        batch = list[int]()
        for _ in range(num_micros):
            batch += [index for one in ranks for index in one.indices_at(one.consumed)]
            for one in ranks:
                one.consumed += one.slice_at(one.consumed).micro_total
        found.append(batch)
    return found


@pytest.mark.parametrize(("world_size", "num_micros"), [(2, 1), (3, 2), (4, 1)])
def test_ranks_do_not_change_the_batches_of_a_mixture(world_size: int, num_micros: int) -> None:
    whole = batches(1, 1, 0, 20)
    assert batches(world_size, num_micros, 0, 9) + batches(1, 1, 9 * 6, 11) == whole
    assert batches(1, 1, 0, 9) + batches(world_size, num_micros, 9 * 6, 11) == whole


# ---------------------------------------------------------------------- the data module


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "prose.txt").write_text("".join(f"line {i} of some prose\n" for i in range(300)))
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"body": f"x_{i} = {i}\n"}) + "\n" for i in range(90)))
    return [
        {"path": str(tmp_path / "prose.txt"), "weight": 3},
        {"path": str(tmp_path / "code.jsonl"), "weight": 1, "text_field": "body"},
    ]


def data(source: Any, folder: Path, **options: Any) -> TextData:
    sizes = {"context_length": 16, "global_batch_size": 8, "cache_dir": folder / "cache", "val_fraction": 0.1}
    made = TextData(source=source, **{**sizes, **options})
    made.prepare_data()
    made.setup()
    return made


def test_a_mixture_of_text_and_records(sources: list[dict[str, Any]], tmp_path: Path) -> None:
    made = data(sources, tmp_path)
    prose = {bytes(x.tolist()) for x, _ in TokenWindows(made.corpora[0].train, 16)}
    texts = [bytes(x.tolist()) for batch in made.train_dataloader() for x in batch[0]]
    assert sum(text in prose for text in texts) == pytest.approx(0.75 * len(texts), abs=2)
    long, short = ([corpus.train.count, corpus.val.count] for corpus in made.corpora)
    samples = (long[0] - 1) // 16 + (short[0] - 1) // 16
    assert len(made.train_dataloader()) == samples // 8
    assert sum(len(batch[0]) for batch in made.val_dataloader()) == (long[1] - 1) // 16 + (short[1] - 1) // 16
    packed = data(sources, tmp_path, packing=True)
    assert packed.train_dataloader().step_sampler.order.num_samples == len(packed.train_dataloader().dataset)  # type: ignore[arg-type]


def test_sources_without_weights_are_read_once_in_an_epoch(sources: list[dict[str, Any]], tmp_path: Path) -> None:
    made = data([sources[0]["path"], {**sources[1], "weight": None}], tmp_path)
    loader = made.train_dataloader()
    order = loader.step_sampler.order.indices(0, 0, len(loader.dataset))  # type: ignore[arg-type]
    assert sorted(order) == list(range(len(loader.dataset)))  # type: ignore[arg-type]
    assert order != sorted(order)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"weight": 2}, "they were mixed 3 : 1 with seed 0 and are mixed 2 : 1 with seed 0"),
        ({"seed": 1}, "they were mixed 3 : 1 with seed 0 and are mixed 3 : 1 with seed 1"),
        ({"text": "x_7 = 7", "to": "x_8 = 7"}, "they have other content"),
    ],
)
def test_another_mixture_than_that_of_a_position_is_refused(
    sources: list[dict[str, Any]], tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    first = data(sources, tmp_path).train_dataloader()
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    data(sources, tmp_path).train_dataloader().load_state_dict(state)
    if "text" in change:
        path = Path(sources[1]["path"])
        path.write_text(path.read_text().replace(change["text"], change["to"]))
    sources[0]["weight"] = change.get("weight", 3)
    other = data(sources, tmp_path, seed=change.get("seed", 0)).train_dataloader()
    with pytest.raises(ConfigurationError, match=rf"not those of the checkpoint: {what}.*resume_overrides=true"):
        other.load_state_dict(state)
    other.step_sampler.accepts_other_data = True
    other.load_state_dict(state)
    assert other.step_sampler.consumed == 8


def test_tokens_beside_text_of_bytes_are_refused(tmp_path: Path) -> None:
    """Without a tokenizer.json nothing says what the tokens mean."""
    np.save(tmp_path / "t.npy", np.arange(300) + 5)
    (tmp_path / "a.txt").write_text("text " * 99)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "t.npy")]
    data = TextData(source=paths, context_length=8, cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigurationError, match=r"t.npy' holds token 304, and the tokens of .* are bytes; set"):
        data.prepare_data()
    np.save(tmp_path / "t.npy", np.arange(300) % 256)
    data.prepare_data()


def test_a_source_that_gets_no_sample_is_refused(sources: list[dict[str, Any]], tmp_path: Path) -> None:
    sources[0]["weight"] = 1e9
    with pytest.raises(ConfigurationError, match=r"weight=1 of the 1e\+09 of all sources gives one of them no sample"):
        data(sources, tmp_path)


@pytest.mark.parametrize("most", [None, 17])
def test_every_beginning_of_the_held_out_samples_has_all_sources(
    sources: list[dict[str, Any]], tmp_path: Path, most: int | None
) -> None:
    made = data(sources, tmp_path, val_samples=most)
    loader = made.val_dataloader()
    count = len(loader.dataset)  # type: ignore[arg-type]
    assert count == (most or sum((corpus.val.count - 1) // 16 for corpus in made.corpora))
    begin_of_code = len(made._val.dataset.datasets[0])  # type: ignore[attr-defined]
    is_code = np.array(loader.dataset.indices) >= begin_of_code  # type: ignore[attr-defined]
    for first in range(1, count + 1):
        assert abs(is_code[:first].sum() - first * is_code.mean()) <= 1
    for of_source in (is_code, ~is_code):
        indices = np.array(loader.dataset.indices)[of_source]  # type: ignore[attr-defined]
        assert len(indices) > 0
        assert (np.diff(indices) > 0).all()
