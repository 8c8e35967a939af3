"""Next-token prediction on a corpus: windows of tokens and their LightningDataModule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from moe_lightning.arrays import IntArray
from moe_lightning.config import NonNegativeInt, PositiveInt, build_config, validated
from moe_lightning.data.corpus import (
    Corpus,
    DataSource,
    TokenSpan,
    document_starts,
    end_of_documents,
    prepare_corpora,
    tokenizer_of,
    trained_tokenizer,
)
from moe_lightning.data.documents import STDLIB
from moe_lightning.data.loader import StepDataModule
from moe_lightning.data.mixture import Mixture, spread
from moe_lightning.data.packing import Packed
from moe_lightning.data.token_folder import fingerprint, is_token_folder, open_token_folder
from moe_lightning.data.tokenizer import check_tokenizer, is_trained, tokenizer_origin
from moe_lightning.errors import ConfigurationError


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
        source: of the tokens, for messages.

    Raises:
        ConfigurationError: a length below one, or a span shorter than one window.
    """

    def __init__(self, span: TokenSpan, context_length: PositiveInt, source: str = "") -> None:
        self.context_length = context_length
        self._windows = (span.count - 1) // context_length
        if self._windows < 1:
            raise ConfigurationError(
                f"data.context_length={context_length} needs {context_length + 1:,} tokens, and one part of "
                f"source={source or str(span.path)!r} has {span.count:,}: lower it (with moe-train "
                "model.context_length, which sets both), give more text, or change val_fraction"
            )
        super().__init__(span)

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        return self._pair(index * self.context_length, self.context_length)


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


class JoinedSamples(ConcatDataset[Any]):
    """Samples of several sources, one source after the other."""

    def __init__(self, datasets: Sequence[Dataset[Any]]) -> None:
        super().__init__(datasets)
        self.data_key = fingerprint(tuple(getattr(dataset, "data_key", None) for dataset in datasets))


