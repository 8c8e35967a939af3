"""Chat formats: conversations as texts of which answers are predicted, and their tokens.

The chat template of the model's tokenizer writes a conversation, or plain marked turns if there is none, as a list of
texts that are predicted or not: only answers to learn are, with their end token. The text is encoded as a whole, so
that its tokens are those that a model sees later, and a token is predicted if it covers any character of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lightning.data.conversations import MARKED_ROLES, REASONING, Conversation, Turn, exchange
from moe_lightning.data.tokenizer import BYTES, Tokenizer, errors_of_package
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import read_text
from moe_lightning.hub import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_SETTINGS, tokenizer_file

Piece = tuple[str, bool]
"""Text, and whether it is predicted."""

_BYTES_END = "<|endoftext|>"
_ANSWER = "\N{SECTION SIGN}"
"""A text that no template has."""
_EXCHANGE = Conversation(exchange("?", _ANSWER))
_CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
"""Call by which chat templates write the date of today."""
_DAY = date(2025, 1, 1)
"""Today, for these templates: a conversation has the same tokens whenever it is read."""
_MARKED_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + (END if message['role'] == 'assistant' else '\\n') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""


class MarkedTurns:
    """Each turn after a line <|role|>, each answer ended by the end token, as in OLMoE-Instruct and Tulu.

    Args:
        end: text that ends an answer.

    Attributes:
        padding: text of the token that fills a window up.
    """

    def __init__(self, end: str) -> None:
        self.end = self.padding = end

    def check(self, conversation: Conversation) -> None:
        """
        Raises:
            ValueError: something of a conversation would be left out.
        """
        other = next((f"the role {turn.role}" for turn in conversation.turns if turn.role not in MARKED_ROLES), None)
        if conversation.tools or any(turn.rest.get("tool_calls") for turn in conversation.turns):
            other = "calls of tools"
        if other is not None:
            raise ValueError(
                f"it has {other}, and without a chat template there are only {', '.join(MARKED_ROLES)}: give the "
                "tokenizer.json of a folder whose template has more"
            )
        if name := next((name for turn in conversation.turns for name in _reasoning(turn)), None):
            raise ValueError(
                f"it has {name}, and without a chat template there is only content: write it there, or remove it"
            )

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """The conversation in order."""
        written: list[Piece] = []
        for turn in conversation.turns:
            written += [(f"<|{turn.role}|>\n", False), (turn.content or "", turn.is_learned)]
            written.append((self.padding, turn.is_learned) if turn.role == "assistant" else ("\n", False))
        return written

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text that asks for the next answer."""
        return "".join(text for text, _ in self.pieces(Conversation(tuple(turns)))) + "<|assistant|>\n"

    def content(self, answer: str) -> str:
        """The content of the turn that a model's answer makes."""
        return answer

    @property
    def template(self) -> str:
        """The format as a chat template of transformers."""
        return _MARKED_TEMPLATE.replace("END", repr(self.end))


