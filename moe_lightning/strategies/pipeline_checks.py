"""What a pipeline refuses, before it trains."""

from __future__ import annotations

import lightning.pytorch as pl

from moe_lightning.algorithms.mesh_shape import MeshShape
from moe_lightning.comm.pipeline import ScheduleName
from moe_lightning.errors import ConfigurationError


def chosen_micro_batches(wanted: int | None, schedule: ScheduleName, ranks: int) -> int:
    """Micro-batches of a batch; 1 without a pipeline.

    Args:
        wanted: by the user.
        ranks: of the pipeline.

    Raises:
        ConfigurationError: a schedule that cannot run so many, or what has no meaning without a pipeline.
    """
    if ranks == 1:
        if wanted is not None or schedule != "1f1b":
            raise ConfigurationError(
                f"schedule={schedule} and micro_batches={wanted} are for pipelines, and mesh.pp is 1: drop them"
            )
        return 1
    micros = 2 * ranks if wanted is None else wanted
    if micros < ranks:
        raise ConfigurationError(
            f"micro_batches={micros} cannot fill the {ranks} stages of mesh.pp: use at least {ranks}"
        )
    if schedule == "interleaved" and micros % ranks:
        raise ConfigurationError(
            f"schedule=interleaved needs a multiple of mesh.pp={ranks} micro-batches, not micro_batches={micros}: use "
            f"{micros // ranks * ranks} or {(micros // ranks + 1) * ranks}"
        )
    return micros


def check_for_pipeline(module: pl.LightningModule) -> None:
    """
    Raises:
        ConfigurationError: what cannot be trained in stages.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "manual optimization calls backward inside of a step, which mesh.pp cuts in stages: use automatic "
            "optimization, or mesh.pp=1"
        )


def check_for_recovery(axes: MeshShape, dense: str) -> None:
    """
    Raises:
        ConfigurationError: a pipeline beside what elastic worlds cannot bring across with it.
    """
    if axes.pp > 1 and dense not in ("ddp", "zero1", "fsdp", "hsdp"):
        raise ConfigurationError(
            f"mesh.pp={axes.pp} beside dense={dense} cannot change its world, as elastic runs do: say "
            "elastic.enabled=false, or use dense=ddp, zero1, fsdp or hsdp"
        )
