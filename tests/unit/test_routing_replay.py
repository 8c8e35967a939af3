"""Choices of experts that are kept and forced: what is replayed, with which gradients, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_lightning import GPT, ConfigurationError, GPTConfig, MoELayer, record_routing, replay_routing
from moe_lightning.moe.replayed_routing import TokenRange, read_samples, write_tokens

EXPERTS, K = 6, 2


def gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(
        GPTConfig(
            vocab_size=32, context_length=8, num_layers=3, d_model=16, num_heads=2, num_experts=EXPERTS,
            router={"top_k": K}, d_expert=8, moe_every=1,
        )
    )  # fmt: skip


def ids(batch: int = 3) -> Tensor:
    return torch.randint(0, 32, (batch, 8), generator=torch.Generator().manual_seed(1))


def recorded(model: nn.Module, tokens: Tensor) -> Tensor:
    with record_routing(model) as choices, torch.no_grad():
        model(tokens)
    return choices.stacked()


def test_another_model_routes_as_the_first_one_did() -> None:
    engine, trainer = gpt(0), gpt(1)
    table = recorded(engine, ids())
    assert table.shape == (24, 3, K)
    assert not torch.equal(recorded(trainer, ids()), table)
    with record_routing(trainer) as seen, replay_routing(trainer, table.view(3, 8, 3, K)):
        trainer(ids()).sum().backward()
    counts = torch.bincount(table[:, 0].flatten(), minlength=EXPERTS)
    layer = next(m for m in trainer.modules() if isinstance(m, MoELayer))
    assert torch.equal(layer.statistics.tokens_NE[0], counts)
    assert layer.router.weight.grad is not None  # type: ignore[union-attr]
    assert layer.router.weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    assert torch.equal(seen.stacked(), table)
    with replay_routing(trainer, table), record_routing(trainer) as seen:
        trainer(ids())
    assert torch.equal(seen.stacked(), table)
    assert not torch.equal(recorded(trainer, ids()), table), "and only inside"


def test_replaying_its_own_choices_changes_no_bit() -> None:
    model = gpt(0)
    plain = model(ids())
    with replay_routing(model, recorded(model, ids())):
        assert torch.equal(model(ids()), plain)


def test_tokens_without_choices_choose_themselves() -> None:
    model, other = gpt(0), recorded(gpt(1), ids())
    own = recorded(model, ids())
    table = other.clone()
    table[:8] = -1
    with replay_routing(model, table):
        model(ids())
    layer = next(m for m in model.modules() if isinstance(m, MoELayer))
    wanted = torch.cat([own[:8, 0], other[8:, 0]])
    assert torch.equal(layer.statistics.tokens_NE[0], torch.bincount(wanted.flatten(), minlength=EXPERTS))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            torch.zeros(24, 2, K, dtype=torch.long),
            r"has the shape \[24, 2, 2\], but this model needs .* 3 layers, 2 exp",
        ),
        (torch.zeros(24, 3, K), r"is torch\.float32: give numbers of experts as integers"),
        (torch.full((24, 3, K), EXPERTS), r"names the experts 6 to 6, but there are 0 to 5"),
        (torch.full((24, 3, K), 1), "gives a token an expert twice"),
        (torch.tensor([-1, 2]).expand(24, 3, K), "some of its experts only"),
        (torch.tensor([0, 2]).expand(20, 3, K), "has 20 tokens, but the model sees 24"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: Tensor, said: str) -> None:
    model = gpt(0)
    with pytest.raises(ConfigurationError, match=said), replay_routing(model, table):
        model(ids())
    assert recorded(model, ids()).shape == (24, 3, K), "nothing is left of it"


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Linear has no MoE layer"), record_routing(nn.Linear(2, 2)):
        raise AssertionError


# ---------------------------------------------------------------------- files


def test_samples_are_read_from_whatever_pieces_hold_them(tmp_path: Path) -> None:
    table = torch.randint(0, 100, (7, 4, 3, K))
    write_tokens(tmp_path, TokenRange(step=3, first_sample=0), table[:3])
    for part in range(2):
        tokens = TokenRange(step=3, first_sample=3, part=part, parts=2)
        write_tokens(tmp_path, tokens, table[3:, 2 * part : 2 * part + 2])
    write_tokens(tmp_path, TokenRange(step=3, first_sample=2), table[2:4])  # as another number of ranks wrote it
    write_tokens(tmp_path, TokenRange(step=4, first_sample=0), table + 1)
    (tmp_path / "notes.txt").write_text("kept")
    assert torch.equal(read_samples(tmp_path, TokenRange(step=3, first_sample=1), 5), table[1:6].to(torch.int16))
    second = read_samples(tmp_path, TokenRange(step=3, first_sample=0, part=1, parts=2), 7)
    assert torch.equal(second, table[:, 2:].to(torch.int16))


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not a folder"):
        read_samples(tmp_path / "nowhere", TokenRange(step=0, first_sample=0), 1)
    write_tokens(tmp_path, TokenRange(step=0, first_sample=0, part=0, parts=2), torch.zeros(2, 4, 1, 1))
    with pytest.raises(ConfigurationError, match="no routing of sample 0 of step 0 in whole"):
        read_samples(tmp_path, TokenRange(step=0, first_sample=0), 1)
    write_tokens(tmp_path, TokenRange(step=1, first_sample=0), torch.zeros(2, 3, 1, 1))
    with pytest.raises(ConfigurationError, match="such as 2 ranks cannot share"):
        read_samples(tmp_path, TokenRange(step=1, first_sample=0, part=0, parts=2), 2)


@pytest.mark.parametrize("damage", ["truncated", "other"])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, damage: str) -> None:
    piece = TokenRange(step=0, first_sample=0)
    write_tokens(tmp_path, piece, torch.zeros(2, 4, 1, 1) if damage == "truncated" else torch.zeros(2, 4))
    if damage == "truncated":
        path = tmp_path / piece.name
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigurationError, match=r"holds (no )?expert_ids"):
        read_samples(tmp_path, piece, 1)