class TemplatedTurns:
    """As the chat template of a Hugging Face tokenizer writes them.

    An answer is what the template adds to the turns before it. Where that has no end, as with GLM, the token that opens
    the next turn belongs to it: a model stops by that one. An earlier answer that the template writes otherwise once
    other turns follow (some drop reasoning) is not predicted.

    Args:
        tokenizer: of transformers, with a chat template.

    Attributes:
        padding: text of the token that fills a window up.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.chat_template = _on_one_day(tokenizer.chat_template)
        self.padding = str(tokenizer.pad_token or tokenizer.eos_token or "")
        if not self.padding:
            raise ConfigurationError(
                f"the tokenizer in {tokenizer.name_or_path} has neither a padding nor an end token: give data.end_token"
            )

    def check(self, conversation: Conversation) -> None:
        """Change what not every template knows: the text has to change with it.

        Raises:
            ValueError: it does not, so something would be left out.
        """
        whole = self._written(conversation)

        def require_other(changed: Conversation, what: str, whole: str = whole) -> None:
            if self._written(changed) == whole:
                raise ValueError(f"the chat template of the tokenizer leaves out {what}")

        if conversation.tools:
            require_other(replace(conversation, tools=()), "the tools that are offered")
        for index, turn in enumerate(conversation.turns):
            content = turn.content or ""
            if turn.content is not None and turn.role not in ("user", "assistant"):
                other = replace(turn, content=f"{content} and more")
                require_other(conversation.with_turn(index, other), f"turns of the role {turn.role}")
            if turn.rest.get("tool_calls"):
                rest = {name: value for name, value in turn.rest.items() if name != "tool_calls"}
                other = replace(turn, content=content, rest=rest)
                require_other(conversation.with_turn(index, other), "calls of tools")
            if names := _reasoning(turn):
                # As the last turn: many templates leave out what earlier answers have thought.
                asked = replace(conversation, turns=conversation.turns[: index + 1])
                rest = {name: value for name, value in turn.rest.items() if name not in names}
                other = replace(turn, rest=rest)
                require_other(asked.with_turn(index, other), f"{names[0]} of an answer", self._written(asked))

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """The conversation in order.

        Raises:
            ValueError: it cannot be written so.
        """
        whole = self._written(conversation)
        learned = [index for index, turn in enumerate(conversation.turns) if turn.is_learned]
        written, at = list[Piece](), 0
        for index in learned:
            start, end = self._before(conversation, index), self._written(conversation, index + 1)
            if whole.startswith(end) and end.startswith(start):
                written += [(whole[at : len(start)], False), (whole[len(start) : len(end)], True)]
                at = len(end)
                opening = self._opening_behind(conversation.turns, index)
                if whole.startswith(opening, at) or at == len(whole):
                    written.append((opening, True))
                    at += len(opening)
            elif index == learned[-1]:
                raise ValueError(
                    "the chat template of the tokenizer writes the last answer otherwise than it asks for it, or "
                    "changes it with the turns after it: leave these out, or give a tokenizer with another template"
                )
        return [piece for piece in (*written, (whole[at:], False)) if piece[0]]

    @property
    def end(self) -> str:
        """Text that ends an answer; empty where there is none.

        Raises:
            ValueError: the template refuses a conversation of one question.
        """
        return (_behind(self._written(self._short)).strip() or self._openings["user"]).strip()

    @cached_property
    def _short(self) -> Conversation:
        """One question with its answer, behind a system turn where the template needs that."""
        with suppress(ValueError):
            self._written(_EXCHANGE)
            return _EXCHANGE
        return Conversation((Turn("system", "?"), *_EXCHANGE.turns))

    def _opening_behind(self, turns: Sequence[Turn], index: int) -> str:
        """Token that opens the turn behind an answer, or that would follow; empty where the answer has an end."""
        follower = "tool" if turns[index].rest.get("tool_calls") else "user"
        return self._openings.get(turns[index + 1].role if index + 1 < len(turns) else follower, "")

    @cached_property
    def _openings(self) -> dict[str, str]:
        """Token that opens a turn behind an answer without an end, by role; empty where there is none."""
        found = dict.fromkeys(("user", "tool"), "")
        for role in found:
            with suppress(ValueError):  # of a template without the role, or that refuses so short a conversation
                longer = Conversation((*self._short.turns, Turn(role, "?")))
                behind, text = (_behind(self._written(conversation)) for conversation in (self._short, longer))
                text = text.removeprefix(behind)
                space = text[: len(text) - len(text.lstrip())]
                tokens = [token for token in self._tokenizer.get_added_vocab() if text.startswith(token, len(space))]
                if tokens and not behind.strip():
                    found[role] = space + max(tokens, key=len)
        return found

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text that asks for the next answer.

        Raises:
            ValueError: the turns cannot be written so.
        """
        return self._written(Conversation(tuple(turns)), asks=True)

    def content(self, answer: str) -> str:
        """The content of the turn that a model's answer makes, without what the template writes before it."""
        questions = self._short.turns[:-1]
        asked, whole = self.prompt(questions), self._written(self._short)
        begin = whole.removeprefix(asked).partition(_ANSWER)[0]
        content = answer.rpartition(begin)[2] if begin.strip() else answer
        try:
            self._written(Conversation((*questions, Turn("assistant", content))))
        except ValueError:  # it ended before its content began
            return ""
        return content

    def _before(self, conversation: Conversation, index: int) -> str:
        """The text up to an answer, with what asks for it."""
        if index:
            return self._written(conversation, index, asks=True)
        # transformers writes no conversation without turns, which could be asked for its first one.
        first, whole = self._written(conversation, 1), self._written(conversation)
        prompt = self._written(conversation, asks=True).removeprefix(whole)
        return first[: max(0, first.find(prompt))] + prompt

    def _written(self, conversation: Conversation, count: int | None = None, *, asks: bool = False) -> str:
        """The first `count` turns, or all."""

        def written(as_text: bool) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    [turn.message(as_text=as_text) for turn in conversation.turns[:count]],
                    tools=list(conversation.tools) or None,
                    tokenize=False,
                    add_generation_prompt=asks,
                )
            )

        try:
            try:
                return written(as_text=False)
            except TypeError:  # some templates, such as DeepSeek's, join the arguments of calls to other text
                return written(as_text=True)
        except Exception as error:  # a template is a program of its own, and raises what it likes
            raise ValueError(f"the chat template of the tokenizer refuses it: {error}") from error


def _reasoning(turn: Turn) -> list[str]:
    """The keys of what an answer to learn thinks."""
    return [name for name in REASONING if turn.is_learned and turn.rest.get(name)]


def _behind(text: str) -> str:
    """The text behind the answer of `_EXCHANGE`."""
    return text.rpartition(_ANSWER)[2]


