"""What Triton's interpreter lacks."""

from __future__ import annotations

import pytest


def widen_bf16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as bits, and multiplies the bits: widen them first."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(self, a, b, d, *options):
        wide = [self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, d, *options)

    patch.setattr(builder, "create_dot", widened)
