"""Instruction tuning: chat formats, and token windows in which only answers are predicted.

The file holds one JSON object a line, or one JSON array of objects. An object is {"messages": [{"role", "content"},
...]}, {"conversations": [{"from", "value"}, ...]} as ShareGPT has it, {"prompt", "response"}, or {"instruction",
"output"} with an optional "input". The chat template of the model's tokenizer formats it, or plain marked turns if
there is none, as a list of texts that are predicted or not: only answers are, with their end token. No expert computes
the padding of a window.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol

import numpy as np
import torch
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.corpus import Tokenizer, load_tokenizer, tokenizer_key
from moe_lightning.data.loader import StepDataModule
from moe_lightning.data.packing import Packed
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_written, decoded, open_regular, read_bytes, read_text
from moe_lightning.moe.losses import IGNORED_TARGET

Turn = tuple[str, str]
"""Role and content."""

Piece = tuple[str, bool]
"""Text, and whether it is predicted."""

_BYTES_END = "<|endoftext|>"


class ChatFormat(Protocol):
    """Writes conversations out."""

    padding: str
    """Text of the token that fills a window up."""

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        """The conversation in order.

        Raises:
            ValueError: it cannot be written so.
        """


class MarkedTurns:
    """Each turn after a line <|role|>, each answer ended by the end token, as in OLMoE-Instruct and Tulu.

    Args:
        end: text that ends an answer.
    """

    def __init__(self, end: str) -> None:
        self.padding = end

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        written: list[Piece] = []
        for role, content in turns:
            is_answer = role == "assistant"
            written += [(f"<|{role}|>\n", False), (content, is_answer)]
            written.append((self.padding, True) if is_answer else ("\n", False))
        return written


class TemplatedTurns:
    """As the chat template of a Hugging Face tokenizer writes them.

    An answer is what the template adds to the turns before it. A template that writes earlier answers otherwise once
    others follow (some drop reasoning) has only the last answer predicted.

    Args:
        tokenizer: of transformers, with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.padding = str(tokenizer.pad_token or tokenizer.eos_token or "")
        if not self.padding:
            raise ConfigurationError(
                f"the tokenizer in {tokenizer.name_or_path} has neither a padding nor an end token: give data.end_token"
            )

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        whole = self._written(turns)
        answers = [index for index, (role, _) in enumerate(turns) if role == "assistant"]
        for chosen in (answers, answers[-1:]):
            spans = [(self._written(turns[:i], asks=True), self._written(turns[: i + 1])) for i in chosen]
            if all(whole.startswith(end) and end.startswith(start) for start, end in spans):
                break
        else:
            raise ValueError("the chat template of the tokenizer writes the last answer in no place of its own")
        written, at = [], 0
        for start, end in spans:
            written += [(whole[at : len(start)], False), (whole[len(start) : len(end)], True)]
            at = len(end)
        return [piece for piece in (*written, (whole[at:], False)) if piece[0]]

    def _written(self, turns: Sequence[Turn], *, asks: bool = False) -> str:
        if not turns and not asks:
            return ""
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
        except Exception as error:  # a template is a program of its own, and raises what it likes
            raise ValueError(f"the chat template of the tokenizer refuses it: {error}") from error


def chat_format(tokenizer: str, end_token: str | None) -> ChatFormat:
    """Return the format of conversations for a tokenizer.

    Args:
        tokenizer: path of a tokenizer.json, whose folder may have a chat template, or "bytes".
        end_token: text that ends an answer of marked turns; None: the end token that the tokenizer's folder names.

    Raises:
        ConfigurationError: no end token is known, the folder has a template and transformers is missing, or its
            tokenizer cannot be read.
    """
    if tokenizer == "bytes":
        return MarkedTurns(end_token or _BYTES_END)
    folder = Path(tokenizer).expanduser().parent
    settings = _settings(folder)
    if settings.get("chat_template") or (folder / "chat_template.jinja").is_file():
        return TemplatedTurns(_hugging_face_tokenizer(folder))
    named = settings.get("eos_token")
    end = end_token or (named.get("content") if isinstance(named, dict) else named)
    if not end:
        raise ConfigurationError(
            f"{folder} has no chat template and names no end token (eos_token in tokenizer_config.json): give "
            "data.end_token"
        )
    return MarkedTurns(str(end))


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder; empty where there is none.

    Raises:
        ConfigurationError: it is no JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        said = json.loads(read_text(path))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON ({error}): take it from the checkpoint again") from None
    if not isinstance(said, dict):
        raise ConfigurationError(f"{path} holds no object: take it from the checkpoint again")
    return said


