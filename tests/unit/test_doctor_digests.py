"""Digests of parts of an output add up to that of the whole, whatever way it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_lightning.doctor.recorder import Sharing, Spans, digests_of, samples_in

WHOLE = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(1))
SECTIONS = (8, 4)


def of(part: Tensor, sharing: Sharing, columns: Spans | None = None) -> dict[str, Tensor]:
    """By the shape of a sample of the whole."""
    samples = samples_in(part, len(part))
    layouts = sharing.layouts(samples.shape[1:], columns)
    return {str(layout.shape): torch.tensor(digests_of(samples, layout)) for layout in layouts}


def parts_along(dim: int) -> list[Tensor]:
    return list(WHOLE.chunk(2, dim))


def of_sections(rank: int) -> Tensor:
    return torch.cat([section.chunk(2, -1)[rank] for section in WHOLE.split(SECTIONS, -1)], -1)


@pytest.mark.parametrize("parts", [[WHOLE, WHOLE], parts_along(1), parts_along(2)], ids=["whole", "positions", "width"])
def test_parts_of_tensor_ranks_add_up(parts: list[Tensor]) -> None:
    expected = of(WHOLE, Sharing())["[8, 12]"]
    found = sum(of(part, Sharing(tensor=rank, tensors=2))["[8, 12]"] for rank, part in enumerate(parts))
    torch.testing.assert_close(found, expected)


def test_sections_are_cut_each_by_itself() -> None:
    columns = [[(0, 4), (8, 2)], [(4, 4), (10, 2)]]
    ranks = [of(of_sections(rank), Sharing(tensor=rank, tensors=2), columns[rank]) for rank in (0, 1)]
    torch.testing.assert_close(ranks[0]["[8, 12]"] + ranks[1]["[8, 12]"], of(WHOLE, Sharing())["[8, 12]"])


@pytest.mark.parametrize("dim", [1, 2], ids=["first", "after heads"])
def test_positions_of_context_ranks_add_up(dim: int) -> None:
    found = sum(of(part, Sharing(part=at, parts=2))["[8, 12]"] for at, part in enumerate(parts_along(dim)))
    torch.testing.assert_close(found, of(WHOLE, Sharing())["[8, 12]"])


def test_positions_are_cut_by_context_first() -> None:
    quarters = WHOLE.chunk(4, 1)
    sharing = [Sharing(part=at // 2, parts=2, tensor=at % 2, tensors=2) for at in range(4)]
    found = sum(of(quarter, place)["[8, 12]"] for quarter, place in zip(quarters, sharing, strict=True))
    torch.testing.assert_close(found, of(WHOLE, Sharing())["[8, 12]"])


def test_heads_and_positions_that_cannot_be_told_apart_say_nothing() -> None:
    layouts = Sharing(parts=2, tensors=2).layouts((2, 8, 4))
    assert [layout.shape for layout in layouts] == [[4, 8, 4], [8, 8, 4]]
