"""Packing, parity and ordered sums, bit by bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import reference
from tests.unit.kernels.kernel_cases import DEVICE, ROUNDED, kernel_settings, randn


def state() -> list[torch.Tensor]:
    tensors = [
        randn(3, 5),
        randn(7, dtype=torch.bfloat16, seed=1),
        torch.tensor(5, device=DEVICE),
        randn(4, 6, seed=2).t(),
        torch.empty(0, 3, device=DEVICE),
        torch.tensor([True, False], device=DEVICE),
        randn(2, dtype=torch.float64, seed=3),
    ]
    tensors[0][0, 0] = torch.nan  # bits must survive, not values
    return tensors


def test_a_pack_has_every_bit():
    tensors = state()
    flat = ops.pack(tensors)
    assert torch.equal(ops.pack(tensors, out=torch.full_like(flat, 7)), flat), "gaps must be zero, whatever was there"
    expected = []
    for tensor in tensors:
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        expected += [content, content.new_zeros(-len(content) % 64)]
    assert torch.equal(flat, torch.cat(expected))


def test_pieces_begin_at_multiples_of_64_bytes():
    flat = ops.pack([torch.ones(1, device=DEVICE), torch.full((1,), 2.0, device=DEVICE)]).view(torch.float32)
    assert flat.nonzero().flatten().tolist() == [0, 16]


def test_pack_checks_every_tensor_before_it_writes():
    target = torch.ones(128, dtype=torch.uint8)
    with pytest.raises(ConfigurationError, match="tensor 1 is on meta"):
        ops.pack([torch.zeros(4), torch.zeros(4, device="meta")], out=target)
    assert target.all()


@kernel_settings
@given(st.integers(1, 9), st.sampled_from([0, 1, 7, 64, 1000]), st.booleans())
def test_xor_parity_restores_a_lost_buffer(count, length, misaligned):
    generator = torch.Generator().manual_seed(length)
    whole = torch.randint(0, 256, (count, length + 8), dtype=torch.uint8, generator=generator).to(DEVICE)
    parts = [row[misaligned : misaligned + length] for row in whole]
    parity = ops.xor_parity(parts)
    assert torch.equal(parity, reference.xor_parity(parts))
    lost = parts[0].clone()
    assert torch.equal(ops.xor_parity([*parts[1:], parity]), lost)
    for target in (parts[0], parts[-1]):  # in place, over the first and over the last
        expected = reference.xor_parity(parts)
        assert ops.xor_parity(parts, out=target) is target
        assert torch.equal(target, expected)


@kernel_settings
@given(st.integers(1, 5), st.sampled_from([0, 1, 3, 1000]), st.sampled_from(ROUNDED))
def test_sum_in_rank_order_is_the_reference_bit_by_bit(count, length, dtype):
    parts = randn(count, length, dtype=dtype) * 100
    expected = reference.sum_in_rank_order(parts)
    assert torch.equal(ops.sum_in_rank_order(parts), expected)
    strided = randn(length, count, dtype=dtype).t()
    assert torch.equal(ops.sum_in_rank_order(strided), reference.sum_in_rank_order(strided))
    out = torch.full_like(expected, torch.nan)
    assert ops.sum_in_rank_order(parts, out=out) is out
    assert torch.equal(out, expected)


def test_the_order_of_the_sum_is_that_of_the_ranks():
    parts = torch.tensor([[1e8], [1.0], [-1e8]], device=DEVICE)
    assert ops.sum_in_rank_order(parts).item() == 0.0
    assert ops.sum_in_rank_order(parts[[0, 2, 1]]).item() == 1.0


BYTES = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.pack([]), "at least one tensor"),
        (lambda: ops.pack([torch.zeros(3)], out=BYTES[:32]), "holds 32 bytes, but 64 are needed"),
        (lambda: ops.pack([torch.zeros(3)], out=torch.zeros(72, dtype=torch.uint8)[8:]), "multiple of 16"),
        (lambda: ops.pack([torch.zeros(3)], out=torch.zeros(16)), "flat contiguous uint8"),
        (lambda: ops.xor_parity([]), "at least one buffer"),
        (lambda: ops.xor_parity([BYTES, BYTES[:3]]), "buffer 1 holds 3 bytes, but 64"),
        (lambda: ops.xor_parity([BYTES], out=BYTES[::2]), "out is torch.uint8 of shape"),
        (lambda: ops.sum_in_rank_order(torch.zeros(0, 3)), "at least one part"),
        (lambda: ops.sum_in_rank_order(torch.zeros(2, 3), out=torch.zeros(2)), "but the sum is torch.float32"),
    ],
)
def test_wrong_input_is_one_sentence(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()
