"""From text to tokens: bytes as they are, or byte-level BPE through the optional package `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_bytes

_BYTES = 256
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """The tokens of UTF-8 text, [count], in the smallest unsigned type that holds the vocabulary."""

    def save(self, folder: Path) -> None:
        """Leave what decodes the tokens in `folder`."""


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every token of a vocabulary."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


class ByteTokenizer:
    """Every byte is a token."""

    vocab_size = _BYTES

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        return np.frombuffer(text, dtype=np.uint8)

    def save(self, folder: Path) -> None:
        """Bytes need nothing to be decoded."""


class BpeTokenizer:
    """A tokenizer of the package `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = int(tokenizer.get_vocab_size())
        self._dtype = np.dtype(token_dtype(self.vocab_size))

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        lines = text.decode().splitlines(keepends=True)
        parts = self._tokenizer.encode_batch(_grouped(lines), add_special_tokens=False)
        return np.concatenate([np.empty(0, self._dtype), *(np.asarray(part.ids, self._dtype) for part in parts)])

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / TOKENIZER_FILE))


def _grouped(lines: list[str], lines_per_text: int = 256) -> list[str]:
    """Texts of many lines, so that the package encodes them side by side and few merges are cut at their borders."""
    return ["".join(lines[i : i + lines_per_text]) for i in range(0, len(lines), lines_per_text)]


def tokenizer_key(spec: str) -> str:
    """What names a tokenizer in a cache: its spec, or the content of its file.

    Args:
        spec: "bytes", "bpe:SIZE" (trained on the training text), or the path of a tokenizer.json.

    Raises:
        ConfigurationError: none of these, a BPE vocabulary that is too small, or a missing file.
    """
    if spec == "bytes":
        return spec
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not size.isdecimal() or int(size) <= _BYTES:
            raise ConfigurationError(
                f"tokenizer={spec!r} asks for no vocabulary larger than the {_BYTES} bytes; try 'bpe:4096'."
            )
        return spec
    path = Path(spec).expanduser()
    if not path.is_file() and (path.suffix == ".json" or path.is_dir()):
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigurationError(
            f"tokenizer={spec!r} {what}; give the path of a tokenizer.json, which save_pretrained of a fast "
            "tokenizer writes, or 'bytes' or 'bpe:SIZE'."
        )
    if not path.is_file():
        raise ConfigurationError(f"tokenizer={spec!r} is neither 'bytes', 'bpe:SIZE' nor the path of a tokenizer.json.")
    try:
        return xxhash.xxh3_128_hexdigest(read_bytes(path))
    except OSError as error:
        raise ConfigurationError(f"tokenizer={spec!r} cannot be read ({error.strerror}).") from error


def load_tokenizer(spec: str, training_text: Iterable[bytes], *, trained: str | None = None) -> Tokenizer:
    """The tokenizer of a spec (see `tokenizer_key`); only "bpe:SIZE" reads `training_text`, to be trained on it.

    Args:
        trained: content of the tokenizer.json that was trained for a "bpe:SIZE" before; None: it is trained here.

    Raises:
        ConfigurationError: the package `tokenizers` is missing, or the file is no tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    package = _tokenizers_package()
    if spec.startswith("bpe:"):
        if trained is not None:
            return BpeTokenizer(package.Tokenizer.from_str(trained))
        return BpeTokenizer(_trained(package, int(spec.removeprefix("bpe:")), training_text))
    try:
        return BpeTokenizer(package.Tokenizer.from_file(str(Path(spec).expanduser())))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigurationError(f"{spec} is not a tokenizer.json ({error}); save it with tokenizers.") from error


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


def _trained(package: Any, vocab_size: int, training_text: Iterable[bytes]) -> Any:
    """Byte-level BPE: every byte is in the alphabet, so that no text is unknown."""
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((chunk.decode() for chunk in training_text), trainer)
    return tokenizer
