"""Instruction tuning: token windows in which only answers are predicted, and their LightningDataModule.

`data.conversations` reads the files, `data.chat_formats` writes what is in them as text. No expert computes the padding
of a window.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import xxhash
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.chat_formats import ChatFormat, Encoded, MarkedTurns, chat_format, encode
from moe_lightning.data.conversations import read, records
from moe_lightning.data.loader import StepDataModule
from moe_lightning.data.packing import Packed
from moe_lightning.data.tokenizer import Tokenizer, check_tokenizer, is_trained, load_tokenizer, tokenizer_origin
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local
from moe_lightning.moe.losses import IGNORED_TARGET
from moe_lightning.user_errors import printable

_SAMPLE = 256
"""Conversations whose windows are looked at before training."""

_MOST_RUNS = 6
_HEAD, _TAIL = 100, 40  # characters


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
        file_key: digest of the file.

    Attributes:
        data_key: a text that changes with the file, the choice of conversations, and the tokens of the first of them.
    """

    def __init__(
        self,
        path: Path,
        spans: NDArray[np.int64],
        tokenizer: Tokenizer,
        written: ChatFormat,
        context_length: int,
        *,
        file_key: str,
    ) -> None:
        self._path = path
        self._spans = spans
        self._tokenizer = tokenizer
        self._written = written
        self._padding = int(tokenizer.encode(written.padding)[0][-1])
        self._length = context_length
        digest = xxhash.xxh3_128(file_key.encode() + spans.tobytes())
        if len(spans):
            digest.update(self.encoded(0).tokens.tobytes())
        self.data_key = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        encoded, size = self.encoded(index), self._length + 1
        padding = max(0, size - len(encoded.tokens))
        ids = torch.tensor(encoded.tokens[:size].tolist() + [self._padding] * padding)
        wanted = torch.tensor(encoded.is_predicted[:size].tolist() + [False] * padding)
        is_token = torch.arange(self._length) < len(encoded.tokens)
        return ids[:-1], ids[1:].masked_fill(~wanted[1:], IGNORED_TARGET), is_token

    def encoded(self, index: int) -> Encoded:
        """Read and tokenize a conversation.

        Raises:
            ConfigurationError: the file has changed.
        """
        offset, nbytes = self._spans[index].tolist()
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                return encode(read(file.read(nbytes)), self._written, self._tokenizer)
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"{self._path} has changed since the run began: at byte {offset:,} there is no conversation ({error}); "
                "put it back, and give changed data to a new run"
            ) from error

    def example(self, index: int) -> str:
        """A conversation as it is trained on, in a line."""
        encoded = self.encoded(index)
        size = min(len(encoded.tokens), self._length + 1)
        is_learned = encoded.is_predicted[:size] & (np.arange(size) > 0)  # nothing predicts the first one
        borders = [0, *(np.flatnonzero(np.diff(is_learned)) + 1).tolist(), size]
        runs = list[str]()
        for begin, end in itertools.pairwise(borders[: _MOST_RUNS + 1]):
            run = _shortened(encoded.text[encoded.places[begin, 0] : encoded.places[end - 1, 1]])
            runs.append(f"«{run}»" if is_learned[begin] else run)
        rest = " ..." if len(borders) > _MOST_RUNS + 1 else ""
        return (
            f"{is_learned.sum()} of the {size} tokens of a conversation are learned, those in «»: {''.join(runs)}{rest}"
        )

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation, whether the context holds them or not."""
        return np.array([len(self.encoded(index).tokens) for index in range(len(self))], dtype=np.int64)

    def learnable(self, most: int) -> tuple[list[int], int, int]:
        """Look at the first `most` conversations, and at more until one is found in which anything is predicted.

        Returns:
            Those in which anything is, the number of those that were looked at, and of those whose window ends before
            what is predicted does.
        """
        found, looked_at, num_cut, size = list[int](), 0, 0, self._length + 1
        while looked_at < len(self) and (looked_at < most or not found):
            encoded = self.encoded(looked_at)
            if encoded.is_predicted[1:size].any():  # nothing predicts the first one
                found.append(looked_at)
            num_cut += int(encoded.is_predicted[size:].any())
            looked_at += 1
        return found, looked_at, num_cut


def _shortened(text: str) -> str:
    """A text of one line, without its middle where it is long."""
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} ... {text[-_TAIL:]}"
    return printable(text)


@validated
class InstructionData(StepDataModule):
    """Conversations as training and held-out batches of a constant global size.

    Args:
        path: file of one JSON object a line, or of a JSON array of objects.
        tokenizer: path of the model's tokenizer.json, ORG/NAME or ORG/NAME@REVISION of it on the Hub, or "bytes".
        context_length: tokens of one sample.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; an evaluation batch is
            as large as a micro-batch.
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
        check_local("path", path)
        check_local("tokenizer", tokenizer)
        check_tokenizer(tokenizer)  # refuses what is no tokenizer before anything else is built
        self.context_length = context_length
        self.source = Path(path).expanduser()
        self.tokenizer = tokenizer
        self._end_token = end_token
        self._val_fraction = val_fraction
        self._val_samples = val_samples
        self.packing = packing
        self._split = self._packs = self._example = ""  # what is said of them

    @cached_property
    def written(self) -> ChatFormat:
        """Format that writes conversations as text."""
        return chat_format(self.tokenizer, self._end_token)

    @property
    def chat_template(self) -> str | None:
        """The format as a chat template of transformers; None where it is that of the tokenizer."""
        return self.written.template if isinstance(self.written, MarkedTurns) else None

    @cached_property
    def end_of_text(self) -> int | None:
        """Token that ends an answer; None where several do, or none."""
        with suppress(ValueError):  # of a template that refuses a conversation of one question
            ids = self._encoder.encode(self.written.end)[0].tolist()
            return int(ids[0]) if len(ids) == 1 else None
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what every checkpoint keeps for an export: the chat template that no file has, the end token, and the
        tokenizer that was named.
        """
        state = {
            "chat_template": self.chat_template,
            "end_of_text": self.end_of_text,
            "tokenizer_origin": tokenizer_origin(self.tokenizer),
        }
        return {name: value for name, value in state.items() if value is not None}

    @cached_property
    def _encoder(self) -> Tokenizer:
        if is_trained(self.tokenizer):
            raise ConfigurationError(f"tokenizer={self.tokenizer!r} is not the model's: give its tokenizer.json")
        return load_tokenizer(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return self._encoder.vocab_size

    def summary(self) -> str:
        """Lines about the file, and once it is set up, about its packs and one conversation."""
        return "\n".join([f"{self.source}{self._split}", *self._packs.splitlines(), *self._example.splitlines()])

    def prepare_data(self) -> None:
        """Check every conversation, once on every node."""
        for name, _, record in records(self.source):
            try:
                conversation = read(record)
                self.written.check(conversation)
                encode(conversation, self.written, self._encoder)
            except ValueError as error:
                raise ConfigurationError(f"{self.source}, {name}, is not a conversation: {error}") from error

    def setup(self, stage: str | None = None) -> None:
        """Find the conversations and split them."""
        digest, places = xxhash.xxh3_128(), list[tuple[int, int]]()
        for _, offset, text in records(self.source):
            digest.update(text)
            places.append((offset, len(text)))
        spans = np.array(places, dtype=np.int64)
        held_out = max(1, round(len(spans) * self._val_fraction))
        if len(spans) - held_out < self.global_batch_size:
            raise ConfigurationError(
                f"{self.source} leaves {len(spans) - held_out} conversations for training, fewer than "
                f"global_batch_size={self.global_batch_size}: lower it or give more"
            )
        order = np.random.default_rng(self.seed).permutation(len(spans))
        measured = min(held_out, self._val_samples or held_out)
        self._split = f": {len(spans)} conversations, {len(spans) - held_out} for training and {held_out} held out"
        spread = np.arange(measured) * held_out // measured
        val, train = (
            Conversations(
                self.source,
                spans[chosen],
                self._encoder,
                self.written,
                self.context_length,
                file_key=digest.hexdigest(),
            )
            for chosen in (np.sort(order[:held_out])[spread], np.sort(order[held_out:]))
        )
        example = train.example(self._first_learnable(train))
        if example != self._example:
            self._example = example
            rank_zero_info(example)
            self._warn_of_the_end()
        self._val = self._packed(val, training=False) if self.packing else val
        self._train = self._packed(train, training=True) if self.packing else train

    def _warn_of_the_end(self) -> None:
        with suppress(ValueError):  # of a template that refuses a conversation of one question
            if not self.written.end:
                rank_zero_warn(
                    f"the chat template of {self.tokenizer} writes nothing behind an answer, so that answers never "
                    "learn to end: let it write the end token there, {{ eos_token }}"
                )

    def _packed(self, conversations: Conversations, *, training: bool) -> Packed:
        length, tokens = self.context_length, conversations.lengths()
        packed = Packed(conversations, np.minimum(tokens, length), length, seed=self.seed if training else None)
        if training:
            packed.require_step(self.global_batch_size)
            self._packs = packed.summary("conversations")
            rank_zero_info(self._packs)
        return packed

    def _first_learnable(self, train: Conversations) -> int:
        """Return the first conversation of which anything is learned; warn of those that the context cuts.

        Raises:
            ConfigurationError: there is none.
        """
        found, looked_at, num_cut = train.learnable(_SAMPLE)
        if not found:
            raise ConfigurationError(
                f"context_length={self.context_length} ends before an answer of {self.source} begins, in all "
                f"{looked_at} conversations: there is nothing to learn, raise it"
            )
        if num_cut:
            rank_zero_warn(
                f"context_length={self.context_length} cuts {num_cut} of {looked_at} conversations that were looked at "
                "before their answers end, so that the rest is not learned: raise it, or shorten them"
            )
        return found[0]
