"""Packed documents in every Hugging Face family: the logits that each has alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.huggingface_models import DENSE, SPARSE, VOCABULARY, make_checkpoint

# Logits are about ten, and plain transformers differs as much between a row of one document and one of two.
TOLERANCE = 5e-5
LENGTHS = ((4, 1, 7), (12, 3))
UPCYCLED = sorted(DENSE.keys() - {"swinv2"})


@torch.no_grad()
@pytest.mark.parametrize("name", [*SPARSE, *UPCYCLED])
def test_documents_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    make_checkpoint(name, tmp_path)
    upcycling = {"upcycling": {"num_experts": 4, "router": {"top_k": 2}}} if name in UPCYCLED else {}
    module = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16, **upcycling})
    module.configure_model()
    module.eval()
    ids = torch.randint(VOCABULARY, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(5))
    begins = torch.zeros_like(ids)
    for row, lengths in enumerate(LENGTHS):
        for end in torch.tensor(lengths).cumsum(0).tolist():
            begins[row, end:] = end
    is_token = torch.arange(16) < torch.tensor([sum(lengths) for lengths in LENGTHS])[:, None]
    logits = module(ids, is_token, begins)
    for row, lengths in enumerate(LENGTHS):
        end = 0
        for length in lengths:
            begin, end = end, end + length
            alone = module(ids[row : row + 1, begin:end])
            torch.testing.assert_close(logits[row : row + 1, begin:end], alone, rtol=0, atol=TOLERANCE)
