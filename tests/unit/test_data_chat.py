"""Conversations as the tokenizers of models write them, and what of them is predicted."""

from __future__ import annotations

import json
import warnings
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moe_lightning import ConfigurationError
from moe_lightning.data.chat_formats import MarkedTurns, chat_format, encode
from moe_lightning.data.conversations import Conversation, Turn
from moe_lightning.data.instructions import InstructionData
from moe_lightning.data.tokenizer import load_tokenizer
from moe_lightning.moe.losses import IGNORED_TARGET

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Earlier answers lose what they thought, as in several reasoning models.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML
TURNS = [("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", "e f")]


def said(*turns: tuple[str, str]) -> Conversation:
    return Conversation.of({"messages": [{"role": role, "content": content} for role, content in turns]})


def tokenizer_folder(folder: Path, template: str | None, **settings: Any) -> str:
    """A byte-level tokenizer with special tokens, saved as checkpoints have it; the path of its tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, **{"eos_token": "<|end|>", **settings})
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder / "tokenizer.json")


def test_without_a_template_turns_are_marked_and_end_with_the_tokenizers_end(tmp_path: Path) -> None:
    written = chat_format(tokenizer_folder(tmp_path, None), None)
    asked = [("<|user|>\n", False), ("a b", False), ("\n", False)]
    assert written.pieces(said(*TURNS[:2])) == [*asked, ("<|assistant|>\n", False), ("c", True), ("<|end|>", True)]
    assert chat_format("bytes", None).padding == "<|endoftext|>"
    assert chat_format("bytes", "\0").padding == "\0"


def test_a_template_writes_all_and_only_answers_are_predicted(tmp_path: Path) -> None:
    pieces = chat_format(tokenizer_folder(tmp_path, CHATML), None).pieces(said(("system", "s"), *TURNS))
    whole = "".join(text for text, _ in pieces)
    assert whole.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na b<|im_end|>\n")
    assert [text for text, is_predicted in pieces if is_predicted] == ["c<|im_end|>\n", "e f<|im_end|>\n"]


SYSTEM_OF_ITS_OWN = "{{ bos_token }}<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML


@pytest.mark.parametrize("turns", [TURNS[1:], TURNS[1:2], [("assistant", ""), *TURNS]], ids=["three", "one", "empty"])
@pytest.mark.parametrize("template", [CHATML, SYSTEM_OF_ITS_OWN], ids=["plain", "system"])
def test_a_conversation_may_begin_with_an_answer(turns: list[tuple[str, str]], template: str, tmp_path: Path) -> None:
    """As those of ShareGPT often do."""
    pieces = chat_format(tokenizer_folder(tmp_path, template, bos_token="<|end|>"), None).pieces(said(*turns))
    answers = [content for role, content in turns if role == "assistant"]
    assert [text for text, is_predicted in pieces if is_predicted] == [f"{answer}<|im_end|>\n" for answer in answers]
    before = "<|end|><|im_start|>system\nBe brief.<|im_end|>\n" if template != CHATML else ""
    written = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert "".join(text for text, _ in pieces) == before + written


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML,
            "the chat template of the tokenizer refuses it: user first",
        ),
        (
            CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"),
            "writes the last answer otherwise than it asks for it",
        ),
    ],
)
def test_an_answer_that_the_template_does_not_write_first(template: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        chat_format(tokenizer_folder(tmp_path, template), None).pieces(said(*TURNS[1:]))


def test_a_template_that_rewrites_earlier_answers_has_its_last_one_predicted(tmp_path: Path) -> None:
    turns = [("user", "q"), ("assistant", "<think>x</think>one"), ("user", "r"), ("assistant", "<think>y</think>two")]
    pieces = chat_format(tokenizer_folder(tmp_path, FORGETFUL), None).pieces(said(*turns))
    assert [text for text, is_predicted in pieces if is_predicted] == ["<think>y</think>two<|im_end|>\n"]
    assert "<think>x" not in "".join(text for text, _ in pieces)


# As Qwen3's: of earlier turns than the last question nothing is kept that an answer has reasoned.
SINCE_THE_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] and loop.index0 > ns.last %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_each_answer_that_is_written_as_it_is_asked_for_is_predicted(tmp_path: Path) -> None:
    """Whatever the template makes of the others."""
    written = chat_format(tokenizer_folder(tmp_path, SINCE_THE_LAST_QUESTION), None)
    thinks, asks = {"role": "assistant", "reasoning_content": "t"}, {"role": "user", "content": "q"}
    call = {**thinks, "tool_calls": [{"function": {"name": "f"}}]}
    turns = [asks, {**thinks, "content": "a"}, asks, call, {"role": "tool", "content": "r"}, {**thinks, "content": "b"}]
    conversation = Conversation.of({"messages": turns})
    learned = [text for text, is_predicted in written.pieces(conversation) if is_predicted]
    assert learned == ['<think>t</think>{"name": "f"}<|im_end|>\n', "<think>t</think>b<|im_end|>\n"]


@pytest.mark.parametrize("call", ["strftime_now('%Y-%m-%d')", 'strftime_now( "%B %d, %Y" )'])
def test_a_template_that_writes_the_date_has_the_same_tokens_on_every_day(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils

    path = tokenizer_folder(tmp_path / "model", "Today: {{ " + call + " }}\n" + CHATML)
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"prompt": "p", "response": "r"})] * 3))

    def key(day: int) -> str:
        monkeypatch.setattr(
            chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2026, 11, day, tzinfo=UTC))
        )
        data = InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path, context_length=128, global_batch_size=1)
        data.setup()
        assert "Today: " in data.summary()
        return data.train_dataloader().dataset.data_key

    assert key(29) == key(30)


# Answers have no end: the token of the next turn is their end.
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if not loop.first %}{{ 'GAP' }}{% endif %}"
    "<|{{ 'observation' if m['role'] == 'tool' else m['role'] }}|>{{ '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'GAP' }}<|assistant|>{{ '\n' }}{% endif %}"
)
ROLES = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]


@pytest.mark.parametrize("gap", ["", "\n"])
def test_an_answer_without_an_end_is_ended_by_the_token_of_the_next_turn(tmp_path: Path, gap: str) -> None:
    path = tokenizer_folder(tmp_path, GLM.replace("GAP", gap), additional_special_tokens=ROLES)
    written = chat_format(path, None)
    asks, answers = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    returns = {"role": "tool", "content": "t"}

    def learned(*messages: dict[str, Any]) -> list[str]:
        encoded = encode(Conversation.of({"messages": list(messages)}), written, load_tokenizer(path))
        places = encoded.places[encoded.is_predicted].tolist()
        return "".join(encoded.text[start:end] for start, end in places).replace(gap or "?", "").split("|>")

    assert learned(asks, answers) == ["c<|user", ""]
    assert learned(asks, answers, asks, answers) == ["c<|user", "c<|user", ""]
    assert learned(asks, calls, returns, answers) == ["f<|observation", "c<|user", ""]
    assert learned(asks, calls) == ["f<|observation", ""]
    assert learned(asks, answers, asks) == ["c<|user", ""]
    assert learned(asks, {**answers, "weight": 0}, asks, answers) == ["c<|user", ""]
    assert learned(asks, answers, {"role": "system", "content": "s"}, asks, answers) == ["cc<|user", ""]
    assert written.end == "<|user|>"
    end = InstructionData(path=tmp_path, tokenizer=path).end_of_text
    assert end == Tokenizer.from_file(path).token_to_id("<|user|>")


def test_an_answer_without_an_end_may_be_written_otherwise_as_the_last_turn(tmp_path: Path) -> None:
    """As by templates that show only of the last answer what it thought."""
    last = "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] or '' }}"
    template = GLM.replace("GAP", "").replace("'\n' + (m['content'] or '') }}", "'\n' }}" + last)
    path = tokenizer_folder(tmp_path, template, additional_special_tokens=["[gMASK]", *ROLES])
    written = chat_format(path, None)
    assert written.end == "<|user|>"
    assert written.pieces(said(*TURNS))[-1] == ("<|user|>", True)


@pytest.mark.parametrize("has_end", [False, True])
def test_a_template_without_an_end_is_warned_of_once(tmp_path: Path, has_end: bool) -> None:
    template = CHATML if has_end else CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "### ")
    path = tokenizer_folder(tmp_path / "model", template)
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"prompt": "p", "response": "r"})] * 2))
    data = InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path, context_length=64, global_batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup()
        data.setup()
    told = [warning for warning in caught if "answers never learn to end: let it write" in str(warning.message)]
    assert len(told) == (not has_end)


def test_targets_are_the_answers_in_the_tokens_of_the_model(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path / "model", CHATML)
    lines = [{"prompt": "hello", "response": "you"}] * 2
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path, context_length=64, global_batch_size=1)
    data.prepare_data()
    data.setup()
    inputs, targets, _ = data.train_dataloader().dataset[0]
    raw = Tokenizer.from_file(path)
    predicted = targets[torch.ne(targets, IGNORED_TARGET)].tolist()
    assert raw.decode(predicted, skip_special_tokens=False) == "you<|im_end|>\n"
    assert raw.decode(inputs.tolist(), skip_special_tokens=False).startswith("<|im_start|>user\nhello<|im_end|>\n")
    assert int(inputs[-1]) == raw.token_to_id("<|end|>"), "padding"
    assert raw.token_to_id("<|im_start|>") in inputs.tolist(), "special tokens are tokens, not text"


def test_a_conversation_is_written_once_for_all_comparisons_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = chat_format(tokenizer_folder(tmp_path, CALLING), None)
    write, texts = written._tokenizer.apply_chat_template, list[str]()  # type: ignore[union-attr]
    monkeypatch.setattr(
        written._tokenizer,  # type: ignore[union-attr]
        "apply_chat_template",
        lambda *given, **options: texts.append(write(*given, **options)) or texts[-1],
    )
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    written.check(Conversation.of({"messages": [{"role": "user", "content": "a"}, *[calls] * 5]}))
    assert len(texts) == 1 + 5


def test_what_a_template_refuses_is_told_with_its_line(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path / "model", STRICT)
    line = {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a"))]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(
        ConfigurationError, match=r"line 1, is not a conversation: the chat template .* no system turns"
    ):
        InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path).prepare_data()


MIXTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ ' [INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def sentencepiece_folder(folder: Path, kind: str, template: str | None) -> str:
    """A tokenizer that begins a text with a space, as those of Llama 2, Mistral and Mixtral do."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set("abcdefghijklmnopqrstuvwxyz[]/INST<>|.?!▁\n"))
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters, "▁a", "▁c", "▁▁"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "c"), ("▁", "▁")], unk_token="<unk>"))
    if kind == "prepend":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>")])
    raw.enable_truncation(4)  # what the file says of lengths is not for training
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("template", [MIXTRAL, ZEPHYR, None], ids=["mixtral", "zephyr", "marked"])
@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
def test_the_tokens_of_a_conversation_are_those_of_its_whole_text(
    tmp_path: Path, kind: str, template: str | None
) -> None:
    path = sentencepiece_folder(tmp_path / "model", kind, template)
    messages = [{"role": role, "content": content} for role, content in TURNS]
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 2))
    data = InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path, context_length=128, global_batch_size=1)
    data.prepare_data()
    data.setup()
    inputs, targets, is_token = data.train_dataloader().dataset[0]
    raw = Tokenizer.from_file(path)
    raw.no_truncation()
    whole = raw.encode("".join(text for text, _ in data.written.pieces(said(*TURNS))), add_special_tokens=False).ids
    assert inputs[is_token].tolist() == whole
    learned = [raw.id_to_token(token) for token in targets.tolist() if token != IGNORED_TARGET]
    answers = "".join(learned).replace("▁", " ").replace("\n", "").split("</s>")
    assert [answer.strip() for answer in answers] == ["c", "e f", ""]
    assert (learned[0] == "▁c") == (template == MIXTRAL), "a space only where the template writes one"


