"""Conversion of a module to the precision of a run, in which some buffers stay in float32.

Parameters and buffers follow the precision plugin, as in stock Lightning. These buffers stay as they are, bit by bit:
the selection biases and rotary tables of this library; in models of transformers the rotary frequencies; and what a
module, of transformers or a user's own, names in `_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from lightning.pytorch.plugins import Precision
from torch import nn

from moe_lightning.compat import private_lightning

_DECLARATIONS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Lists of names or paths of buffers, or of modules around them, as in transformers."""

_FREQUENCIES = r"\w*inv_freq"
"""Rotary frequencies in the models of transformers, whose base class has a `base_model_prefix`."""


def convert_by_rule(precision: Precision) -> None:
    """Let a precision plugin leave these buffers as they are, until `private_lightning.use_own_methods`."""
    convert = type(precision).convert_module.__get__(precision)
    private_lightning.convert_with(precision, partial(_convert, convert))


def _convert(convert: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    kept = [(part, name, part.get_buffer(name).data) for part, name in _kept_buffers(module)]
    converted = convert(module)
    for part, name, values in kept:
        buffer = part.get_buffer(name)
        buffer.data = values.to(buffer.device)
    return converted


def _kept_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the names of buffers that are kept, with the modules that have them under these names."""
    for part in module.modules():
        patterns = [name for attribute in _DECLARATIONS for name in getattr(part, attribute, None) or ()]
        if hasattr(part, "base_model_prefix"):
            patterns.append(_FREQUENCIES)
        if patterns:
            kept = re.compile(rf"(^|\.)({'|'.join(patterns)})($|\.)")
            yield from ((part, name) for name, _ in part.named_buffers() if kept.search(name))
