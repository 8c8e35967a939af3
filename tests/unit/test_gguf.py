"""moe-ckpt export-gguf: llama.cpp continues texts as transformers does, tokens as well as probabilities; mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lightning.cli.ckpt import main
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.huggingface.export import cast
from tests.huggingface_models import make_checkpoint, reloaded, transformers
from tests.unit.test_adapters import disturb
from tests.unit.test_generate import gpt, save

pytest.importorskip("gguf", reason="gguf is not installed: pip install '.[gguf]'")

TEXTS = [
    "def add(a, b):\n    return",
    "It's 3.14 or 2,718 - isn't it?",
    " Gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n\t\N{GRINNING FACE}",
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_key_value_heads": 1},
    "mixtral_tied": {},
    "olmoe": {},
    "qwen3": {"decoder_sparse_step": 1},
}


def write_tokenizer(folder: Path, kind: str) -> None:
    """A tokenizer of 300 tokens, trained on the texts, with an end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>"]
    if kind == "sentencepiece":
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        letters = sorted(
            {letter for text in TEXTS for letter in text if letter.isascii() and letter.isprintable()} - {" "}
        )
        vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        merges = [("r", "e"), ("\N{LOWER ONE EIGHTH BLOCK}", "i"), ("re", "t"), ("\N{LOWER ONE EIGHTH BLOCK}", "ret")]
        for token in ["".join(pair) for pair in merges] + ["\N{LOWER ONE EIGHTH BLOCK}", *letters]:
            vocabulary[token] = len(vocabulary)
        tokenizer.model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}"), normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        tokenizer.add_special_tokens(special)
    else:
        tokenizer = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        split = pre_tokenizers.Split(Regex(QWEN), "isolated")
        tokenizer.pre_tokenizer = byte_level if kind == "gpt2" else pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def checkpoint(name: str, folder: Path, kind: str = "gpt2", **changes: Any) -> None:
    """A checkpoint of ours over a folder `theirs`."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    make_checkpoint(name, folder / "theirs", vocab_size=384, **FAMILIES.get(name, {}) | changes)
    write_tokenizer(folder / "theirs", kind)
    config: dict[str, Any] = {"pretrained": str(folder / "theirs"), "context_length": 16}
    if name == "llama":
        config["upcycling"] = {"num_experts": 4, "router": {"top_k": 2, "softmax_after_top_k": True}}
    module = HuggingFaceModule(config)
    module.configure_model()
    save(module, folder / "run.ckpt")


_LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 64, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)

def ask(path, **content):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(content).encode(), headers)
    return json.load(urllib.request.urlopen(request))

for text in json.load(sys.stdin):
    ids, begun = (ask("/tokenize", content=text, add_special=special)["tokens"] for special in (False, True))
    options = {"n_predict": 12, "temperature": 0.0, "return_tokens": True, "cache_prompt": False, "n_probs": 1}
    found = ask("/completion", prompt=ids, ignore_eos=True, **options)
    likeliest = [[token["id"], token["logprob"]] for token in found["completion_probabilities"][:1]]
    print(json.dumps({"ids": ids, "begun": begun, "new": found["tokens"], "likeliest": likeliest}))
"""


