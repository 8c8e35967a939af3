"""Compiles what the Triton rooms would launch on a GPU that is not there, and reads budgets from the machine code."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What one block may take, by compute capability."""

MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, 120: 170}
POINTERS = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel for one capability.

    Attributes:
        name: of the kernel.
        registers: of a thread.
        spilled: bytes of a thread that lie in local memory.
        shared: bytes of a block.
        code: mnemonics of its instructions, in order.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    code: tuple[str, ...]

    def count(self, *mnemonics: str) -> int:
        """Instructions that begin so."""
        return sum(instruction.startswith(mnemonics) for instruction in self.code)


class Compiler:
    """Stands in for `launch`: compiles each kernel with the arguments that it would have run with."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: list[Compiled] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], data: Any, *arguments: Any, **meta: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        if not all(grid):
            return
        options = {key: meta.pop(key) for key in ("num_warps", "num_stages") if key in meta}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[object]]] = {}
        unspecialized = {kernel.params[place].name for place in kernel.do_not_specialize if isinstance(place, int)}
        unspecialized |= {name for name in kernel.do_not_specialize if isinstance(name, str)}
        for place, (name, value) in enumerate({**dict(zip(kernel.arg_names, arguments, strict=False)), **meta}.items()):
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{POINTERS[value.dtype]}"
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif hasattr(value, "block_shape"):
                signature[name] = f"tensordesc<{POINTERS[value.base.dtype]}{list(value.block_shape)}>"
            elif name in meta or value is None or (isinstance(value, int) and value == 1 and name not in unspecialized):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if value % 16 == 0 and name not in unspecialized:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        assert list(signature) == list(kernel.arg_names)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        path = Path(os.environ["TRITON_CACHE_DIR"]) / f"{kernel.__name__}.cubin"
        path.write_bytes(binary.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(path))
        found = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        listing = _tool("cuobjdump", "-sass", str(path))
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", listing)
        self.kernels.append(
            Compiled(
                name=kernel.__name__,
                registers=found["REG"],
                spilled=found["STACK"] + found["LOCAL"],
                shared=binary.metadata.shared,
                code=tuple(code),
            )
        )


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True, timeout=60).stdout
