"""moe-bench NAME: the project's benchmarks. Every figure is a ratio inside one run or a median of several."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

from moe_lightning import mistakes
from moe_lightning.arguments import Parser, add_options, read_options, value
from moe_lightning.elastic.failure import Interrupted
from moe_lightning.values import Range

_Threads = Annotated[int, Range(least=1, most=1024)]

BENCHMARKS = {
    "layer": "MoE layer forward and backward against a loop over experts and padded matrices",
    "step": "training step with the strategy on one rank against stock Lightning",
    "compare": "the same model trained and saved by stock Lightning (DDP, FSDP2, DCP) and by this project",
    "checkpoint": "stall of a snapshot and speed of writing against memmove, DCP, torch.save and safetensors",
    "balance-trace": "balance of placements and quotas on a recorded routing trace",
    "finetune": "adapters on experts, in four bits too: memory, tokens a second, beside peft's own loop",
    "packing": "instructions of lengths like Alpaca's, packed against padded",
    "planner": "seconds and memory of plans for thousands of ranks",
    "balance": "step time under skewed routing for every way of balancing, on two ranks of one core each",
    "uneven": "step time with a slow rank, for everything that may follow its speed, on two ranks of one core each",
    "pictures": "heat maps of the experts' loads over time, from a trace or a run's expert_load.csv",
    "plot": "pictures of a run: loads, imbalance, checkpoints, lost tokens, recoveries",
    "report": "a run as one HTML page: loss, loads, placements, recoveries, checkpoints, configuration",
    "workspace": "panels of W&B for all that runs log, as a saved view or a report",
    "calibrate": "this machine as moe-sim sees it, and its predictions beside real trainings",
    "recovery": "a killed rank to the next step, in process, restarted, under torchrun; cost without faults; a trace",
    "paper": "figures and tables of the papers, recomputed",
    "kernels": "every kernel against its reference and its competitors",
    "gpu-check": "whether everything that needs a GPU works on this machine: a table of pass and fail",
    "roofline": "a model of the layer's kernels on GPUs: percent of peak and what bounds each; needs no GPU",
    "tiles": "the table of the matmuls' tiles: by the model, or measured on this machine's GPU for this user",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; 0 on success, 2 for a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="moe-bench", description="Measure moe-lightning on this machine.")
    subparsers = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        subparser.add_argument(
            "--threads", type=value(_Threads), default=1, help="torch and OpenMP threads (default: 1)"
        )
        if name in arguments[:1]:
            add_options(subparser, _module(name).Options)
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    if "torch" in sys.modules:  # it has looked already
        sys.modules["torch"].set_num_threads(given.threads)
    module = _module(given.name)
    try:
        return int(module.run(read_options(module.Options, given)))
    except Interrupted as stop:
        print(f"moe-bench: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except Exception as error:
        sentence = mistakes.sentence_of(error) or _sentence_of_memory(error)
        if sentence is None:
            raise
        print(f"moe-bench: error: {sentence}", file=sys.stderr)
        return mistakes.EXIT_MISTAKE


def _sentence_of_memory(error: BaseException) -> str | None:
    """For sizes that nothing checks beforehand, since what they need depends on the contenders."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        why = mistakes.one_line(error)[:100]
        return f"this needs more memory than there is ({why}): lower the sizes that were given"
    return None


def _module(name: str):  # type: ignore[no-untyped-def]
    """The benchmark's module; imported only when it is asked for, since most of them need torch."""
    return importlib.import_module(f"moe_lightning.bench.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
