"""Compilation and activation checkpointing of the dense parts of a model: attention, dense feed-forward layers, shared
experts.

Dispatch depends on the counts of every micro-batch, on integers on the host and on other ranks, so a static graph
cannot contain an MoE layer; and Lightning's `self.log` cannot be traced, so `torch.compile(module)` of a whole
LightningModule does not help either. The parts between are compiled in place: names in checkpoints stay.

MoE layers keep their activations: computing them again would send every token to its experts once more.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from moe_lightning.compat import private_lightning, private_torch
from moe_lightning.config import validated
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.randomness import StreamDropout, remembering
from moe_lightning.parallel.tensor import PartedForward
from moe_lightning.strategies.expert_parallel import own_strategy
from moe_lightning.strategies.stages import is_gated
from moe_lightning.strategies.worlds import ExpertParallelCallback

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@validated
class CompileDense(ExpertParallelCallback):
    """Compiles the dense parts of the module when the Trainer starts; the first steps take longer.

    Args:
        backend: of torch.compile.
        mode: of torch.compile, such as "max-autotune-no-cudagraphs"; None: its default.
        dynamic: as in torch.compile; None: shapes are taken as fixed until they change.

    Attributes:
        compiled: names of the parts.

    Raises:
        ConfigurationError: an unknown backend.
    """

    def __init__(self, backend: str = "inductor", mode: Mode | None = None, dynamic: bool | None = None) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigurationError(
                f"backend={backend!r} is not known to torch.compile: use one of "
                f"{', '.join(sorted(torch.compiler.list_backends()))}"
            )
        self._backend = backend
        self._mode = mode
        self._dynamic = dynamic
        self.compiled: list[str] = []

    def _compile(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Once for a module; later calls find it compiled."""
        parts = [(name, part) for name, part in dense_parts(pl_module) if not private_torch.is_compiled(part)]
        if parts and self._backend == "inductor":
            check_inductor(trainer.strategy.root_device)
        for name, part in parts:
            _keep_noise_out(part)
            part.compile(backend=self._backend, mode=self._mode, dynamic=self._dynamic)
            self.compiled.append(name)

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _compile
    on_world_changed = _compile  # other blocks may be on this rank now


def _keep_noise_out(part: nn.Module) -> None:
    """Let keyed dropout run outside of graphs: Inductor's CPU code of its 64-bit integer hash ends in a segmentation
    fault (torch 2.13).
    """
    for module in part.modules():
        if isinstance(module, StreamDropout) and module.p > 0:
            outside = torch.compiler.disable(type(module).forward)  # type: ignore[no-untyped-call]
            module.forward = MethodType(outside, module)  # type: ignore[method-assign]


def dense_parts(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest submodules without experts that have several layers, with their names; a single layer gains nothing
    from being compiled alone. Of the blocks of a pipeline stage, which are called for other stages too, the parts.
    """
    for child_name, child in model.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        goes_inside = isinstance(child, nn.ModuleList | nn.ModuleDict) or any(
            isinstance(part, MoELayer) or is_gated(part) for part in child.modules()
        )
        if isinstance(child, MoELayer):
            if child.shared_expert is not None:
                yield f"{path}.shared_expert", child.shared_expert
        elif goes_inside:
            yield from dense_parts(child, path)
        elif next(child.children(), None) is not None:
            yield path, child


def check_inductor(device: torch.device) -> None:
    """Refuse what would end in a traceback of the compiler.

    Raises:
        ConfigurationError: no C++ compiler for a CPU, no Triton for a GPU.
    """
    cure = "drop CompileDense, or give it backend='aot_eager'"
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise ConfigurationError(
                f"torch.compile needs a C++ compiler on the CPU and {compiler} is not there: install g++ or set CXX, "
                f"or {cure}"
            )
    elif importlib.util.find_spec("triton") is None:
        raise ConfigurationError(f'torch.compile needs Triton: pip install "moe-lightning[triton]", or {cure}')


class RecomputeDense(ExpertParallelCallback):
    """While a Trainer fits, the dense parts of the module keep their inputs only, and compute what lies between again
    in the backward pass: the same losses, to the last bit, with less memory and about a third more dense computation.

    Raises:
        ConfigurationError: when training starts, the parts are compiled, too.
    """

    def __init__(self) -> None:
        self._parts: dict[str, nn.Module] = {}  # by name; those of a pipeline stage may leave this rank

    @property
    def recomputed(self) -> list[str]:
        """Names of the parts that are computed again."""
        return list(self._parts)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if private_lightning.callback_of(trainer, CompileDense) is not None:
            raise ConfigurationError(
                "CompileDense and RecomputeDense both take the dense parts: Inductor decides by itself what to compute "
                "again, so drop one of them"
            )
        self._recompute(pl_module)

    def _recompute(self, module: pl.LightningModule) -> None:
        for name, part in dense_parts(module):
            if self._parts.get(name) is part:
                continue
            with _whole(part):  # computes with what is gathered
                if "forward" not in vars(part):  # somebody else's, such as a quantiser's, stays
                    part.forward = MethodType(_forward, part)
                    self._parts[name] = part

    @override
    def on_world_changed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Other blocks may be on this rank now. Where ranks only wait for others nothing is computed."""
        worlds = own_strategy(trainer, "RecomputeDense").worlds
        if not worlds.cannot_train(worlds.present.size):
            here = [part for _, part in dense_parts(pl_module)]
            for name in [name for name, part in self._parts.items() if part not in here]:
                del self._parts.pop(name).forward
            self._recompute(pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for part in self._parts.values():
            with _whole(part):  # weights may stay cut
                del part.forward
        self._parts = {}

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning calls no teardown then


@contextmanager
def _whole(part: nn.Module) -> Iterator[None]:
    """Inside, a part that is cut computes as if it were whole, so that its forward pass can be replaced."""
    parted = vars(part).get("forward")
    if not isinstance(parted, PartedForward):
        yield
        return
    parted.undo()
    yield
    PartedForward(part, parted.style, parted.ranks)


def _forward(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In the place of a part's own."""
    own = type(part).forward
    if not (part.training and torch.is_grad_enabled()):
        return own(part, *args, **kwargs)
    contexts = partial(remembering, list(part.modules()))
    return checkpoint(own, part, *args, use_reentrant=False, context_fn=contexts, **kwargs)
