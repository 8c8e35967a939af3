"""moe-generate: greedy text is that of a loop without cache, or of transformers; streams, dialogues, mistakes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from moe_lightning import ExpertParallelStrategy
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.checkpoint.files import write_file
from moe_lightning.checkpoint.inspect import checkpoint_files
from moe_lightning.cli.expert_edits import ExpertEdit, edit_file
from moe_lightning.cli.generate import TextStream, main
from moe_lightning.cli.language_model import TrainedText, open_language_model
from moe_lightning.cli.run_directory import checkpoints
from moe_lightning.cli.saved_model import open_saved
from moe_lightning.data.documents import source_files
from moe_lightning.data.token_folder import Recipe, write_token_folder
from moe_lightning.data.tokenizer import ByteTokenizer
from moe_lightning.errors import CheckpointError, ConfigurationError
from moe_lightning.models.generation import Sampling, generate
from moe_lightning.models.gpt import GPT
from moe_lightning.models.gpt_module import GPTModule
from moe_lightning.moe.adapters import add_adapters
from tests.agents import ForkedAgent
from tests.distributed.training import RandomTokens, quiet, quiet_trainer
from tests.huggingface_models import DENSE, SPARSE, VARIANTS, logits_of, make_checkpoint, reloaded, transformers
from tests.parameters import slow

PROMPT = "1 + 2 = "  # bytes below 64, which every small model knows
IDS = list(PROMPT.encode())
GREEDY = Sampling()
SMALL: dict[str, Any] = {
    "vocab_size": 64, "context_length": 24, "num_layers": 2, "num_heads": 4, "d_model": 32, "num_experts": 4,
    "moe_every": 1, "init_std": 0.4,
}  # fmt: skip
STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "dense": {"num_experts": 0},
    "llama": {
        "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": False, "qk_norm": True,
        "num_kv_heads": 2, "tie_embeddings": False,
    },
    "deepseek": {"router": {"score": "sigmoid", "top_k": 2}, "num_shared_experts": 1, "num_dense_layers": 1},
    "dropout": {"dropout": 0.5, "position": "rope"},
}  # fmt: skip


def gpt(**options: Any) -> GPTModule:
    torch.manual_seed(1)
    module = GPTModule({**SMALL, **options})
    module.configure_model()
    return module.eval()


def save(module: Any, path: Path, **more: Any) -> Path:
    """A checkpoint file, as a training writes it."""
    values = {**more, "hyper_parameters": dict(module.hparams), "pytorch-lightning_version": lightning.__version__}
    write_file({"state_dict": module.state_dict(), "global_step": 3, **values}, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must succeed; return what it wrote."""
    assert main(list(map(str, arguments))) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@torch.no_grad()
def without_cache(model: GPT, ids: Sequence[int], count: int) -> list[int]:
    """Compute everything for every token; of a full context the newer half is kept."""
    sequence, new = list(ids), list[int]()
    for _ in range(count):
        if len(sequence) > model.config.context_length:
            sequence = sequence[-(model.config.context_length // 2) :]
        new.append(int(model(torch.tensor([sequence]))[0, -1].argmax()))
        sequence.append(new[-1])
    return new


@pytest.mark.parametrize("style", STYLES)
def test_cached_text_is_that_of_a_loop_without_cache(style: str) -> None:
    module = gpt(**STYLES[style])
    expected = without_cache(module.model, IDS, 30)
    assert len(set(expected)) > 1
    assert list(generate(module.model, IDS, GREEDY, 30)) == expected
    logits = module.model(torch.tensor([IDS]))
    assert logits.shape == (1, len(IDS), 64), "the model is as it was"


@pytest.mark.parametrize("style", ["gpt2", "dense"])
def test_a_model_is_opened_in_the_precision_of_its_training(style: str, tmp_path: Path) -> None:
    trained = gpt(**STYLES[style]).bfloat16()
    network = open_language_model(str(save(trained, tmp_path / "run.ckpt")), tokenizer="bytes").network
    assert network.token_embedding.weight.dtype == torch.bfloat16
    assert list(generate(network, IDS, GREEDY, 5)) == list(generate(trained.model, IDS, GREEDY, 5))


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 0.5, "top_k": 5}, {"temperature": 1.5, "top_p": 0.7},
     {"temperature": 0.8, "top_k": 9, "top_p": 0.4}, {"temperature": 1.0, "top_k": 1},
     {"temperature": 2.0, "top_p": 1e-9}],
)  # fmt: skip
def test_tokens_are_sampled_as_transformers_samples_them(options: dict[str, Any]) -> None:
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = [TemperatureLogitsWarper(options["temperature"])]
    processors += [TopKLogitsWarper(options["top_k"])] if "top_k" in options else []
    processors += [TopPLogitsWarper(options["top_p"])] if "top_p" in options else []
    for seed in range(20):
        scores = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
        logits = scores[0].clone()
        for processor in processors:
            scores = processor(None, scores)
        torch.manual_seed(seed)
        expected = int(scores.softmax(-1).multinomial(1))
        torch.manual_seed(seed)
        assert Sampling(**options).choose(logits) == expected


