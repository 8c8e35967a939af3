"""Choice of the kernels' implementation, by device or by the user; logged once for each device."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import torch_grouped, torch_kernels
from moe_lightning.kernels.interface import (
    ActivationKernels,
    ByteKernels,
    FusedKernels,
    MatmulKernels,
    PlanKernels,
    RouterKernels,
    RoutingKernels,
    RowKernels,
    StreamKernels,
)

BackendName = Literal["auto", "torch", "triton", "grouped", "reference"]
BACKENDS: tuple[str, ...] = get_args(BackendName)

_log = logging.getLogger(__name__)
_chosen = "auto"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Kernels of one backend."""

    routing: RoutingKernels
    rows: RowKernels
    matmul: MatmulKernels
    activation: ActivationKernels
    bytes: ByteKernels
    plan: PlanKernels
    stream: StreamKernels
    fused: FusedKernels | None = None
    router: RouterKernels | None = None


_TORCH = Implementation(
    routing=torch_kernels,
    rows=torch_kernels,
    matmul=torch_kernels,
    activation=torch_kernels,
    bytes=torch_kernels,
    plan=torch_kernels,
    stream=torch_kernels,
)


def set_backend(name: str) -> None:
    """Choose the implementation for this process: "auto" (Triton on CUDA where it is installed, else torch), "torch",
    "triton", "grouped" (as "auto", but torch's own kernel multiplies the experts, see `torch_grouped`) or "reference".

    Raises:
        ConfigurationError: an unknown name, or "triton" where it is not installed.
    """
    global _chosen
    if name not in BACKENDS:
        raise ConfigurationError(f"kernel backend {name!r} does not exist: use one of {', '.join(BACKENDS)}")
    if name == "triton" and not _has_triton():
        raise ConfigurationError("kernel backend 'triton' needs the package triton: install it, or use 'auto'")
    _chosen = name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the implementation inside a `with` block (see `set_backend`)."""
    before = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def implementation(device: torch.device, dtype: torch.dtype | None = None) -> Implementation | None:
    """Return the implementation for tensors of a device and dtype; None stands for the reference.

    The Triton kernels accumulate in fp32 and torch's grouped kernel takes no fp64, so that runs on torch.

    Raises:
        ConfigurationError: Triton was asked for and cannot run on the device.
    """
    found = _implementation(_chosen, device.type)
    return _TORCH if found is not None and dtype == torch.float64 else found


@functools.cache
def _implementation(name: str, device_type: str) -> Implementation | None:
    is_grouped = name == "grouped"
    if name == "auto" or is_grouped:
        name = "triton" if device_type == "cuda" and _has_triton() else "torch"
    _log.info("kernels on %s: %s%s", device_type, name, ", experts by torch's grouped_mm" if is_grouped else "")
    if name == "reference":
        return None
    found = _TORCH if name == "torch" else _load_triton(device_type)
    return replace(found, matmul=torch_grouped, fused=None) if is_grouped else found


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _load_triton(device_type: str) -> Implementation:
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigurationError(
            f"kernel backend 'triton' cannot run on device {device_type!r}: use 'auto', or interpret it with "
            "TRITON_INTERPRET=1 set before the start"
        )
    # Imported here: Triton is absent on most CPUs, and reads TRITON_INTERPRET when its kernels are defined.
    from moe_lightning.kernels.triton import activation, matmul, plan, router, routing, rows

    return Implementation(
        routing=routing,
        rows=rows,
        matmul=matmul,
        activation=activation,
        bytes=rows,
        plan=plan,
        stream=rows,
        fused=matmul,
        router=router,
    )
