"""Instruction tuning: chat formats, and token windows in which only answers are predicted.

The file holds one JSON object a line, or one JSON array of objects. An object is {"messages": [{"role", "content"},
...]}, {"conversations": [{"from", "value"}, ...]} as ShareGPT has it, {"prompt", "response"}, or {"instruction",
"output"} with an optional "input"; a key whose value is null is absent. "system" and "tools" may stand beside all of
them, and beside a single answer its reasoning, and "history", earlier questions with their answers in pairs. The chat
template of the model's tokenizer formats it, or plain marked turns if there is none, as a list of texts that are
predicted or not: only answers are, with their end token, and without those of "weight": 0. The text is encoded as a
whole, so that its tokens are those that a model sees later, and a token is predicted if it covers any character of an
answer. No expert computes the padding of a window.
"""

from __future__ import annotations

import codecs
import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
import xxhash
from annotated_types import Interval
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from moe_lightning.config import NonNegativeInt, PositiveInt, shown, validated
from moe_lightning.data.loader import StepDataModule
from moe_lightning.data.packing import Packed
from moe_lightning.data.tokenizer import (
    BYTES,
    Tokenizer,
    check_tokenizer,
    errors_of_package,
    is_trained,
    load_tokenizer,
    tokenizer_origin,
)
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local, check_written, decoded, open_regular, read_bytes, read_text
from moe_lightning.hub import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_SETTINGS, tokenizer_file
from moe_lightning.moe.losses import IGNORED_TARGET
from moe_lightning.user_errors import printable


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role, content: who says what; None is an answer that only calls tools.
        is_learned: True for an answer that is predicted.
        rest: other keys of the message, for a chat template.
    """

    role: str
    content: str | None
    is_learned: bool = False
    rest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Any) -> Turn:
        """Read {"role", "content"} or {"from", "value"}.

        Raises:
            KeyError: it lacks one of them.
            ValueError: it is no turn.
        """
        message = _present(message, "a turn")
        is_shared = "from" in message and "role" not in message
        names = ("from", "value") if is_shared else ("role", "content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content", "from", "value")}
        weight = rest.pop("weight", 1)
        role = message[names[0]]
        if is_shared and isinstance(role, str):
            role = _ROLE_OF.get(role, role)
        calls_only = role == "assistant" and rest.get("tool_calls") and names[1] not in message
        content = None if calls_only else _text(message[names[1]])
        if role not in _ROLES:
            raise ValueError(f"a turn has the role {shown(role)}, which is none of {', '.join(_ROLES)}")
        if type(weight) not in (int, float) or weight not in (0, 1):
            raise ValueError(f"a turn has the weight {shown(weight)}: give 0 for an answer that is not learned, or 1")
        other = next((name for name in _OTHER_WEIGHTS if rest.get(name) in (0, False)), None)
        if other is not None and role == "assistant" and "weight" not in message:
            raise ValueError(
                f"an answer has {other}={shown(rest[other])} and no weight: give 0 if it is not learned, or 1"
            )
        return cls(role, content, role == "assistant" and weight == 1, rest)

    @property
    def reasoning(self) -> list[str]:
        """Keys of what comes before the content of an answer that is learned."""
        return [name for name in _REASONING if self.is_learned and self.rest.get(name)]

    def without(self, names: Sequence[str]) -> Turn:
        """The turn without some of its other keys."""
        return replace(self, rest={name: value for name, value in self.rest.items() if name not in names})

    def message(self, *, as_text: bool = False) -> dict[str, Any]:
        """The turn as chat templates want it, calls of tools with their arguments as objects or as JSON text."""
        return {"role": self.role, "content": self.content, **self.rest, **_calls(self.rest, as_text)}


def _calls(rest: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """Calls of tools, whose arguments may be JSON text, as OpenAI has them, or objects."""
    calls = copy.deepcopy(rest.get("tool_calls"))
    if not isinstance(calls, list):
        return {}
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or "arguments" not in function:
            continue
        arguments = function["arguments"]
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            with suppress(ValueError):
                function["arguments"] = json.loads(arguments)
    return {"tool_calls": calls}


def _present(thing: Any, what: str) -> dict[str, Any]:
    """An object without keys of null at any depth, which stand for what a row of joined data sets lacks."""
    if not isinstance(thing, Mapping):
        raise ValueError(f"{what} is not an object")
    return {name: _without_nulls(value) for name, value in thing.items() if value is not None}


def _without_nulls(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return _present(thing, "it")
    return [_without_nulls(element) for element in thing] if isinstance(thing, list) else thing


def _text(content: Any) -> str:
    """The text of a turn, which may come in parts."""
    if isinstance(content, list):
        parts = [_present(part, "a part of a turn") for part in content]
        other = next((part for part in parts if part.get("type") != "text"), None)
        if other is not None:
            raise ValueError(f"a turn has a part of the type {shown(other.get('type'))}: only text is trained on")
        return "".join(_text(part["text"]) for part in parts)
    if not isinstance(content, str):
        raise ValueError(f"a turn has the content {shown(content)}, which is not text")
    return content


@dataclass(frozen=True)
class Conversation:
    """Turns in order, and the tools that are offered in them."""

    turns: tuple[Turn, ...]
    tools: Sequence[Any] = ()

    @classmethod
    def of(cls, line: Any) -> Conversation:
        """Read one parsed object.

        Raises:
            KeyError: a turn lacks a key.
            ValueError: it has none of the known forms, or no answer to learn.
        """
        line = _present(line, "it")
        if name := next((name for name in ("messages", "conversations") if line.get(name)), None):
            turns = tuple(map(Turn.of, _list(line[name], name)))
        elif "prompt" in line and "response" in line:
            turns = _turns(line, line["prompt"], line["response"])
        elif "instruction" in line and "output" in line:
            question = [_text(line[name]) for name in ("instruction", "input") if name in line]
            turns = _turns(line, "\n\n".join(filter(None, question)), line["output"])
        else:
            raise ValueError("it has neither messages, conversations, prompt and response nor instruction and output")
        if (system := line.get("system")) and all(turn.role != "system" for turn in turns):
            turns = Turn("system", _text(system)), *turns
        found = cls(turns, _list(line.get("tools") or (), "tools"))
        if not any(turn.role == "assistant" for turn in found.turns):
            raise ValueError("it has no answer of the assistant")
        if not any(turn.is_learned for turn in found.turns):
            raise ValueError("every answer has the weight 0, so that there is nothing to learn: leave it out")
        return found


def _list(thing: Any, name: str) -> Sequence[Any]:
    """A list, or the JSON text of one."""
    with suppress(json.JSONDecodeError):
        thing = json.loads(thing) if isinstance(thing, str) else thing
    if not isinstance(thing, list | tuple):
        raise ValueError(f"it has {name}={shown(thing)}, which is no list: give a JSON array, or remove it")
    return thing


def _turns(line: Mapping[str, Any], question: Any, answer: Any) -> tuple[Turn, ...]:
    """A question with its answer, behind the pairs of such that it has as its history."""
    turns = list[Turn]()
    for pair in _list(line.get("history") or (), "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                f"its history has {shown(pair)}, which is no pair of a question and its answer: give "
                "[[question, answer], ...], or remove it"
            )
        turns += _exchange(*pair)
    asks, answers = _exchange(question, answer)
    reasoning = {name: line[name] for name in _REASONING if name in line}
    return *turns, asks, replace(answers, rest=reasoning)


def _exchange(question: Any, answer: Any) -> tuple[Turn, ...]:
    return Turn("user", _text(question)), Turn("assistant", _text(answer), True)


Piece = tuple[str, bool]
"""Text, and whether it is predicted."""

_BYTES_END = "<|endoftext|>"
_ANSWER = "\N{SECTION SIGN}"
"""A text that no template has."""
_EXCHANGE = Conversation(_exchange("?", _ANSWER))


def _behind(answered: str) -> str:
    """Return the part of a text behind the answer of `_EXCHANGE`."""
    return answered.rpartition(_ANSWER)[2]


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
        other = next((f"the role {turn.role}" for turn in conversation.turns if turn.role not in _MARKED_ROLES), None)
        if conversation.tools or any(turn.rest.get("tool_calls") for turn in conversation.turns):
            other = "calls of tools"
        if other is not None:
            raise ValueError(
                f"it has {other}, and without a chat template there are only {', '.join(_MARKED_ROLES)}: give the "
                "tokenizer.json of a folder whose template has more"
            )
        reasoning = next((name for turn in conversation.turns for name in turn.reasoning), None)
        if reasoning is not None:
            raise ValueError(
                f"it has {reasoning}, and without a chat template there is only content: write it into the answer, or "
                "remove it"
            )

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """The conversation in order."""
        written: list[Piece] = []
        for turn in conversation.turns:
            written += [(f"<|{turn.role}|>\n", False), (turn.content or "", turn.is_learned)]
            written.append((self.padding, turn.is_learned) if turn.role == "assistant" else ("\n", False))
        return written

    def num_left_out(self, conversation: Conversation) -> int:
        """Number of answers to learn that are not predicted."""
        return 0

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
    other turns follow (some drop reasoning) is not predicted. The date of today, where the template writes it, is that
    of `_DAY`, so that a conversation has the same tokens whenever it is read.

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
        if conversation.tools and whole == self._written(replace(conversation, tools=())):
            raise ValueError("the chat template of the tokenizer leaves out the tools that are offered")
        for index, turn in enumerate(conversation.turns):
            others, thoughts = list[tuple[str, Turn]](), list[tuple[str, Turn]]()
            content = turn.content or ""
            if turn.content is not None and turn.role not in ("user", "assistant"):
                others.append((f"turns of the role {turn.role}", replace(turn, content=f"{content} and more")))
            if turn.rest.get("tool_calls"):
                others.append(("calls of tools", replace(turn.without(["tool_calls"]), content=content)))
            if turn.reasoning:
                cure = "name it as the template does, write it into the answer, or remove it"
                thoughts.append((f"{turn.reasoning[0]} of an answer: {cure}", turn.without(turn.reasoning)))
            thought, ends, _ = content.partition(_THOUGHT)
            if turn.is_learned and ends and thought.replace("<think>", "").strip():
                what = f"what an answer has before {_THOUGHT}: let the template write that, or remove it"
                thoughts.append((what, replace(turn, content=content.replace(_THOUGHT, _ANSWER + _THOUGHT, 1))))
            self._require(conversation, whole, index, others)
            if thoughts:  # of the answer as the last turn: many templates leave out what earlier ones have thought
                asked = replace(conversation, turns=conversation.turns[: index + 1])
                self._require(asked, self._written(asked), index, thoughts)

    def _require(self, conversation: Conversation, whole: str, index: int, others: Sequence[tuple[str, Turn]]) -> None:
        """Refuse a template that writes the same text with another turn in the place of one."""
        for what, other in others:
            turns = (*conversation.turns[:index], other, *conversation.turns[index + 1 :])
            if whole == self._written(replace(conversation, turns=turns)):
                raise ValueError(f"the chat template of the tokenizer leaves out {what}")

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """The conversation in order.

        Raises:
            ValueError: it cannot be written so.
        """
        whole = self._written(conversation)
        answers = self._answers(conversation)
        fitting = _fitting(whole, answers)
        if answers and (last := max(answers)) not in fitting:
            raise ValueError(_misplaced(*answers[last]))
        written, at = [], 0
        for index, (start, end) in fitting.items():
            written += [(whole[at : len(start)], False), (whole[len(start) : len(end)], True)]
            at = len(end)
            opening = self._opening_behind(conversation.turns, index)
            if whole.startswith(opening, at) or at == len(whole):
                written.append((opening, True))
                at += len(opening)
        return [piece for piece in (*written, (whole[at:], False)) if piece[0]]

    def num_left_out(self, conversation: Conversation) -> int:
        """Number of answers to learn that are not predicted."""
        answers = self._answers(conversation)
        return len(answers) - len(_fitting(self._written(conversation), answers))

    def _answers(self, conversation: Conversation) -> dict[int, tuple[str, str]]:
        """The text that asks for each answer to learn, and the text up to its end, by its turn."""
        learned = (index for index, turn in enumerate(conversation.turns) if turn.is_learned)
        return {index: (self._before(conversation, index), self._written(conversation, index + 1)) for index in learned}

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
        """Text that opens the turn behind an answer, or that would follow; empty where the answer has an end."""
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


_CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
"""Call by which chat templates write the date of today."""
_DAY = date(2025, 1, 1)


def _on_one_day(template: Any) -> Any:
    """Write a day into a chat template, or into each of several by their names, where it asks for today."""
    if isinstance(template, Mapping):
        return {name: _on_one_day(each) for name, each in template.items()}
    return template and _CLOCK.sub(lambda call: repr(_DAY.strftime(call[2])), template)


def _fitting(whole: str, answers: Mapping[int, tuple[str, str]]) -> dict[int, tuple[str, str]]:
    """Return the answers that stand in the whole text as a model is asked for them."""
    return {
        index: (start, end)
        for index, (start, end) in answers.items()
        if whole.startswith(end) and end.startswith(start)
    }


def _misplaced(asked: str, answered: str) -> str:
    """Explain why the text that asks for an answer is not the beginning of the text with the answer."""
    if answered.startswith(asked):
        return "the chat template of the tokenizer changes the last answer with the turns after it: leave those out"
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, answered, strict=False)))
    return (
        f"the chat template of the tokenizer asks for an answer with '{_shortened(asked[same:])}', and writes this "
        f"answer as '{_shortened(answered[same:])}': let answers in the file begin as they are asked for, or shorten "
        "what the template adds for add_generation_prompt"
    )


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


_SAMPLE = 256
"""Conversations whose windows are looked at before training."""

_MARKED_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + (END if message['role'] == 'assistant' else '\\n') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

_MARKED_ROLES = ("system", "user", "assistant")
_ROLES = (*_MARKED_ROLES, "developer", "tool")
_OTHER_WEIGHTS = ("loss", "loss_mask", "train", "training", "trainable")
"""Keys by which other trainers mark answers that are not learned."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys that data sets and chat templates have for what an answer reasons before its content."""
_THOUGHT = "</think>"
"""Ends what an answer reasons within its content."""
_ROLE_OF = {"human": "user", "gpt": "assistant"}  # ShareGPT's words
_LONGEST_LINE = 1 << 26  # bytes
_LARGE = 10_000_000  # bytes that take a while to read
_SPACE = re.compile(r"[ \t\n\r]*")


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
        lengths: int64 [n], tokens of each conversation; None: they are counted where they are needed.

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
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self._path = path
        self._spans = spans
        self._tokenizer = tokenizer
        self._written = written
        self._padding = int(tokenizer.encode(written.padding)[0][-1])
        self._length = context_length
        self._lengths = lengths
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
        if self._lengths is not None:
            return self._lengths
        return np.array([len(self.encoded(index).tokens) for index in range(len(self))], dtype=np.int64)

    def learnable(self, most: int) -> tuple[int, list[int], int, int]:
        """Return, of the first `most` conversations, and of more until one is found, how many were looked at, those in
        which anything is predicted, how many of these are cut before what is predicted ends, and how many answers of
        all of them are not predicted, see `TemplatedTurns`.
        """
        looked_at, found, num_cut, num_left_out, size = 0, list[int](), 0, 0, self._length + 1
        while looked_at < len(self) and (looked_at < most or not found):
            encoded = self.encoded(looked_at)
            if encoded.is_predicted[1:size].any():  # nothing predicts the first one
                found.append(looked_at)
                num_cut += int(encoded.is_predicted[size:].any())
            num_left_out += self._written.num_left_out(encoded.conversation)
            looked_at += 1
        return looked_at, found, num_cut, num_left_out