TEXT = {**SPARSE, **DENSE}
del TEXT["swinv2"]


@pytest.mark.parametrize("name", [slow(name) if name in VARIANTS else name for name in TEXT])
def test_greedy_text_of_every_family_is_that_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder, and from a checkpoint of ours over it, whose experts are our layers."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    theirs = make_checkpoint(name, tmp_path / "theirs")
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = theirs.generate(torch.tensor([IDS]), attention_mask=torch.ones(1, len(IDS)), **options)[0].tolist()
    upcycling = {"upcycling": {"num_experts": 4, "router": {"top_k": 2, "softmax_after_top_k": True}}}
    config = {"pretrained": str(tmp_path / "theirs"), "context_length": 16, **(upcycling if name in DENSE else {})}
    module = HuggingFaceModule(config)
    module.configure_model()
    for path in (tmp_path / "theirs", save(module, tmp_path / "run.ckpt")):
        out = run(capsys, path, PROMPT, "--greedy", "--max-new-tokens", 12, "--tokenizer", "bytes")
        assert list(out.removesuffix("\n").encode()) == expected
    assert len(set(expected)) > len(set(IDS))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_are_added_to_the_weights_of_their_base(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_lightning.cli.huggingface import export_checkpoint
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    make_checkpoint("olmoe", tmp_path / "base")
    options = {"adapter": {"kind": kind, "rank": 3, "alpha": 9.0, "targets": ["experts", "attention", "router"]}}
    module = HuggingFaceModule({"pretrained": str(tmp_path / "base"), "context_length": 16, **options})
    module.configure_model()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    path = save(module, tmp_path / "run.ckpt")
    export_checkpoint(path, tmp_path / "merged", dtype="float32")
    texts = [
        run(capsys, place, PROMPT, "--greedy", "--max-new-tokens", 20, "--tokenizer", "bytes")
        for place in (path, tmp_path / "merged", tmp_path / "base")
    ]
    assert texts[0] == texts[1] != texts[2]
    if kind == "lora":
        export_checkpoint(path, tmp_path / "adapter", adapter_alone=True)
        assert main([str(tmp_path / "adapter"), PROMPT]) == 2
        assert "adapter holds an adapter alone: give the run that has trained it" in capsys.readouterr().err
    make_checkpoint("olmoe", tmp_path / "base", initializer_range=0.3)
    assert main([str(path), PROMPT, "--tokenizer", "bytes"]) == 2
    assert "were trained beside other base weights" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_what_was_trained_beside_adapters_is_in_texts_and_exports(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint file has all weights, and a directory only those that were trained."""
    from moe_lightning.cli.huggingface import export_checkpoint
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.start_agent", ForkedAgent)
    make_checkpoint("olmoe", tmp_path / "base")
    adapter = {"rank": 3, "targets": ["experts", "attention"]}

    class WithEmbedding(HuggingFaceModule):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.get_input_embeddings().weight.requires_grad_(True)

    module = WithEmbedding(
        {"pretrained": str(tmp_path / "base"), "context_length": 16, "adapter": adapter},
        {"warmup_steps": 0, "decay": "constant", "lr": 0.05},
    )
    quiet()
    saver = PartialExpertsCheckpoint(str(tmp_path / "run"), every_n_steps=2)
    trainer = quiet_trainer(
        strategy=ExpertParallelStrategy(),
        max_steps=2,
        callbacks=[saver],
        enable_checkpointing=True,
        precision=precision,
    )
    trainer.fit(module, DataLoader(RandomTokens(8), batch_size=4))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        expected = module.eval().float()(ids)
    for path in (tmp_path / "run.ckpt", tmp_path / "run"):
        texts = open_language_model(str(path), tokenizer="bytes")
        target = path.with_name(f"{path.name}-merged")
        export_checkpoint(path, target, dtype="float32")
        assert texts.network.dtype == {"32-true": torch.float32, "bf16-true": torch.bfloat16}[precision]
        for network in (texts.network.float(), reloaded(target)):
            torch.testing.assert_close(logits_of(network, ids), expected, rtol=0, atol=1e-4)
        with pytest.raises(ConfigurationError, match="has trained other weights too"):
            export_checkpoint(path, tmp_path / "alone", adapter_alone=True)


def test_weights_of_experts_do_not_train_beside_adapters_without_a_word(tmp_path: Path) -> None:
    """Directories take them from the base folder. Lightning's own strategies may train them: files have all."""
    from moe_lightning.cli.huggingface import export_checkpoint
    from moe_lightning.models.huggingface.module import HuggingFaceModule
    from moe_lightning.moe.layer import moe_layers

    make_checkpoint("olmoe", tmp_path / "base")
    options = {"pretrained": str(tmp_path / "base"), "context_length": 16, "adapter": {"rank": 2}}
    module = HuggingFaceModule(options)
    module.configure_model()
    experts = moe_layers(module)[0].experts
    export_checkpoint(save(module, tmp_path / "first.ckpt"), tmp_path / "alone", adapter_alone=True)
    experts.w_up.requires_grad_(True)
    quiet()
    trainer = quiet_trainer(strategy=ExpertParallelStrategy(), max_steps=1)
    with pytest.raises(ConfigurationError, match=r"experts\.w_up would train beside adapters"):
        trainer.fit(module, DataLoader(RandomTokens(8), batch_size=4))
    with torch.no_grad():
        experts.w_up.add_(1)
    with pytest.raises(ConfigurationError, match="has trained other weights too"):
        export_checkpoint(save(module, tmp_path / "run.ckpt"), tmp_path / "others", adapter_alone=True)


@pytest.mark.parametrize("kind", ["gpt", "olmoe"])
def test_adapters_that_the_configuration_does_not_name_are_not_left_out(kind: str, tmp_path: Path) -> None:
    from moe_lightning.cli.huggingface import export_checkpoint
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    path, others = tmp_path / "run.ckpt", "tensors of adapters or layers that its configuration does not name"
    if kind == "gpt":
        module = gpt()
    else:
        make_checkpoint(kind, tmp_path / "base")
        module = HuggingFaceModule({"pretrained": str(tmp_path / "base"), "context_length": 16})
        module.configure_model()
    add_adapters(module.model, {"rank": 2})
    save(module, path)
    with pytest.raises(CheckpointError, match=others):
        open_language_model(str(path), tokenizer="bytes")
    write = {
        "gpt": partial(edit_file, edits=lambda layers: [ExpertEdit(prune=(3,))] * layers),
        "olmoe": export_checkpoint,
    }
    with pytest.raises(CheckpointError, match=others):
        write[kind](path, tmp_path / "written")


def test_extra_state_of_a_module_is_passed_over(tmp_path: Path) -> None:
    class Counting(GPTModule):
        def get_extra_state(self) -> dict[str, int]:
            return {"samples": 1}

    module = Counting(SMALL)
    module.configure_model()
    assert open_saved(save(module, tmp_path / "run.ckpt")).dtype == torch.float32


def test_a_seed_repeats_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(gpt(), tmp_path / "run.ckpt")
    few = "--tokenizer", "bytes", "--max-new-tokens", 24
    texts = [run(capsys, path, PROMPT, *few, "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith(PROMPT) for text in texts)


# ---------------------------------------------------------------- text


def streamed(text: str, end: str = "", rest: bytes = b"") -> list[str]:
    stream = TextStream(ByteTokenizer().decode, list(b"before"), end)
    parts = []
    for token in [*text.encode(), *rest]:
        parts.append(stream.add(token))
        if stream.is_ended:
            break
    parts.append(stream.finish())
    assert stream.text == "".join(parts)
    return parts


def test_characters_are_printed_whole() -> None:
    parts = streamed("a\N{EURO SIGN}b\N{GRINNING FACE}")
    assert parts == ["a", "", "", "\N{EURO SIGN}", "b", "", "", "", "\N{GRINNING FACE}", ""]
    assert streamed("a", rest=b"\xe2\x82") == ["a", "", "", "\N{REPLACEMENT CHARACTER}"], "it ends inside of one"
    assert "".join(streamed("", rest=b"\xff\xfeab")) == "\N{REPLACEMENT CHARACTER}" * 2 + "ab", "it is not UTF-8"


def test_a_text_ends_before_its_end() -> None:
    assert "".join(streamed("so<|x<|end|>more", "<|end|>")) == "so<|x"
    assert "".join(streamed("so<|en", "<|end|>")) == "so<|en"
    assert streamed("a<b", "<|end|>") == ["a", "", "<b", ""]


# ---------------------------------------------------------------- tokenizers and dialogues


def trained_run(folder: Path, data: dict[str, Any], origin: Path | None = None, **options: Any) -> Path:
    """A run directory, whose checkpoint names the tokenizer by its whole path."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run_dir": str(folder), "data": data}))
    state = {} if origin is None else {"TextData": {"tokenizer_origin": str(origin)}}
    save(gpt(**options), folder / "checkpoints" / "step-0000003.ckpt", **state)
    return folder


def says(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


class Answers:
    """Stands for a model that says what it was asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.prompts: list[str] = []
        waiting = list(answers)

        def generate(model: Any, ids: list[int], sampling: Any, count: int, is_done: Any) -> None:
            self.prompts.append(model.text.decode(ids))
            tokens = model.text.tokenizer.encode(waiting.pop(0))[0].tolist()
            assert any(is_done(token) for token in tokens)

        monkeypatch.setattr("moe_lightning.cli.language_model.LanguageModel.generate", generate)


INSTRUCTIONS = {"_target_": "moe_lightning.data.instructions.InstructionData", "tokenizer": "bytes", "end_token": "</>"}


def test_a_model_of_conversations_is_talked_to_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained_run(tmp_path / "run", INSTRUCTIONS, vocab_size=256, context_length=1024)
    model = Answers(monkeypatch, "fine</>lost", "bye</>")
    says(monkeypatch, "how?", "", "well")
    assert run(capsys, folder, "--chat", "--system", "Be kind.") == "fine\nbye\n"
    first = "<|system|>\nBe kind.\n<|user|>\nhow?\n<|assistant|>\n"
    assert model.prompts == [first, f"{first}fine</><|user|>\nwell\n<|assistant|>\n"]


def test_the_oldest_exchange_goes_when_the_context_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained_run(tmp_path / "run", INSTRUCTIONS, vocab_size=256, context_length=128)
    model = Answers(monkeypatch, "x</>", "y</>")
    says(monkeypatch, "a" * 20, "b" * 20)
    run(capsys, folder, "--chat")
    assert ["a" in prompt.replace("assistant", "") for prompt in model.prompts] == [True, False]


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path, **settings: Any) -> Path:
    """A tokenizer of bytes and an end token, as transformers writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", **settings)
    fast.save_pretrained(folder)
    return folder


def test_a_chat_template_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("olmoe", tmp_path / "model", vocab_size=300, max_position_embeddings=512)
    write_tokenizer(tmp_path / "model", chat_template=TEMPLATE)
    model = Answers(monkeypatch, "h\N{LATIN SMALL LETTER E WITH ACUTE}<e>")
    says(monkeypatch, "you?")
    assert run(capsys, tmp_path / "model", "--chat") == "h\N{LATIN SMALL LETTER E WITH ACUTE}\n"
    assert model.prompts == ["[user]you?<e>[assistant]"]


def test_a_folder_has_the_tokens_of_its_file_whatever_its_class(tmp_path: Path) -> None:
    """AutoTokenizer gives some classes a split of their own."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["2023 345678"] * 9, trainer)
    in_groups = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\P{N}+"), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([in_groups, pre_tokenizers.ByteLevel(False, use_regex=False)])
    make_checkpoint("olmoe", tmp_path, vocab_size=300)
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    text = "2023 and 345678"
    by_class = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert open_language_model(str(tmp_path)).text.begin(text) == raw.encode(text).ids != by_class


def test_a_template_that_needs_a_system_turn_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    make_checkpoint("olmoe", tmp_path / "model", vocab_size=300, max_position_embeddings=512)
    write_tokenizer(tmp_path / "model", chat_template=needs + TEMPLATE)
    model = Answers(monkeypatch, "fine<e>", "bye<e>")
    says(monkeypatch, "you?", "well")
    assert run(capsys, tmp_path / "model", "--chat", "--system", "Be kind.") == "fine\nbye\n"
    asked = "[system]Be kind.<e>[user]you?<e>[assistant]"
    assert model.prompts == [asked, f"{asked}fine<e>[user]well<e>[assistant]"]


@pytest.mark.parametrize(
    ("answer", "content"), [("<c>analysis<m>hm<c>final<m>fine", "fine"), ("<c>analysis<m>hm", "")], ids=["whole", "cut"]
)
def test_what_a_template_writes_before_an_answer_is_no_part_of_it(
    answer: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As GPT-OSS, whose template refuses its marks of channels in a message."""
    template = (
        "{% for m in messages %}{% if '<c>' in m.content %}{{ raise_exception('marks') }}{% endif %}"
        "[{{ m.role }}]{{ '<c>final<m>' if m.role == 'assistant' }}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    make_checkpoint("olmoe", tmp_path / "model", vocab_size=300, max_position_embeddings=512)
    write_tokenizer(tmp_path / "model", chat_template=template)
    model = Answers(monkeypatch, f"{answer}<e>", "<c>final<m>bye<e>")
    says(monkeypatch, "how?", "well")
    assert run(capsys, tmp_path / "model", "--chat").endswith("<c>final<m>bye\n")
    assert model.prompts[1] == f"[user]how?<e>[assistant]<c>final<m>{content}<e>[user]well<e>[assistant]"


def test_a_folder_has_its_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = make_checkpoint("qwen3", tmp_path / "model", vocab_size=300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "model"))
    out = run(capsys, tmp_path / "model", "abc", "--greedy", "--max-new-tokens", 9)
    expected = theirs.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=9, do_sample=False)[0]
    assert out == tokenizer.decode(expected) + "\n"


@pytest.mark.parametrize("is_another_there", [False, True])
def test_a_run_has_its_own_tokenizer_in_every_folder(
    is_another_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The relative path of its configuration means another file there, or none."""
    file = Path("tok/tokenizer.json")
    own = write_tokenizer(tmp_path / file.parent) / file.name
    folder = trained_run(tmp_path / "run", {"tokenizer": str(file)}, tmp_path / file, vocab_size=300)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    if is_another_there:
        content = json.loads(own.read_text())
        content["model"]["vocab"] = {word: 255 - token for word, token in content["model"]["vocab"].items()}
        file.parent.mkdir()
        file.write_text(json.dumps(content))
    few = "--greedy", "--max-new-tokens", 32
    expected = run(capsys, folder, PROMPT, *few, "--tokenizer", own)
    assert run(capsys, folder, PROMPT, *few) == expected


def test_a_run_whose_tokens_are_gone_does_not_speak_in_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would have named the tokenizer."""
    folder = trained_run(tmp_path / "run", {"source": "gone/tokens", "tokenizer": None}, vocab_size=300)
    assert main([str(folder), PROMPT]) == 2
    assert re.search(r"and data.source=gone/tokens is not there: .* --tokenizer with", capsys.readouterr().err)
    run(capsys, folder, PROMPT, "--tokenizer", "bytes", "--max-new-tokens", 8)
    bytes_ = trained_run(tmp_path / "bytes", {"source": "gone/text", "tokenizer": None}, vocab_size=256)
    run(capsys, bytes_, PROMPT, "--max-new-tokens", 8)


def test_generation_ends_at_the_end_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = make_checkpoint("olmoe", tmp_path / "theirs")
    first = int(theirs.generate(torch.tensor([IDS]), max_new_tokens=1, do_sample=False)[0, -1])
    theirs.generation_config.eos_token_id = [first]
    theirs.save_pretrained(tmp_path / "theirs")
    assert run(capsys, tmp_path / "theirs", PROMPT, "--greedy", "--tokenizer", "bytes") == f"{PROMPT}\n"
    data = {"tokenizer": "bytes", "end_of_document": without_cache(gpt().model, IDS, 1)[0]}
    assert run(capsys, trained_run(tmp_path / "run", data), PROMPT, "--greedy") == f"{PROMPT}\n"
    (tmp_path / "a.txt").write_text("text")
    recipe = Recipe(tokenizer=None, text_field="", end_of_document=data["end_of_document"])
    write_token_folder(tmp_path / "tokens", source_files([str(tmp_path / "a.txt")]), recipe)
    data = {"source": [{"path": str(tmp_path / "tokens"), "weight": 1}], "tokenizer": None}
    assert run(capsys, trained_run(tmp_path / "other", data), PROMPT, "--greedy") == f"{PROMPT}\n"


def test_a_checkpoint_away_from_its_run_has_learned_a_dialogue_whose_format_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(gpt(), tmp_path / "run.ckpt", InstructionData={"chat_template": "{{ messages }}", "end_of_text": 1})
    assert main([str(path), "--chat", "--tokenizer", "bytes"]) == 2
    assert "run.ckpt has no chat template, nor the configuration of a run that was" in capsys.readouterr().err


@pytest.mark.parametrize("data", [None, {**INSTRUCTIONS, "end_token": None}])
def test_a_checkpoint_knows_the_end_of_a_text(
    data: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its run, and where the data's configuration names no token."""
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    if data is not None:
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"run_dir": "here", "data": data}))
    state = {"end_of_text": without_cache(gpt().model, IDS, 1)[0]}
    save(gpt(), path, **{"TextData" if data is None else "InstructionData": state})
    assert run(capsys, path, PROMPT, "--greedy", "--tokenizer", "bytes") == f"{PROMPT}\n"


def test_generation_of_a_pretrained_model_ends_at_the_end_of_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    theirs = make_checkpoint("olmoe", tmp_path / "theirs")
    first = int(theirs.generate(torch.tensor([IDS]), max_new_tokens=1, do_sample=False)[0, -1])
    module = HuggingFaceModule({"pretrained": str(tmp_path / "theirs"), "context_length": 16})
    module.configure_model()
    for end, expected in ((first, f"{PROMPT}\n"), (None, None)):
        folder = tmp_path / f"run{end}"
        folder.mkdir()
        data = {"tokenizer": "bytes", "end_of_document": end}
        (folder / "config.yaml").write_text(yaml.safe_dump({"run_dir": "here", "data": data}))
        said = run(capsys, save(module, folder / "run.ckpt"), PROMPT, "--greedy")
        assert (said == expected) == (end is not None)


@pytest.mark.parametrize("how", ["--greedy", "--temperature=1"])
def test_a_diverged_model_chooses_no_token(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = make_checkpoint("olmoe", tmp_path / "theirs"), gpt()
    for parameter in (*theirs.parameters(), *ours.parameters()):
        parameter.data.fill_(math.nan)
    theirs.save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "theirs", save(ours, tmp_path / "ours.ckpt")):
        assert main([str(path), PROMPT, how, "--tokenizer", "bytes"]) == 2
        assert "the model's logits are NaN, as after a training that has diverged: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    "preferred",
    [
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "temperature": 0.7, "max_length": 9},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[5]]},
        {"token_healing": True},
        {"cache_implementation": "quantized"},
    ],
    ids=lambda preferred: next(iter(preferred)),
)
def test_a_folder_that_prefers_another_mode_gives_one_text(
    preferred: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    theirs = make_checkpoint("olmoe", tmp_path / "theirs")
    expected = theirs.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False)[0].tolist()
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(preferred))
    module = HuggingFaceModule({"pretrained": str(tmp_path / "theirs"), "context_length": 16})
    module.configure_model()
    for path in (tmp_path / "theirs", save(module, tmp_path / "run.ckpt")):
        transformers.logging.set_verbosity_warning()
        assert main([str(path), PROMPT, "--greedy", "--max-new-tokens", "12", "--tokenizer", "bytes"]) == 0
        captured = capsys.readouterr()
        assert list(captured.out.removesuffix("\n").encode()) == expected
        assert captured.err == ""
    transformers.logging.set_verbosity_error()


