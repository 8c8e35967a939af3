"""The GPT: causal, both styles, grouped heads, rotary positions, tied weights, the papers' sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import reference
from moe_lightning.kernels.interface import ACTIVATIONS
from moe_lightning.models.gpt import GPT, Attention, GPTConfig, Rotary
from moe_lightning.moe.experts import FeedForward
from moe_lightning.moe.layer import MoELayer, moe_layers
from tests.unit.gpt_size import count_parameters

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "context_length": 12,
    "num_layers": 2,
    "num_heads": 4,
    "d_model": 32,
    "d_hidden": 24,
    "num_experts": 4,
    "init_std": 0.2,
}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False}
STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "grouped": LLAMA | {"num_kv_heads": 2, "qk_norm": True, "tie_embeddings": False, "num_shared_experts": 1},
}


def make(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**TINY | options))


@pytest.mark.parametrize("style", STYLES)
def test_no_token_sees_the_future(style: str) -> None:
    model = make(**STYLES[style]).eval()
    ids = torch.randint(0, 40, (2, 10))
    logits = model(ids)
    assert logits.shape == (2, 10, 40)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 40
    again = model(changed)
    torch.testing.assert_close(again[:, :6], logits[:, :6], rtol=1e-4, atol=1e-5)
    assert (again[:, 6:] - logits[:, 6:]).abs().amax(dim=-1).min() > 1e-3
    past = ids.clone()
    past[:, 0] = (past[:, 0] + 1) % 40
    assert (model(past)[:, -1] - logits[:, -1]).abs().max() > 1e-4, "the past is not seen"


@pytest.mark.parametrize("style", STYLES)
def test_every_parameter_trains(style: str) -> None:
    model = make(**STYLES[style])
    F.cross_entropy(model(torch.randint(0, 40, (4, 12))).flatten(0, 1), torch.randint(0, 40, (48,))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def rotate_by_hand(x_C: Tensor, position: int, theta: float) -> Tensor:
    """Pair (c, c + C/2) as a complex number, turned by position * theta^(-2c/C)."""
    half = len(x_C) // 2
    out = torch.empty_like(x_C)
    for c in range(half):
        angle = position * theta ** (-2 * c / len(x_C))
        value = complex(x_C[c], x_C[c + half]) * complex(math.cos(angle), math.sin(angle))
        out[c], out[c + half] = value.real, value.imag
    return out


def test_rotary_formula_and_relative_positions() -> None:
    config = GPTConfig(**TINY | {"position": "rope", "rope_theta": 100.0, "context_length": 32})
    rotary = Rotary(config)
    x = torch.randn(1, 1, 32, config.head_size)
    turned = rotary(x)
    for position in (0, 1, 7, 31):
        expected = rotate_by_hand(x[0, 0, position].double(), position, 100.0).float()
        torch.testing.assert_close(turned[0, 0, position], expected, rtol=1e-5, atol=1e-6)
    q, k = torch.randn(config.head_size), torch.randn(config.head_size)
    q_all, k_all = (rotary(v.expand(1, 1, 32, -1))[0, 0] for v in (q, k))
    torch.testing.assert_close(q_all[9] @ k_all[4], q_all[25] @ k_all[20], rtol=1e-4, atol=1e-4)
    assert not rotary.state_dict(), "tables are not state"
    assert rotary(x.bfloat16()).dtype == torch.bfloat16


def attention_by_hand(attention: Attention, x_LD: Tensor) -> Tensor:
    """One head and one query after another; key-value head h // (H / KV)."""
    heads, kv, size = attention.num_heads, attention.kv_heads, attention.head_size
    rows = attention.qkv(x_LD)
    q = rows[:, : heads * size].view(-1, heads, size)
    k = rows[:, heads * size : (heads + kv) * size].view(-1, kv, size)
    v = rows[:, (heads + kv) * size :].view(-1, kv, size)
    out = torch.zeros(len(x_LD), heads, size)
    for h in range(heads):
        group = h // (heads // kv)
        queries, keys = attention.query_norm(q[:, h]), attention.key_norm(k[:, group])
        if attention.rotary is not None:
            queries, keys = (attention.rotary(t[None, None])[0, 0] for t in (queries, keys))
        for i in range(len(x_LD)):
            weights = (keys[: i + 1] @ queries[i] / math.sqrt(size)).softmax(dim=0)
            out[i, h] = weights @ v[: i + 1, group]
    return attention.out(out.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("style", STYLES)
def test_attention_formula(style: str) -> None:
    attention = make(**STYLES[style]).blocks[0].attention
    assert isinstance(attention, Attention)
    x = torch.randn(1, 7, 32)
    torch.testing.assert_close(attention(x)[0], attention_by_hand(attention, x[0]), rtol=1e-4, atol=1e-5)


def test_tied_weights_are_one_tensor() -> None:
    tied, free = make(), make(tie_embeddings=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert free.head.weight is not free.token_embedding.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 40 * 32


def test_moe_layers_lie_where_the_config_says() -> None:
    def kinds(**options: Any) -> str:
        model = make(**{"num_layers": 6} | options)
        return "".join("M" if isinstance(b.feed_forward, MoELayer) else "d" for b in model.blocks)

    assert kinds(moe_every=1) == "MMMMMM"
    assert kinds(moe_every=2) == "dMdMdM"
    assert kinds(moe_every=3) == "ddMddM"
    assert kinds(moe_every=1, num_dense_layers=2) == "ddMMMM"
    assert kinds(num_experts=0) == "dddddd"
    assert len(moe_layers(make(num_layers=6, moe_every=2))) == 3


def test_initialisation() -> None:
    model = make(num_layers=8, d_model=64, d_hidden=256, num_experts=2, moe_every=1, init_std=0.1)
    residual = 0.1 / math.sqrt(16)
    block = model.blocks[0]
    for weights, std in (
        (block.attention.qkv.weight, 0.1),
        (block.attention.out.weight, residual),
        (block.feed_forward.experts.w_up, 0.1),
        (block.feed_forward.experts.w_down, residual),
        (model.token_embedding.weight, 0.1),
    ):
        assert float(weights.detach().std()) == pytest.approx(std, rel=0.05)
    biases = [
        p for name, p in model.named_parameters() if name.endswith(("bias", "b_up", "b_down")) and "norm" not in name
    ]
    assert biases
    assert not any(b.any() for b in biases)


@pytest.mark.parametrize(
    ("options", "millions", "tolerance"),
    [
        # GPT-S, M, L of Lazarus: MoE in every layer, printed as 521M, 1.3B, 1.7B
        ({"d_model": 768, "num_experts": 8, "moe_every": 1}, 521.2, 0.05),
        ({"d_model": 1024, "num_heads": 16, "num_experts": 12, "moe_every": 1}, 1312, 0.5),
        ({"d_model": 1024, "num_heads": 16, "num_experts": 16, "moe_every": 1}, 1715, 0.5),
        # GPT-125M-8E of PEC (323M with a tied head), GPT-350M-16E of MoC (1.8659e9)
        ({"d_model": 768, "num_experts": 8, "moe_every": 2}, 322.8, 0.05),
        ({"d_model": 1024, "num_heads": 16, "num_layers": 24, "num_experts": 16, "moe_every": 2}, 1865.9, 0.05),
    ],
)
def test_sizes_of_the_papers(options: dict[str, Any], millions: float, tolerance: float) -> None:
    config = GPTConfig(**options, router={"top_k": 1})  # type: ignore[arg-type]
    assert count_parameters(config) / 1e6 == pytest.approx(millions, abs=tolerance)


def test_a_sequence_that_is_too_long() -> None:
    with pytest.raises(ConfigurationError, match="13 tokens exceeds context_length=12: cut it or raise"):
        make()(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_formula(activation: Any, bias: bool) -> None:
    torch.manual_seed(0)
    x = 9 * torch.randn(2, 3, 6)  # beyond the limit of swiglu_clamped
    layer = FeedForward(6, 5, activation, bias, init_std=0.5)
    hidden = F.linear(x, layer.up.weight, layer.up.bias).flatten(0, 1)
    expected = F.linear(reference.expert_activation(hidden, activation), layer.down.weight, layer.down.bias)
    torch.testing.assert_close(layer(x), expected.view_as(x))