@dataclass(frozen=True)
class Encoded:
    """A conversation in tokens.

    Attributes:
        conversation: as it was read.
        text: as it is written.
        tokens, places: see `Tokenizer.encode`.
        is_predicted: bool [count], True for tokens that cover any character of an answer.
    """

    conversation: Conversation
    text: str
    tokens: NDArray[np.integer]
    places: NDArray[np.int64]
    is_predicted: NDArray[np.bool_]


_MOST_RUNS = 6
_HEAD, _TAIL = 100, 40  # characters


def _shortened(text: str) -> str:
    """A text of one line, without its middle where it is long."""
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} ... {text[-_TAIL:]}"
    return printable(text)


def read(record: bytes) -> Conversation:
    """Read one conversation of a file.

    Raises:
        ValueError: it is none.
    """
    try:
        return Conversation.of(json.loads(decoded(record.removeprefix(codecs.BOM_UTF8))))
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON ({error.msg}, character {error.pos + 1}): write a JSON object a line"
        ) from error
    except RecursionError as error:
        raise ValueError(str(error)) from error


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
    return Encoded(conversation, text, tokens, places, before[ends] > before[starts])


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
        self._counted = "", np.zeros(0, dtype=np.int64)  # digest of the file that was checked, tokens of each of them

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
        return "\n".join(
            [f"{self.source}{self._split}", *self._packs.splitlines(), *self.passes(0.0), *self._example.splitlines()]
        )

    def prepare_data(self) -> None:
        """Check every conversation, once on every node."""
        if (nbytes := self.source.stat().st_size if self.source.exists() else 0) >= _LARGE:
            rank_zero_info(f"reading and checking all conversations of {self.source} ({nbytes / 1e6:,.0f} MB)")
        digest, lengths = xxhash.xxh3_128(), list[int]()
        for name, _, record in records(self.source):
            digest.update(record)
            try:
                conversation = read(record)
                self.written.check(conversation)
                lengths.append(len(encode(conversation, self.written, self._encoder).tokens))
            except ValueError as error:
                raise ConfigurationError(f"{self.source}, {name}, is not a conversation: {error}") from error
        self._counted = digest.hexdigest(), np.array(lengths, dtype=np.int64)

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
        file_key, (counted, lengths) = digest.hexdigest(), self._counted
        val, train = (
            Conversations(
                self.source,
                spans[chosen],
                self._encoder,
                self.written,
                self.context_length,
                file_key=file_key,
                lengths=lengths[chosen] if counted == file_key else None,
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
            if not (end := self.written.end):
                rank_zero_warn(
                    f"the chat template of {self.tokenizer} writes nothing behind an answer, so that answers never "
                    "learn to end: let it write the end token there, {{ eos_token }}"
                )
            elif self.end_of_text is None and self.tokenizer != BYTES and not self._has_added_token(end):
                rank_zero_warn(
                    f"{end!r}, which ends an answer, is no single token of {self.tokenizer}, and inference engines "
                    "stop at a token: end answers with one that it has, by data.end_token or the chat template"
                )

    def _has_added_token(self, end: str) -> bool:
        """True if engines can stop at a token of several that end an answer."""
        return not self._encoder.added.isdisjoint(self._encoder.encode(end)[0].tolist())

    def _packed(self, conversations: Conversations, *, training: bool) -> Packed:
        length, tokens = self.context_length, conversations.lengths()
        packed = Packed(conversations, np.minimum(tokens, length), length, seed=self.seed if training else None)
        if training:
            packed.require_step(self.global_batch_size)
            # The last target of a sample lies behind its last input.
            self._packs = packed.summary("conversations", num_cut=int((tokens > length + 1).sum()))
            rank_zero_info(self._packs)
        return packed

    def _first_learnable(self, train: Conversations) -> int:
        """The first conversation of which anything is learned: refuse, or where it concerns only some say, that windows
        end before the answers begin; say that they end before these do, which the line about packs says otherwise, and
        that the template leaves answers out of what is learned.
        """
        looked_at, found, num_cut, num_left_out = train.learnable(_SAMPLE)
        cause = f"context_length={self.context_length} ends before an answer of {self.source} begins"
        if not found:
            raise ConfigurationError(f"{cause}, in all {looked_at} conversations: there is nothing to learn, raise it")
        if len(found) < looked_at:
            rank_zero_warn(f"{cause}, in {looked_at - len(found)} of {looked_at} conversations that were looked at")
        if num_cut and not self.packing:
            rank_zero_warn(
                f"context_length={self.context_length} cuts {num_cut} of {looked_at} conversations that were looked at "
                "before their answers end, so that the rest is not learned: raise it, or shorten them"
            )
        if num_left_out:
            rank_zero_warn(
                f"the chat template of {self.tokenizer} writes {num_left_out} answers of {looked_at} conversations "
                "that were looked at otherwise once other turns follow, so that they are not learned: make a "
                "conversation that ends with each of them, or give a tokenizer whose template writes all answers alike"
            )
        return found[0]


def records(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Name in messages, first byte and content of each conversation.

    Raises:
        ConfigurationError: the file is missing or cannot be read, is no regular one, empty, or a damaged array.
    """
    if not path.exists():
        raise ConfigurationError(f"the instruction file {path} does not exist: give a .jsonl or .json file")
    found = False
    try:
        check_written(path)
        with open_regular(path) as file:
            is_array = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
            file.seek(0)
            for record in _elements(path) if is_array else _lines(file, path):
                found = True
                yield record
    except OSError as error:
        raise ConfigurationError(f"the instruction file {path} cannot be read ({error.strerror})") from error
    if not found:
        raise ConfigurationError(f"the instruction file {path} is empty: give one conversation a line")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, int, bytes]]:
    """The lines that are not blank."""
    number = offset = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise ConfigurationError(f"{path}, line {number}, is longer than {_LONGEST_LINE:,} bytes: split it")
        if line.strip():
            yield f"line {number}", offset, line
        offset += len(line)


def _elements(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """The elements of an array, which is read as a whole."""
    text = read_bytes(path).decode("latin-1")  # a character for each byte, so that places are those in the file
    decoder, number, at = json.JSONDecoder(), 0, text.index("[")
    try:
        while True:
            at = _after_space(text, at + 1)
            if number > 0 or text[at : at + 1] != "]":
                number += 1
                _, end = decoder.raw_decode(text, at)
                yield f"element {number}", at, text[at:end].encode("latin-1")
                at = _after_space(text, end)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise ValueError("neither a comma nor the end of the array follows it")
        if _after_space(text, at + 1) < len(text):
            raise ValueError("something follows the end of the array, such as a second one")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not a complete JSON array: element {number}: {error}; fix it, or write one conversation "
            "per line"
        ) from error


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
