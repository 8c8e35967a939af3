"""Pipeline schedules of torch.distributed.pipelining: order of micro-batches in each stage, transfers, and checks.

Shapes of the transfers are given before a run: otherwise torch would run the model once more to infer them, and routers
would count tokens that are not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from moe_lightning.parallel.context import World
from moe_lightning.parallel.mesh import STAGES_PER_RANK, ScheduleName

Compute = Callable[[int, int, tuple[Tensor, ...]], Any]
"""(stage, micro-batch, what has arrived) -> what is sent on, or in the last stage the loss."""


class Pipe:
    """Runs micro-batches of one shape through the stages.

    Args:
        schedule: the order.
        micros: micro-batches of a run.
        sent: what one stage sends another of a micro-batch: values of its shapes and dtypes.
        compute: what a stage does with a micro-batch.
        again: called with the number of a micro-batch before its backward pass, which may compute layers again.
        world: the ranks of the stages, by stage.
    """

    def __init__(
        self,
        schedule: ScheduleName,
        micros: int,
        sent: Sequence[Tensor],
        compute: Compute,
        again: Callable[[int], None],
        world: World,
    ) -> None:
        self._micros = torch.arange(micros)
        count = STAGES_PER_RANK[schedule] * world.size
        own = range(world.rank, count, world.size)
        self._is_first, self._is_last = own[0] == 0, own[-1] == count - 1
        self._bubbles = _Bubbles(world)
        stages: list[Any] = [_Stage(number, count, sent, compute, again, world, self._bubbles) for number in own]
        options: dict[str, Any] = {"n_microbatches": micros, "loss_fn": _given, "scale_grads": False}
        if len(stages) == 1:
            kind = Schedule1F1B if micros >= count else ScheduleGPipe
            self._schedule: Any = kind(stages[0], **options)
        else:
            rounds = max(1, micros // world.size)
            several = ScheduleInterleaved1F1B if micros % rounds == 0 else ScheduleLoopedBFS
            self._schedule = several(stages, **options)

    def run(self, *, backward: bool) -> None:
        """All micro-batches, forward and, where it is wanted, backward; collective."""
        arguments = (self._micros,) if self._is_first else ()
        target = self._micros if self._is_last else None
        run = self._schedule.step if backward else self._schedule.eval
        with self._bubbles.outside_of_stages():
            run(*arguments, target=target, return_outputs=False)


class _Bubbles:
    """Measures idle time of a pipeline for the world's clock."""

    def __init__(self, world: World) -> None:
        self._world, self._bubble = world, ExitStack()

    def _begin(self) -> None:
        self._bubble.enter_context(self._world.bubbles.exchange(self._world.device))

    @contextmanager
    def outside_of_stages(self) -> Generator[None, None, None]:
        """Around a run."""
        with self._bubble:
            self._begin()
            yield

    @contextmanager
    def computing(self) -> Generator[None, None, None]:
        """Around what a stage computes."""
        self._bubble.close()
        try:
            yield
        finally:
            self._begin()


class _Stage(PipelineStage):
    """One that tells which micro-batch it computes, and lets mistakes through as they are."""

    def __init__(
        self,
        number: int,
        count: int,
        sent: Sequence[Tensor],
        compute: Compute,
        again: Callable[[int], None],
        world: World,
        bubbles: _Bubbles,
    ) -> None:
        outcome, wire = torch.zeros(()), tuple(sent)
        super().__init__(
            part := _Part(number, compute),
            number,
            count,
            world.device,
            input_args=(torch.zeros(1, dtype=torch.int64),) if number == 0 else wire,
            output_args=(outcome,) if number == count - 1 else wire,
            group=world.dense,
        )

        self._part, self._again, self._bubbles = part, again, bubbles

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._part.micro = fwd_chunk_id
        with _bare(), self._bubbles.computing():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with _bare(), self._bubbles.computing():
            self._again(bwd_chunk_id)
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class _Part(nn.Module):
    def __init__(self, number: int, compute: Compute) -> None:
        super().__init__()
        self.micro = 0
        self._number, self._compute = number, compute

    def forward(self, *arrived: Tensor) -> Any:
        return self._compute(self._number, self.micro, arrived)


def _given(loss: Tensor, _: Tensor) -> Tensor:
    return loss


@contextmanager
def _bare() -> Generator[None, None, None]:
    """torch wraps what a stage raises in an error of its own, which lists tensors."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