def test_an_example_shows_what_is_learned(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * 500 + "\x1b", "response": "r\n"}] * 2
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = InstructionData(path=tmp_path / "chat.jsonl", context_length=1024, global_batch_size=1, end_token="\0")
    data.setup()
    line = data.summary().splitlines()[1]
    assert line.startswith("3 of the 528 tokens of a conversation are learned, those in «»: <|user|>\\npppp")
    assert line.endswith("pp\\x1b\\n<|assistant|>\\n«r\\n\\x00»")
    assert len(line) < 300


CALLING = (
    "{% if tools %}{% for t in tools %}<|im_start|>tool {{ t['name'] }}<|im_end|>{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m['role'] in ('user', 'assistant') %}" + CHATML.partition("%}")[2]
CALL = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
USES_TOOLS: list[dict[str, Any]] = [
    {"role": "developer", "content": "d"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "t", "tool_call_id": "1"},
    {"role": "assistant", "content": "a"},
]


def test_tools_are_written_as_the_template_has_them(tmp_path: Path) -> None:
    written = chat_format(tokenizer_folder(tmp_path, CALLING), None)
    uses = Conversation.of({"messages": USES_TOOLS, "tools": [{"name": "f"}]})
    written.check(uses)
    pieces = written.pieces(uses)
    assert pieces[0][0].startswith("<|im_start|>tool f<|im_end|><|im_start|>developer\nd<|im_end|>")
    calls = '{"name": "f", "arguments": {"x": 1}}<|im_end|>\n'
    assert [text for text, is_predicted in pieces if is_predicted] == [calls, "a<|im_end|>\n"]


@pytest.mark.parametrize("arguments", ['{"x": "ü"}', {"x": "ü"}])
def test_a_template_may_want_the_arguments_of_calls_as_text(arguments: Any, tmp_path: Path) -> None:
    """As those of DeepSeek do."""
    template = CALLING.replace("c['function'] | tojson", "c['function']['name'] + ' ' + c['function']['arguments']")
    written = chat_format(tokenizer_folder(tmp_path, template), None)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    uses = Conversation.of({"messages": [USES_TOOLS[1], call, *USES_TOOLS[3:]]})
    written.check(uses)
    learned = [text for text, is_predicted in written.pieces(uses) if is_predicted]
    assert learned == ['f {"x": "ü"}<|im_end|>\n', "a<|im_end|>\n"]


def test_nulls_inside_tools_and_their_calls_are_absent(tmp_path: Path) -> None:
    """Arrow gives every row of a joined data set the parameters of all tools; JSON text keeps what it says."""
    written = chat_format(tokenizer_folder(tmp_path, CALLING.replace("t['name']", "t | tojson")), None)
    row = {"name": "f", "arguments": {"x": 1, "y": None, "z": [None, {"a": None}]}}
    text = {"name": "g", "arguments": '{"x": null}'}
    answer = {"role": "assistant", "tool_calls": [{"function": row}, {"function": text}]}
    tool = {"name": "f", "properties": {"x": {"type": "number"}, "y": None}}
    uses = Conversation.of({"messages": [USES_TOOLS[1], answer], "tools": [tool]})
    (offered, _), (called, _) = written.pieces(uses)
    assert '{"name": "f", "properties": {"x": {"type": "number"}}}' in offered
    expected = '{"name": "f", "arguments": {"x": 1, "z": [null, {}]}}{"name": "g", "arguments": {"x": null}}'
    assert called == f"{expected}<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "line", "sentence"),
    [
        (CHATML, {"messages": [USES_TOOLS[1], {**USES_TOOLS[2], "content": ""}]}, "leaves out calls of tools"),
        (CHATML, {"messages": USES_TOOLS[:2] + USES_TOOLS[4:], "tools": [{"name": "f"}]}, "leaves out the tools"),
        (NO_SYSTEM, {"messages": USES_TOOLS[:2] + USES_TOOLS[4:]}, "leaves out turns of the role developer"),
        (NO_SYSTEM, {"messages": USES_TOOLS[1:2] + USES_TOOLS[3:]}, "leaves out turns of the role tool"),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    tmp_path: Path, template: str, line: dict[str, Any], sentence: str
) -> None:
    path = tokenizer_folder(tmp_path / "model", template)
    (tmp_path / "chat.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigurationError, match=f"line 1, is not a conversation: the chat template .* {sentence}"):
        InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path).prepare_data()


def test_an_empty_list_of_calls_leaves_out_nothing(tmp_path: Path) -> None:
    turns = [USES_TOOLS[1], {**USES_TOOLS[4], "tool_calls": []}]
    for written in (chat_format(tokenizer_folder(tmp_path, CHATML), None), MarkedTurns("\0")):
        written.check(Conversation.of({"messages": turns, "tools": []}))


# Writes what the last answer has thought, and forgets it of earlier ones.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['thinking'] %}<think>{{ m['thinking'] }}</think>{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reasoned(**keys: Any) -> Conversation:
    answer = {"role": "assistant", "content": "c", **keys}
    return Conversation.of({"messages": [USES_TOOLS[1], answer, USES_TOOLS[1], {**USES_TOOLS[4], **keys}]})


def test_reasoning_that_a_template_writes_is_learned(tmp_path: Path) -> None:
    written = chat_format(tokenizer_folder(tmp_path, THINKING), None)
    for keys in ({"thinking": "two"}, {"thinking": "two", "reasoning": "two"}):
        written.check(reasoned(**keys))
        learned = [text for text, is_predicted in written.pieces(reasoned(**keys)) if is_predicted]
        assert learned == ["<think>two</think>a<|im_end|>\n"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_is_not_written_is_refused(tmp_path: Path, name: str) -> None:
    written = chat_format(tokenizer_folder(tmp_path, CHATML), None)
    written.check(reasoned(**{name: ""}))
    with pytest.raises(ValueError, match=f"leaves out {name} of an answer"):
        written.check(reasoned(**{name: "two"}))
    with pytest.raises(ValueError, match=f"it has {name}, and without a chat template there is only content: write it"):
        MarkedTurns("\0").check(reasoned(**{name: "two"}))
    MarkedTurns("\0").check(Conversation((*reasoned().turns, Turn("assistant", "b", False, {name: "two"}))))


def test_a_file_that_changes_under_a_run_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "p", "response": "r"})] * 2))
    data = InstructionData(path=path, context_length=64, global_batch_size=1)
    data.setup()
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(ConfigurationError, match=r"chat.jsonl has changed since the run began: at byte \d+ "):
        data.train_dataloader().dataset[0]