def llama_cpp(file: Path) -> list[dict[str, Any]]:
    """For each text its tokens, without and with special ones, the 12 that follow, and the likelihood of the first of
    these that has text.
    """
    pytest.importorskip("xllamacpp", reason="xllamacpp, which has llama.cpp, is not installed")
    command = [sys.executable, "-c", _LLAMA_CPP, str(file)]
    found = subprocess.run(command, input=json.dumps(TEXTS), capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral", "sentencepiece"),
        ("mixtral_tied", "gpt2"),
        ("olmoe", "gpt2"),
        ("qwen3", "qwen2"),
        ("llama", "sentencepiece"),
    ],
)
def test_llama_cpp_continues_as_transformers(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path, kind)
    for command, target in (("export-gguf", "model.gguf"), ("export-hf", "exported")):
        assert main([command, str(tmp_path / "run.ckpt"), str(tmp_path / target)]) == 0
    tokenizer, theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs"), reloaded(tmp_path / "exported")
    compared = 0
    for text, found in zip(TEXTS, llama_cpp(tmp_path / "model.gguf"), strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found["ids"] == ids
        assert found["begun"] == tokenizer(text)["input_ids"]
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        said = theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
        assert found["new"] == said.sequences[0, len(ids) :].tolist()
        for token, logprob in found["likeliest"]:
            if token == found["new"][0]:
                assert logprob == pytest.approx(float(said.logits[0][0].log_softmax(-1).max()), abs=1e-3)
                compared += 1
    assert compared


def test_adapters_are_added_and_a_trained_tokenizer_is_used(tmp_path: Path) -> None:
    """The file has the tensors of the folder that export-hf writes, in the type that is asked for."""
    import gguf
    from safetensors.torch import load_file

    from moe_lightning.models.huggingface.module import HuggingFaceModule

    checkpoint("mixtral", tmp_path)
    content = (tmp_path / "theirs" / "tokenizer.json").read_text()
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    module = HuggingFaceModule(
        {
            "pretrained": str(tmp_path / "theirs"),
            "context_length": 16,
            "adapter": {"rank": 3, "targets": ["experts", "attention"]},
        }
    )
    module.configure_model()
    disturb(module)
    save(module, tmp_path / "run.ckpt", TextData={"trained_tokenizer": content})
    for command, target in (("export-gguf", "model.gguf"), ("export-hf", "merged")):
        assert main([command, str(tmp_path / "run.ckpt"), str(tmp_path / target), "--dtype", "bfloat16"]) == 0
    merged = {}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        merged |= load_file(file)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    down = torch.from_numpy(found["blk.1.ffn_down_exps.weight"].data.copy()).view(torch.bfloat16)
    for expert in range(6):
        expected = merged[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        assert torch.equal(down[expert], expected)
    norm = torch.from_numpy(found["blk.0.attn_norm.weight"].data.copy())
    assert norm.dtype == torch.float32
    assert torch.equal(norm.bfloat16(), merged["model.layers.0.input_layernorm.weight"])
    assert len(found) == 2 + 1 + 2 * (2 + 4 + 1 + 3)


@pytest.mark.parametrize(
    ("has_own_end", "end", "expected"),
    [
        (False, None, {"eos": 383}),
        (False, 65, {"eos": 65}),
        (True, 65, {"eos": 2, "eot": 65}),
        (True, None, {"eos": 2}),
    ],
)
def test_a_text_ends_where_generation_does(
    has_own_end: bool, end: int | None, expected: dict[str, int], tmp_path: Path
) -> None:
    """Else llama.cpp takes token 11 for the end, which is a comma."""
    import gguf

    from moe_lightning.models.huggingface.module import HuggingFaceModule

    checkpoint("mixtral", tmp_path)
    theirs = tmp_path / "theirs"
    module = HuggingFaceModule({"pretrained": str(theirs), "context_length": 16})
    module.configure_model()
    own = {} if has_own_end else {"trained_tokenizer": (theirs / "tokenizer.json").read_text().replace("</s>", "x")}
    save(module, tmp_path / "run.ckpt", TextData={**own, "end_of_text": end})
    assert main(["export-gguf", str(tmp_path / "run.ckpt"), str(tmp_path / "model.gguf")]) == 0
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    names = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")}
    assert {name: field.contents() for name, field in names.items() if field is not None} == expected


def test_the_template_of_the_run_comes_before_that_of_the_settings(tmp_path: Path) -> None:
    """As in transformers."""
    import gguf

    from moe_lightning.models.huggingface.module import HuggingFaceModule

    checkpoint("mixtral", tmp_path)
    settings = tmp_path / "theirs" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "THEIRS"}))
    module = HuggingFaceModule({"pretrained": str(tmp_path / "theirs"), "context_length": 16})
    module.configure_model()
    save(module, tmp_path / "run.ckpt", InstructionData={"chat_template": "OURS"})
    assert main(["export-gguf", str(tmp_path / "run.ckpt"), str(tmp_path / "model.gguf")]) == 0
    assert gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.chat_template"].contents() == "OURS"


