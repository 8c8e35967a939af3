"""How a conversation is written out for a model: by the chat template of its tokenizer, or as plain marked turns.

A written conversation is a list of pieces of text, each predicted or not; only answers are, with what ends them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text

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
    """How conversations are written for a tokenizer.

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
