"""Packing: every document once, none over the limit, the same on any ranks, and the loss of the unpacked run."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning import ConfigurationError, GPTModule
from moe_lightning.data.instructions import InstructionData
from moe_lightning.data.loader import StepLoader
from moe_lightning.data.packing import Packed, first_fit
from moe_lightning.data.text import TextData
from moe_lightning.moe.layer import moe_layers
from moe_lightning.moe.losses import IGNORED_TARGET, auxiliary_loss, mean_over_targets, num_targets

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "context_length": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_model": 32,
    "d_hidden": 24,
    "num_experts": 4,
    "init_std": 0.2,
    "router": {"top_k": 2, "aux_loss_coef": 0.5, "z_loss_coef": 0.1},
}
STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False, "num_kv_heads": 2},
}


class Numbered(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Document i holds i everywhere, and its targets are negative."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.full((20,), index)
        return x, -1 - x, torch.arange(20) < self.lengths[index]


def packed(lengths: list[int], seed: int | None = 0, capacity: int = 20) -> Packed:
    return Packed(Numbered(lengths), np.array(lengths), capacity, seed=seed)


@settings(deadline=None)
@given(lengths=LENGTHS, capacity=st.integers(20, 40))
def test_first_fit_takes_the_first_pack_with_room(lengths: list[int], capacity: int) -> None:
    room: list[int] = []
    for length, pack in zip(lengths, first_fit(np.array(lengths), capacity).tolist(), strict=True):
        fitting = [at for at, left in enumerate(room) if left >= length]
        assert pack == (fitting[0] if fitting else len(room))
        room += [capacity] * (pack == len(room))
        room[pack] -= length
    assert min(room) >= 0


@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, seed=st.none() | st.integers(0, 9))
def test_every_document_is_in_one_pack_whole(lengths: list[int], seed: int | None) -> None:
    packs = packed(lengths, seed)
    members = [member for index in range(len(packs)) for member in packs.members(index)]
    assert sorted(members) == list(range(len(lengths)))
    for index in range(len(packs)):
        inputs, targets, is_token, begins = packs[index]
        expected = [member for member in packs.members(index) for _ in range(lengths[member])]
        assert inputs[is_token].tolist() == expected
        assert targets[is_token].tolist() == [-1 - member for member in expected]
        assert (targets[~is_token] == IGNORED_TARGET).all()
        ends = np.cumsum([lengths[member] for member in packs.members(index)]).tolist()
        starts = [*np.repeat([0, *ends[:-1]], np.diff([0, *ends])).tolist()]
        assert begins.tolist() == starts + [ends[-1]] * (20 - ends[-1])


@settings(deadline=None, max_examples=20)
@given(lengths=st.lists(st.integers(5, 20), min_size=16, max_size=40), ranks=st.integers(1, 4), stop=st.integers(0, 6))
def test_steps_are_the_same_on_any_ranks_and_from_anywhere(lengths: list[int], ranks: int, stop: int) -> None:
    def steps(rank: int, world_size: int, first: int) -> list[list[list[int]]]:
        loader = StepLoader.of_samples(packed(lengths), global_batch_size=4, seed=3, training=True)
        loader.bind(rank=rank, world_size=world_size)
        loader.load_state_dict({"consumed": 4 * first})
        return [[b.unique().tolist() for b in batch[0]] for _ in range(2) for batch in loader][: 7 - first]

    whole = steps(0, 1, 0)
    stop = min(stop, len(whole))
    parts = [steps(rank, ranks, stop) for rank in range(ranks)]
    joined = [list(chain.from_iterable(some)) for some in zip(*parts, strict=True)]
    assert joined[: len(whole) - stop] == whole[stop:]


def conversations(path: Path, number: int = 40) -> Path:
    lines = [{"prompt": "q" * (i % 7), "response": chr(97 + i % 26) * (1 + i * i % 30)} for i in range(number)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def instructions(path: Path, **options: Any) -> InstructionData:
    made = InstructionData(path=path, **{"context_length": 128, "global_batch_size": 2, "end_token": "\0", **options})
    made.prepare_data()
    made.setup()
    return made


@pytest.mark.parametrize("style", STYLES)
def test_loss_and_gradients_are_those_of_the_unpacked_run(style: str, tmp_path: Path) -> None:
    path = conversations(tmp_path / "chat.jsonl")
    plain, packs = (instructions(path, packing=packing).train_dataloader().dataset for packing in (False, True))
    assert isinstance(packs, Packed)
    chosen = [packs[index] for index in range(3)]
    documents = [plain[member] for index in range(3) for member in packs.members(index)]
    assert len(documents) > 4
    torch.manual_seed(0)
    module = GPTModule(TINY | STYLES[style])
    module.configure_model()

    def step(samples: list[Any]) -> tuple[Tensor, Tensor, dict[str, Tensor], list[list[int]]]:
        batch: Any = tuple(torch.stack(leaves) for leaves in zip(*samples, strict=True))
        module.zero_grad()
        logits = module.logits(batch)
        loss = mean_over_targets(logits, batch[1])
        (loss + auxiliary_loss(module)).backward()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[1].flatten(), reduction="none", ignore_index=IGNORED_TARGET
        )[torch.ne(batch[1].flatten(), IGNORED_TARGET)]
        counts = [layer.statistics.tokens_NE.sum(0).tolist() for layer in moe_layers(module)]  # type: ignore[union-attr]
        assert len(losses) == num_targets(batch[1])
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        return loss.detach(), losses.detach(), gradients, counts

    (loss, losses, gradients, counts), (expected_loss, expected, wanted, expected_counts) = (
        step(chosen),
        step(documents),
    )
    assert counts == expected_counts
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_instructions_say_how_full_packs_are(tmp_path: Path) -> None:
    path = conversations(tmp_path / "chat.jsonl")
    made = instructions(path, packing=True, context_length=48)
    packs = made.train_dataloader().dataset
    assert isinstance(packs, Packed)
    assert f"packing: 38 conversations in {len(packs)} samples of 48 tokens" in made.summary()
    plain = instructions(path, context_length=48).train_dataloader().dataset
    assert sum(int(packs.lengths[i]) for i in range(38)) == sum(int(s[2].sum()) for s in (plain[i] for i in range(38)))


def test_held_out_conversations_are_packed_in_their_order(tmp_path: Path) -> None:
    made = instructions(conversations(tmp_path / "chat.jsonl"), packing=True, val_fraction=0.3)
    packs = made.val_dataloader().dataset
    assert isinstance(packs, Packed)
    assert packs.members(0)[0] == 0
    assert sum(len(batch[0]) for batch in made.val_dataloader()) == len(packs)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="documents of 1 to context_length=20 tokens, and there is one of 21"):
        packed([3, 21])
    with pytest.raises(ConfigurationError, match="there is none"):
        packed([])
    with pytest.raises(ConfigurationError, match="document 0 has 20 inputs and 20 targets, fewer than the 21"):
        packed([21], capacity=30)[0]
    with pytest.raises(IndexError, match="pack 1 of 1"):
        packed([3])[1]
    with pytest.raises(ConfigurationError, match=r"packing makes \d+ samples of context_length=128 tokens, fewer than"):
        instructions(conversations(tmp_path / "chat.jsonl"), packing=True, global_batch_size=30)


def text(tmp_path: Path, source: Path, **options: Any) -> TextData:
    sizes = {"context_length": 32, "global_batch_size": 2, "val_fraction": 0.2, "cache_dir": tmp_path / "cache"}
    made = TextData(source=str(source), packing=True, **{**sizes, **options})
    made.prepare_data()
    made.setup()
    return made


def predicted(packs: Any) -> list[bytes]:
    """What a model is taught, document by document or piece by piece."""
    found = []
    for index in range(len(packs)):
        inputs, targets, is_token, begins = packs[index]
        for begin in begins[is_token].unique().tolist():
            mine = is_token & (begins == begin)
            assert inputs[mine][1:].tolist() == targets[mine][:-1].tolist()
            found.append(bytes([inputs[mine][0], *targets[mine].tolist()]))
    return found


def test_text_files_are_documents(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [chr(65 + i) * (5 + i * i % 70) for i in range(26)] + ["z", ""]
    for number, said in enumerate(texts):
        (folder / f"{number}.txt").write_text(said)
    made = text(tmp_path, folder, val_samples=1)
    pieces = predicted(made.train_dataloader().dataset)
    assert all(len(set(piece)) == 1 for piece in pieces), "no document follows another"
    assert "documents, or pieces of long ones, in" in made.summary()
    training = bytes(made.corpora[0].train.open())
    for first in {piece[:1] for piece in pieces}:
        tokens = sum(len(piece) - 1 for piece in pieces if piece[:1] == first)
        assert tokens == training.count(first) - 1, "every token but the first is predicted once"
    assert len(made.val_dataloader().dataset) == 1  # type: ignore[arg-type]


def test_a_token_ends_documents(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"".join(bytes([i]) * (3 + i * 7 % 50) + b"\0" for i in range(1, 60)))
    pieces = predicted(text(tmp_path, path, dtype="uint8", end_of_document=0).train_dataloader().dataset)
    assert all(len(set(piece) - {0}) == 1 and piece.count(0) <= 1 for piece in pieces)
    assert sum(piece.endswith(b"\0") for piece in pieces) > 40
    with pytest.raises(ConfigurationError, match="set end_of_document to the token that ends one"):
        text(tmp_path, path, dtype="uint8")
    with pytest.raises(ConfigurationError, match="end_of_document=255 ends no document among the"):
        text(tmp_path, path, dtype="uint8", end_of_document=255)
