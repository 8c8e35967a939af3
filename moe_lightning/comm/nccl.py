"""What NCCL needs and gloo does not: settings before its first group, and groups that fail or end without a word.

None of it has run on a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


def prepare_environment(*, is_elastic: bool) -> None:
    """Say what NCCL and torch's part of it read before their first group; what a user has set stays.

    Args:
        is_elastic: ranks outlive their world.
    """
    # Three communicators run side by side, and their kernels must start in one order on all ranks.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if is_elastic:  # torch's watchdog would end a survivor whose groups we are about to abort
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def first_group_options(device: torch.device) -> dict[str, Any]:
    """For `init_process_group`: communicators are made at once, while those who build them are watched."""
    return {"device_id": device} if device.type == "cuda" else {}


def background_options(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """For `new_group` of a group whose transfers overlap with others: theirs are short, and go first."""
    if device.type != "cuda":
        return {}
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it is another than the group's
    return {"pg_options": options}


def is_silent(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group's collectives of a device's tensors run on the device, as NCCL's: only aborting the group ends
    one whose peer is gone, and then it raises nothing. gloo's run on sockets of this process, on GPUs too.
    """
    return device.type != "cpu" and group._get_backend(device).name() != "gloo"


def has_failed(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group has met an error that it notes and does not raise, as NCCL's."""
    state = getattr(group._get_backend(device), "get_error", None)  # only NCCL can say
    return state is not None and state().name != "SUCCESS"


def abort_together(groups: Sequence[ProcessGroup], device: torch.device) -> None:
    """Abort communicators of a device in one bracket: one by one, each may wait for the others."""
    if not groups:
        return
    backend: Any = groups[0]._get_backend(device)
    backend._group_start()
    try:
        for group in groups:
            try:
                group.abort()
            except RuntimeError as error:
                logger.warning("a process group could not be aborted: %s", error)
    finally:
        backend._group_end()