@validated
class TextData(StepDataModule):
    """Text or tokens as training, held-out and prediction batches of a constant global size.

    Args:
        source: "stdlib" (the source code of Python's standard library), a file, a folder or a glob of text, JSONL,
            Parquet or a saved Hugging Face data set, a folder of tokens that moe-data has made, or a .bin or .npy file
            of tokens. A list mixes several: of paths, or of mappings with `path`, `weight` (share of the samples,
            relative to the other sources; without weights an epoch has every sample once) and `text_field`.
        text_field: of the text in records: key of JSONL, column of Parquet and saved data sets.
        context_length: tokens of one sample.
        global_batch_size: samples of one optimizer step over all ranks and micro-batches; an evaluation batch is
            as large as a micro-batch.
        num_workers: DataLoader processes on each rank; slicing a memory map rarely needs any.
        val_fraction: fraction of the tokens of each source that is held out, inside (0, 1): its end, where files are in
            the order of a hash of their names.
        val_samples: at most so many held-out samples, spread evenly; None for all.
        tokenizer: "bytes", "bpe:SIZE", the path of a tokenizer.json, or ORG/NAME or ORG/NAME@REVISION of a model on the
            Hub that has one. None: bytes of text, and that of a folder of tokens.
        cache_dir: where tokens are kept; the user's cache folder if None.
        seed: of the order of the samples.
        dtype: of a .bin source.
        packing: keep documents apart, with several in one sample, see `Packed`; else samples are windows of the text,
            wherever documents end in it.
        end_of_document: token that ends a document. It is appended to documents of text that do not end with it.

    Raises:
        ConfigurationError: from the constructor for sizes; from `prepare_data`, `setup`, `vocab_size` for the source.
    """

    def __init__(
        self,
        *,
        source: str | Sequence[str | DataSource] = STDLIB,
        text_field: str = "text",
        context_length: PositiveInt = 128,
        global_batch_size: PositiveInt = 32,
        num_workers: NonNegativeInt = 0,
        val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.05,
        val_samples: PositiveInt | None = None,
        tokenizer: str | None = None,
        cache_dir: str | Path | None = None,
        seed: NonNegativeInt = 0,
        dtype: str | None = None,
        packing: bool = False,
        end_of_document: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, num_workers=num_workers, seed=seed)
        self.packing = packing
        self.context_length = context_length
        self.val_samples = val_samples
        self.sources = sources_of(source, text_field)
        self._tokenizer = tokenizer
        self._trained: str | None = None
        self._options: dict[str, Any] = {
            "cache_dir": cache_dir,
            "val_fraction": val_fraction,
            "dtype": dtype,
            "end_of_document": end_of_document,
        }
        self._corpora: tuple[Corpus, ...] | None = None
        self._packs = ""  # what is said of them

    # ------------------------------------------------------------------ what the text is

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """The tokens of each source, built at the first use."""
        if self._corpora is None:
            self._corpora = prepare_corpora(
                self.sources, tokenizer=self._tokenizer, trained=self.trained_tokenizer, **self._options
            )
        return self._corpora

    @property
    def source(self) -> str:
        """The source of the text, as given, or the names of several."""
        return shown_sources(self.sources)

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer of the text, as given or of a folder of tokens; None where the source is a file of tokens."""
        return tokenizer_of(self.sources, self._tokenizer)

    @property
    def tokens_tokenizer(self) -> str | None:
        """Identity of the tokenizer that made the first folder of tokens among the sources; None without one."""
        folder = next((source.path for source in self.sources if is_token_folder(source.path)), None)
        return None if folder is None else open_token_folder(folder).header.tokenizer

    @property
    def trained_tokenizer(self) -> str | None:
        """Content of the tokenizer.json that was trained for tokenizer="bpe:SIZE"; None for any other tokenizer."""
        if not self.trains_tokenizer or not all(source.is_text for source in self.sources):
            return None
        if self._trained is None:
            check_tokenizer(str(self._tokenizer))
            options = {name: self._options[name] for name in ("val_fraction", "cache_dir")}
            self._trained = trained_tokenizer(self.sources, str(self._tokenizer), **options)
        return self._trained

    @property
    def trains_tokenizer(self) -> bool:
        """True for tokenizer="bpe:SIZE"."""
        return self._tokenizer is not None and is_trained(self._tokenizer)

    @property
    def end_of_text(self) -> int | None:
        """Token that ends documents, as given or of the folders of tokens; None without one."""
        return end_of_documents(self.sources, self._options["end_of_document"])

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return max(corpus.vocab_size for corpus in self.corpora)

    def summary(self) -> str:
        """A line about each source, and once they are set up, about their packs."""
        return "\n".join([*(corpus.summary() for corpus in self.corpora), *self._packs.splitlines()])

    # ------------------------------------------------------------------ Lightning's hooks

    def state_dict(self) -> dict[str, Any]:
        """Return what every checkpoint keeps: the tokenizer that was trained, without which no token can be read, and
        for an export the token that ends documents and the tokenizer that was named.
        """
        state = {
            "trained_tokenizer": self.trained_tokenizer,
            "end_of_text": self.end_of_text,
            "tokenizer_origin": tokenizer_origin(self._tokenizer),
        }
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the tokenizer of a checkpoint instead of training one, before or after the tokens are made."""
        trained = state_dict.get("trained_tokenizer")
        if trained is None or not self.trains_tokenizer:
            return
        if self._corpora is not None and self.trained_tokenizer != trained:
            self._corpora = None
        self._trained = trained
        if self._corpora is None and hasattr(self, "_train"):
            self.setup()

    def prepare_data(self) -> None:
        """Build the tokens, once on every node; other ranks then find them."""
        self._corpora = None  # the files may have changed
        assert self.corpora

    def setup(self, stage: str | None = None) -> None:
        """Map the tokens."""
        self._packs = ""
        make = self._packed if self.packing else self._windows
        samples = [make(corpus) for corpus in self.corpora]
        trains, vals = [train for train, _ in samples], [val for _, val in samples]
        if len(samples) == 1:
            self._train, val = samples[0]
        else:
            self._train, val = JoinedSamples(trains), JoinedSamples(vals)
            weights = [source.weight for source in self.sources if source.weight is not None]
            self._order = Mixture([len(train) for train in trains], weights or None, self.seed)
        if self._packs:
            rank_zero_info(self._packs)
        most = min(len(val), self.val_samples or len(val))
        chosen = np.arange(most) * len(val) // most
        self._val = Subset(val, _mingled(chosen, [len(one) for one in vals]).tolist())

    def _windows(self, corpus: Corpus) -> tuple[Any, Any]:
        train, val = (TokenWindows(span, self.context_length, corpus.name) for span in (corpus.train, corpus.val))
        return train, val

    def _packed(self, corpus: Corpus) -> tuple[Any, Any]:
        train, val = (
            Packed(pieces, pieces.lengths, self.context_length, seed=seed)
            for pieces, seed in (
                (self._pieces(corpus, corpus.train), self.seed),
                (self._pieces(corpus, corpus.val), None),
            )
        )
        if len(self.sources) == 1:
            train.require_step(self.global_batch_size)
        self._packs += train.summary("documents, or pieces of long ones,") + "\n"
        return train, val

    def _pieces(self, corpus: Corpus, span: TokenSpan) -> DocumentPieces:
        starts, end = document_starts(span, corpus.end_of_document), corpus.end_of_document
        if end is not None and span == corpus.train and len(starts) < 2:
            raise ConfigurationError(
                f"end_of_document={end} ends no document among the {span.count} training tokens of {span.path}: name "
                "the token that does, or set packing=false"
            )
        return DocumentPieces(span, starts, self.context_length)


def _mingled(chosen: IntArray, sizes: Sequence[int]) -> IntArray:
    """Return ascending indices of samples in an order of which every beginning, such as that of limit_val_batches, has
    the sources in about their ratio.

    Args:
        chosen: the indices.
        sizes: number of samples of each source.
    """
    sources = np.searchsorted(np.cumsum(sizes), chosen, side="right")
    return chosen[spread(np.bincount(sources))]


def sources_of(source: str | Sequence[str | DataSource], text_field: str) -> tuple[DataSource, ...]:
    """The sources that are given as `TextData` takes them.

    Raises:
        ConfigurationError: there is none, or some have a weight and others do not.
    """
    if isinstance(source, str):
        return (DataSource(path=source, text_field=text_field),)
    sources = []
    for number, given in enumerate(source):
        values: Any = {"path": given} if isinstance(given, str) else given
        if isinstance(values, Mapping):
            values = {"text_field": text_field, **values}
        sources.append(build_config(DataSource, values, key=f"source[{number}]"))
    if not sources:
        raise ConfigurationError("source=[] is empty: give a file, a folder or a list of them")
    weighted = [one for one in sources if one.weight is not None]
    if 0 < len(weighted) < len(sources):
        without = next(one.path for one in sources if one.weight is None)
        raise ConfigurationError(f"source={without!r} has no weight, but {weighted[0].path!r} has: give all or none")
    return tuple(sources)


def shown_sources(sources: Sequence[DataSource]) -> str:
    """Return the path of one source as given, or the names of several."""
    paths = [source.path for source in sources]
    return paths[0] if len(paths) == 1 else ", ".join(Path(path).name for path in paths)