def _on_one_day(template: Any) -> Any:
    """Write a day into a chat template, or into each of several by their names, where it asks for today."""
    if isinstance(template, Mapping):
        return {name: _on_one_day(each) for name, each in template.items()}
    return template and _CLOCK.sub(lambda call: repr(_DAY.strftime(call[2])), template)


ChatFormat = MarkedTurns | TemplatedTurns
"""Writes conversations out."""


def chat_format(tokenizer: str, end_token: str | None) -> ChatFormat:
    """Return the format of conversations for a tokenizer.

    Args:
        tokenizer: path of a tokenizer.json, or ORG/NAME on the Hub, whose folder may have a chat template; or "bytes".
        end_token: text that ends an answer of marked turns; None: the end token that the tokenizer's folder names.

    Raises:
        ConfigurationError: no end token is known, or one is given beside a template; the folder has a template and
            transformers is missing, or its tokenizer cannot be read.
    """
    if tokenizer == BYTES:
        return MarkedTurns(end_token or _BYTES_END)
    folder = tokenizer_file(tokenizer).parent
    templated = templated_turns(folder)
    if templated is not None:
        if end_token is not None:
            raise ConfigurationError(
                f"end_token={end_token!r} is for a tokenizer without a chat template, and the template in {folder} "
                "ends answers itself: leave end_token out"
            )
        return templated
    named = _settings(folder).get("eos_token")
    end = end_token or (named.get("content") if isinstance(named, dict) else named)
    if not end:
        raise ConfigurationError(
            f"{folder} has no chat template and names no end token (eos_token in tokenizer_config.json): give "
            "data.end_token"
        )
    return MarkedTurns(str(end))


def templated_turns(folder: Path) -> TemplatedTurns | None:
    """Return the format of the chat template of a tokenizer's folder; None without one.

    Raises:
        ConfigurationError: transformers is missing, or its tokenizer cannot be read.
    """
    if _settings(folder).get("chat_template") or (folder / CHAT_TEMPLATE).is_file():
        return TemplatedTurns(hugging_face_tokenizer(folder))
    return None


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder; empty where there is none.

    Raises:
        ConfigurationError: it is not JSON object.
    """
    path = folder / TOKENIZER_SETTINGS
    if not path.is_file():
        return {}
    try:
        settings = json.loads(read_text(path))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON ({error}): take it from the checkpoint again") from None
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path} holds no object: take it from the checkpoint again")
    return settings


def hugging_face_tokenizer(folder: Path, *, for_text: bool = False) -> Any:
    """Load the tokenizer of a Hugging Face folder.

    Args:
        for_text: it encodes texts, by its tokenizer.json where there is one, as in training: some classes of
            transformers split a text in a way of their own.

    Raises:
        ConfigurationError: it cannot be read, or transformers is missing.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        raise ConfigurationError(
            f"{folder} has a chat template, which needs transformers: pip install 'moe-lightning[hf]'"
        ) from None
    kind = PreTrainedTokenizerFast if for_text and (folder / TOKENIZER).is_file() else AutoTokenizer
    with errors_of_package(
        lambda error: ConfigurationError(f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}")
    ):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@dataclass(frozen=True)
class Encoded:
    """A conversation in tokens.

    Attributes:
        text: as it is written.
        tokens, places: see `Tokenizer.encode`.
        is_predicted: bool [count], True for tokens that cover any character of an answer.
    """

    text: str
    tokens: NDArray[np.integer]
    places: NDArray[np.int64]
    is_predicted: NDArray[np.bool_]


def encode(conversation: Conversation, written: ChatFormat, tokenizer: Tokenizer) -> Encoded:
    """Write out and tokenize one conversation.

    Raises:
        ValueError: it cannot be written or tokenized.
    """
    pieces = written.pieces(conversation)
    text = "".join(piece for piece, _ in pieces)
    try:
        tokens, places = tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it holds half of a surrogate pair, {text[error.start]!r}, behind {text[: error.start][-20:]!r}: no UTF-8 "
            "text can; replace it"
        ) from error
    of_answers = np.repeat([is_predicted for _, is_predicted in pieces], [len(piece) for piece, _ in pieces])
    before = np.append(0, np.cumsum(of_answers))
    starts, ends = places.T
    ends = np.minimum(np.maximum(ends, starts + 1), len(text))  # a token may cover no character
    # White space beside its text decides nothing: a special token may strip what belongs to the next or last piece.
    is_text = np.append(0, np.cumsum([not letter.isspace() for letter in text]))
    first, last = np.searchsorted(is_text, is_text[starts], side="right") - 1, np.searchsorted(is_text, is_text[ends])
    has_text = is_text[ends] > is_text[starts]
    starts, ends = np.where(has_text, first, starts), np.where(has_text, last, ends)
    return Encoded(text, tokens, places, before[ends] > before[starts])
