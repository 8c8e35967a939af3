"""The n-gram yardstick against a slow model written out, and against entropies known in advance."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.callbacks import summary
from moe_lightning.callbacks.summary import ngram_cross_entropy
from moe_lightning.data.corpus import prepare_corpus
from moe_lightning.errors import ConfigurationError


def by_hand(train: list[int], val: list[int], order: int, vocab_size: int) -> float:
    """The same model from dictionaries; like the fast one it counts shorter n-grams inside the longest ones."""
    grams = Counter(tuple(train[i : i + order + 1]) for i in range(len(train) - order))

    def probability(gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / vocab_size
        lower = probability(gram[1:])
        tails = Counter[tuple[int, ...]]()
        for key, count in grams.items():
            tails[key[-len(gram) :]] += count
        once, twice = (list(tails.values()).count(times) for times in (1, 2))
        discount = max(0.05, once / max(1, once + 2 * twice))
        successors = {tail: count for tail, count in tails.items() if tail[:-1] == gram[:-1]}
        total = sum(successors.values())
        if not total:
            return lower
        return (max(successors.get(gram, 0) - discount, 0) + discount * len(successors) * lower) / total

    losses = [-math.log(probability(tuple(val[i : i + order + 1]))) for i in range(len(val) - order)]
    return sum(losses) / len(losses)


@given(
    train=st.lists(st.integers(0, 3), min_size=3, max_size=40),
    val=st.lists(st.integers(0, 3), min_size=3, max_size=8),
    order=st.integers(0, 2),
)
@settings(deadline=None, max_examples=60)
def test_agrees_with_the_model_written_out(train: list[int], val: list[int], order: int) -> None:
    fast = ngram_cross_entropy(np.array(train), np.array(val), order, 4)
    assert fast == pytest.approx(by_hand(train, val, order, 4), rel=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_reaches_the_entropy_of_a_chain_of_that_order(order: int) -> None:
    """A random Markov chain of 8 tokens, which the model of its order learns and a shorter one does not."""
    rng = np.random.default_rng(0)
    rows = rng.dirichlet(np.full(8, 0.3), size=8**order)
    draws, tokens = rng.random(60_000), [0] * order
    cumulative = rows.cumsum(1)
    losses = []
    for draw in draws:
        context = 0
        for token in tokens[len(tokens) - order :]:
            context = context * 8 + token
        token = min(int(np.searchsorted(cumulative[context], draw)), 7)
        losses.append(-math.log(rows[context, token]))
        tokens.append(token)
    text = np.array(tokens, np.uint8)
    entropy = float(np.mean(losses[50_000:]))
    assert ngram_cross_entropy(text[:50_000], text[50_000:], order, 8) == pytest.approx(entropy, abs=0.03)
    if order:
        assert ngram_cross_entropy(text[:50_000], text[50_000:], order - 1, 8) > entropy + 0.05


def test_pieces_and_dtypes_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(1).integers(0, 9, 5000)
    whole = ngram_cross_entropy(text[:4000], text[4000:], 2, 9)
    monkeypatch.setattr(summary, "_PIECE", 77)
    for dtype in (np.uint8, np.uint16, np.int64, np.uint64):
        tokens = text.astype(dtype)
        assert ngram_cross_entropy(tokens[:4000], tokens[4000:], 2, 9) == pytest.approx(whole, rel=1e-12)


def test_the_discounts_are_near_the_best_for_unseen_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (np.random.default_rng(2).zipf(1.5, 60_000) % 32).astype(np.uint8)
    train, val = text[:40_000], text[40_000:]
    chosen = ngram_cross_entropy(train, val, 2, 32)
    fixed = []
    for discount in (0.05, 0.5, 0.7, 0.9):
        monkeypatch.setattr(summary, "_discount", lambda _, discount=discount: discount)
        fixed.append(ngram_cross_entropy(train, val, 2, 32))
    assert chosen < min(fixed) + 0.02
    assert max(fixed) > min(fixed) + 0.1


def test_a_long_text_costs_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    probabilities = summary._Table.probabilities

    def measured(table: summary._Table, codes: summary.Codes, *rest: Any) -> summary.Floats:
        sizes.append(len(codes))
        return probabilities(table, codes, *rest)

    monkeypatch.setattr(summary._Table, "probabilities", measured)
    monkeypatch.setattr(summary, "_PIECE", 16)
    text = np.random.default_rng(3).integers(0, 4, 8 * 32 * 10)
    ngram_cross_entropy(text, text, 1, 4)
    assert max(sizes) == 16


def test_counts_of_a_text_beyond_32_bits() -> None:
    counts = summary._count(np.zeros(2, np.uint8), 1, 256).reshape(256, 256)
    counts[:, 32] = 10_000_000
    counts[32, 33] = 1 << 31
    unigrams, bigrams = summary._tables(counts.reshape(-1), 1, 256)
    assert unigrams.counts[32] == 2_560_000_000
    assert bigrams.counts[32 * 256 + 33] == 1 << 31
    assert unigrams.totals[0] == counts.sum()


def test_large_vocabularies_at_order_one() -> None:
    tokens = np.arange(20_000) % 4096
    assert ngram_cross_entropy(tokens[:16_000], tokens[16_000:], 1, 4096) < 2.5 < math.log(4096)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"train": np.array([1, 2, 9])}, "do not fit vocab_size=4"),
        ({"val": np.array([1, 2, -1])}, "do not fit vocab_size=4"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    right = {"train": np.array([1, 2, 3]), "val": np.array([1, 2, 3]), "order": 1, "vocab_size": 4}
    with pytest.raises(ConfigurationError, match=sentence):
        ngram_cross_entropy(**(right | options))


@pytest.mark.slow
def test_the_standard_library_in_seconds(tmp_path: Path) -> None:
    corpus = prepare_corpus("stdlib", cache_dir=tmp_path)
    train, val = corpus.train.open(), corpus.val.open()
    start = time.process_time()
    first, second = (ngram_cross_entropy(train, val, order, corpus.vocab_size) for order in (1, 2))
    assert time.process_time() - start < 15  # measured 3; the rest is for slower machines
    assert 1.5 < second < first - 0.4 < 2.4