def test_a_folder_that_names_strings_ends_at_them(tmp_path: Path) -> None:
    theirs = make_checkpoint("olmoe", tmp_path)
    write_tokenizer(tmp_path)
    model = open_language_model(str(tmp_path), device="cpu")
    expected = theirs.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)[0, len(IDS) :].tolist()
    model.network.generation_config.stop_strings = [model.text.decode(expected[:2])]
    found = list[int]()

    def is_done(token: int) -> bool:
        found.append(token)
        return False

    model.generate(IDS, GREEDY, 4, is_done)
    assert found == expected[:2]
    with pytest.raises(ConfigurationError, match=r"generation_config.json of .* has stop_strings"):
        replace(model, text=TrainedText(ByteTokenizer(), "bytes")).generate(IDS, GREEDY, 4, is_done)


def test_the_newest_complete_checkpoint_of_a_run_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained_run(tmp_path / "run", {"tokenizer": "bytes"})
    few = "--greedy", "--max-new-tokens", "8"
    expected = run(capsys, folder, PROMPT, *few)
    damaged = folder / "checkpoints" / "step-0000005.ckpt"
    damaged.write_bytes((folder / "checkpoints" / "step-0000003.ckpt").read_bytes()[:-40])
    assert main([str(folder), PROMPT, *few]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected
    assert captured.err.startswith(f"moe-generate: {damaged} is damaged")
    assert captured.err.endswith("; the one before it is used\n")
    whole = folder / "checkpoints" / "step-0000003.ckpt"
    assert run(capsys, whole, PROMPT, *few) == expected
    assert main([str(damaged), PROMPT]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"moe-generate: error: {damaged} is damaged")
    assert said.endswith("; restore it from a copy, or name another checkpoint\n")
    whole.unlink()
    assert main([str(folder), PROMPT]) == 2
    said = capsys.readouterr().err
    assert "holds no complete checkpoint" in said
    assert said.endswith("; restore one from a copy, or name another directory\n")


def test_steps_order_the_files_of_a_copied_run(tmp_path: Path) -> None:
    """As `resume` does; files of other names are ordered by the times at which they were written."""
    folder = trained_run(tmp_path / "run", {"tokenizer": "bytes"}) / "checkpoints"
    earlier, later = folder / "step-0000003.ckpt", folder / "step-0000010.ckpt"
    shutil.copy(earlier, later)
    os.utime(later, (1, 1))
    assert open_saved(folder.parent).path == later
    assert checkpoint_files(folder) == [saved.path for saved in checkpoints(folder)] == [later, earlier]
    shutil.copy(earlier, folder / "last.ckpt")
    os.utime(folder / "last.ckpt", (2, 2))
    assert checkpoint_files(folder) == [earlier, folder / "last.ckpt", later]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "a"], ["nowhere does not exist", "outputs/quickstart", "hf download ORG/NAME"]),
        (["empty", "a"], ["empty is a run without a checkpoint", "train it"]),
        (["run"], ["give either a PROMPT or --chat (moe-generate --help shows the options)"]),
        ([], ["are required: RUN ("]),
        (["run", "a", "--chat"], ["give either a PROMPT or --chat"]),
        (["run", "--chat", "--system", ""], ["--system is empty"]),
        (["run", ""], ["the prompt is empty", "give some text"]),
        (["run", "\udcff"], ["the prompt is not UTF-8"]),
        (["run", "a", "--system", "b"], ["--system is for a dialogue"]),
        (["run", "0" * 25], ["the prompt has 25 tokens", "24 of the context", "shorten it"]),
        (["run", "a"], ["the token 97", "knows 64", "--tokenizer"]),
        (["run", "--chat"], ["has no chat template", "only a text can be continued"]),
        (["run", "0", "--tokenizer", "gpt2"], ["tokenizer='gpt2' is neither", "nor ORG/NAME of a model on the Hub"]),
        (["run", "0", "--tokenizer", "bpe:300"], ["--tokenizer bpe:300", "give bytes"]),
        (["run", "0", "--device", "tpu9"], ["--device tpu9", "give cpu, cuda"]),
        (["run/checkpoints/../../lone.ckpt", "0"], ["the tokenizer of", "is not known", "--tokenizer bytes"]),
        (["run", "0", "--temperature", "0"], ["0.0 must be a number of at least 0.001"]),
        (["run", "0", "--temperature", "1e-40"], ["1e-40 must be a number of at least 0.001"]),
        (["run", "0", "--temperature", "nan"], ["nan must be a number of at least 0.001"]),
        (["run", "0", "--greedy", "--top-k", "1"], ["--top-k is for sampling", "leave --greedy out"]),
        (["run", "0", "--greedy", "--top-p", "1"], ["--top-p is for sampling"]),
        (["run", "0", "--greedy", "--seed", "0"], ["--seed is for sampling"]),
        (["run", "0", "--top-p", "1.5"], ["1.5 must be a number", "at most 1"]),
        (["run", "0", "--top-p", "0"], ["0.0 must be a number above 0"]),
        (["run", "0", "--top-k", "0"], ["0 must be an integer of at least 1"]),
        (["run", "0", "--max-new-tokens", "0"], ["0 must be an integer"]),
        (["run", "0", "--greedy", "--temperature", "1"], ["--temperature", "not allowed with", "--greedy"]),
        (["folder", "0"], ["folder holds no tokenizer", "--tokenizer bytes"]),
        (["code", "0"], ["transformers cannot load a language model from code"]),
        (["pickle", "0"], ["transformers cannot load a language model from pickle"]),
        (["partial", "0"], ["partial lacks", "tensors of the model"]),
        (["images.ckpt", "0"], ["is not a checkpoint of a GPTModule or a HuggingFaceModule"]),
        (["swin.ckpt", "0"], ["a Swinv2ForImageClassification, which is no language model", "task=validate"]),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if arguments:
        prepare(Path(arguments[0]).name)
    says(monkeypatch, "0")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert [word for word in words if word not in captured.err] == [], captured.err


