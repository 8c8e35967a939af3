"""Forced routing: the frequencies asked for, distinct experts, traces and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import ForcedRouting, Popularity, sample_experts
from moe_lightning.moe.randomness import SampleStream, attach_stream
from moe_lightning.moe.router import Router, RouterConfig
from tests.traces import recorded


def inclusion_by_hand(shares: np.ndarray, top_k: int) -> np.ndarray:
    """K * share, where no expert may exceed one: the excess goes to the others in proportion."""
    probabilities = np.zeros(len(shares))
    sure: set[int] = set()
    while True:
        free = [e for e in range(len(shares)) if e not in sure]
        total = sum(shares[e] for e in free)
        for e in range(len(shares)):
            probabilities[e] = 1.0 if e in sure else shares[e] / total * (top_k - len(sure))
        over = {e for e in free if probabilities[e] > 1.0}
        if not over:
            return probabilities
        sure |= over


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.data())
def test_frequencies_and_distinct_choices(weights: list[float], data: st.DataObject) -> None:
    shares = np.array(weights) / sum(weights)
    top_k = data.draw(st.integers(1, len(weights)))
    uniform_T = (torch.arange(20_000) + 0.5) / 20_000
    ids_TK = sample_experts(shares, uniform_T, top_k)
    assert ids_TK.shape == (20_000, top_k)
    assert ids_TK.min() >= 0
    assert ids_TK.max() < len(weights)
    assert (ids_TK.sort(dim=1).values.diff(dim=1) > 0).all(), "a token chose an expert twice"
    frequencies = torch.bincount(ids_TK.flatten(), minlength=len(weights)) / 20_000
    np.testing.assert_allclose(frequencies, inclusion_by_hand(shares, top_k), atol=2e-3)


def test_zipf_has_its_shares_in_another_order_in_each_layer() -> None:
    forced = ForcedRouting(kind="zipf", exponent=1.5)
    expected = np.arange(1, 9) ** -1.5
    layers = [Popularity(forced, 8, layer).at(0) for layer in range(4)]
    for shares in layers:
        np.testing.assert_allclose(sorted(shares, reverse=True), expected / expected.sum())
    assert len({tuple(shares) for shares in layers}) > 1
    np.testing.assert_allclose(Popularity(ForcedRouting(kind="uniform", exponent=3.0), 8, 0).at(5), 1 / 8)


def test_a_forced_router_follows_its_shares_and_still_trains() -> None:
    torch.manual_seed(0)
    router = Router(8, 8, RouterConfig(forced=ForcedRouting(kind="zipf", exponent=1.0), top_k=2))
    attach_stream(router, stream := SampleStream(seed=1))
    stream.advance(step=0, first_sample=0, num_samples=40_000)
    routing = router(torch.randn(40_000, 8))
    shares = Popularity(ForcedRouting(kind="zipf", exponent=1.0), 8, 0).at(0)
    expected = inclusion_by_hand(shares, 2) / 2
    np.testing.assert_allclose(routing.tokens_per_expert_E / 80_000, expected, atol=0.01)
    (routing.weights_TK[:, 0].sum()).backward()
    assert router.weight.grad.abs().sum() > 0


def test_layers_differ_after_a_pass_without_numbers() -> None:
    forced = ForcedRouting(kind="zipf", exponent=3.0)
    routers = torch.nn.ModuleList(Router(8, 8, RouterConfig(forced=forced, top_k=1)) for _ in range(3))
    for router in routers:
        router(torch.randn(4, 8))
    attach_stream(routers, SampleStream())
    hottest = [int(router(torch.randn(512, 8)).tokens_per_expert_E.argmax()) for router in routers]
    assert hottest == [int(Popularity(forced, 8, layer).at(0).argmax()) for layer in range(3)]


def write_trace(path: Path, counts: Any, iteration: Any) -> str:
    np.savez(path, counts=np.array(counts), iteration=np.array(iteration))
    return str(path)


def test_a_trace_is_followed_in_time_and_by_layer(tmp_path: Path) -> None:
    counts = np.zeros((2, 2, 3, 4), dtype=np.int64)  # samples, layers, ranks, experts
    counts[0, 0] = [[1, 2, 3, 4]] * 3
    counts[1, 0] = [[0, 0, 0, 9]] * 3
    counts[0, 1] = [[5, 5, 0, 0]] * 3  # and the second sample of layer 1 saw no token
    path = write_trace(tmp_path / "trace.npz", counts, [1, 11])
    forced = ForcedRouting(kind="trace", path=path)
    first = Popularity(forced, 4, 0)
    np.testing.assert_allclose(first.at(0), np.array([1, 2, 3, 4]) / 10)
    np.testing.assert_allclose(first.at(9), np.array([1, 2, 3, 4]) / 10)  # step 9 is iteration 10
    np.testing.assert_allclose(first.at(10), [0, 0, 0, 1])
    np.testing.assert_allclose(first.at(10_000), [0, 0, 0, 1])
    second = Popularity(forced, 4, 1)
    np.testing.assert_allclose(second.at(0), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(second.at(10), [0.25] * 4)
    np.testing.assert_allclose(Popularity(forced, 4, 2).at(0), first.at(0))  # layers wrap around
    np.testing.assert_allclose(Popularity(forced, 2, 0).at(0), np.array([3, 4]) / 7)  # the two most used ones


def test_the_recorded_trace_drives_a_router() -> None:
    with np.load(path := recorded(), allow_pickle=False) as archive:
        counts, iteration = archive["counts"], archive["iteration"]
    at = len(iteration) // 2
    loads = counts[at, 0].sum(axis=0).astype(float)
    shares = Popularity(ForcedRouting(kind="trace", path=str(path)), counts.shape[3], 0).at(int(iteration[at]) - 1)
    np.testing.assert_allclose(shares, loads / loads.sum())


def test_wrong_traces_are_one_sentence(tmp_path: Path) -> None:
    good = np.ones((2, 1, 1, 4), dtype=np.int64)
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", something=np.ones(3))
    np.savez(tmp_path / "objects.npz", counts=np.array([{}], dtype=object), iteration=np.array([1]))
    np.save(tmp_path / "array.npy", np.ones(3))
    full = write_trace(tmp_path / "full.npz", good, [1, 2])
    (tmp_path / "cut.npz").write_bytes(Path(full).read_bytes()[:200])
    cases = {
        str(tmp_path / "none.npz"): "is not a file: give the path",
        str(tmp_path): "is not a file",
        str(tmp_path / "text.npz"): "is not a routing trace",
        str(tmp_path / "other.npz"): "is not a routing trace",
        str(tmp_path / "objects.npz"): "is not a routing trace",
        str(tmp_path / "cut.npz"): "is not a routing trace",
        str(tmp_path / "array.npy"): "is not a routing trace",
        write_trace(tmp_path / "flat.npz", np.ones((2, 4)), [1, 2]): r"needs counts .* not \(2, 4\)",
        write_trace(tmp_path / "order.npz", good, [2, 1]): "does not ascend",
        write_trace(tmp_path / "length.npz", good, [1, 2, 3]): "needs counts",
        write_trace(tmp_path / "scalar.npz", good, 1): "needs counts",
        write_trace(tmp_path / "words.npz", good, ["a", "b"]): "not numbers",
        write_trace(tmp_path / "negative.npz", -good, [1, 2]): "not numbers of 0 or more",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigurationError, match=message) as caught:
            Popularity(ForcedRouting(kind="trace", path=path), 4, 0)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="records 4 experts, fewer than the model's 5"):
        Popularity(ForcedRouting(kind="trace", path=full), 5, 0)
