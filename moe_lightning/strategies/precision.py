"""Conversion of a module to the precision of a run, in which some buffers stay in float32.

Parameters and buffers follow the precision plugin, as in stock Lightning. These buffers stay as they are, bit by bit:
the selection biases and rotary tables of this library; in models of transformers the rotary frequencies; complex
buffers, which have no half precision; and what a module, of transformers or a user's own, names in
`_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from moe_lightning.compat import private_lightning
from moe_lightning.state.tensors import kept_marks

_DECLARATIONS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""A name or path of buffers, or of modules around them, or several, as in transformers."""

_FREQUENCIES = r"\w*inv_freq"
"""Rotary frequencies in the models of transformers, whose base class has a `base_model_prefix`."""


def convert_by_rule(precision: Precision) -> None:
    """Let a precision plugin leave these buffers as they are, until `private_lightning.use_own_methods`."""
    convert = type(precision).convert_module.__get__(precision)
    private_lightning.convert_with(precision, partial(_convert, convert))


def _convert(convert: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    kept = [(part, name, part.get_buffer(name).data) for part, name in _kept_buffers(module)]
    with kept_marks(module):  # a DTensor is replaced by another one
        converted = convert(module)
    for part, name, values in kept:
        buffer = part.get_buffer(name)
        if values.dtype in (torch.float16, torch.bfloat16):
            if values.any():  # zeros are exact
                rank_zero_warn(
                    f"buffer {name} of {type(part).__name__} is to stay in float32, but was built in "
                    f"{str(values.dtype).removeprefix('torch.')}, the default inside `configure_model`, which has "
                    "rounded its values: build it with dtype=torch.float32"
                )
            values = values.float()
        buffer.data = values.to(buffer.device)
    return converted


def _kept_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the names of buffers that are kept, with the modules that have them under these names."""
    for part in module.modules():
        declared = [getattr(part, attribute, None) or () for attribute in _DECLARATIONS]
        patterns = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
        if hasattr(part, "base_model_prefix"):
            patterns.append(_FREQUENCIES)
        if patterns:
            kept = re.compile(rf"(^|\.)({'|'.join(patterns)})($|\.)")
            yield from ((part, name) for name, _ in part.named_buffers() if kept.search(name))
        yield from ((part, name) for name, buffer in part.named_buffers(recurse=False) if buffer.is_complex())