def test_a_vocabulary_without_room_for_an_end_is_warned_of(tmp_path: Path) -> None:
    from moe_lightning.models.huggingface.gguf_file import _further_ends

    with pytest.warns(UserWarning, match="has no end token, .* --ignore-eos, or train with data.end_of_document=ID"):
        assert _further_ends(tmp_path, {}, {0: "a"}, []) == {}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "deepseek",
            {},
            ["model_type='deepseek_v3' cannot be written as GGUF, only mixtral, olmoe, qwen3_moe", "export-hf"],
        ),
        ("olmoe_normalised", {}, ["norm_topk_prob=True of olmoe", "only False"]),
        ("olmoe", {"tie_word_embeddings": True}, ["tie_word_embeddings=True of olmoe", "only False"]),
        ("olmoe", {"clip_qkv": 3.0}, ["clip_qkv=3.0 of olmoe", "only None"]),
        ("olmoe", {"num_key_value_heads": 1}, ["num_key_value_heads=1 of olmoe", "only 2"]),
        ("qwen3", {"decoder_sparse_step": 2}, ["a qwen3_moe with dense layers", "experts in every layer"]),
        ("qwen3", {"attention_bias": True}, ["q_proj.bias cannot be written"]),
        (
            "olmoe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            ["rope_type='linear'"],
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    name: str, changes: dict[str, Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(name, tmp_path, **changes)
    check_refusal(tmp_path, words, capsys)


def check_refusal(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str], *options: str, to: str = "model.gguf"
) -> None:
    before, command = set(folder.iterdir()), "export-gguf" if to.endswith(".gguf") else "export-hf"
    assert main([command, str(folder / "run.ckpt"), str(folder / to), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert [word for word in words if word not in captured.err] == [], captured.err
    assert set(folder.iterdir()) == before


def test_other_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint("olmoe", tmp_path)
    tokenizer = tmp_path / "theirs" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    check_refusal(tmp_path, ["dtype=float64 cannot be written"], capsys, "--dtype", "float64")
    checkpoint("olmoe", tmp_path, initializer_range=1e5)
    for target in ("model.gguf", "folder"):
        check_refusal(
            tmp_path, ["weight' has values beyond 65504", "--dtype bfloat16"], capsys, "--dtype", "float16", to=target
        )
    with pytest.raises(ConfigurationError, match=r"beyond 3\.38953e\+38, .*: export with --dtype float32$"):
        cast("w", torch.tensor(3.4e38), torch.bfloat16)
    content["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer.write_text(json.dumps(content))
    check_refusal(tmp_path, ["the tokenizer cannot be", "only byte-level BPE"], capsys)
    tokenizer.write_text("{}")
    check_refusal(tmp_path, ["tokenizer.json is not a file of the package", "get it again"], capsys)
    tokenizer.unlink()
    check_refusal(tmp_path, ["theirs has no tokenizer.json"], capsys)
    (tmp_path / "model.gguf").touch()
    check_refusal(tmp_path, ["model.gguf exists already: name another file"], capsys)
    (tmp_path / "model.gguf").unlink()
    save(gpt(), tmp_path / "run.ckpt")
    check_refusal(
        tmp_path, ["is not a checkpoint of a HuggingFaceModule", "moe-ckpt export CKPT model.safetensors"], capsys
    )


def test_the_package_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint("olmoe", tmp_path)
    monkeypatch.delitem(sys.modules, "moe_lightning.models.huggingface.gguf_file", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    check_refusal(tmp_path, ["GGUF needs the package gguf", "pip install 'moe-lightning[gguf]'"], capsys)
