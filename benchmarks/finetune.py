"""moe-bench finetune: adapters on the experts of an OLMoE with random weights, and the same trained by peft's own loop.

Each contender runs in processes of its own, so that peak memory (resident, all ranks added up) is its own.
`--shape olmoe` has the sizes of OLMoE-1B-7B: 6.9 billion parameters, which only four bits bring into 8 GB.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from benchmarks.measuring import goal
from moe_lightning.arguments import Count, option
from moe_lightning.cli.short_training import machine, on_ranks
from moe_lightning.text_table import table

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "olmoe": {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}
CONTENDERS = ("qlora", "lora", "peft")
_WORKER = "benchmarks.finetune_worker:measure"
_MOST_GB = 8.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    shape: Literal["small", "olmoe"] = option("sizes of the model: small, or olmoe as OLMoE-1B-7B", "small")
    contenders: list[str] = option(
        "what to train: qlora and lora of this project, peft", CONTENDERS, choices=CONTENDERS
    )
    ranks: Annotated[int, Interval(ge=1, le=64)] = option("processes of our own contenders", 1)
    steps: Count = option("measured steps, after one that is not", 4)
    batch: Count = option("sequences of all ranks", 4)
    context: Count = option("tokens of a sequence", 128)
    rank: Count = option("of the adapters", 8)
    precision: Literal["32-true", "bf16-true"] = option("of what is not in four bits: 32-true or bf16-true", "32-true")


def run(options: Options) -> int:
    """Train every contender that fits this machine, print memory, tokens a second and losses; 0 on success."""
    found: dict[str, list[dict[str, float]]] = {}
    weights = least_bytes(options, "qlora") / 1e9
    print(f"{machine()}; {options.shape}, whose weights take {weights:.2f} GB in four bits", flush=True)
    with tempfile.TemporaryDirectory(prefix="moe-finetune-") as folder:
        for name in options.contenders:
            reason = why_not(options, name)
            if reason is not None:
                print(f"{name}: {reason}")
                continue
            settings = asdict(options) | {"contender": name}
            ranks = 1 if name == "peft" else options.ranks
            found[name] = on_ranks(_WORKER, settings, num_ranks=ranks, folder=Path(folder) / name)
    print(results(options, found))
    if "qlora" in found and options.shape == "olmoe":
        print(goal("GB of all ranks, in four bits", _gigabytes(found["qlora"]), _MOST_GB))
    return 0


def results(options: Options, found: Mapping[str, list[dict[str, float]]]) -> str:
    """The table of what the ranks of each contender saw."""
    tokens = options.batch * options.context
    rows = [
        (
            name,
            len(ranks),
            f"{_gigabytes(ranks):.2f}",
            f"{max(rank['step_s'] for rank in ranks):.2f}",
            f"{tokens / max(rank['step_s'] for rank in ranks):.0f}",
            f"{ranks[0]['first_loss']:.3f}",
            f"{ranks[0]['last_loss']:.3f}",
        )
        for name, ranks in found.items()
    ]
    return table(("contender", "ranks", "peak GB", "step s", "tokens/s", "first loss", "last loss"), rows)


def least_bytes(options: Options, name: str) -> float:
    """What the weights of a contender take, whatever else does, over all its ranks."""
    sizes, ranks = SHAPES[options.shape], 1 if name == "peft" else options.ranks
    width, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    experts = layers * sizes["num_experts"] * 3 * width * sizes["intermediate_size"]
    dense = 2 * width * sizes["vocab_size"] + layers * 4 * width**2
    number = 4 if options.precision == "32-true" else 2
    return ranks * dense * number + experts * (0.5 + 4 / 64 if name == "qlora" else number)


def why_not(options: Options, name: str) -> str | None:
    """Why a contender cannot run here; None: it can."""
    if name == "peft" and importlib.util.find_spec("peft") is None:
        return "not installed: pip install 'moe-lightning[peft]'"
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = least_bytes(options, name)
    return f"its weights alone take {needed / 1e9:.0f} GB of {free / 1e9:.0f}" if needed > 0.9 * free else None


def _gigabytes(ranks: list[dict[str, Any]]) -> float:
    return float(sum(rank["peak_bytes"] for rank in ranks)) / 1e9
