"""Overrides of the command line in other tools' names and spellings, and former names of keys.

Names of Hugging Face, torchrun, DeepSpeed, Megatron and nanoGPT are understood by moe-train and moe-sim. A name whose
meaning is certain is read as ours and one line says so; a name that means something else here is refused with a
one-line explanation.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import yaml
from omegaconf import OmegaConf

from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import suggestion

_WRITTEN_AS_YAML = re.compile(r"([A-Za-z_][\w.]*):(?!//)\s*(.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w.]*")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Other names for a command's settings.

    Args:
        program: the command.
        names: key of the configuration by other key; applied where the other one is not a key of the configuration. Of
            several, with | between them, the first that the configuration has.
        short: key by the group whose plain value it stands for, as in hardware=h100.
        beside: further override by key that was read from another name, unless its own key is given.
        settings: overrides by whole setting; they stand for it whatever the configuration has.
        explained: advice by key that means nothing certain here.
        further: by group, a test of names: True for an argument of its class that the configuration leaves out.
        nullable: keys that are null until a key below them is given, each with advice where the configuration has none.
        options: words that begin with a dash and are the command's own, with the number of words that follow each.
        words: advice by bare word.
    """

    program: str
    names: Mapping[str, str]
    short: Mapping[str, str]
    beside: Mapping[str, str]
    settings: Mapping[str, str]
    explained: Mapping[str, str]
    further: Mapping[str, Callable[[str], bool]]
    nullable: Mapping[str, str]
    options: Mapping[str, int]
    words: Mapping[str, str]

    @classmethod
    def load(cls, program: str, further: Mapping[str, Callable[[str], bool]] | None = None) -> Self:
        """Read a command's vocabulary from vocabulary.yaml."""
        data = yaml.safe_load(Path(__file__).with_name("vocabulary.yaml").read_text())[program]
        settings = {
            f"{key}={word}": meant
            for meant, lines in data.get("settings", {}).items()
            for keys, _, words in (line.partition(" = ") for line in lines)
            for key in keys.split()
            for word in words.split()
        }
        return cls(
            program=program,
            names=with_groups(data["names"]),
            short=data.get("short", {}),
            beside=data.get("beside", {}),
            settings=settings,
            explained={word: entry["advice"] for entry in data["explained"] for word in entry["words"].split()},
            further=further or {},
            nullable=data.get("nullable", {}),
            options={word: count for count, words in data["options"].items() for word in words.split()},
            words=data["words"],
        )

    def has(self, key: str) -> bool:
        """True if something is said of the key here."""
        return key in self.names or key in self.explained or any(key.startswith(f"{name}.") for name in self.nullable)


def read_settings(
    arguments: Sequence[str], vocabulary: Vocabulary, top: Collection[str], known_keys: Callable[[], Collection[str]]
) -> list[str]:
    """Return the command line as Hydra reads it; every change is told on stderr.

    Args:
        arguments: words of the command line.
        vocabulary: of the command.
        top: keys and groups of the top level.
        known_keys: all keys of the configuration, dotted; takes the time of a composition.

    Raises:
        ConfigurationError: a setting that is explained, or a word that is none.
    """
    for word in arguments:
        _require_decoded(word)
    reader = _Reader(vocabulary, top, known_keys)
    words, read, changed = list(arguments), list[str](), list[str]()
    while words:
        word = words.pop(0)
        if word in vocabulary.options or word.partition("=")[0] in vocabulary.options or re.match("-[a-z]+=?$", word):
            read += [word, *(words.pop(0) for _ in range(min(vocabulary.options.get(word, 0), len(words))))]
            continue
        typed, setting = _one_setting(word, words, reader)
        for override in reader.overrides(setting):
            if override not in (typed, f"++{typed}"):
                changed.append(override.partition("=")[0])
                _tell(f"{vocabulary.program}: {shown(typed)} is read as {override.lstrip('+')}")
            read.append(override)
    for key in changed:
        further = vocabulary.beside.get(key)
        if further and not any(word.startswith(further.partition("=")[0]) for word in read):
            _tell(f"{vocabulary.program}: with it goes {further}")
            read.append(further)
    return read


def _require_decoded(word: str) -> None:
    """
    Raises:
        ConfigurationError: Python could not decode a word of the command line, and put surrogates for its bytes.
    """
    if not any("\udc80" <= character <= "\udcff" for character in word):
        return
    encoding, typed = sys.getfilesystemencoding(), os.fsencode(word).decode(errors="replace")
    cure = "rename it in UTF-8" if encoding == "utf-8" else "set PYTHONUTF8=1, or LC_ALL to a locale of UTF-8"
    raise ConfigurationError(f"{shown(typed)} is no text in {encoding}, the encoding of this locale: {cure}")


