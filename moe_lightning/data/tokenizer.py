"""Tokenizers of text: plain bytes, or BPE through the optional package `tokenizers`."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text
from moe_lightning.hub import origin, tokenizer_file, tokenizer_identity

_BYTES = 256


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every token of a vocabulary."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


class ByteTokenizer:
    """Every byte is a token."""

    vocab_size = _BYTES
    added: frozenset[int] = frozenset()

    def encode(self, text: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        """The tokens of a whole text, [count], and the first character of each and the one behind it, [count, 2].

        Raises:
            ValueError: it cannot be encoded.
        """
        tokens = np.frombuffer(text.encode(), dtype=np.uint8)
        character = np.cumsum((tokens & 0xC0) != 0x80) - 1
        return tokens, np.stack([character, character + 1], axis=1)

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens of one UTF-8 text that comes in chunks of whole characters, in the smallest unsigned type that
        holds the vocabulary: those of the whole text, wherever the chunks end.
        """
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; U+FFFD stands for bytes that are not UTF-8, such as those of half a character."""
        return bytes(index for index in ids if index < _BYTES).decode(errors="replace")


@contextmanager
def errors_of_package(as_ours: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Raise what the package `tokenizers` raises as an error of ours: it has nothing narrower than Exception, and its
    panics are not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise as_ours(error) from error


def refusal(error: BaseException) -> ConfigurationError:
    """Return the error for a tokenizer that can be read, but not used."""
    return ConfigurationError(f"the tokenizer fails ({error}): get its tokenizer.json again, or use another one")


class BpeTokenizer:
    """A tokenizer of the package `tokenizers`, whatever its file says of special, cut or padding tokens.

    Attributes:
        vocab_size: of its tokens, those that were added included.
        added: tokens beside the vocabulary of the texts, such as those that end an answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.post_processor = None  # all that is left of it without special tokens is that it trims offsets
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # The largest number and not the count of entries: vocabularies may have holes, as before added tokens.
        self.vocab_size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.added = frozenset(tokenizer.get_added_tokens_decoder())
        self._dtype = np.dtype(token_dtype(self.vocab_size))

    def encode(self, text: str) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        text.encode()  # the package's error for a lone surrogate names no character
        with errors_of_package(lambda error: ValueError(f"the tokenizer refuses it: {error}")):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, self._dtype), places

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[npt.NDArray[np.integer]]:
        """Windows of the text are encoded side by side, and joined where two that overlap have the same border between
        tokens: a tokenizer may begin every text in a way of its own, such as with a space, and no merge is cut.
        """
        waiting, first = list[_Window](), 0  # windows not yielded yet, and the first token of theirs that is to be
        for texts in _windows(chunks):
            with errors_of_package(refusal):
                encodings = self._tokenizer.encode_batch([text for _, text in texts], add_special_tokens=False)
            for (start, text), encoding in zip(texts, encodings, strict=True):
                window = _Window(start, text, encoding)
                if waiting and waiting[-1].border(window) is not None:
                    joined = self._joined(waiting)
                    border = joined.border(window)
                    if border is not None:
                        yield np.asarray(joined.encoding.ids[first : border[0]], self._dtype)
                        waiting, first = [], border[1]
                waiting.append(window)
        if waiting:
            yield np.asarray(self._joined(waiting).encoding.ids[first:], self._dtype)

    def _joined(self, windows: list[_Window]) -> _Window:
        """Neighbours without a common border as one: a run of one character, or of digits in groups."""
        if len(windows) == 1:
            return windows[0]
        text = "".join(window.text[:_WINDOW] for window in windows[:-1]) + windows[-1].text
        with errors_of_package(refusal):
            return _Window(windows[0].start, text, self._tokenizer.encode(text, add_special_tokens=False))

    @errors_of_package(refusal)
    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


Tokenizer = ByteTokenizer | BpeTokenizer

_WINDOW, _OVERLAP = 1 << 13, 1 << 8  # characters


def _windows(chunks: Iterable[bytes]) -> Iterator[list[tuple[int, str]]]:
    """The windows that a chunk completes, as (first character, text); each overlaps the next one."""
    start, text = 0, ""
    for chunk in chunks:
        text += chunk.decode()
        complete = max(0, len(text) - _OVERLAP) // _WINDOW
        yield [(start + at, text[at : at + _WINDOW + _OVERLAP]) for at in range(0, complete * _WINDOW, _WINDOW)]
        start, text = start + complete * _WINDOW, text[complete * _WINDOW :]
    if text:
        yield [(start, text)]


