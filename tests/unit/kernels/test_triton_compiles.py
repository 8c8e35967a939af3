"""Every Triton kernel compiles to machine code for two generations of NVIDIA GPUs and fits their shared memory.

The interpreter shows that the kernels compute the right values; this shows that the compiler takes them, without a GPU.
"""

import importlib.util
import os

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"),
]

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class Recorder:
    """Stands in for `launch`: compiles each kernel with the arguments it would have run with."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.compiled: set[str] = set()

    def __call__(self, kernel, grid, data, *arguments, **meta):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        if not all(grid):
            return
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        options = {key: meta.pop(key) for key in ("num_warps", "num_stages") if key in meta}
        signature, constants, attributes = {}, {}, {}
        for place, (name, value) in enumerate({**values, **meta}.items()):
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif name in meta or value is None or value == 1:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        assert list(signature) == list(kernel.arg_names)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        assert binary.asm["cubin"]
        assert binary.metadata.shared <= SHARED_BYTES[self.capability]
        self.compiled.add(kernel.__name__)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_and_fit(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from moe_lightning.kernels import triton_activation, triton_bytes, triton_matmul, triton_routing, triton_rows

    recorder = Recorder(capability)
    rooms = (triton_activation, triton_bytes, triton_matmul, triton_routing, triton_rows)
    for room in rooms:
        monkeypatch.setattr(room, "launch", recorder)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability // 10, 0))

    tokens, top_k, experts, width = 4096, 4, 64, 1024
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    order = torch.zeros(tokens * top_k, dtype=torch.int64)
    counts = torch.zeros(experts, dtype=torch.int64)
    x = torch.zeros(tokens, width, dtype=torch.bfloat16)
    rows = torch.zeros(tokens * top_k, width, dtype=torch.bfloat16)
    gate = torch.zeros(tokens * top_k)
    weight = torch.zeros(experts, width, 64, dtype=torch.bfloat16)

    triton_routing.top_k(torch.zeros(tokens, experts), top_k)
    triton_routing.sort_by_expert(ids, experts, may_drop=False)
    triton_rows.gather(x, order, top_k)
    triton_rows.combine(rows, ids, gate.view(ids.shape))
    triton_rows.spread(x, order, rows, gate.view(ids.shape), want_rows=True)
    for gather, operand in ((None, rows), (order, x)):
        triton_matmul.grouped_mm(operand, weight, counts, gather, top_k)
        triton_matmul.grouped_wgrad(operand, rows[:, :64].contiguous(), counts, gather, top_k)
    triton_matmul.grouped_mm(x[:512], weight, counts, None, 1)  # few rows a slot: low tiles
    triton_matmul.grouped_mm(rows[:, :64].contiguous(), weight.transpose(1, 2), counts, None, 1)
    for kind in ("gelu", "swiglu", "gelu_tanh", "swiglu_clamped"):
        triton_activation.activation(rows, kind, gate)
        triton_activation.activation_grad(rows, rows, kind, gate)
    triton_bytes.xor([torch.zeros(1024, dtype=torch.uint8)] * 4, torch.zeros(1024, dtype=torch.uint8))
    triton_bytes.sum_in_rank_order(torch.zeros(4, 1024), torch.zeros(1024))

    defined = {name for room in rooms for name in vars(room) if name.endswith("_kernel")}
    assert recorder.compiled == defined