def test_folders_that_say_too_little(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path, None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"names no end token .*: give data.end_token"):
        chat_format(path, None)
    assert isinstance(chat_format(path, "<|im_end|>"), MarkedTurns)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        chat_format(path, None)


def test_a_template_may_refuse_the_conversation_that_shows_its_end(tmp_path: Path) -> None:
    """A checkpoint asks for the end of answers in the middle of a training."""
    template = "{% if messages|length < 4 %}{{ raise_exception('too short') }}{% endif %}{{ messages[-1].content }}"
    path = tokenizer_folder(tmp_path, template)
    assert InstructionData(path=tmp_path / "chat.jsonl", tokenizer=path).state_dict() == {"tokenizer_origin": path}


def test_a_template_ends_answers_itself(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path, "{{ messages }}")
    with pytest.raises(ConfigurationError, match=r"^end_token='<x>' is for a tokenizer .*: leave end_token out$"):
        chat_format(path, "<x>")


def test_a_set_without_a_token_to_learn_is_refused(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * 50, "response": "r"}] * 4
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = InstructionData(path=tmp_path / "long.jsonl", context_length=40, global_batch_size=1)
    with pytest.raises(ConfigurationError, match=r"context_length=40 ends before an answer .* in all 3 conversations"):
        data.setup()
    lines[:3] = [{"prompt": "p", "response": "r"}] * 3
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    seed = next(s for s in range(20) if np.random.default_rng(s).permutation(4)[0] != 3)  # the long one is trained on
    mixed = InstructionData(path=tmp_path / "long.jsonl", context_length=40, global_batch_size=1, seed=seed)
    with pytest.warns(UserWarning, match=r"cuts 1 of 3 conversations"):
        mixed.setup()


TIGHT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>{% endif %}"
)


@pytest.mark.parametrize("strips", ["lstrip", "rstrip"])
@pytest.mark.parametrize("answer", ["c", "  c", ""])
def test_a_special_token_that_strips_white_space_belongs_to_its_own_turn(
    tmp_path: Path, strips: str, answer: str
) -> None:
    """As those of Phi-3 do: they cover white space of the answer before or behind them."""
    path = tokenizer_folder(tmp_path, TIGHT)
    raw = json.loads(Path(path).read_text())
    for token in raw["added_tokens"]:
        token[strips] = True
    Path(path).write_text(json.dumps(raw))
    turns = [("user", "a"), ("assistant", answer), ("user", "d")]
    encoded = encode(said(*turns), chat_format(path, None), load_tokenizer(path))
    learned = "".join(encoded.text[start:end] for start, end in encoded.places[encoded.is_predicted])
    assert learned.strip() == f"{answer.strip()}<|end|>"
