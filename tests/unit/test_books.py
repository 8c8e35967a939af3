"""The books of a run fit the room that is reserved for them, however long it is."""

from __future__ import annotations

import numpy as np
import pytest

from moe_lightning.algorithms.selection import parse_scopes
from moe_lightning.checkpoint.books import Books
from moe_lightning.checkpoint.frames import dump_object


@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (3, 5), (61, 256)])
def test_a_dump_never_outgrows_its_room(layers: int, experts: int) -> None:
    books = Books(
        num_layers=layers,
        num_experts=experts,
        planned_assignments=10**9,
        owners=np.zeros((layers, experts), dtype=np.int64),
        num_ranks=1,
        scopes=parse_scopes("full"),
    )
    for step in range(70):
        books.ledger.record(np.full((layers, experts), 10**6))
        books.begin(step, books.plan(1, 1))
        if step in (0, 69):
            assert len(dump_object(books.dump())) <= books.largest_dump_bytes
    assert len(dump_object(books.dump())) > 0.5 * books.largest_dump_bytes - (16 << 10)
