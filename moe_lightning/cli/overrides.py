"""Settings of moe-train in the names and spellings of Hugging Face, torchrun, DeepSpeed, Megatron and nanoGPT.

A name whose meaning is certain is read as ours, and a line says so; a name that means something else here is refused in
one sentence. vocabulary.yaml lists both.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import suggestion

_WRITTEN_AS_YAML = re.compile(r"([A-Za-z_][\w.]*):(?!//)\s*(.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w.]*")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


def _keys(lines: Mapping[str, str]) -> dict[str, str]:
    """Key by other name, from the names of each key and its last part: alone, and below the first part of the key."""
    found: dict[str, str] = {}
    for key, names in lines.items():
        for name in (key.rpartition(".")[2], *names.split()):
            found[name] = key
            if "." in key and "." not in name:
                found[f"{key.partition('.')[0]}.{name}"] = key
    return {name: key for name, key in found.items() if name not in lines}


def _settings(lines: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Override by whole setting, from lines "KEYS = VALUES": each of the keys with each of the values."""
    return {
        f"{key}={value}": meant
        for meant, several in lines.items()
        for keys, _, values in (line.partition(" = ") for line in several)
        for key in keys.split()
        for value in values.split()
    }


_VOCABULARY: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("vocabulary.yaml").read_text())
_KEYS, _SETTINGS = _keys(_VOCABULARY["names"]), _settings(_VOCABULARY["settings"])
_ADVICE = {word: entry["advice"] for entry in _VOCABULARY["explained"] for word in entry["words"].split()}


def read_settings(
    arguments: Sequence[str],
    options: Mapping[str, bool],
    top: Collection[str],
    known_keys: Callable[[], Collection[str]],
) -> list[str]:
    """Return the command line as Hydra reads it; every change is told on stderr.

    Args:
        arguments: words of the command line.
        options: words that begin with a dash and are the command's own; True if a word follows.
        top: keys and groups of the top level.
        known_keys: all keys of the configuration, dotted; takes the time of a composition.

    Raises:
        ConfigurationError: a setting that is explained, or a word that is none.
    """
    words, read, known = list(arguments), list[str](), cache(known_keys)
    while words:
        word = words.pop(0)
        _require_decoded(word)
        if word.partition("=")[0] in options or re.match("-[a-z]+=?$", word):
            read += [word, words.pop(0)] if options.get(word) and words else [word]
            continue
        typed, setting = _one_setting(word, words, options, top)
        override = _override(setting, top, known)
        if override not in (typed, f"++{typed}"):
            beside = _VOCABULARY["beside"].get(override.partition("=")[0], "")
            _tell(f"moe-train: {shown(typed)} is read as {override.lstrip('+')} {beside}".rstrip())
            read[:0] = beside.split()  # before what is given: the last one counts
        read.append(override)
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


def _one_setting(word: str, words: list[str], options: Mapping[str, bool], top: Collection[str]) -> tuple[str, str]:
    """Return the typed words and the setting as key=value; remove further words of the setting from `words`."""
    option, written_as_yaml = _OPTION.fullmatch(word), _WRITTEN_AS_YAML.fullmatch(word)
    if option:
        key = option[1].replace("-", "_")
        if not _can_be_read(key, top):
            raise refuse_option("moe-train", word, options)
        if option[2] is not None:
            return word, f"{key}={option[2]}"
        if words and "=" not in words[0] and not words[0].startswith("-"):
            value = words.pop(0)
            return f"{word} {value}", f"{key}={value}"
        return word, f"{key}=true"
    if written_as_yaml and "=" not in written_as_yaml[1] and _can_be_read(written_as_yaml[1], top):
        if written_as_yaml[2]:
            return word, f"{written_as_yaml[1]}={written_as_yaml[2]}"
        if words and "=" not in words[0]:
            value = words.pop(0)
            return f"{word} {value}", f"{written_as_yaml[1]}={value}"
    if _KEY.fullmatch(word) and word not in _ADVICE and _can_be_read(word, top):
        raise ConfigurationError(f"{word} has no value: give {word}=VALUE")
    return word, word


def _can_be_read(key: str, top: Collection[str]) -> bool:
    """True if a setting of this key is ours or another tool's."""
    is_of_setting = any(setting.startswith(f"{key}=") for setting in _SETTINGS)
    return key.split(".")[0] in top or key in _KEYS or key in _ADVICE or is_of_setting


def _override(setting: str, top: Collection[str], known: Callable[[], Collection[str]]) -> str:
    """Return the override that a setting stands for."""
    key, has_value, value = setting.partition("=")
    if not has_value:
        if setting in _ADVICE:
            raise ConfigurationError(f"{shown(setting)} is not a setting: {_ADVICE[setting]}")
        return setting
    if not key:
        raise ConfigurationError(f"{shown(setting)} names no key: write KEY=VALUE")
    if f"{key}={value.lower()}" in _SETTINGS and not Path(value).exists():
        setting = _SETTINGS[f"{key}={value.lower()}"]
        key, _, value = setting.partition("=")
    if not _KEY.fullmatch(key) or key in top:
        return setting
    for name in _VOCABULARY["nullable"]:
        if key.startswith(f"{name}.") and key not in known():
            if name not in known():
                raise _advice(key, _ADVICE[name])
            return f"++{setting}"
    if (key in _KEYS or key in _ADVICE) and key not in known():
        if key in _ADVICE:
            raise _advice(key, _ADVICE[key])
        return f"{_KEYS[key]}={value}"
    return setting


def _advice(key: str, advice: str) -> ConfigurationError:
    return ConfigurationError(f"there is no key {shown(key)} here: {advice}")


def refuse_option(program: str, word: str, options: Collection[str]) -> ConfigurationError:
    """The error for an option that there is not."""
    near = suggestion(word.partition("=")[0], options)
    return ConfigurationError(
        f"there is no option {shown(word)}{near}: settings are written key=value, {program} --help lists both"
    )
