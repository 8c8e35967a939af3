"""Versions and machine, for reports of faults."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata

from moe_lightning import __version__
from moe_lightning.cores import usable_cores

_VARIABLES = re.compile(r"(CUDA|GLOO|HYDRA|MOE|NCCL|OMP|PYTORCH|SLURM|TORCH|TRITON|WANDB)_")
_PRIVATE = re.compile(
    r"ACCOUNT|ADDR|DIR|ENTITY|FILE|HOME|HOOK|HOST|KEY|NAME|NODELIST|PASSWORD|PATH|SECRET|TOKEN|UID|URL|USER"
)
_PLACE = re.compile(r"[/@\\]|:\d")
"""Part of a value that is a path or an address, or names a user."""


def environment_report() -> str:
    """Versions of the package and of all that it may use, the machine, and variables of the environment that change a
    run; none that may name a user, a host or a path, and no secret.
    """
    import torch

    cuda = torch.version.cuda if torch.cuda.is_available() else None
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else []
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {name: _version(name) for name in sorted(_required())}
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name) and not _PRIVATE.search(name) and not _PLACE.search(value)
    ]
    return "\n".join(
        [
            f"moe-lightning {__version__}",
            f"Python {platform.python_version()} on {platform.platform()}",
            f"{usable_cores()} of {os.cpu_count()} cores, {memory_gib:.0f} GiB of memory",
            f"GPUs: {', '.join(devices) or 'none'}{f'; CUDA {cuda}, NCCL {torch.cuda.nccl.version()}' if cuda else ''}",  # type: ignore[no-untyped-call]
            f"variables: {' '.join(variables) or 'none'}",
            f"packages: {', '.join(f'{name} {version}' for name, version in found.items() if version)}",
        ]
    )


def _required() -> set[str]:
    """Names of what the package and its extras require."""
    requirements = metadata.requires("moe-lightning") or []
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements} - {"moe-lightning"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
