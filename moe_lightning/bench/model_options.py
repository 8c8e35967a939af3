"""Options that size the model of a benchmark, for those that measure the same one (`balance_worker.model_config`)."""

from __future__ import annotations

import argparse

from moe_lightning.arguments import Count, value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Context, widths, layers and experts."""
    for name, default, meaning in (
        ("context", 128, "tokens of a sequence"),
        ("d-model", 192, "model width"),
        ("d-expert", 768, "expert width"),
        ("layers", 2, "transformer layers, all MoE"),
        ("experts", 8, "experts of a layer"),
    ):
        parser.add_argument(f"--{name}", type=value(Count), default=default, help=f"{meaning} (default: %(default)s)")
