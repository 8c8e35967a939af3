"""Conversations: the forms in which files have them, and the reader of such files.

The file holds one JSON object a line, or one JSON array of objects. An object is {"messages": [{"role", "content"},
...]}, {"conversations": [{"from", "value"}, ...]} as ShareGPT has it, {"prompt", "response"}, or {"instruction",
"output"} with an optional "input"; a key whose value is null is absent. "system" and "tools" may stand beside all of
them. Answers are learned, but for those of "weight": 0.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_written, decoded, open_regular, read_bytes

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer for what it thinks."""

MARKED_ROLES = ("system", "user", "assistant")
"""Roles that need no chat template."""

_ROLES = (*MARKED_ROLES, "developer", "tool")
_ROLE_OF = {"human": "user", "gpt": "assistant"}  # ShareGPT's words
_WEIGHTS = ("weight", "loss", "loss_mask", "train", "training", "trainable")
"""Keys by which trainers mark answers that are not learned: by 0, or false."""
_LONGEST_LINE = 1 << 26  # bytes
_SPACE = re.compile(r"[ \t\n\r]*")


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
        weights = [rest.pop(name) for name in _WEIGHTS if name in rest]
        role = message[names[0]]
        if is_shared and isinstance(role, str):
            role = _ROLE_OF.get(role, role)
        calls_only = role == "assistant" and rest.get("tool_calls") and names[1] not in message
        content = None if calls_only else _text(message[names[1]])
        if role not in _ROLES:
            raise ValueError(f"a turn has the role {shown(role)}, which is none of {', '.join(_ROLES)}")
        for weight in weights:
            if weight not in (0, 1):
                raise ValueError(
                    f"a turn has the weight {shown(weight)}: give 0 for an answer that is not learned, or 1"
                )
        return cls(role, content, role == "assistant" and all(weights), rest)

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
        elif name := next((name for name in ("history", *REASONING) if line.get(name)), None):
            raise ValueError(f"it has {name} beside a single answer: write its turns as messages")
        elif "prompt" in line and "response" in line:
            turns = exchange(line["prompt"], line["response"])
        elif "instruction" in line and "output" in line:
            question = [_text(line[name]) for name in ("instruction", "input") if name in line]
            turns = exchange("\n\n".join(filter(None, question)), line["output"])
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

    def with_turn(self, index: int, turn: Turn) -> Conversation:
        """Return the conversation with another turn in the place of one."""
        return replace(self, turns=(*self.turns[:index], turn, *self.turns[index + 1 :]))


def _list(thing: Any, name: str) -> Sequence[Any]:
    """A list, or the JSON text of one."""
    with suppress(json.JSONDecodeError):
        thing = json.loads(thing) if isinstance(thing, str) else thing
    if not isinstance(thing, list | tuple):
        raise ValueError(f"it has {name}={shown(thing)}, which is no list: give a JSON array, or remove it")
    return thing


def exchange(question: Any, answer: Any) -> tuple[Turn, ...]:
    """Return a question and its answer."""
    return Turn("user", _text(question)), Turn("assistant", _text(answer), True)


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
