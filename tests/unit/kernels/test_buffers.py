"""The pool lends each block to one tensor at a time and takes it back when its last holder is gone."""

import gc
import threading

import pytest
import torch

from moe_lightning import kernels as ops
from moe_lightning.kernels.torch_kernels import BufferPool, pool

MIB = 1 << 18  # floats


@pytest.fixture
def own() -> BufferPool:
    return BufferPool(idle_limit_bytes=8 << 20)


def test_a_block_returns_when_its_last_view_dies(own):
    first = own.empty((2, MIB), torch.float32)
    view, address = first[1], first.data_ptr()
    del first
    assert own.empty((2, MIB), torch.float32).data_ptr() != address, "a view still holds the block"
    del view
    gc.collect()
    assert own.idle_bytes > 0
    assert own.empty((2, MIB), torch.bfloat16).dtype == torch.bfloat16


def test_blocks_that_live_at_once_do_not_overlap(own):
    tensors = [own.empty((MIB,), torch.float32).fill_(i) for i in range(5)]
    assert [float(t.sum()) for t in tensors] == [i * MIB for i in range(5)]
    assert all(t.data_ptr() % 64 == 0 for t in tensors)


def test_idle_memory_is_limited(own):
    tensors = [own.empty((4 * MIB,), torch.float32) for _ in range(5)]
    del tensors
    assert own.idle_bytes <= 8 << 20
    own.clear()
    assert own.idle_bytes == 0


def test_a_small_tensor_takes_no_large_block(own):
    del_me = own.empty((4 * MIB,), torch.float32)
    del del_me
    own.empty((MIB,), torch.float32)
    assert own.reused == 0
    own.empty((3 * MIB,), torch.float32)
    assert own.reused == 1


def test_threads_never_share_a_block(own):
    wrong = []

    def work(mark):
        for _ in range(50):
            tensor = own.empty((MIB,), torch.float32).fill_(mark)
            if float(tensor.min()) != mark or float(tensor.max()) != mark:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool serves the CPU")
def test_a_steady_layer_allocates_nothing_large():
    tokens, width, experts = 2048, 256, 4
    ids = torch.randint(0, experts, (tokens, 2), generator=torch.Generator().manual_seed(0))
    x = torch.randn(tokens, width, requires_grad=True)
    w1, w2 = (torch.randn(experts, width, width, requires_grad=True) for _ in range(2))
    weights = torch.rand(tokens, 2, requires_grad=True)

    def step() -> None:
        sort = ops.sort_by_expert(ids, experts)
        h = ops.grouped_mm(ops.permute(x, sort.order_M, sort.inverse_TK), w1, sort.tokens_per_expert_E)
        y = ops.grouped_mm(ops.expert_activation(h, "gelu"), w2, sort.tokens_per_expert_E)
        out = ops.unpermute(y, sort.inverse_TK, sort.order_M, weights)
        torch.autograd.grad(out, [x, w1, w2, weights], torch.ones_like(out))

    step()
    fresh, reused = pool.fresh, pool.reused
    step()
    step()
    assert pool.fresh == fresh
    assert pool.reused > reused
