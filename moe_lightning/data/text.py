"""Next-token prediction on a corpus: windows of tokens and their LightningDataModule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset, Subset

from moe_lightning.config import NonNegativeInt, PositiveInt, validated
from moe_lightning.data.corpus import Corpus, TokenSpan, document_starts, is_token_file, prepare_corpus, text_files
from moe_lightning.data.loader import StepDataModule
from moe_lightning.data.packing import IntArray, Packed
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local


class _MappedTokens(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and, one token later, targets, both int64, of tokens on disk, mapped here and again in workers."""

    def __init__(self, span: TokenSpan) -> None:
        self.span = span
        self.data_key = span.digest
        self._tokens = span.open()

    def _pair(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self._tokens[start : start + length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Without the map: a memory map would be sent to a spawned worker as a copy of the whole file."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self.span.open()


@validated
class TokenWindows(_MappedTokens):
    """Window i is the tokens [i*L, (i+1)*L] of a span: x [L] and, one token later, y [L], both int64.

    Windows share only the token between them, so every token but the first is predicted exactly once.

    Args:
        span: tokens on disk.
        context_length: L.
        max_windows: at most so many windows, spread evenly over the span.

    Raises:
        ConfigurationError: a length or number below one, or a span shorter than one window.
    """

    def __init__(self, span: TokenSpan, context_length: PositiveInt, max_windows: PositiveInt | None = None) -> None:
        self.context_length = context_length
        self._windows = (span.count - 1) // context_length
        if self._windows < 1:
            raise ConfigurationError(
                f"{span.path} has {span.count} tokens for this part, fewer than one window of {context_length + 1} "
                "(data.context_length + 1); lower that (with moe-train model.context_length, which sets both), give "
                "more text, or change val_fraction."
            )
        self._length = self._windows if max_windows is None else min(max_windows, self._windows)
        super().__init__(span)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        return self._pair(index * self._windows // self._length * self.context_length, self.context_length)


class DocumentPieces(_MappedTokens):
    """The documents of a span, long ones in pieces: x and, one token later, y, of 1 to L tokens. Every token but the
    first of its document is predicted exactly once.

    Args:
        span: tokens on disk.
        starts: int64, the first token of each document, ascending.
        context_length: L, the most tokens of a piece.

    Attributes:
        lengths: int64, tokens of each piece.
    """

    def __init__(self, span: TokenSpan, starts: IntArray, context_length: int) -> None:
        super().__init__(span)
        ends = np.append(starts[1:], span.count) - 1  # the last token of a document has no next one
        pieces = -(-(ends - starts) // context_length)
        inside = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)
        self._begins = np.repeat(starts, pieces) + context_length * inside
        self.lengths: IntArray = np.minimum(np.repeat(ends, pieces) - self._begins, context_length)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pair(int(self._begins[index]), int(self.lengths[index]))


@validated
class TextData(StepDataModule):
    """Text or tokens as training, held-out and prediction batches of a constant global size.

    Args:
        source: see `prepare_corpus`: "stdlib", text file, folder, glob, or .bin or .npy token file.
        context_length: tokens of one sample.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; also of an evaluation batch.
        num_workers: DataLoader processes on each rank; slicing a memory map rarely needs any.
        val_fraction: fraction of the bytes that is held out, inside (0, 1).
        val_samples: at most so many held-out windows, spread evenly; None for all.
        tokenizer: "bytes", "bpe:SIZE", the path of a tokenizer.json, or ORG/NAME or ORG/NAME@REVISION of a model on the
            Hub that has one.
        cache_dir: where tokens are kept; the user's cache folder if None.
        seed: of the split and of the order of the samples.
        dtype: of a .bin source.
        packing: keep documents apart, with several in one sample, see `Packed`; else samples are windows of the text,
            wherever documents end in it.
        end_of_document: token that ends a document, under `packing`; so do text files.

    Raises:
        ConfigurationError: from the constructor for sizes; from `prepare_data`, `setup`, `vocab_size` for the source.
    """

    def __init__(
        self,
        *,
        source: str = "stdlib",
        context_length: PositiveInt = 128,
        global_batch_size: PositiveInt = 32,
        num_workers: NonNegativeInt = 0,
        val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.05,
        val_samples: PositiveInt | None = None,
        tokenizer: str = "bytes",
        cache_dir: str | Path | None = None,
        seed: NonNegativeInt = 0,
        dtype: str | None = None,
        packing: bool = False,
        end_of_document: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, seed=seed)
        if end_of_document is not None and not packing:
            raise ConfigurationError(
                f"end_of_document={end_of_document} is read under packing=true only: set that, or leave it out"
            )
        self.packing = packing
        self.end_of_document = end_of_document
        self.context_length = context_length
        self.val_samples = val_samples
        self._source: dict[str, Any] = {
            "source": source,
            "cache_dir": cache_dir,
            "tokenizer": tokenizer,
            "val_fraction": val_fraction,
            "seed": seed,
            "dtype": dtype,
            "trained": None,
        }
        self._corpus: Corpus | None = None
        self._packs = ""  # what is said of them

    # ------------------------------------------------------------------ what the text is

    @property
    def corpus(self) -> Corpus:
        """The tokens, built at the first use."""
        if self._corpus is None:
            self._corpus = self._prepared()
        return self._corpus

    def _prepared(self) -> Corpus:
        source, share = self.source, self._source["val_fraction"]
        check_local("source", source)
        if not is_token_file(source) and not self.packing:
            # No tokenizer makes more tokens of a text than it has bytes, up to what it puts before each file.
            files = text_files(source)
            most = len(files) + round(min(share, 1 - share) * sum(file.size_bytes for file in files))
            if most <= self.context_length:
                raise ConfigurationError(
                    f"data.context_length={self.context_length} is more than the {most:,} bytes of source={source!r} "
                    f"that val_fraction={share} leaves for a part: lower it (with moe-train model.context_length, "
                    "which sets both), or give more text"
                )
        return prepare_corpus(**self._source)

    @property
    def source(self) -> str:
        """The source of the text, as given."""
        return str(self._source["source"])

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of the text, as given; None where the source is a file of tokens."""
        return None if is_token_file(self.source) else str(self._source["tokenizer"])

    @property
    def trained_tokenizer(self) -> str | None:
        """Content of the tokenizer.json that was trained for tokenizer="bpe:SIZE"; None for any other tokenizer."""
        if not self.trains_tokenizer:
            return None
        if self._source["trained"] is None:
            self._source["trained"] = self.corpus.trained_tokenizer()
        return str(self._source["trained"])

    @property
    def trains_tokenizer(self) -> bool:
        """True for tokenizer="bpe:SIZE"."""
        return str(self._source["tokenizer"]).startswith("bpe:")

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return self.corpus.vocab_size

    def summary(self) -> str:
        """One line about the text, and under `packing` another, once it is set up."""
        return "\n".join([self.corpus.summary(), *self._packs.splitlines()])

    # ------------------------------------------------------------------ Lightning's hooks

    def state_dict(self) -> dict[str, Any]:
        """Return what every checkpoint keeps: the tokenizer that was trained, without which no token can be read."""
        trained = self.trained_tokenizer
        return {} if trained is None else {"trained_tokenizer": trained}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the tokenizer of a checkpoint instead of training one, before or after the tokens are made."""
        trained = state_dict.get("trained_tokenizer")
        if trained is None or not self.trains_tokenizer:
            return
        if self._corpus is not None and self.trained_tokenizer != trained:
            self._corpus = None
        self._source["trained"] = trained
        if self._corpus is None and hasattr(self, "_train"):
            self.setup()

    def prepare_data(self) -> None:
        """Build the tokens, once on every node; other ranks then find them."""
        corpus = self._prepared()
        asked, total = self._source["val_fraction"], corpus.train.count + corpus.val.count
        if abs(corpus.val.count / total - asked) > asked / 5:
            rank_zero_warn(
                f"{corpus.val.count:,} of the {total:,} tokens of {corpus.name} are held out, "
                f"{corpus.val.count / total:.1%} and not val_fraction={asked}: text this short, or whose files differ "
                "this much in bytes a token, is not split more exactly"
            )

    def setup(self, stage: str | None = None) -> None:
        """Map the tokens."""
        if self.packing:
            self._pack()
            return
        self._train = TokenWindows(self.corpus.train, self.context_length)
        self._val = TokenWindows(self.corpus.val, self.context_length, self.val_samples)

    def _pack(self) -> None:
        train, val = (
            Packed(pieces, pieces.lengths, self.context_length, seed=seed)
            for pieces, seed in ((self._pieces(self.corpus.train), self.seed), (self._pieces(self.corpus.val), None))
        )
        train.require_step(self.global_batch_size)
        self._packs = train.summary("documents, or pieces of long ones,")
        rank_zero_info(self._packs)
        most = min(len(val), self.val_samples or len(val))
        self._train, self._val = train, Subset(val, (np.arange(most) * len(val) // most).tolist())

    def _pieces(self, span: TokenSpan) -> DocumentPieces:
        starts = document_starts(span, self.end_of_document)
        if self.end_of_document is not None and span == self.corpus.train and len(starts) < 2:
            raise ConfigurationError(
                f"end_of_document={self.end_of_document} ends no document among the {span.count} training tokens of "
                f"{span.path}: name the token that does, or set packing=false"
            )
        return DocumentPieces(span, starts, self.context_length)