def prepare(name: str) -> None:
    """Make what a mistake is made with, in the current folder."""
    if name == "run":
        trained_run(Path("run"), {"tokenizer": "bytes"})
    elif name == "empty":
        Path("empty").mkdir()
        Path("empty/config.yaml").touch()
    elif name == "lone.ckpt":
        Path("run/checkpoints").mkdir(parents=True)
        save(gpt(), Path(name))
    elif name == "swin.ckpt":
        from moe_lightning.models.huggingface.module import HuggingFaceModule

        make_checkpoint("swinv2", Path("theirs"))
        module = HuggingFaceModule({"pretrained": "theirs", "upcycling": {"num_experts": 4}})
        module.configure_model()
        save(module, Path(name))
    elif name == "images.ckpt":
        values = {"hyper_parameters": {"config": {"image_size": 8}}, "pytorch-lightning_version": "2"}
        write_file({"state_dict": {"w": torch.zeros(1)}, **values, "global_step": 0}, Path(name))
    elif name != "nowhere":
        model = make_checkpoint("olmoe", Path(name))
        config = json.loads(Path(name, "config.json").read_text())
        weights = Path(name, "model.safetensors")
        if name == "code":
            config |= {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "model.Model"}}
            Path(name, "model.py").write_text("raise SystemExit('code was run')")
        elif name == "pickle":
            weights.unlink()
            torch.save(model.state_dict(), Path(name, "pytorch_model.bin"))
        elif name == "partial":
            from safetensors.torch import load_file, save_file

            tensors = load_file(weights)
            tensors.pop("lm_head.weight")
            save_file(tensors, weights, {"format": "pt"})
        Path(name, "config.json").write_text(json.dumps(config))
