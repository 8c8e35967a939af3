"""`moe-train doctor=true`: the run that the configuration describes, for some steps beside one process."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from moe_lightning.errors import ConfigurationError

_FOLDER = "doctor"
_CALLBACK = "parity_doctor"
_LEFT_OUT = ("checkpoint", "partial_experts_checkpoint", "fault_recovery", "fault_injection", "dynamic_k")
"""Callbacks that write checkpoints, or need some: nothing goes on from this run."""


def examined(composed: DictConfig) -> None:
    """Let a run be a short one of its own, which leaves nothing in the folder of the run that it examines.

    Raises:
        ConfigurationError: it does not train.
    """
    if composed.get("task") != "train":
        raise ConfigurationError(f"doctor=true compares steps of training, and task={composed.task} has none: drop one")
    OmegaConf.set_struct(composed, False)
    composed.run_dir = f"{composed.run_dir}/{_FOLDER}"
    composed.resume, composed.elastic.enabled, composed.logger = False, False, {}
    composed.trainer.limit_val_batches, composed.objective = 0, None
    given = composed.callbacks.get(_CALLBACK) or {}
    target = {"_target_": "moe_lightning.doctor.parity_doctor.ParityDoctor"}
    kept = {name: node for name, node in composed.callbacks.items_ex(resolve=False) if name not in _LEFT_OUT}
    composed.callbacks = kept | {_CALLBACK: {**target, **given}}