def _hugging_face_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigurationError(
            f"{folder} has a chat template, which needs transformers: pip install 'moe-lightning[hf]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises nothing narrower
        raise ConfigurationError(f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}") from error


_SAMPLE = 256
"""Conversations whose windows are looked at before training."""

_ROLES = ("system", "user", "assistant")
_ROLE_OF = {"human": "user", "gpt": "assistant"}  # ShareGPT's words
_LONGEST_LINE = 1 << 26  # bytes
_SPACE = re.compile(r"[ \t\n\r]*")


class Conversations(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Conversation i of a file as inputs [L] and targets [L], both int64, and is_token [L], bool; a target is -100
    unless it belongs to an answer.

    Longer conversations are cut at their end, shorter ones padded, where is_token is False; padding follows all that is
    predicted and so changes nothing in a causal model.

    Args:
        path: the file.
        spans: int64 [n, 2], the first byte of each conversation that is used, and its bytes.
        tokenizer: of the model.
        written: how a conversation becomes text.
        context_length: L.
    """

    def __init__(
        self, path: Path, spans: NDArray[np.int64], tokenizer: Tokenizer, written: ChatFormat, context_length: int
    ) -> None:
        self._path = path
        self._spans = spans
        self._tokenizer = tokenizer
        self._written = written
        self._padding = self._encoded(written.padding)[-1]
        self._length = context_length

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._window(*self._tokens(index))

    def _tokens(self, index: int) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and for each whether it is predicted."""
        offset, nbytes = self._spans[index].tolist()
        with self._path.open("rb") as file:
            file.seek(offset)
            turns = conversation(json.loads(file.read(nbytes)))
        tokens: list[int] = []
        predicted: list[bool] = []
        for text, is_predicted in self._written.pieces(turns):
            piece = self._encoded(text)
            tokens += piece
            predicted += [is_predicted] * len(piece)
        return tokens, predicted

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation, whether the context holds them or not; reads and tokenizes all."""
        return np.array([len(self._tokens(index)[0]) for index in range(len(self))], dtype=np.int64)

    def learnable(self, most: int) -> tuple[int, int]:
        """Count, of the first `most` conversations, and of more until one is found, those looked at and those in which
        anything is predicted.
        """
        looked_at = found = 0
        while looked_at < len(self) and (looked_at < most or not found):
            found += bool(torch.ne(self[looked_at][1], IGNORED_TARGET).any())
            looked_at += 1
        return looked_at, found

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text.encode())]

    def _window(self, tokens: list[int], predicted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        size = self._length + 1
        padding = max(0, size - len(tokens))
        ids = torch.tensor(tokens[:size] + [self._padding] * padding)
        wanted = torch.tensor(predicted[:size] + [False] * padding)
        is_token = torch.arange(self._length) < len(tokens)
        return ids[:-1], ids[1:].masked_fill(~wanted[1:], IGNORED_TARGET), is_token


def conversation(line: Any) -> list[tuple[str, str]]:
    """(role, content) of each turn of one parsed object.

    Raises:
        ValueError: it has none of the known forms, or no answer.
    """
    if not isinstance(line, Mapping):
        raise ValueError("it is not an object")
    if "messages" in line:
        turns = [_turn(message) for message in line["messages"]]
    elif "conversations" in line:
        turns = [_turn(message) for message in line["conversations"]]
    elif "prompt" in line and "response" in line:
        turns = [("user", line["prompt"]), ("assistant", line["response"])]
    elif "instruction" in line and "output" in line:
        question = "\n\n".join(part for part in (line["instruction"], line.get("input")) if part)
        turns = [("user", question), ("assistant", line["output"])]
    else:
        raise ValueError("it has neither messages, conversations, prompt and response nor instruction and output")
    if any(role not in _ROLES or not isinstance(content, str) for role, content in turns):
        raise ValueError(f"a turn needs one of the roles {', '.join(_ROLES)} and a text")
    if not any(role == "assistant" for role, _ in turns):
        raise ValueError("it has no answer of the assistant")
    return turns


def _turn(message: Any) -> tuple[str, Any]:
    """(role, content) of {"role", "content"} or of {"from", "value"}."""
    if "from" in message:
        return _ROLE_OF.get(message["from"], message["from"]), message["value"]
    return message["role"], message["content"]


@validated
class InstructionData(StepDataModule):
    """Conversations as training and held-out batches of a constant global size.

    Args:
        path: file of one JSON object a line, or of a JSON array of objects.
        tokenizer: path of the model's tokenizer.json, or "bytes".
        context_length: tokens of one sample.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; also of an evaluation batch.
        end_token: text that ends an answer where the tokenizer has no chat template; None: the tokenizer's own.
        num_workers: DataLoader processes on each rank.
        val_fraction: held out, inside (0, 1).
        val_samples: at most so many held-out conversations, spread evenly over the file; None for all.
        seed: of the split and of the order of the samples.
        packing: put several conversations into one sample, see `Packed`; else each is padded to the context.

    Raises:
        ConfigurationError: sizes out of range from the constructor; a missing or malformed file or tokenizer, or
            conversations without a token to learn, from `prepare_data` and `setup`.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        tokenizer: str = "bytes",
        context_length: PositiveInt = 1024,
        global_batch_size: PositiveInt = 32,
        end_token: str | None = None,
        num_workers: NonNegativeInt = 0,
        val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.05,
        val_samples: PositiveInt | None = None,
        seed: NonNegativeInt = 0,
        packing: bool = False,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, seed=seed)
        if end_token == "":
            raise ConfigurationError(
                "end_token is empty: an answer would never learn to end; null takes the tokenizer's own"
            )
        tokenizer_key(tokenizer)  # refuses what is no tokenizer before anything else is built
        self.context_length = context_length
        self._path = Path(path).expanduser()
        self._tokenizer_spec = tokenizer
        self._end_token = end_token
        self._val_fraction = val_fraction
        self._val_samples = val_samples
        self._packing = packing
        self._tokenizer: Tokenizer | None = None
        self._packs = ""  # what is said of them

    @cached_property
    def written(self) -> ChatFormat:
        """Format that writes conversations as text."""
        return chat_format(self._tokenizer_spec, self._end_token)

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded at the first use."""
        if self._tokenizer is None:
            if self._tokenizer_spec.startswith("bpe:"):
                raise ConfigurationError(
                    f"tokenizer={self._tokenizer_spec!r} is not the model's: give its tokenizer.json"
                )
            self._tokenizer = load_tokenizer(self._tokenizer_spec, ())
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return self.tokenizer.vocab_size

    def summary(self) -> str:
        """One line about the file, and under `packing` another, once it is set up."""
        return "\n".join([f"{self._path}", *self._packs.splitlines()])

    def prepare_data(self) -> None:
        """Check every conversation, once on every node."""
        for name, _, text in _records(self._path):
            try:
                self.written.pieces(conversation(json.loads(decoded(text.removeprefix(codecs.BOM_UTF8)))))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                reason = f"it lacks {error}" if isinstance(error, KeyError) else error
                raise ConfigurationError(f"{self._path}, {name}, is not a conversation: {reason}") from error

    def setup(self, stage: str | None = None) -> None:
        """Find the conversations and split them."""
        spans = np.array([(offset, len(text)) for _, offset, text in _records(self._path)], dtype=np.int64)
        held_out = max(1, round(len(spans) * self._val_fraction))
        if len(spans) - held_out < self.global_batch_size:
            raise ConfigurationError(
                f"{self._path} leaves {len(spans) - held_out} conversations for training, fewer than "
                f"global_batch_size={self.global_batch_size}: lower it or give more"
            )
        order = np.random.default_rng(self.seed).permutation(len(spans))
        measured = min(held_out, self._val_samples or held_out)
        spread = np.arange(measured) * held_out // measured
        val = self._conversations(spans[np.sort(order[:held_out])[spread]])
        train = self._conversations(spans[np.sort(order[held_out:])])
        self._check_learnable(train)
        self._val = self._packed(val, training=False) if self._packing else val
        self._train = self._packed(train, training=True) if self._packing else train

    def _packed(self, conversations: Conversations, *, training: bool) -> Packed:
        length, tokens = self.context_length, conversations.lengths()
        packed = Packed(conversations, np.minimum(tokens, length), length, seed=self.seed if training else None)
        if training:
            packed.require_step(self.global_batch_size)
            # The last target of a sample lies behind its last input.
            self._packs = packed.summary("conversations", num_cut=int((tokens > length + 1).sum()))
            rank_zero_info(self._packs)
        return packed

    def _check_learnable(self, train: Conversations) -> None:
        """Refuse, or where it concerns only some say, that windows end before the answers begin."""
        looked_at, found = train.learnable(_SAMPLE)
        cause = f"context_length={self.context_length} ends before an answer of {self._path} begins"
        if not found:
            raise ConfigurationError(f"{cause}, in all {looked_at} conversations: there is nothing to learn, raise it")
        if found < looked_at:
            rank_zero_warn(f"{cause}, in {looked_at - found} of {looked_at} conversations that were looked at")

    def _conversations(self, spans: NDArray[np.int64]) -> Conversations:
        return Conversations(self._path, spans, self.tokenizer, self.written, self.context_length)


def _records(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Name in messages, first byte and content of each conversation.

    Raises:
        ConfigurationError: the file is missing or cannot be read, is no regular one, empty, or a damaged array.
    """
    if not path.exists():
        raise ConfigurationError(f"the instruction file {path} does not exist: give a .jsonl or .json file")
    found = False
    try:
        check_written(path)
        with open_regular(path) as file:
            is_array = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
            file.seek(0)
            for record in _elements(path) if is_array else _lines(file, path):
                found = True
                yield record
    except OSError as error:
        raise ConfigurationError(f"the instruction file {path} cannot be read ({error.strerror})") from error
    if not found:
        raise ConfigurationError(f"the instruction file {path} is empty: give one conversation a line")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, int, bytes]]:
    """The lines that are not blank."""
    number = offset = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise ConfigurationError(f"{path}, line {number}, is longer than {_LONGEST_LINE:,} bytes: split it")
        if line.strip():
            yield f"line {number}", offset, line
        offset += len(line)


def _elements(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """The elements of an array, which is read as a whole."""
    text = read_bytes(path).decode("latin-1")  # a character for each byte, so that places are those in the file
    decoder, number, at = json.JSONDecoder(), 0, text.index("[")
    try:
        while True:
            at = _after_space(text, at + 1)
            if number == 0 and text[at : at + 1] == "]":
                return
            number += 1
            _, end = decoder.raw_decode(text, at)
            yield f"element {number}", at, text[at:end].encode("latin-1")
            at = _after_space(text, end)
            if text[at : at + 1] == "]":
                return
            if text[at : at + 1] != ",":
                raise ValueError("neither a comma nor the end of the array follows it")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no whole JSON array: element {number}: {error}; mend it, or give one conversation a line"
        ) from error


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
