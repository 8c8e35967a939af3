"""`moe-eval`: measures a language model.

    moe-eval RUN FILE             loss, perplexity and bits per byte on text, or on texts in JSONL
    moe-eval RUN --tasks NAMES    tasks of lm-eval, such as hellaswag

Text is cut into windows of the context, as in training and with the same loss. Each line of JSONL is a text of its own,
in the field that the run has read.
"""

from __future__ import annotations

import argparse
import codecs
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lightning.arguments import Count, Parser, input_file, value
from moe_lightning.cli.generate import add_model, open_model, run_command
from moe_lightning.config import NonNegativeInt, shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.text_table import table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from moe_lightning.cli.language_model import LanguageModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(parser(), _run, argv)


def parser() -> argparse.ArgumentParser:
    """Return the parser of a command line."""
    parser = Parser(
        prog="moe-eval",
        usage="moe-eval RUN FILE [options]\n       moe-eval RUN --tasks NAME[,NAME] [options]",
        description="Measure a language model on text, JSONL or tasks of lm-eval.",
    )
    add_model(parser)
    parser.add_argument("file", type=input_file, nargs="?", metavar="FILE", help="UTF-8 text, or .jsonl of texts")
    parser.add_argument(
        "--context-length", type=value(Count), metavar="L", help="tokens of a window (default: that of the run)"
    )
    parser.add_argument(
        "--batch-size", type=value(Count), default=8, metavar="N", help="sequences at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--text-field", metavar="NAME", help="of the texts in JSONL (default: that of the run, or text)"
    )
    parser.add_argument(
        "--tasks", metavar="NAME[,NAME]", help="of lm-eval, or YAML files of tasks; what they need is downloaded"
    )
    parser.add_argument(
        "--num-fewshot", type=value(NonNegativeInt), metavar="N", help="solved examples before each question of a task"
    )
    parser.add_argument("--chat", action="store_true", help="write the questions of tasks as messages to the model")
    parser.add_argument("--limit", type=value(Count), metavar="N", help="samples of each task (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of an evaluation.

    Attributes:
        loss: mean cross-entropy of the predicted tokens, in nats.
        perplexity: exponential of the loss.
        bits_per_byte: the loss in bits, for a byte of the text.
        tokens: number of predicted tokens.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens that do not see those of other documents.

    Attributes:
        ids: its tokens.
        num_bytes: of its text.
    """

    ids: NDArray[np.int64]
    num_bytes: int

    def windows(self, length: int) -> Iterator[NDArray[np.int64]]:
        """Yield pieces of at most `length` tokens, each with the one that follows it."""
        for start in range(0, len(self.ids) - 1, length):
            yield self.ids[start : start + length + 1]


def _run(arguments: argparse.Namespace) -> None:
    if (arguments.file is None) == (arguments.tasks is None):
        raise ConfigurationError("give either a FILE or --tasks (moe-eval --help shows the options)")
    others = ("context_length", "text_field") if arguments.file is None else ("num_fewshot", "limit", "chat")
    for name in others:
        if (given := getattr(arguments, name)) is not None and given is not False:
            kind = "a file" if arguments.file is None else "tasks"
            raise ConfigurationError(f"--{name.replace('_', '-')} is for {kind}: leave it out")
    if arguments.file is None:
        _run_tasks(arguments)
    else:
        _run_file(arguments)


def _run_file(arguments: argparse.Namespace) -> None:
    model = open_model(arguments, "moe-eval")
    length = arguments.context_length or model.context_length
    if length > model.positions:
        raise ConfigurationError(
            f"--context-length {length} is more than the {model.positions} positions of {model.name}: lower it"
        )
    measured = measure(model, arguments.file, length, arguments.batch_size, arguments.text_field)
    if arguments.json:
        print(json.dumps({"model": model.name, "file": str(arguments.file), **asdict(measured)}))
        return
    numbers = (f"{measured.loss:.4f}", f"{measured.perplexity:.2f}", f"{measured.bits_per_byte:.4f}")
    row = (f"{measured.tokens:,}", *numbers)
    print(table(("tokens", "loss (nats)", "perplexity", "bits per byte"), [row], f"{model.name} on {arguments.file}"))


def _run_tasks(arguments: argparse.Namespace) -> None:
    names = [name for name in arguments.tasks.split(",") if name]
    if not names:
        raise ConfigurationError("--tasks is empty: name one, such as hellaswag")
    try:
        from moe_lightning.cli.benchmark_tasks import measure_tasks
    except ImportError as error:
        raise ConfigurationError(f"--tasks needs lm-eval ({error}): pip install 'moe-lightning[lm-eval]'") from error
    model = open_model(arguments, "moe-eval")
    results = measure_tasks(
        model,
        names,
        batch_size=arguments.batch_size,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        as_dialogue=arguments.chat,
    )
    if arguments.json:
        print(json.dumps({"model": model.name, "tasks": results}))
        return
    rows = [row for task, metrics in results.items() for row in _rows(task, metrics)]
    print(table(("task", "metric", "value", "standard error"), rows, f"{model.name} on tasks of lm-eval"))


def _rows(task: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for name, number in metrics.items():
        metric, comma, chosen = name.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(number, int | float):
            continue
        error = metrics.get(f"{metric}_stderr,{chosen}")
        title = metric if chosen == "none" else f"{metric} ({chosen})"
        yield task, title, f"{number:.4f}", f"{error:.4f}" if isinstance(error, float) else "-"


def measure(
    model: LanguageModel, path: Path, context_length: int, batch_size: int, text_field: str | None
) -> Measurement:
    """Measure a model on a file.

    Args:
        text_field: of the texts in JSONL; None: that of the model's training.

    Raises:
        ConfigurationError: the file is not text, nothing in it is predicted, or a line has another form.
    """
    from moe_lightning.callbacks.telemetry import perplexity

    total, count, num_tokens, num_bytes = 0.0, 0, 0, 0

    def windows() -> Iterator[NDArray[np.int64]]:
        nonlocal num_tokens, num_bytes
        for document in documents(model, path, context_length, text_field):
            model.check_known(document.ids, str(path))
            num_tokens, num_bytes = num_tokens + len(document.ids), num_bytes + document.num_bytes
            yield from document.windows(context_length)

    left = windows()
    while batch := list(islice(left, batch_size)):
        loss, number = _loss(model, batch)
        total, count = total + loss * number, count + number
    if not count:
        raise ConfigurationError(f"{path} has no token to predict: give more text")
    loss = total / count
    return Measurement(
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=loss / math.log(2) * num_tokens / num_bytes,
        tokens=count,
    )


def _loss(model: LanguageModel, batch: Sequence[NDArray[np.int64]]) -> tuple[float, int]:
    """Return the mean loss of a batch of windows and the number of tokens that are predicted."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from moe_lightning.moe.losses import IGNORED_TARGET, mean_over_targets, num_targets

    windows = [torch.from_numpy(ids) for ids in batch]
    logits_BLV = next_token_logits(model, [ids[:-1] for ids in windows])
    targets = pad_sequence([ids[1:] for ids in windows], batch_first=True, padding_value=IGNORED_TARGET)
    targets_BL = targets.to(model.device)
    return float(mean_over_targets(logits_BLV, targets_BL)), int(num_targets(targets_BL))


def next_token_logits(model: LanguageModel, sequences: Sequence[Tensor]) -> Tensor:
    """Logits [B, L, V] of sequences of token ids of any lengths; those behind the end of one mean nothing."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids_BL = pad_sequence(list(sequences), batch_first=True).to(model.device)
    lengths_B1 = torch.tensor([[len(ids)] for ids in sequences], device=model.device)
    with torch.no_grad():
        return model.logits(ids_BL, torch.arange(ids_BL.shape[1], device=model.device) < lengths_B1)


def documents(model: LanguageModel, path: Path, context_length: int, text_field: str | None) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
        ConfigurationError: see `measure`.
    """
    import numpy as np

    from moe_lightning.data.documents import TOKEN_SUFFIXES, reading, suffix_of, text_chunks
    from moe_lightning.files import open_regular

    tokenizer, suffix = model.text.tokenizer, suffix_of(path)
    if suffix in (*_UNREAD, *TOKEN_SUFFIXES):
        raise ConfigurationError(
            f"{path} is named {suffix}, and moe-eval reads UTF-8 text and .jsonl of texts: unpack it, or write its "
            "texts into such a file"
        )
    if suffix in (".jsonl", ".ndjson"):
        for text in _texts(path, text_field or str(model.data.get("text_field", "text"))):
            yield Document(ids=np.asarray(tokenizer.encode(text)[0], np.int64), num_bytes=len(text.encode()))
        return
    if text_field is not None:
        raise ConfigurationError(
            f"--text-field is for JSONL, and {path} is read as text: leave it out, or name the file .jsonl"
        )
    num_bytes = path.stat().st_size
    with reading(path), open_regular(path) as file:
        chunks = tokenizer.encode_chunks(text_chunks(file, path))
        try:
            ids = np.concatenate([np.zeros(0, np.int64), *(chunk.astype(np.int64) for chunk in chunks)])
        except ConfigurationError as error:
            if isinstance(error.__cause__, UnicodeDecodeError):  # whose cure there is for a source of training
                raise ConfigurationError(f"{path} is not UTF-8 text ({error.__cause__.reason}): convert it") from error
            raise
    windows = (len(ids) - 1) // context_length
    if windows > 0 and not model.data.get("packing"):  # training leaves out the end, which fills no window
        kept = windows * context_length + 1
        num_bytes, ids = num_bytes * kept // len(ids), ids[:kept]
    yield Document(ids=ids, num_bytes=num_bytes)


_UNREAD = (".json", ".gz", ".zst", ".parquet", ".arrow")
"""Suffixes of files that hold no plain text: training refuses or unpacks them."""


def _texts(path: Path, field: str) -> Iterator[str]:
    """Yield the text of each line of a JSONL file."""
    from moe_lightning.data.conversations import records
    from moe_lightning.files import decoded

    for name, _, record in records(path):
        try:
            found = json.loads(decoded(record.removeprefix(codecs.BOM_UTF8)))
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}, {name}, is not JSON ({error}): fix it") from error
        text = found.get(field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise ConfigurationError(f"{path}, {name}, has no text in {shown(field)}: give its field as --text-field")
        yield text


if __name__ == "__main__":
    sys.exit(main())
