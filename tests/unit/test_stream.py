"""Keyed randomness: uniform, independent of slicing, different for every key."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_lightning.moe.randomness import NoiseSource, SampleStream, StreamDropout, attach_stream

CPU = torch.device("cpu")


def at(seed: int = 1, step: int = 0, first: int = 0, samples: int = 0) -> SampleStream:
    stream = SampleStream(seed)
    stream.advance(step=step, first_sample=first, num_samples=samples)
    return stream


def draw(stream: SampleStream, rows: int, columns: int = 4, tag: int = 0) -> Tensor:
    return stream.uniform(tag, rows, columns, CPU)


def test_uniform_fills_the_open_interval_evenly() -> None:
    values = draw(at(), 20_000, 16)
    assert values.dtype == torch.float32
    assert 0.0 < float(values.min()) < 1e-4
    assert 1 - 1e-4 < float(values.max()) < 1.0
    counts = torch.histc(values, bins=64, min=0.0, max=1.0)
    expected = values.numel() / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 120, "63 degrees of freedom: the 99.9th percentile is 104"


def test_neighbours_are_uncorrelated() -> None:
    values = draw(at(), 20_000, 4) - 0.5
    scale = 12.0 / values.shape[0]
    assert abs(float((values[1:, 0] * values[:-1, 0]).sum())) * scale < 0.03, "rows"
    assert abs(float((values[:, 0] * values[:, 1]).sum())) * scale < 0.03, "columns"
    for other in (at(seed=2), at(step=1)):
        assert abs(float((values[:, 0] * (draw(other, 20_000)[:, 0] - 0.5)).sum())) * scale < 0.03
    assert abs(float((values[:, 0] * (draw(at(), 20_000, tag=1)[:, 0] - 0.5)).sum())) * scale < 0.03, "tags"


def test_normal_has_its_moments() -> None:
    values = at().normal(0, 30_000, 4, CPU).double()
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01
    assert abs(float((values**3).mean())) < 0.05
    assert abs(float((values**4).mean()) - 3) < 0.1
    assert torch.isfinite(values).all()


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    rows_per_sample=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_slices_of_a_batch_see_the_numbers_of_the_whole(
    seed: int, step: int, rows_per_sample: int, sizes: list[int]
) -> None:
    total = sum(sizes)
    whole = draw(at(seed, step, 0, total), total * rows_per_sample)
    parts, first = [], 0
    for size in sizes:
        parts.append(draw(at(seed, step, first, size), size * rows_per_sample))
        first += size
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(draw(at(seed, step, 0, total), total * rows_per_sample, columns=2), whole[:, :2])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_parts_of_samples_see_the_numbers_of_the_whole(samples: int, parts: int, rows: int, first: int) -> None:
    whole = draw(at(first=first, samples=samples), samples * parts * rows).view(samples, parts, rows, -1)
    for part in range(parts):
        stream = at(first=first, samples=samples)
        stream.part, stream.parts = part, parts
        assert torch.equal(draw(stream, samples * rows).view(samples, rows, -1), whole[:, part])


def test_rows_of_a_part_of_the_samples_are_drawn_too() -> None:
    stream = at(first=0, samples=4)
    stream.part, stream.parts = 1, 2
    assert draw(stream, 3).shape[0] == 3


def test_a_stream_that_nobody_drives_still_changes() -> None:
    stream = SampleStream()
    assert not torch.equal(draw(stream, 8), draw(stream, 8))
    driven = at()
    assert torch.equal(draw(driven, 8), draw(driven, 8)), "recomputation must see the same noise"


def test_a_checkpoint_of_torch_draws_the_same_noise_again() -> None:
    dropout, x = StreamDropout(0.5), torch.ones(64, 8, requires_grad=True)
    out = checkpoint(lambda x: dropout(x) ** 2, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)  # type: ignore[union-attr]


def test_dropout_scales_what_it_keeps() -> None:
    dropout = StreamDropout(0.25)
    x = torch.ones(200, 10, 50, requires_grad=True)
    out = dropout(x)
    kept = out != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.75))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())  # type: ignore[arg-type]
    assert dropout(x.bfloat16()).dtype == torch.bfloat16
    assert dropout.eval()(x) is x
    assert StreamDropout(0.0)(x) is x


def test_dropout_follows_the_sample() -> None:
    dropout, x = StreamDropout(0.5), torch.ones(6, 3, 8)
    dropout.stream = at(first=0, samples=6)
    whole = dropout(x)
    dropout.stream = at(first=4, samples=2)
    assert torch.equal(dropout(x[4:]), whole[4:])
    assert torch.equal(dropout(x[4:, :2]), whole[4:, :2]), "of samples that are padded less"
    assert not torch.equal(whole[0], whole[1])


def test_modules_share_the_stream_and_differ_by_tag() -> None:
    model = nn.Sequential(StreamDropout(0.5), nn.Linear(2, 2), nn.Sequential(StreamDropout(0.5)))
    stream = at()
    attach_stream(model, stream)
    first, second = model[0], model[2][0]
    assert first.stream is second.stream is stream
    assert (first.tag, second.tag) == (0, 1)
    x = torch.ones(50, 8)
    assert not torch.equal(first(x), second(x))


def test_no_two_draws_of_a_model_have_the_same_key() -> None:
    keys = [source.key(tag) for source in NoiseSource for tag in range(1000)]
    assert len(set(keys)) == len(keys)


def test_keys_are_those_that_recorded_losses_depend_on() -> None:
    assert [source.key(5) for source in list(NoiseSource)[:4]] == [15, 16, 17, -6]
