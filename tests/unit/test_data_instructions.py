"""Instruction files: what is predicted, how lines are read and split, and what a wrong line says."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from moe_lightning import ConfigurationError
from moe_lightning.data.conversations import Conversation
from moe_lightning.data.instructions import InstructionData
from moe_lightning.moe.losses import IGNORED_TARGET

CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and é?"},
        {"role": "assistant", "content": "ü"},
    ]
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    return path


def data(path: Path, **options: Any) -> InstructionData:
    options = {"context_length": 24, "global_batch_size": 1, "end_token": "\0", **options}
    made = InstructionData(path=path, **options)
    made.prepare_data()
    made.setup()
    return made


def samples(made: InstructionData) -> list[tuple[bytes, bytes]]:
    """Inputs, and targets with a dot for what is not predicted, of all conversations; bytes as tokens."""
    loaders = (made.train_dataloader(), made.val_dataloader())
    triples = [three for loader in loaders for three in (loader.dataset[i] for i in range(len(loader.dataset)))]  # type: ignore[arg-type]
    pairs = [(x, y) for x, y, _ in triples]
    shown = [torch.where(y == IGNORED_TARGET, ord("."), y) for _, y in pairs]
    assert len(pairs) >= 2, "one to train on and one to validate with"
    return [(bytes(x.tolist()), bytes(y.tolist())) for (x, _), y in zip(pairs, shown, strict=True)]


def test_only_answers_are_predicted(tmp_path: Path) -> None:
    made = data(write(tmp_path / "chat.jsonl", CHAT, CHAT), context_length=96)
    text = "<|system|>\nbe brief\n<|user|>\n2+2?\n<|assistant|>\n4\0<|user|>\nand é?\n<|assistant|>\nü\0".encode()
    for inputs, targets in samples(made):
        assert inputs[: len(text) - 1] == text[:-1]
        assert set(inputs[len(text) - 1 :]) == {0}, "padding"
        predicted = [i for i, target in enumerate(targets) if target != ord(".")]
        first = text.index(b"4")
        assert predicted == [first - 1, first, *range(len(text) - 4, len(text) - 1)]
        assert bytes(targets[i] for i in predicted) == "4\0ü\0".encode()


def test_padding_is_marked_and_what_ends_an_answer_is_not(tmp_path: Path) -> None:
    made = data(write(tmp_path / "chat.jsonl", CHAT, CHAT), context_length=96)
    x, _, is_token = made.val_dataloader().dataset[0]  # type: ignore[index]
    length = len(b"<|system|>\nbe brief\n<|user|>\n2+2?\n<|assistant|>\n4\0<|user|>\nand e?\n<|assistant|>\nu\0") + 2
    assert is_token.tolist() == [True] * length + [False] * (96 - length)
    assert x[length - 1] == x[length] == 0, "the answer's own end, then padding of the same token"
    _, _, full = data(write(tmp_path / "long.jsonl", CHAT, CHAT), context_length=60).val_dataloader().dataset[0]  # type: ignore[index]
    assert full.all()


def turns_of(line: Any) -> list[tuple[str, str | None]]:
    return [(turn.role, turn.content) for turn in Conversation.of(line).turns]


def test_forms_of_a_line() -> None:
    turns = [("user", "a"), ("assistant", "b")]
    assert turns_of({"prompt": "a", "response": "b"}) == turns
    assert turns_of({"instruction": "a", "output": "b"}) == turns
    assert turns_of({"instruction": "a", "input": "", "output": "b"}) == turns
    assert turns_of({"instruction": "a", "input": "c", "output": "b"})[0] == ("user", "a\n\nc")
    assert turns_of(CHAT)[0] == ("system", "be brief")
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert turns_of({"id": "x", "conversations": shared}) == turns
    assert turns_of({"conversations": [{"from": "system", "value": "s"}, *shared]}) == [("system", "s"), *turns]
    assert turns_of({"conversations": [{"role": "user", "content": "a"}, *shared[1:]]}) == turns
    assert turns_of({"messages": shared}) == turns


def test_what_stands_beside_the_turns_is_read() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b")]
    assert turns_of({"instruction": "a", "output": "b", "system": "s"}) == turns
    assert turns_of({"prompt": "a", "response": "b", "system": ""}) == turns[1:]
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert turns_of({"conversations": shared, "system": "s"}) == turns
    assert turns_of({"messages": CHAT["messages"], "system": "other"})[0] == ("system", "be brief")
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        assert Conversation.of({"prompt": "a", "response": "b", "tools": tools}).tools == [{"name": "f"}]


NULL = dict.fromkeys(("messages", "conversations", "prompt", "response", "instruction", "input", "output", "tools"))
UNUSED = {"from": None, "value": None, "weight": None, "tool_calls": None}


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": "a", **UNUSED}, {"role": "assistant", "content": "b", **UNUSED}]},
        {"conversations": [{"from": "human", "value": "a", "role": None}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "response": "b"},
        {"messages": [], "prompt": "a", "response": "b"},
        {"instruction": "a", "output": "b"},
        {"prompt": [{"type": "text", "text": "a", "image_url": None}], "response": "b"},
    ],
)
def test_a_key_of_null_is_absent(line: dict[str, Any]) -> None:
    assert turns_of(NULL | line) == [("user", "a"), ("assistant", "b")]


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path: Path) -> None:
    wrong = [CHAT["messages"][1], {"role": "assistant", "content": "5", "weight": 0}]
    line = {"messages": [*wrong, *CHAT["messages"][1:3]]}
    for inputs, targets in samples(data(write(tmp_path / "chat.jsonl", line, line), context_length=96)):
        assert b"5\0<|user|>" in inputs
        assert targets.replace(b".", b"") == b"4\0"


@pytest.mark.parametrize("name", ["loss", "loss_mask", "train", "training", "trainable"])
@pytest.mark.parametrize("value", [0, 0.0, False])
def test_the_marks_of_other_trainers_are_weights(name: str, value: float) -> None:
    question, answer, *others = CHAT["messages"][1:]
    for marks, is_learned in (({name: value}, False), ({name: True}, True), ({name: value, "weight": 1}, False)):
        turns = Conversation.of({"messages": [question | marks, answer | marks, *others]}).turns
        assert [turn.is_learned for turn in turns] == [False, is_learned, False, True]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_like_lines(tmp_path: Path, indent: int | None) -> None:
    entries = [CHAT, {"prompt": "é]", "response": "[ü,"}, {"instruction": "a", "output": "\u2028"}]
    (tmp_path / "array.json").write_text("\n" + json.dumps(entries, ensure_ascii=False, indent=indent) + "\n")
    lines = data(write(tmp_path / "lines.jsonl", *entries), context_length=96)
    assert samples(data(tmp_path / "array.json", context_length=96)) == samples(lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"[]", "is empty"),
        (b'[{"prompt": "a", "response": "b"}', "not a complete JSON array: element 1: neither a comma nor the end"),
        (b'[{"prompt": "a", "response": "b"},', "not a complete JSON array: element 2: Expecting value"),
        (b'[{"prompt": "a", "response": "b"}, {"text": "c"}]', "element 2, is not a conversation: it has neither"),
        (
            b'[{"prompt": "a", "response": "b"}]\n[{"prompt": "c", "response": "d"}]',
            "array: element 1: something follows the end of the array, such as a second one; fix it",
        ),
        (b'[]\n[{"prompt": "a", "response": "b"}]', "element 0: something follows the end of the array"),
        (b'[{"prompt": "\xff", "response": "b"}]', "element 1, is not a conversation: it is not UTF-8 text"),
        (b'{"prompt": "\xff", "response": "b"}', "line 1, is not a conversation: it is not UTF-8 text: invalid start"),
        (b"[" * 100_000, "element 1: maximum recursion depth"),
        (
            b'{"conversations": [{"from": "bing", "value": "c"}]}',
            "role 'bing', which is none of system, user, assistant",
        ),
        (
            b'{"prompt": "a", "response": "so \\ud83d"}',
            "line 1, is not a conversation: it holds half of a surrogate pair",
        ),
        (
            b'[{"messages": [{"role": "user", "content": "\\udc00"}, {"role": "assistant", "content": "b"}]}]',
            "'\\udc00'",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: bytes, sentence: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=re.escape(sentence)) as raised:
        data(path)
    assert str(path) in str(raised.value)
    assert "codec" not in str(raised.value)


def test_long_conversations_are_cut(tmp_path: Path) -> None:
    line = {"prompt": "q", "response": "r" * 100}
    for inputs, targets in samples(data(write(tmp_path / "long.jsonl", line, line), context_length=30)):
        assert len(inputs) == len(targets) == 30
        assert inputs.endswith(b"rr")
        assert targets.endswith(b"rr")


LONG = {"prompt": "q", "response": "r" * 100}
ASKS_ON = {"messages": [*CHAT["messages"][1:3], {"role": "user", "content": "u" * 100}]}
ASKS_AGAIN = {"messages": [*ASKS_ON["messages"], {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(("line", "packing"), [(LONG, False), (LONG, True), (ASKS_ON, False), (ASKS_AGAIN, False)])
def test_answers_that_lose_their_end_are_told_once(tmp_path: Path, line: dict[str, Any], packing: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data(write(tmp_path / "long.jsonl", *[line] * 3), context_length=30, packing=packing)
    told = [text for text in (str(warning.message) for warning in caught) if "before their answers end" in text]
    assert [text.partition(" conversations")[0] for text in told] == (
        ["context_length=30 cuts 2 of 2"] if line in (LONG, ASKS_AGAIN) else []
    )


def test_every_line_is_used_once_and_the_split_follows_the_seed(tmp_path: Path) -> None:
    lines = [{"prompt": "p", "response": f"{i:03d}"} for i in range(40)]
    path = write(tmp_path / "many.jsonl", *lines)

    def answers(**options: Any) -> tuple[set[bytes], set[bytes]]:
        made = data(path, context_length=32, val_fraction=0.25, **options)
        sets = []
        for loader in (made.train_dataloader(), made.val_dataloader()):
            windows = [loader.dataset[i][1] for i in range(len(loader.dataset))]  # type: ignore[arg-type]
            sets.append({bytes(y[y != IGNORED_TARGET].tolist()[:3]) for y in windows})
        return sets[0], sets[1]

    train, val = answers()
    assert (len(train), len(val)) == (30, 10)
    assert train | val == {line["response"].encode() for line in lines}
    assert answers() == (train, val)
    assert answers(seed=1) != (train, val)


def test_fewer_held_out_conversations_are_spread_over_all(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *[{"prompt": "p", "response": f"{i:03d}"} for i in range(40)])

    def held_out(most: int | None) -> list[bytes]:
        loader = data(path, context_length=32, val_fraction=0.25, val_samples=most).val_dataloader()
        targets = [loader.dataset[i][1] for i in range(len(loader.dataset))]  # type: ignore[arg-type]
        return [bytes(y[y != IGNORED_TARGET].tolist()[:3]) for y in targets]

    everything = held_out(None)
    assert held_out(4) == [everything[i] for i in (0, 2, 5, 7)]
    assert held_out(99) == everything


def test_loaders_serve_whole_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "some.jsonl", *[{"prompt": "p", "response": str(i)} for i in range(20)])
    made = data(path, context_length=32, global_batch_size=4, val_fraction=0.1, num_workers=1)
    batches = list(made.train_dataloader())
    assert made.summary().splitlines()[0] == f"{path}: 20 conversations, 18 for training and 2 held out"
    assert [tuple(x.shape) for x, _, _ in batches] == [(4, 32)] * 4
    for held_out in (made.val_dataloader(), made.test_dataloader(), made.predict_dataloader()):
        assert sum(len(x) for x, _, _ in held_out) == 2


def test_a_tokenizer_file(tmp_path: Path) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    bpe.train_from_iterator(
        ["hello there"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[end])
    )
    bpe.save(str(tmp_path / "tokenizer.json"))
    line = {"prompt": "hello", "response": "there"}
    path = write(tmp_path / "two.jsonl", line, line)
    made = data(path, tokenizer=str(tmp_path / "tokenizer.json"), end_token=end, context_length=40)
    assert made.vocab_size == bpe.get_vocab_size()
    _, targets, _ = made.train_dataloader().dataset[0]  # type: ignore[index]
    answer = targets[targets != IGNORED_TARGET].tolist()
    assert answer[-1] == bpe.token_to_id(end)
    assert bpe.decode(answer[:-1]).replace(" ", "") == "there"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 3, is not a conversation: it is not JSON \(Expecting property name .*, character 3\): write a"),
        ("[1]", "it is not an object"),
        ('{"text": "x"}', "it has neither messages, conversations, prompt and response"),
        ('{"messages": [{"role": "user"}]}', "it lacks 'content'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "it has no answer"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "a turn has the role .*, which is none of system"),
        ('{"messages": ["x"]}', "a turn is not an object"),
        ('{"messages": {"role": "user"}}', "messages={'role': 'user'}, which is no list: give a JSON"),
        ('{"conversations": {"from": "human"}}', "conversations={'from': 'human'}, which is no list"),
        (
            '{"prompt": "x", "response": "x", "tools": "f(x)"}',
            "tools='f.x.', which is no list: give a JSON array, or re",
        ),
        (
            '{"prompt": "x", "response": "x", "history": [["q", "a"]]}',
            "it has history beside .*: write its turns as mess",
        ),
        ('{"instruction": "x", "output": "x", "thinking": "t"}', "it has thinking beside a single answer: write"),
        ('{"prompt": 1, "response": "x"}', "a turn has the content 1, which is not text"),
        ('{"prompt": null, "response": "x"}', "it has neither messages, conversations, prompt and response"),
        (
            '{"prompt": [{"type": "image_url"}], "response": "x"}',
            "a part of the type 'image_url': only text is trained",
        ),
        ('{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}', "every answer has the weight 0"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}',
            "the weight 0.5: give 0 for an answer",
        ),
        (
            '{"messages": [{"role": "developer", "content": "x"}, {"role": "assistant", "content": "x"}]}',
            "role developer",
        ),
        ('{"prompt": "x", "response": "x", "messages": [{"role": "assistant", "tool_calls": [{}]}]}', "calls of tools"),
    ],
)
def test_wrong_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n" + line + "\n")
    with pytest.raises(ConfigurationError, match=message):
        data(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 0}, "context_length=0 of InstructionData must be an integer of at least 1"),
        ({"global_batch_size": 0}, "global_batch_size=0 of InstructionData must be an integer of at least 1"),
        ({"global_batch_size": 3}, "leaves 1 conversations for training, fewer than global_batch_size=3"),
        ({"val_fraction": 1.0}, "val_fraction=1.0 of InstructionData must be a number above 0 and below 1"),
        ({"end_token": ""}, "end_token='' of InstructionData must be text"),
        ({"tokenizer": "bpe:300"}, "tokenizer='bpe:300' is not the model's"),
        ({"tokenizer": "nowhere.json"}, "tokenizer='nowhere.json' does not exist; give the path"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "two.jsonl", CHAT, CHAT)
    with pytest.raises(ConfigurationError, match=message):
        data(path, **options)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        data(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ConfigurationError, match="is empty"):
        data(tmp_path / "empty.jsonl")