@dataclass(frozen=True)
class _Window:
    """Part of a text from the character `start` on, and its tokens."""

    start: int
    text: str
    encoding: Any

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def border(self, following: _Window) -> tuple[int, int] | None:
        """The tokens of both windows that begin at the same character in the middle of what they share; None if they do
        not have the same tokens there.
        """
        edge = _OVERLAP // 4  # what lies nearer may depend on where a window ends
        inside = following.start + edge, self.end - edge
        ours, theirs = self._borders(*inside), following._borders(*inside)
        if not ours or [border[:2] for border in ours] != [border[:2] for border in theirs]:
            return None
        return ours[len(ours) // 2][2], theirs[len(ours) // 2][2]

    def _borders(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The characters of [begin, end) at which a token begins and the one before has ended, with the vocabulary's
        number of that token and its place among those of the window.
        """
        places, ids = self.encoding.token_to_chars, self.encoding.ids
        first = bisect_left(range(len(ids)), begin - self.start, key=lambda token: places(token)[0])
        last = bisect_left(range(len(ids)), end - self.start, key=lambda token: places(token)[0])
        return [
            (places(token)[0] + self.start, ids[token], token)
            for token in range(max(1, first), last)
            if places(token - 1)[1] <= places(token)[0]
        ]


BYTES = tokenizer_identity(None)
"""Spec and identity of `ByteTokenizer`."""


def is_trained(spec: str) -> bool:
    """True for "bpe:SIZE", a tokenizer that is trained on the text."""
    return spec.startswith("bpe:")


def check_tokenizer(spec: str) -> Path | None:
    """Return the tokenizer.json of a spec; None for "bytes" and "bpe:SIZE".

    Args:
        spec: "bytes", "bpe:SIZE" (trained on the training text), the path of a tokenizer.json, or ORG/NAME on the Hub.

    Raises:
        ConfigurationError: none of these, a BPE vocabulary that is too small, or a missing file.
    """
    if spec == BYTES:
        return None
    if is_trained(spec):
        size = spec.removeprefix("bpe:")
        if not size.isdecimal() or int(size) <= _BYTES:
            raise ConfigurationError(
                f"tokenizer={spec!r} asks for no vocabulary larger than the {_BYTES} bytes; try 'bpe:4096'."
            )
        return None
    path = tokenizer_file(spec)
    if not path.is_file() and (path.suffix == ".json" or path.is_dir()):
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigurationError(
            f"tokenizer={spec!r} {what}; give the path of a tokenizer.json, which save_pretrained of a fast "
            "tokenizer writes, or 'bytes' or 'bpe:SIZE'."
        )
    if not path.is_file():
        raise ConfigurationError(
            f"tokenizer={spec!r} is neither 'bytes', 'bpe:SIZE', the path of a tokenizer.json, nor ORG/NAME of a model "
            "on the Hub; give one of these."
        )
    return path


def tokenizer_origin(spec: str | None) -> str | None:
    """Return the tokenizer of a spec as every folder understands it; None where it names no file."""
    return None if spec is None or spec == BYTES or is_trained(spec) else origin(spec)


def tokenizer_content(spec: str) -> str | None:
    """Return the content of the tokenizer.json of a spec; None for "bytes".

    Raises:
        ConfigurationError: see `check_tokenizer`, or the file cannot be read.
    """
    path = check_tokenizer(spec)
    if path is None:
        assert spec == BYTES, "one that is trained has no file"
        return None
    try:
        return read_text(path)
    except OSError as error:
        raise ConfigurationError(f"tokenizer={spec!r} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ConfigurationError(f"{spec} is not a tokenizer.json ({error}); save it with tokenizers.") from error


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a spec other than "bpe:SIZE", see `check_tokenizer`.

    Raises:
        ConfigurationError: the package `tokenizers` is missing, or the file is no tokenizer.
    """
    return tokenizer_from(tokenizer_content(spec), spec)


def tokenizer_from(content: str | None, name: str = "this") -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's content; None: bytes.

    Args:
        name: of the file, for messages.

    Raises:
        ConfigurationError: the package `tokenizers` is missing, or the content is no tokenizer.
    """
    if content is None:
        return ByteTokenizer()
    package = _tokenizers_package()
    with errors_of_package(
        lambda error: ConfigurationError(f"{name} is not a tokenizer.json ({error}); save it with tokenizers.")
    ):
        return BpeTokenizer(package.Tokenizer.from_str(content))


def train_tokenizer(spec: str, training_text: Iterable[bytes]) -> str:
    """Return the tokenizer.json of a byte-level BPE with the vocabulary of "bpe:SIZE": every byte is in its alphabet,
    so that no text is unknown.

    Raises:
        ConfigurationError: the package `tokenizers` is missing.
    """
    package = _tokenizers_package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=int(spec.removeprefix("bpe:")),
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chunk.decode() for chunk in training_text), trainer)
    return str(tokenizer.to_str(pretty=True))


def _tokenizers_package() -> Any:
    # Unset, the package prints a warning in every process that is forked later, such as the workers of a DataLoader.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigurationError(
            "BPE needs the package 'tokenizers'; run: pip install 'moe-lightning[bpe]', or set tokenizer=bytes."
        ) from error
    return tokenizers
