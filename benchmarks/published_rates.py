"""Published rates of Triton and CUTLASS matmuls, which the model of `roofline` is held against.

A block size that a source does not name is that of the kernel's public code. Rates in TFLOP/s; 1.0 bytes are fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.roofline_model import DEVICES, Matmul, Tile, matmul_cost


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure: who measured what on which device; `is_fitted`: a number of `DEVICES` was chosen to meet it."""

    source: str
    device: str
    matmul: Matmul
    tflops: float
    is_fitted: bool = False

    @property
    def modelled_tflops(self) -> float:
        return self.matmul.flops / matmul_cost(self.matmul, DEVICES[self.device]).seconds / 1e12


_AHEAD = {"is_persistent": True, "stores_ahead": True}
_FP8 = Tile(m=128, n=256, k=128)
_HALF = Tile(m=128, n=256, k=64)

PUBLISHED = (
    Published(
        source="Triton tutorial 09, fp8, one program a tile (triton-lang/triton#5461)", device="h100", tflops=1208.9,
        matmul=Matmul(rows=8192, width=8192, inner=4096, tile=_FP8, element_bytes=1.0),
    ),
    Published(
        source="Triton tutorial 09, fp8, persistent, descriptors (triton-lang/triton#5461)", device="h100",
        tflops=1330.7,
        matmul=Matmul(rows=8192, width=8192, inner=4096, tile=_FP8, element_bytes=1.0, **_AHEAD),
    ),
    Published(
        source="Triton tutorial 03, fp8 (triton-lang/triton#3546)", device="h100", tflops=1279.9,
        matmul=Matmul(rows=3584, width=3584, inner=3584, tile=_FP8, element_bytes=1.0),
    ),
    Published(
        source="FBGEMM Triton TMA persistent, fp8 rows (pytorch/FBGEMM#2766)", device="h100",
        tflops=1358.9, is_fitted=True,
        matmul=Matmul(rows=6144, width=8192, inner=8192, tile=_FP8, element_bytes=1.0, **_AHEAD),
    ),
    Published(
        source="the same, K of 64 (pytorch/FBGEMM#2766)", device="h100", tflops=131.8,
        matmul=Matmul(rows=6144, width=8192, inner=64, tile=_FP8, element_bytes=1.0, **_AHEAD),
    ),
    Published(
        source="CUTLASS by torch.compile, bf16 (gist Chillee/2ec89696)", device="h100", tflops=780.2, is_fitted=True,
        matmul=Matmul(rows=4224, width=2048, inner=8192, tile=_HALF, shares_loads=True, **_AHEAD),
    ),
    Published(
        source="CUTLASS profiler's documentation, fp16 (NVIDIA/cutlass#956)", device="a100", tflops=235.0,
        matmul=Matmul(rows=3456, width=4096, inner=8192, tile=Tile(m=256, n=128, k=32)),
    ),
    Published(
        source="Triton 3.5 tutorial 03, fp16 (triton-lang/triton#6523)", device="a100", tflops=170.1,
        matmul=Matmul(rows=2944, width=2944, inner=2944, tile=Tile(m=128, n=256, k=64)),
    ),
    Published(
        source="Triton TLX warp-specialised, fp16 (facebookexperimental/triton#474)", device="b200",
        tflops=1039.7, is_fitted=True,
        matmul=Matmul(
            rows=4096, width=4096, inner=4096, tile=_HALF, is_persistent=True, hides_epilogue=True
        ),
    ),
    Published(
        source="Triton tutorial 08 with TMA, 4 groups, fp16 (facebookexperimental/triton#459)", device="b200",
        tflops=663.7,
        matmul=Matmul(rows=4096, width=8192, inner=8192, groups=4, tile=Tile(m=128, n=128, k=64), is_persistent=True),
    ),
)  # fmt: skip
