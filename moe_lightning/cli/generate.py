"""`moe-generate`: text from a run, a checkpoint or a Hugging Face folder.

    moe-generate RUN "PROMPT"     continue a text
    moe-generate RUN --chat       a dialogue: a line of the terminal is a message, Ctrl-D or Ctrl-C ends it

This module parses and prints; what needs torch, which takes seconds to import, is imported for a command that is run.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from moe_lightning import user_errors
from moe_lightning.arguments import Count, Parser, value
from moe_lightning.config import PositiveInt
from moe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from moe_lightning.cli.language_model import LanguageModel
    from moe_lightning.models.generation import Sampling

_Temperature = Annotated[float, Interval(ge=1e-3, le=1e3)]
_Share = Annotated[float, Interval(gt=0, le=1)]
_Seed = Annotated[int, Interval(ge=0, lt=1 << 63)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(parser(), _run, argv)


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Parse and run a command that prints text of models; returns the exit code."""
    try:
        arguments = parser.parse_intermixed_args(argv)  # else an optional text could not stand behind options
    except SystemExit as stop:  # argparse has printed the reason
        return int(stop.code or 0)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    if getattr(arguments, "tasks", None) is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    try:
        run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return user_errors.stop_printing()
    except Exception as error:
        return user_errors.report(parser.prog, error)
    return 0


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model."""
    parser.add_argument("path", metavar="RUN", help="a run directory, a checkpoint, or a Hugging Face folder")
    parser.add_argument("--tokenizer", help="bytes, or a tokenizer.json (default: that of the run or the folder)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or cuda:N (default: a GPU if there is one)")


def open_model(arguments: argparse.Namespace, program: str) -> LanguageModel:
    """Load the model that the arguments name."""
    from moe_lightning.cli.language_model import open_language_model

    return open_language_model(
        arguments.path,
        tokenizer=arguments.tokenizer,
        device=arguments.device,
        report=lambda problem: print(f"{program}: {problem}; the one before it is used", file=sys.stderr),
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of a command line."""
    parser = Parser(
        prog="moe-generate",
        usage='moe-generate RUN "PROMPT" [options]\n       moe-generate RUN --chat [options]',
        description="Continue a text, or hold a dialogue, with a trained model.",
    )
    add_model(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument("--chat", action="store_true", help="a dialogue: each line of the input is a message")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before a dialogue")
    parser.add_argument(
        "--max-new-tokens", type=value(Count), default=256, metavar="N", help="of a text (default: %(default)s)"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--greedy", action="store_true", help="always the most likely token")
    choice.add_argument(
        "--temperature", type=value(_Temperature), default=0.8, metavar="X", help="of sampling (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=value(PositiveInt), metavar="K", help="sample from the K most likely tokens")
    parser.add_argument("--top-p", type=value(_Share), metavar="P", help="sample from the likeliest that sum to P")
    parser.add_argument("--seed", type=value(_Seed), metavar="N", help="of sampling (default: another text each time)")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if (arguments.prompt is None) != arguments.chat:
        raise ConfigurationError("give either a PROMPT or --chat (moe-generate --help shows the options)")
    if arguments.system is not None and not arguments.chat:
        raise ConfigurationError("--system is for a dialogue: give it with --chat")
    given = next((name for name in ("top_k", "top_p", "seed") if getattr(arguments, name) is not None), None)
    if arguments.greedy and given is not None:
        raise ConfigurationError(f"--{given.replace('_', '-')} is for sampling: leave it out, or leave --greedy out")
    _check_text(
        "--system" if arguments.chat else "the prompt", arguments.system if arguments.chat else arguments.prompt
    )
    import torch

    from moe_lightning.models.generation import Sampling

    model = open_model(arguments, "moe-generate")
    temperature = None if arguments.greedy else arguments.temperature
    sampling = Sampling(temperature=temperature, top_k=arguments.top_k, top_p=arguments.top_p or 1.0)
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    if arguments.chat:
        _chat(model, sampling, arguments.system, arguments.max_new_tokens)
        return
    ids = model.text.begin(arguments.prompt)
    model.check(ids)
    room = model.positions - len(ids)
    if not model.is_ours and room < arguments.max_new_tokens:
        print(f"moe-generate: only {room:,} new tokens fit the context of {model.positions:,}", file=sys.stderr)
    sys.stdout.write(arguments.prompt)
    answer(model, ids, sampling, arguments.max_new_tokens)


def _check_text(name: str, text: str | None) -> None:
    if text == "":
        raise ConfigurationError(f"{name} is empty: give some text")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{name} is not UTF-8 text at character {error.start}: fix it") from None


def _chat(model: LanguageModel, sampling: Sampling, system: str | None, max_new_tokens: int) -> None:
    """Answer each line of the input until it ends; the oldest exchanges go when the context is full."""
    from moe_lightning.data.conversations import Turn

    written, tokenizer = model.chat(), model.text.tokenizer
    first = [] if system is None else [Turn("system", system)]
    turns: list[Turn] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return
        if not line:
            continue
        turns.append(Turn("user", line))
        try:
            ids = tokenizer.encode(written.prompt([*first, *turns]))[0].tolist()
            while len(ids) > model.positions - min(max_new_tokens, model.positions // 2) and len(turns) > 1:
                del turns[:2]
                ids = tokenizer.encode(written.prompt([*first, *turns]))[0].tolist()
            end = written.end
        except ValueError as error:
            raise ConfigurationError(f"this dialogue cannot be written: {error}") from error
        model.check(ids, "the message")
        try:
            said = answer(model, ids, sampling, max_new_tokens, end)
        except KeyboardInterrupt:
            print()
            return
        turns.append(Turn("assistant", written.content(said)))


def answer(model: LanguageModel, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, end: str = "") -> str:
    """Print what follows some tokens as it comes, and a line end; returns it.

    Args:
        end: text that ends it, which is not printed.
    """
    text = TextStream(model.text.decode, ids, end)

    def is_done(token: int) -> bool:
        if token in model.ends:
            return True
        print(text.add(token), end="", flush=True)
        return text.is_ended

    model.generate(ids, sampling, max_new_tokens, is_done)
    print(text.finish(), flush=True)
    return text.text


class TextStream:
    """Text of tokens as they come: whole characters, and nothing that may become the text at which it ends.

    Args:
        decode: returns the text of tokens.
        ids: tokens before the first one.
        end: ends the text, and does not belong to it; empty: nothing does.

    Attributes:
        text: what has been returned.
        is_ended: True once the end has come.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], ids: Sequence[int], end: str = "") -> None:
        self._decode, self._end = decode, end
        self._ids = list(ids)[-_BEFORE:]
        self._begin, self._read, self._held = 0, len(self._ids), ""
        self.text, self.is_ended = "", False

    def add(self, token: int) -> str:
        """Return the text that is complete with a token."""
        self._ids.append(token)
        new = self._new()
        if new.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character
            return ""
        self._begin, self._read = self._read, len(self._ids)
        said, self._held = self._held + new, ""
        if self._end:
            said, found, _ = said.partition(self._end)
            self.is_ended = bool(found)
            lengths = range(0 if found else len(self._end) - 1, 0, -1)
            begun = next((length for length in lengths if said.endswith(self._end[:length])), 0)
            said, self._held = said[: len(said) - begun], said[len(said) - begun :]
        self.text += said
        return said

    def finish(self) -> str:
        """Return what is left when no token follows."""
        rest = "" if self.is_ended else self._held + self._new()
        self.text += rest
        return rest

    def _new(self) -> str:
        """The text of the tokens since the last complete character."""
        before = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(before) :]


_BEFORE = 8
"""Tokens before the first that are decoded with it: some tokenizers write a token as its neighbors ask for."""


if __name__ == "__main__":
    sys.exit(main())
