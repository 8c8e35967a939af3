"""moe-eval --tasks: the numbers of lm-eval's own adapter for transformers, and those of a GPT; mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from moe_lightning.cli.evaluate import main
from moe_lightning.cli.language_model import TrainedText, open_language_model
from moe_lightning.data.chat_formats import MarkedTurns
from moe_lightning.data.tokenizer import ByteTokenizer, load_tokenizer
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.generation import Sampling
from tests.huggingface_models import make_checkpoint, transformers
from tests.parameters import slow
from tests.unit.test_generate import TEMPLATE, Answers, gpt, trained_run, write_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[lm-eval]'")
from moe_lightning.cli.benchmark_tasks import _Harnessed

TASKS: dict[str, dict[str, Any]] = {
    "sums": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "answer",
        "doc_to_choice": "{{choices}}",
        "num_fewshot": 1, "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "texts": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["7", "a"], "max_gen_toks": 12}, "metric_list": [{"metric": "bleu"}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tasks on a file of five questions, as their arguments; the last text is longer than the context."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    questions = [
        {
            "question": f"{i} + 1 =",
            "choices": [f" {i + 1}", f" {i}", " 123"],
            "answer": i % 2,
            "text": "3 + 4 = " * 4**i,
        }
        for i in range(4)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}}}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **data, **task}))
    return ",".join(str(tmp_path / f"{name}.yaml") for name in TASKS)


def measured(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, Any]]:
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["tasks"]


def numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{task} {name}": value for task, metrics in results.items() for name, value in metrics.items()
        if isinstance(value, float)
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("as_dialogue", "begins"), [(False, False), (True, False), (False, True)])
def test_a_folder_has_the_results_of_the_adapter_for_transformers(
    as_dialogue: bool, begins: bool, tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "model"
    make_checkpoint("olmoe", folder, vocab_size=300, max_position_embeddings=128, eos_token_id=256, bos_token_id=256)
    write_tokenizer(folder, chat_template=TEMPLATE)
    if begins:  # every text with a token
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single="<e> $A", special_tokens=[("<e>", 256)])
        tokenizer.save(str(folder / "tokenizer.json"))
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=2, max_length=128)
    options = {"tasks": tasks.split(","), "log_samples": False, "apply_chat_template": as_dialogue}
    expected = numbers(simple_evaluate(model=theirs, **options)["results"])
    capsys.readouterr()
    found = numbers(measured(capsys, folder, "--tasks", tasks, "--batch-size", 3, *["--chat"] * as_dialogue))
    assert len(expected) >= 6
    assert found == pytest.approx(expected, rel=1e-4)
    assert main([str(folder), f"--tasks={tasks}", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder} on tasks of lm-eval"
    assert lines[1].split() == ["task", "metric", "value", "standard", "error"]
    assert {line.split()[0] for line in lines[2:]} == set(TASKS)


def test_an_answer_inside_the_last_token_of_its_question_has_its_own_tokens() -> None:
    """It would have no tokens, and with them the likelihood 1."""
    words = {"2 =": [2, 3], "2 =1": [2, 9], "1": [1], "\n": [4]}

    def encode(text: str) -> tuple[torch.Tensor, None]:
        return torch.tensor(words[text]), None

    model = SimpleNamespace(
        is_ours=True, theirs=None, ends=frozenset(),
        text=SimpleNamespace(
            decode=lambda _: "\n", begin=lambda text: words[text], tokenizer=SimpleNamespace(encode=encode)
        ),
    )  # fmt: skip
    asked = _Harnessed(model, 1, None)
    assert asked._encode_pair("2 =", "1") == ([2, 3], [1])
    with pytest.raises(ConfigurationError, match="--tasks: an answer is empty"):
        asked._encode_pair("2 =", "")


@pytest.mark.parametrize("end", ["<end>", "E"])
def test_an_answer_of_a_dialogue_ends_as_its_format_says(end: str) -> None:
    """Also where that is no token, or none of those at which the model's generation ends."""
    tokenizer = ByteTokenizer()

    def generate(ids: list[int], sampling: Any, count: int, is_done: Any) -> None:
        assert any(is_done(token) for token in f"42{end}<|user|>\nmore".encode())

    model = SimpleNamespace(
        is_ours=True, theirs=None, ends=frozenset(), positions=64, generate=generate, check=lambda *_: None,
        text=TrainedText(tokenizer, "bytes"),
    )  # fmt: skip
    options = {"until": ["Q:"], "max_gen_toks": 20}
    assert _Harnessed(model, 1, MarkedTurns(end))._continued("6 * 7?", options) == "42"


