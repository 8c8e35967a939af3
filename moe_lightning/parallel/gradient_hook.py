"""Communication hook of DDP that sums dense gradients. (No postponed annotations: DDP inspects the hook's.)"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class DenseSum:
    """Sum of dense gradients.

    Attributes:
        group: of the ranks.
        check: called with this rank's gradients before they are summed.
    """

    group: dist.ProcessGroup
    check: Callable[[torch.Tensor], None]


def sum_over_ranks(dense: DenseSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP's all-reduce without its division: the loss of each rank is already its share of the global mean."""
    dense.check(bucket.buffer())
    future = dist.all_reduce(bucket.buffer(), group=dense.group, async_op=True).get_future()
    summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return summed
