"""Models of the Hugging Face Hub by name: their files in its cache, downloaded where they are missing.

A name is ORG/NAME or ORG/NAME@REVISION, with a branch, tag or commit. A file or folder of that name on this machine
comes first, then the cache, then the Hub. Configuration, tokenizer and safetensors are downloaded, never pickles or
code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
GENERATION = "generation_config.json"

OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
COMPANIONS = (
    TOKENIZER,
    TOKENIZER_SETTINGS,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    CHAT_TEMPLATE,
    "chat_template.json",
    f"{NAMED_TEMPLATES}/*.jinja",
    GENERATION,
    *OF_IMAGES,
)
"""Files beside configuration and weights that belong to a model, as patterns."""

TOKENIZERS = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Files of which a folder with a tokenizer has one."""

_SMALL = (CONFIG, INDEX, *COMPANIONS)
_NAME = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*?)(@(?P<revision>[\w-][\w./-]*?))?(/tokenizer\.json)?", re.ASCII
)
_WEIGHTS = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HubName:
    """Name of a model on the Hub.

    Attributes:
        repository: ORG/NAME.
        revision: branch, tag or commit; None: the main branch.
    """

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def hub_name(given: str) -> HubName | None:
    """Return the model that is named, also by the path of its tokenizer.json in it; None for a path."""
    match = _NAME.fullmatch(given)
    if match is None or match["repository"].endswith(".json") or Path(given).exists():
        return None
    return HubName(repository=match["repository"], revision=match["revision"])


def origin(given: str) -> str:
    """Return a model's path or name as every folder understands it: a path absolute, a name of the Hub as it is."""
    name = hub_name(given)
    return str(Path(given).expanduser().absolute()) if name is None else str(name)


def local_folder(given: str) -> Path:
    """Return the folder of a model, by path or name, as it is on this machine: nothing is downloaded, and it may be
    missing or incomplete.
    """
    name = hub_name(given)
    if name is None:
        return Path(given).expanduser()
    return _cached(name, _SMALL)[0] or Path(given)


def local_tokenizer(given: str) -> Path:
    """Return the tokenizer.json of a path, or of the folder or name of a model; see `local_folder`."""
    path = local_folder(given)
    return path / TOKENIZER if path.is_dir() else path


def model_folder(given: str, key: str = "pretrained") -> Path:
    """Return the folder with configuration and tokenizer of a model, by path or name.

    Args:
        given: by the user.
        key: of the user's configuration, for errors.

    Raises:
        ConfigurationError: a name that the Hub does not know or give, or no connection to it.
    """
    name = hub_name(given)
    if name is None:
        return Path(given).expanduser()
    folder = _fetched(name, key, _SMALL, (CONFIG,))
    if not (folder / CONFIG).is_file():
        raise ConfigurationError(f"{key}={name} has no {CONFIG}, so it is not a model of transformers: give another")
    return folder


def weights_folder(given: str, key: str = "pretrained") -> Path:
    """Return the folder with all that belongs to a model, by path or name; see `model_folder`.

    Raises:
        ConfigurationError: also for a model without safetensors.
    """
    name, folder = hub_name(given), model_folder(given, key)
    if name is None:
        return folder
    commit = HubName(repository=name.repository, revision=folder.name)
    if (folder / INDEX).is_file():
        folder = _fetched(commit, key, (*_SMALL, SINGLE), ())
    files = _weights(folder, name, key)
    folder = _fetched(commit, key, (*_SMALL, *files), files)
    if not all((folder / file).is_file() for file in files):
        raise ConfigurationError(
            f"{key}={name} has no safetensors, and pickles are not read: save it with save_pretrained of transformers, "
            "which writes them, and give that folder"
        )
    return folder


def tokenizer_file(given: str, key: str = "tokenizer") -> Path:
    """Return the tokenizer.json of a path, or of a model by name; see `model_folder`.

    Raises:
        ConfigurationError: also for a model without one.
    """
    name = hub_name(given)
    if name is None:
        return Path(given).expanduser()
    path = _fetched(name, key, _SMALL, (TOKENIZER,)) / TOKENIZER
    if not path.is_file():
        raise ConfigurationError(
            f"{key}={given}: {name} has no {TOKENIZER}: save_pretrained of a fast tokenizer writes one"
        )
    return path


_IRRELEVANT = ("truncation", "padding", "post_processor", "decoder")
"""Entries of a tokenizer.json that change no token of a text."""


def tokenizer_identity(content: str | None) -> str:
    """Return a text that tokenizers share if they make the same tokens of every text, whoever saved their files.

    Args:
        content: of a tokenizer.json; None: bytes.
    """
    if content is None:
        return "bytes"
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):  # refused when it is loaded
        values = content
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name not in _IRRELEVANT}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode()))