def test_an_answer_of_a_folder_is_that_of_the_adapter_for_transformers(tmp_path: Path) -> None:
    """Without special tokens, up to the end of the tokenizer, and sampled as the folder and transformers prefer."""
    write_tokenizer(tmp_path, additional_special_tokens=["<x>"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chosen = []

    def generate(ids: list[int], sampling: Any, count: int, is_done: Any) -> None:
        chosen.append(sampling)
        assert [is_done(token) for token in theirs.encode("4<x>2<e>")] == [False] * 3 + [True]

    model = SimpleNamespace(
        is_ours=False, theirs=theirs, ends=frozenset(), positions=64, generate=generate, check=lambda *_: None,
        text=SimpleNamespace(
            decode=theirs.decode, begin=theirs.encode, tokenizer=load_tokenizer(str(tmp_path / "tokenizer.json"))
        ),
        network=SimpleNamespace(
            config=transformers.OlmoeConfig(), generation_config=transformers.GenerationConfig(top_p=0.7)
        ),
    )  # fmt: skip
    options = {"until": ["Q:"], "max_gen_toks": 20, "do_sample": True, "temperature": 0.5}
    assert _Harnessed(model, 1, None)._continued("6 * 7?", options) == "42"
    assert chosen == [Sampling(temperature=0.5, top_k=50, top_p=0.7)]
    with pytest.raises(ConfigurationError, match=r"temperature=1e-40 .* of at least 0\.001"):
        _Harnessed(model, 1, None)._continued("6 * 7?", {**options, "temperature": 1e-40})


def test_a_text_begins_as_the_tokenizer_says(tmp_path: Path) -> None:
    """The config.json of a Qwen names a beginning that its tokenizer does not have."""
    make_checkpoint("olmoe", tmp_path, vocab_size=300, bos_token_id=7, eos_token_id=9)
    write_tokenizer(tmp_path)
    theirs = open_language_model(str(tmp_path), device="cpu")
    trained = replace(theirs, text=TrainedText(ByteTokenizer(), ""))
    found = [_Harnessed(model, 1, None).prefix_token_id for model in (theirs, trained)]
    assert found == [256, 9], "the end of the tokenizer, or that of the generation"


def test_a_run_of_a_gpt(tasks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text is in one window, whose first token follows a new line."""
    options = {"vocab_size": 256, "context_length": 64}
    run = trained_run(tmp_path / "run", {"tokenizer": "bytes"}, **options)
    found = numbers(measured(capsys, run, "--tasks", tasks, "--limit", 1))
    ids = torch.tensor(list(b"\n" + b"3 + 4 = "))
    logits = gpt(**options).model(ids[None, :-1])[0].detach()
    loss = torch.nn.functional.cross_entropy(logits, ids[1:]) / torch.log(torch.tensor(2.0))
    assert found["rolling bits_per_byte,none"] == pytest.approx(float(loss), rel=1e-5)
    assert {"sums acc,none", "texts bleu,none"} <= set(found)


def test_long_answers_leave_half_of_the_context_to_the_question(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer may be longer than the context of a GPT, of which the older half then goes."""
    answers = Answers(monkeypatch, *["7"] * 4)
    run = trained_run(tmp_path / "run", {"tokenizer": "bytes"}, vocab_size=256, context_length=12)
    measured(capsys, run, "--tasks", tasks.split(",")[-1])
    assert answers.prompts == [f"{i} + 1 ="[-6:] for i in range(4)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        slow(["--tasks", "no_such_task"], ["--tasks no_such_task is neither a task of lm-eval", "lm-eval ls tasks"]),
        (["--tasks", ","], ["--tasks is empty"]),
        slow(["--tasks", "broken.yaml"], ["--tasks broken.yaml cannot be loaded"]),
        (["--tasks", "arc_easy", "text.txt"], ["give either a FILE or --tasks"]),
        (["--tasks", "arc_easy", "--context-length", "8"], ["--context-length is for a file"]),
        (["text.txt", "--limit", "8"], ["--limit is for tasks: leave it out"]),
        (["text.txt", "--num-fewshot", "0"], ["--num-fewshot is for tasks"]),
        (["text.txt", "--chat"], ["--chat is for tasks"]),
        slow(["--tasks", "broken.yaml", "--chat"], ["has no chat template"]),
        (["--tasks", "arc_easy", "--limit", "0"], ["0 must be an integer of at least 1"]),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    trained_run(Path("run"), {"tokenizer": "bytes"})
    Path("text.txt").write_text("0123")
    Path("broken.yaml").write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.jsonl}\n")
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert [word for word in words if word not in captured.err] == [], captured.err
