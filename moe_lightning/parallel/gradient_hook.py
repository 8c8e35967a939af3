"""Communication hook of DDP that sums dense gradients. (No postponed annotations: DDP inspects the hook's.)"""

import torch
import torch.distributed as dist


def sum_over_ranks(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP's all-reduce without its division: the loss of each rank is already its share of the global mean."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return summed
