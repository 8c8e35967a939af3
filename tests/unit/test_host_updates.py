"""What of updates on the host needs no ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_lightning.state import tensors
from moe_lightning.state.tensors import Updates


def test_sparse_gradients_of_embeddings_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "lies_on_a_device", lambda parameter: True)
    monkeypatch.setattr(tensors, "page_locked", lambda shape, dtype: torch.empty(*shape, dtype=dtype))
    found = []
    for on_host in (False, True):
        torch.manual_seed(0)
        table, updates = nn.Embedding(8, 4, sparse=True), Updates(on_host=on_host)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for step, is_sparse in enumerate((True, True, False, True)):
            optimizer.zero_grad()
            table.sparse = is_sparse
            table(torch.tensor([step, 3, 3])).square().sum().backward()
            with updates.around(optimizer, ()) as see:
                see()
                optimizer.step()
        found.append(table.weight.detach().clone())
    assert torch.equal(*found)