def _tell(line: str) -> None:
    """Print a line on stderr, once for all ranks of torchrun and SLURM."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(line, file=sys.stderr)


def _one_setting(word: str, words: list[str], reader: _Reader) -> tuple[str, str]:
    """Return the typed words and the setting as key=value; remove further words of the setting from `words`."""
    option, yaml = _OPTION.fullmatch(word), _WRITTEN_AS_YAML.fullmatch(word)
    if option:
        key = option[1].replace("-", "_")
        if not reader.knows(key):
            raise refuse_option(reader.vocabulary.program, word, reader.vocabulary.options)
        if option[2] is not None:
            return word, f"{key}={option[2]}"
        value = words.pop(0) if words and "=" not in words[0] and not words[0].startswith("-") else "true"
        return f"{word} {value}" if value != "true" else word, f"{key}={value}"
    if yaml and "=" not in yaml[1] and reader.knows(yaml[1]):
        if yaml[2]:
            return word, f"{yaml[1]}={yaml[2]}"
        if words and "=" not in words[0]:
            value = words.pop(0)
            return f"{word} {value}", f"{yaml[1]}={value}"
    if _KEY.fullmatch(word) and reader.knows(word) and word not in reader.vocabulary.words:
        reader.explain(word)
        raise ConfigurationError(f"{word} has no value: give {word}=VALUE")
    return word, word


class _Reader:
    """One command line's settings against the configuration, which is composed only where a name is not plain."""

    def __init__(self, vocabulary: Vocabulary, top: Collection[str], known_keys: Callable[[], Collection[str]]) -> None:
        self.vocabulary = vocabulary
        self._top = top
        self._known_keys = known_keys

    @cached_property
    def known(self) -> set[str]:
        return set(self._known_keys())

    def knows(self, key: str) -> bool:
        """True if a setting of this key can be read."""
        return (
            key.split(".")[0] in self._top
            or self.vocabulary.has(key)
            or any(setting.startswith(f"{key}=") for setting in self.vocabulary.settings)
            or ("." not in key and self._by_ending(key) is not None)
        )

    def explain(self, key: str) -> None:
        """Raise the advice that there is on a key."""
        if key in self.vocabulary.explained:
            raise ConfigurationError(f"there is no key {shown(key)} here: {self.vocabulary.explained[key]}")

    def overrides(self, setting: str) -> list[str]:
        """The overrides that a setting stands for."""
        vocabulary = self.vocabulary
        key, has_value, value = setting.partition("=")
        if not has_value:
            if setting in vocabulary.words:
                raise ConfigurationError(f"{shown(setting)} is not a setting: {vocabulary.words[setting]}")
            return [setting]
        if not key:
            raise ConfigurationError(f"{shown(setting)} names no key: write KEY=VALUE")
        if f"{key}={value.lower()}" in vocabulary.settings and not Path(value).exists():
            meant = vocabulary.settings[f"{key}={value.lower()}"]
            return [meant] if meant in vocabulary.settings else self.overrides(meant)
        if key in vocabulary.short and not value.startswith(("{", "[")):
            return [f"{vocabulary.short[key]}={value}"]
        if not _KEY.fullmatch(key) or (key in self._top and not vocabulary.has(key)):
            return [setting]
        for name, advice in vocabulary.nullable.items():
            if key.startswith(f"{name}.") and key not in self.known:
                if name not in self.known:
                    raise ConfigurationError(f"{key} is not a key of this configuration: {advice}")
                return [f"++{setting}"]
        if vocabulary.has(key) and key not in self.known:
            self.explain(key)
            targets = vocabulary.names[key].split("|")
            target = next((target for target in targets if target in self.known), targets[0])
            return self.overrides(f"{target}={value}")
        group, _, name = key.partition(".")
        if group in vocabulary.further and vocabulary.further[group](name):
            return [f"++{setting}"]
        if "." not in key and key not in self._top and key not in self.known:
            ending = self._by_ending(key)
            return [setting] if ending is None else [f"{ending}={value}"]
        return [setting]

    def _by_ending(self, key: str) -> str | None:
        """The one key of the configuration that ends in this word."""
        found = [name for name in self.known if name.endswith(f".{key}") and not name.startswith("callbacks.")]
        return found[0] if len(found) == 1 else None


def refuse_option(program: str, word: str, options: Collection[str]) -> ConfigurationError:
    """The error for an option that there is not."""
    near = suggestion(word.partition("=")[0], options)
    return ConfigurationError(
        f"there is no option {shown(word)}{near}: settings are written key=value, {program} --help lists both"
    )


def with_groups(names: Mapping[str, str]) -> dict[str, str]:
    """Key by other key, from words that stand for it: alone, and below the first part of the key.

    Args:
        names: words between spaces, by key.
    """
    found: dict[str, str] = {}
    for key, words in names.items():
        group = key.split(".")[0]
        for word in words.split():
            found[word] = key
            if "." in key and "." not in word:
                found[f"{group}.{word}"] = key
    targets = {key.split("|")[0] for key in names}
    return {word: key for word, key in found.items() if word not in targets}


_PASSED = ("callbacks", "logger", "plugins", "strategy", "profiler")
"""Arguments of the Trainer that moe-train gives itself, or that no text can be."""


def _is_further_trainer_argument(name: str) -> bool:
    """True for what the Trainer takes and conf/trainer leaves out."""
    if not name.isidentifier() or name in OmegaConf.load(CONFIG_DIR / "trainer" / "default.yaml") or name in _PASSED:
        return False
    from lightning.pytorch import Trainer  # seconds, and only for such a name

    return name in inspect.signature(Trainer).parameters


TRAIN = Vocabulary.load("moe-train", {"trainer": _is_further_trainer_argument})
SIM = Vocabulary.load("moe-sim")
