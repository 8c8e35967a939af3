"""Wrong values of Python's interface: one sentence each, from the table in wrong_values.tsv.

What commands say of theirs is in typical_mistakes.tsv; `test_public_constructors.py` tries values that no argument has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moe_lightning import (
    ExpertParallelStrategy,
    ForcedRouting,
    GPTConfig,
    LoadBalancer,
    MoELayer,
    OptimizerConfig,
    PartialExpertsCheckpoint,
    RouterConfig,
    StepSampler,
)
from moe_lightning.balancing.cluster import allocate_replicas
from moe_lightning.balancing.cost_model import BlockCosts
from moe_lightning.balancing.forecast import LoadForecast, ReplanRule
from moe_lightning.balancing.rules import PlacementPolicy
from moe_lightning.callbacks.fault_injection import FaultInjection
from moe_lightning.callbacks.routing import RoutingRecorder
from moe_lightning.config import build_config
from moe_lightning.data.images import ImageData
from moe_lightning.data.text import TextData
from moe_lightning.dispatch.placement import parse_placements, uniform_placement
from moe_lightning.dispatch.quota import given_speeds
from moe_lightning.elastic.membership import ElasticSettings
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPT
from moe_lightning.models.swin import SwinModule
from moe_lightning.moe.adapters import add_adapters
from moe_lightning.moe.experts import Experts
from moe_lightning.moe.randomness import StreamDropout
from moe_lightning.moe.router import Router
from moe_lightning.parallel.mesh import chosen_axes
from moe_lightning.simulate.failures import Failures
from moe_lightning.simulate.mesh import MeshSpec

SMALL: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "d_model": 32, "d_hidden": 24, "num_experts": 4}
SWIN: dict[str, Any] = {
    "num_classes": 12, "image_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2),
    "num_heads": (2, 2), "num_experts": 4,
}  # fmt: skip


def _make(made: Callable[..., object], options: dict[str, Any]) -> object:
    return made(**options)


MAKERS: dict[str, Callable[[Any], object]] = {
    "GPT": lambda options: GPT(GPTConfig(**SMALL | options)),
    "GPTConfig": lambda options: build_config(GPTConfig, options),
    "RouterConfig": lambda options: build_config(RouterConfig, options),
    "OptimizerConfig": lambda options: build_config(OptimizerConfig, options),
    "Router": lambda options: Router(8, 4, RouterConfig(**options)),
    "MoELayer": lambda options: MoELayer(**{"d_model": 8, "d_expert": 6, "num_experts": 5} | options),
    "Experts": lambda options: Experts(**{"num_experts": 5, "d_model": 6, "d_expert": 7} | options),
    "SwinModule": lambda options: SwinModule(SWIN | options),
    "adapters": lambda options: add_adapters(GPT(GPTConfig(**SMALL, moe_every=1)), options),
    "StepSampler": lambda options: StepSampler(**{"num_samples": 100, "global_batch_size": 8} | options),
    "PartialExpertsCheckpoint": lambda options: PartialExpertsCheckpoint("steps", **options),
    "FaultInjection": lambda options: FaultInjection("faults", **options),
    "RoutingRecorder": lambda options: RoutingRecorder("counts.npz", **options),
    "fault": lambda options: FaultInjection("faults", **options),
    "BlockCosts": lambda options: BlockCosts(
        **dict.fromkeys(("row_bytes", "weight_bytes", "gradient_bytes", "bytes_per_s", "rows_per_s"), 1.0) | options
    ),
    "mesh": chosen_axes,
    "speeds": lambda speeds: given_speeds(speeds, 2, "load_balancer.speeds"),
    "placement table": lambda table: parse_placements(
        table, num_layers=2, num_experts=3, num_ranks=2, origin="plan.json"
    ),
    "allocate_replicas": lambda options: allocate_replicas(
        **{"slots": 8, "num_nodes": 4, **options, "load": np.array(options.get("load", [1, 2, 3]))}
    ),
    **{
        made.__name__: partial(_make, made)
        for made in (
            ElasticSettings, ExpertParallelStrategy, Failures, ForcedRouting, ImageData, LoadBalancer,
            LoadForecast, MeshSpec, PlacementPolicy, ReplanRule, StreamDropout, TextData, uniform_placement,
        )
    },
}  # fmt: skip
ROWS = [tuple(row.split("\t")) for row in Path(__file__).with_name("wrong_values.tsv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("made", "options", "sentence"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in ROWS])
def test_a_wrong_value_is_one_sentence(made: str, options: str, sentence: str) -> None:
    """The sentence is a regular expression, the options are YAML."""
    with pytest.raises(ConfigurationError) as caught:
        MAKERS[made](yaml.safe_load(options))
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