def other_word(given: str, own: str) -> str | None:
    """Return a text of the vocabulary of one tokenizer that is not the same token for another one; None without any.

    Args:
        given, own: contents of tokenizer.json; tokens that `given` adds to the words of `own` are no difference.
    """
    words = _words(given)
    return next((word for word, token in _words(own).items() if words.get(word) != token), None)


def _words(content: str) -> dict[str, int]:
    """Tokens by their texts, without those that were added to the vocabulary, such as special ones."""
    try:
        vocabulary = json.loads(content)["model"]["vocab"]
        if isinstance(vocabulary, dict):
            return vocabulary
        # A unigram model has pairs of text and score, in the order of the tokens.
        return {word: token for token, (word, _) in enumerate(vocabulary)}
    except (ValueError, RecursionError, KeyError, TypeError):  # refused when it is loaded
        return {}


def missing_weights(given: str) -> bool:
    """True if weights must be downloaded before a model, by path or name, can be loaded."""
    name = hub_name(given)
    if name is None:
        return False
    folder, is_whole = _cached(name, (*_SMALL, SINGLE))
    if folder is None or not is_whole or not (folder / CONFIG).is_file():
        return True
    return not all((folder / file).is_file() for file in _weights(folder, name, "pretrained"))


def is_indexed(folder: Path) -> bool:
    """True if weights are in the files that the index of a folder lists: one file comes before it, as in transformers,
    whose `save_pretrained` leaves an old index beside it.
    """
    return (folder / INDEX).is_file() and not (folder / SINGLE).is_file()


def _weights(folder: Path, name: HubName, key: str) -> tuple[str, ...]:
    """Names of the files with weights."""
    if not is_indexed(folder):
        return (SINGLE,)
    try:
        files = sorted(set(json.loads(read_text(folder / INDEX))["weight_map"].values()))
        if all(_WEIGHTS.fullmatch(file) for file in files):
            return tuple(files)
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise ConfigurationError(f"{key}={name} has a damaged {INDEX} ({error!r}): name another revision") from error
    raise ConfigurationError(f"{key}={name} lists files in its {INDEX} that are not safetensors: name another revision")


def _fetched(name: HubName, key: str, files: Iterable[str], required: Collection[str]) -> Path:
    """Return the snapshot in the cache with all of some files; they are downloaded if it lacks any. Where that fails,
    the required ones are enough.
    """
    folder, is_whole = _cached(name, files)
    if folder is not None and not all((folder / file).is_file() for file in required):
        folder = None
    if folder is not None and is_whole:
        return folder
    package = _package()
    try:
        return Path(package.snapshot_download(name.repository, revision=name.revision, allow_patterns=[*files]))
    except Exception as error:  # its HTTP client has its own, which differ between versions
        if folder is not None:
            return folder
        raise ConfigurationError(f"{key}={name} {_reason(name, key, error)}") from error


def _cached(name: HubName, files: Iterable[str]) -> tuple[Path | None, bool]:
    """Return the snapshot in the cache, None without one, and True unless it is known to lack any of some files."""
    package = _package()
    try:
        folder = package.snapshot_download(
            name.repository, revision=name.revision, allow_patterns=[*files], local_files_only=True
        )
        return Path(folder), True
    except (package.errors.LocalEntryNotFoundError, package.errors.HFValidationError) as error:
        part = getattr(error, "snapshot_path", None)
        return None if part is None else Path(part), False


def _reason(name: HubName, key: str, error: Exception) -> str:
    package = _package()
    errors, constants = package.errors, package.constants
    directory = name.repository.rpartition("/")[2]
    revision = "" if name.revision is None else f" --revision {name.revision}"
    given = f"{directory}/{TOKENIZER}" if key == "tokenizer" else directory
    cure = f"run hf download {name.repository}{revision} --local-dir {directory}, and give {key}={given}"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated: accept its terms on {constants.ENDPOINT}/{name.repository}, and run hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        return (
            "is neither on this machine nor a model of the Hub that you may read: check name and revision, or run hf "
            "auth login for a private model"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            "is neither on this machine nor in the cache of the Hub, and HF_HUB_OFFLINE forbids downloads: set "
            f"HF_HUB_OFFLINE=0, or where there is a network {cure}"
        )
    said = next(iter(str(error.__cause__ or error).strip().splitlines()), repr(error))
    return f"is not on this machine, and the Hub cannot be reached ({said}): where there is a network {cure}"


def _package() -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise ConfigurationError(
            "models of the Hub need the package huggingface_hub: pip install 'moe-lightning[hf]'"
        ) from error
    return huggingface_hub
