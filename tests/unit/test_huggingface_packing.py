"""Packed documents in every Hugging Face family: the logits that each has alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from moe_lightning.errors import ConfigurationError
from tests.huggingface_models import DENSE, RECURRENT, SPARSE, VARIANTS, VOCABULARY, make_checkpoint
from tests.parameters import slow

# Logits are about ten, and plain transformers differs as much between a row of one document and one of two.
TOLERANCE = 5e-5
LENGTHS = ((4, 1, 7), (12, 3))
UPCYCLED = sorted(DENSE.keys() - {"swinv2"})


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [*(slow(name) if name in VARIANTS else name for name in SPARSE if name not in RECURRENT), *UPCYCLED],
)
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


@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
def test_masks_of_packed_documents_are_made_without_a_warning(tmp_path: Path) -> None:
    from moe_lightning.models.huggingface.attention import document_options

    model = make_checkpoint("gpt_oss", tmp_path)
    positions = torch.arange(16)[None]
    assert set(document_options(model, positions, torch.zeros_like(positions))["attention_mask"])


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_that_carry_a_state_refuse_packed_documents(name: str, tmp_path: Path) -> None:
    """Before the model is read, and where a loader packs without a datamodule."""
    from moe_lightning.data.instructions import InstructionData
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    make_checkpoint(name, tmp_path, vocab_size=300)
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"prompt": "a", "response": "b"}\n' * 9)
    module = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 64})
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1)
    sentence = (
        r"data\.packing=true cannot keep documents apart in the linear_attention layers .*: use data\.packing=false"
    )
    with pytest.raises(ConfigurationError, match=sentence):
        trainer.fit(module, datamodule=InstructionData(path=talk, context_length=64, packing=True, global_batch_size=2))
    assert not hasattr(module, "model")
    module.configure_model()
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match=sentence):
        module(ids, None, ids)


def test_attention_that_counts_places_refuses_long_packs_and_parts(tmp_path: Path) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    make_checkpoint("llama4", tmp_path, floor_scale=8, attention_chunk_size=None)
    module = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16})
    module.configure_model()
    assert not hasattr(module.model, "context")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    module(ids[:, :7], None, ids[:, :7])
    sentence = r"with 8 positions: llama4_text scales .* the place in the sample"
    with pytest.raises(ConfigurationError, match=sentence):
        module(ids, None, ids)
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(packing=True, context_length=7))  # type: ignore[assignment]
    module.setup("fit")  # packs are shorter than the model's sequences
    module.trainer.datamodule.context_length = 8  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=sentence):
        module.setup("fit")


def test_recomputed_layers_see_the_padding_and_the_noise_of_their_own_batch(tmp_path: Path) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    make_checkpoint("olmoe", tmp_path)
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(5))
    masks = [torch.arange(16) < torch.tensor(lengths)[:, None] for lengths in ((12, 3), (7, 8))]
    gradients = []
    for recomputes in (False, True):
        config = {"pretrained": str(tmp_path), "context_length": 16, "router": {"jitter": 0.5}}
        module = HuggingFaceModule({**config, "gradient_checkpointing": recomputes})
        module.configure_model()
        module.train()
        torch.manual_seed(6)  # of the noise
        losses = [module.loss((ids, ids.masked_fill(~is_token, -100), is_token)) for is_token in masks]
        for loss in losses:  # as in a pipeline, where other batches have come by then
            loss.backward()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
