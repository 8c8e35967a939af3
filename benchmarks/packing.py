"""moe-bench packing: instructions of lengths like Alpaca's, packed against padded, as tokens a second without padding.

The file is made up: a conversation's text has about as many bytes, which are the tokens here, as Alpaca's conversations
have tokens of LLaMA: log-normal, half of them below 85, a tenth above 220.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval

from benchmarks.measuring import interleaved_medians
from moe_lightning.arguments import Count, option
from moe_lightning.cli.short_training import ModelOptions, gpt, machine
from moe_lightning.data.instructions import InstructionData
from moe_lightning.models.gpt_module import GPTModule
from moe_lightning.moe.losses import auxiliary_loss
from moe_lightning.text_table import table

_MEDIAN, _SIGMA, _SHARE_OF_ANSWER = 85, 0.75, 0.55
_MARKS = len("<|user|>\n\n<|assistant|>\n\0")
_LEAST = 1.8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    conversations: Annotated[int, Interval(ge=1, le=1_000_000)] = option("lines of the file", 2000)
    batch: Count = option("samples of a step", 8)
    rounds: Count = option("measured steps of each, in turns", 9)
    context: Count = option("tokens of a sample", 512)
    d_model: Count = option("model width", 192)
    layers: Count = option("transformer layers, all MoE", 4)


def run(options: Options) -> int:
    """Print step milliseconds, tokens a step and tokens a second of both; 0 on success."""
    with tempfile.TemporaryDirectory(prefix="moe-packing-") as folder:
        path = Path(folder) / "instructions.jsonl"
        write_conversations(path, options.conversations)
        contenders = {name: _Steps(path, options, packing=name == "packed") for name in ("padded", "packed")}
        steps: dict[str, Callable[[], object]] = {name: contender.step for name, contender in contenders.items()}
        seconds = interleaved_medians(steps, options.rounds)
    speeds = {name: contender.tokens_of_step / seconds[name] for name, contender in contenders.items()}
    rows = [
        (name, f"{1e3 * seconds[name]:.1f}", f"{c.tokens_of_step:.0f}", f"{c.full:.2f}", f"{speeds[name]:.0f}")
        for name, c in contenders.items()
    ]
    print(f"{machine()}; {options.conversations} conversations, medians of {options.rounds} steps, in turns")
    print(table(("samples", "step ms", "tokens", "full", "tokens/s"), rows))
    ratio = speeds["packed"] / speeds["padded"]
    print(f"{'met   ' if ratio >= _LEAST else 'missed'}  packed over padded: {ratio:.2f}, goal at least {_LEAST}")
    return 0


def write_conversations(path: Path, number: int) -> None:
    """An instruction file with lengths like Alpaca's, always the same."""
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(number):
            length = max(2, round(generator.lognormvariate(math.log(_MEDIAN), _SIGMA)) - _MARKS)
            answer = max(1, round(_SHARE_OF_ANSWER * length))
            text = "".join(generator.choices("abcdefgh ", k=length))
            file.write(json.dumps({"prompt": text[answer:], "response": text[:answer]}) + "\n")


class _Steps:
    """Training steps of one way to make samples.

    Attributes:
        tokens_of_step: mean over the data.
        full: share of the positions that are tokens.
    """

    def __init__(self, path: Path, options: Options, *, packing: bool) -> None:
        torch.manual_seed(0)
        data = InstructionData(
            path=path, context_length=options.context, global_batch_size=options.batch, end_token="\0", packing=packing
        )
        data.setup()
        self._loader = data.train_dataloader()
        sizes = ModelOptions(
            context=options.context, d_model=options.d_model, d_expert=2 * options.d_model, layers=options.layers
        )
        self._module = GPTModule(gpt(sizes))
        self._module.configure_model()
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-4)
        samples: Any = self._loader.dataset
        self.full = sum(float(samples[i][2].float().mean()) for i in range(len(samples))) / len(samples)
        self.tokens_of_step = self.full * options.batch * options.context
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def step(self) -> None:
        """One, from the file to the new weights."""
        batch = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._module.loss(batch) + auxiliary_loss(self._module)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
