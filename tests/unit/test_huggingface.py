"""Checkpoints of transformers in our layers: the same logits, and a round trip that changes no bit."""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file, save_file

from moe_lightning import CheckpointError, ConfigurationError, auxiliary_loss, record_routing, replay_routing
from moe_lightning.cli import train
from moe_lightning.cli.ckpt import main
from moe_lightning.cli.language_model import open_language_model
from moe_lightning.data.chat_formats import templated_turns
from moe_lightning.data.conversations import Turn
from moe_lightning.data.corpus import prepare_corpus
from moe_lightning.data.instructions import InstructionData
from moe_lightning.data.text import TextData
from moe_lightning.data.tokenizer import load_tokenizer, train_tokenizer
from moe_lightning.models.gpt_module import OptimizerConfig
from moe_lightning.models.huggingface.architecture import SparseArchitecture
from moe_lightning.models.huggingface.attention import check_packing
from moe_lightning.models.huggingface.card import TrainingFacts, write_card
from moe_lightning.models.huggingface.export import copy_companions, new_folder, plan_export
from moe_lightning.models.huggingface.families import FAMILIES
from moe_lightning.models.huggingface.loading import build_skeleton, config_from
from moe_lightning.models.huggingface.module import HuggingFaceConfig, HuggingFaceModule
from moe_lightning.models.huggingface.weights import StackedExperts, WeightsFolder
from moe_lightning.moe.experts import VACANT, deferred_experts
from moe_lightning.moe.losses import mean_over_targets
from tests.distributed.training import OwnModule, RandomTokens, quiet, quiet_trainer
from tests.documented import ROOT
from tests.huggingface_models import (
    SIZES,
    SPARSE,
    VOCABULARY,
    WITH_IMAGES,
    export,
    files_equal,
    inputs_for,
    logits_of,
    make_checkpoint,
    make_checkpoint_with_images,
    reloaded,
    transformers,
)
from tests.parameters import slow
from tests.programs import exit_code
from tests.unit.test_generate import TEMPLATE, write_tokenizer

PAGE = (ROOT / "docs" / "huggingface.md").read_text()
TOLERANCE = 1e-5
"""Of logits, whose largest are between one and ten here."""


def load(folder: Path, **options: Any) -> Any:
    """A HuggingFaceModule with its model, as a process without a strategy has it."""

    module = HuggingFaceModule({"pretrained": str(folder), "context_length": 16, **options})
    module.configure_model()
    return module.eval()


def save(module: Any, folder: Path, dtype: str | None = None) -> None:
    """Export a module whose experts are all here."""

    stacks = (layer.experts.stacked_parameters() for layer in module.architecture.layers.values())
    plan_export(module.architecture, module.model, dtype).write(folder, module.model.state_dict(), stacks)


@torch.no_grad()
def assert_same_logits(module: Any, expected: torch.Tensor, inputs: torch.Tensor) -> None:
    error = float((module(inputs) - expected).abs().max())
    assert error <= TOLERANCE, error


def assert_same_gradients(module: Any, theirs: Any, inputs: torch.Tensor) -> None:
    targets = inputs.roll(-1, dims=1)
    mean_over_targets(theirs(inputs).logits, targets).backward()
    mean_over_targets(module(inputs), targets).backward()
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.requires_grad}
    family, actual = module.architecture.family, dict[str, torch.Tensor | None]()
    layout = family.layout if isinstance(family.layout, StackedExperts) else StackedExperts(is_transposed=True)
    for key, parameter in module.model.named_parameters():
        if ".moe.experts." not in key:
            actual[family.model_name(key)] = parameter.grad
    for block, layer in module.architecture.layers.items():
        stacks = {key: parameter.grad for key, parameter in layer.experts.stacked_parameters().items()}
        actual |= layout.write(f"{block}.", stacks)
    assert set(actual) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", SPARSE)
def test_logits_gradients_and_round_trip(name: str, tmp_path: Path) -> None:
    theirs, inputs = make_checkpoint(name, tmp_path / "theirs"), inputs_for(name)
    expected = logits_of(theirs, inputs)
    module = load(tmp_path / "theirs")
    assert_same_logits(module, expected, inputs)
    save(module, tmp_path / "ours")
    files_equal(tmp_path / "theirs", tmp_path / "ours")
    assert torch.equal(logits_of(reloaded(tmp_path / "ours"), inputs), expected)
    assert_same_gradients(module, theirs, inputs)


QUICK = ("mixtral", "olmoe", "deepseek", "gpt_oss", "qwen2", "glm4")
FEW = [name if name in QUICK else slow(name) for name in SPARSE]
"""All families, of which the default run takes those whose layouts differ; it compares logits and gradients of all."""


@pytest.mark.parametrize("name", FEW)
@pytest.mark.filterwarnings("error::UserWarning:moe_lightning")
def test_the_stacks_of_transformers_5_are_read(name: str, tmp_path: Path) -> None:
    theirs, inputs = make_checkpoint(name, tmp_path / "theirs"), inputs_for(name)
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False, max_shard_size="20KB")
    module = load(tmp_path / "stacked")
    assert_same_logits(module, logits_of(theirs, inputs), inputs)
    save(module, tmp_path / "ours")
    files_equal(tmp_path / "theirs", tmp_path / "ours")
    for kind in ("lora", "qlora"):
        adapted = {"adapter": {"kind": kind, "rank": 2}}
        torch.manual_seed(0)
        expected = load(tmp_path / "theirs", **adapted)(inputs)
        torch.manual_seed(0)
        assert torch.equal(load(tmp_path / "stacked", **adapted)(inputs), expected)


@pytest.mark.parametrize("name", FEW)
def test_transformers_takes_a_trained_step_over(name: str, tmp_path: Path) -> None:
    before, inputs = logits_of(make_checkpoint(name, tmp_path / "theirs"), inputs_for(name)), inputs_for(name)
    module = load(tmp_path / "theirs").train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.loss((inputs, inputs.roll(-1, dims=1))).backward()
    optimizer.step()
    save(module.eval(), tmp_path / "ours")
    trained = logits_of(reloaded(tmp_path / "ours"), inputs)
    assert_same_logits(module, trained, inputs)
    assert float((trained - before).abs().max()) > 0.1, "nothing was learned, so nothing was tested"


@pytest.mark.parametrize("name", ["granite", "ernie"])
def test_a_checkpoint_may_have_no_coefficient_of_balance(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    edited(tmp_path, router_aux_loss_coef=None)
    assert {layer.router.config.aux_loss_coef for layer in load(tmp_path).architecture.layers.values()} == {0.0}


def test_the_documented_model_is_made_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "huggingface.md").read_text()
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "save_pretrained" in code), {})
    assert open_language_model("tiny").network.config.model_type == "qwen3_moe"


def test_the_documentation_lists_every_family() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| (\w+) \| (\w+) \|", PAGE, re.MULTILINE)
    assert [row[:2] for row in rows] == [(family.title, model_type) for model_type, family in FAMILIES.items()]
    supported = {}
    for class_name, options in SPARSE.values():
        config = getattr(transformers, class_name)(**{**SIZES, **options})
        try:
            check_packing(config, 16)
            packs = "yes"
        except ConfigurationError:
            packs = "no"
        parts = hasattr(build_skeleton(SparseArchitecture(config)), "context")
        supported[config.model_type] = (packs, "yes" if parts else "no")
    assert {row[1]: row[2:] for row in rows} == supported


def test_bfloat16_survives_training_in_float32(tmp_path: Path) -> None:
    model = make_checkpoint("deepseek", tmp_path / "float32")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    module = load(tmp_path / "theirs")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    save(module, tmp_path / "ours")
    ours = load_file(next((tmp_path / "ours").glob("*-00002-*")))
    assert {t.dtype for t in ours.values()} == {torch.bfloat16}
    for name, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items():
        if "experts." in name and "shared" not in name:
            assert torch.equal(tensor, ours[name]), name
    save(module, tmp_path / "wide", dtype="float32")
    reloaded(tmp_path / "wide")


def test_experts_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building the model reads no expert; placing one reads its rows and no other's."""

    make_checkpoint("olmoe", tmp_path)
    seen: list[str] = []
    read = WeightsFolder.read

    def recorded(self: WeightsFolder, name: str, row: int | None = None) -> torch.Tensor:
        seen.append(name)
        return read(self, name, row)

    monkeypatch.setattr(WeightsFolder, "read", recorded)
    with deferred_experts():
        module = load(tmp_path)
    assert seen
    assert not any("experts" in name for name in seen)
    layers = module.architecture.layers
    assert all(layer.experts.is_deferred for layer in layers.values())
    seen.clear()
    layers["model.layers.0.mlp"].experts.place((5, VACANT, 2), torch.device("cpu"))
    assert {name.split("experts.")[1].split(".")[0] for name in seen} == {"5", "2"}
    assert all(name.startswith("model.layers.0.") for name in seen)
    assert not layers["model.layers.0.mlp"].experts.w_up[1].any()


@pytest.mark.parametrize(
    ("config", "sizes", "parameters"),
    [
        ("OlmoeConfig", {"intermediate_size": 1024}, 6.919e9),
        ("MixtralConfig", {}, 46.70e9),
        ("GptOssConfig", {}, 116.83e9),
        ("DeepseekV3Config", {}, 671.03e9),
    ],
)
def test_skeletons_need_no_memory(config: str, sizes: dict[str, int], parameters: float) -> None:
    """The models as they were published, which no test machine could hold."""
    skeleton = build_skeleton(SparseArchitecture(getattr(transformers, config)(**sizes)))
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert sum(parameter.numel() for parameter in skeleton.parameters()) == pytest.approx(parameters, rel=1e-3)


def test_generation_is_that_of_transformers(tmp_path: Path) -> None:
    theirs, inputs = make_checkpoint("gpt_oss", tmp_path), inputs_for("gpt_oss")
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(load(tmp_path).model.generate(inputs, **options), theirs.generate(inputs, **options))


def routed_rows(module: Any) -> list[int]:
    return [int(layer.statistics.tokens_NE.sum()) for layer in module.architecture.layers.values()]


def test_padding_reaches_no_expert_and_changes_no_gradient(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path)
    inputs = inputs_for("olmoe")
    is_token = torch.arange(inputs.shape[1]) < torch.tensor([[5], [9], [2]])
    targets = inputs.masked_fill(~is_token, -100)
    gradients = []
    for options in ({}, {"gradient_checkpointing": True}):
        module = load(tmp_path, **options).train()
        for noise in (0, 7):
            module.zero_grad()
            padded = torch.where(is_token, inputs, noise)
            module.loss((padded, targets, is_token)).backward()
            assert routed_rows(module) == [2 * int(is_token.sum())] * 2
            gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        for others in gradients[1:]:
            if name != "model.model.embed_tokens.weight":
                torch.testing.assert_close(others[name], gradient, msg=name)
    module(inputs)
    assert routed_rows(module) == [2 * inputs.numel()] * 2, "a mask is of one batch"
    module.model(inputs, attention_mask=is_token.long())
    assert routed_rows(module) == [2 * int(is_token.sum())] * 2


@pytest.mark.parametrize("name", ["olmoe", "deepseek"])
def test_a_backward_pass_behind_replayed_routing_takes_the_same_experts(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    inputs = inputs_for(name)
    gradients = []
    for is_recomputed in (False, True):
        module = load(tmp_path, gradient_checkpointing=is_recomputed).train()
        (num_experts,) = {layer.num_experts for layer in module.architecture.layers.values()}
        size = inputs.numel(), len(module.architecture.layers), num_experts
        ids = torch.rand(size, generator=torch.Generator().manual_seed(1)).argsort(dim=-1)[..., :2]
        with replay_routing(module, ids):
            loss = module(inputs).logsumexp(-1).sum()
        loss.backward()
        gradients.append({key: value.grad for key, value in module.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, msg=key)


def test_recorded_routing_is_of_the_last_forward_pass(tmp_path: Path) -> None:
    """The backward pass computes the layers of both again, those of the first one last."""
    make_checkpoint("olmoe", tmp_path)
    module, inputs = load(tmp_path, gradient_checkpointing=True).train(), inputs_for("olmoe")
    with record_routing(module) as choices:
        losses = [module(ids).logsumexp(-1).sum() for ids in (inputs, inputs.flip(1))]
        last = choices.stacked()
        torch.stack(losses).sum().backward()
    assert torch.equal(choices.stacked(), last)


def test_loaded_models_can_be_copied(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    module = load(tmp_path)
    copied = copy.deepcopy(module.model)
    inputs = inputs_for("mixtral")
    with torch.no_grad():
        assert torch.equal(copied(inputs).logits, module(inputs))


def fit(module: Any, steps: int = 3, loader: Any = None, **options: Any) -> pl.Trainer:
    """A few steps of stock Lightning in this process, on tokens where nothing else is given."""

    quiet()
    trainer = quiet_trainer(max_steps=steps, **options)
    trainer.fit(module, loader or torch.utils.data.DataLoader(RandomTokens(24), batch_size=8))
    return trainer


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_training_moves_every_weight_and_export_takes_them(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    router = {"bias_update_rate": 0.01} if name == "deepseek" else {"aux_loss_coef": 0.1}
    options = {"gradient_checkpointing": name == "gpt_oss", "router": router}
    module = load(tmp_path / "theirs", **options)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    export(fit(module), tmp_path / "ours")
    after = module.state_dict()
    # Stock Lightning calls no update_bias: the strategy does.
    unmoved = [key for key in before if torch.equal(before[key], after[key]) and "expert_bias" not in key]
    assert not unmoved
    inputs = inputs_for(name)
    assert_same_logits(module.eval(), logits_of(reloaded(tmp_path / "ours"), inputs), inputs)
    assert (tmp_path / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("name", "layers"), [("qwen3", 1), ("jamba", 2), ("mixtral", 2)])
def test_the_balance_loss_has_the_weight_of_the_checkpoint(name: str, layers: int, tmp_path: Path) -> None:
    """transformers takes the mean over the layers with experts, not over all."""
    theirs = make_checkpoint(name, tmp_path, router_aux_loss_coef=0.1)
    module, inputs = load(tmp_path), inputs_for(name)
    assert len(module.architecture.layers) == layers
    for layer in module.architecture.layers.values():
        assert layer.router.config.aux_loss_coef == pytest.approx(0.1 * layer.router.config.top_k / layers)
    if layers == 1:
        module.train()(inputs)
        expected = 0.1 * theirs(inputs, output_router_logits=True).aux_loss
        assert auxiliary_loss(module).item() == pytest.approx(float(expected), rel=1e-4)
    for layer in load(tmp_path, router={"aux_loss_coef": 0.3}).architecture.layers.values():
        assert layer.router.config.aux_loss_coef == 0.3


def test_a_weight_that_the_user_sets_is_taken_however_large(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path, router_aux_loss_coef=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = load(tmp_path, overrides={"router_aux_loss_coef": 0.2})
    layers = module.architecture.layers.values()
    for layer in layers:
        assert layer.router.config.aux_loss_coef == pytest.approx(0.2 * layer.router.config.top_k / len(layers))


@pytest.mark.parametrize(("given", "taken"), [(None, 0.0), (0.001, 0.001), (0.0, 0.0)])
def test_a_weight_that_would_outweigh_the_loss_is_left_out(given: float | None, taken: float, tmp_path: Path) -> None:
    """As GPT-OSS has it, whose makers and transformers do not use it."""
    make_checkpoint("gpt_oss", tmp_path, router_aux_loss_coef=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = load(tmp_path, router={"aux_loss_coef": given})
    assert {layer.router.config.aux_loss_coef for layer in module.architecture.layers.values()} == {taken}
    told = [str(warning.message) for warning in caught if "router_aux_loss_coef=0.9" in str(warning.message)]
    assert len(told) == (given is None)


def data_of(
    kind: type[TextData | InstructionData], folder: Path, tokenizer: str, end_token: str | None = "<end>"
) -> TextData | InstructionData:
    sizes: Any = {"context_length": 32, "global_batch_size": 2, "tokenizer": tokenizer}
    if kind is InstructionData:
        lines = [json.dumps({"prompt": f"{i}?", "response": "The quick brown fox."}) for i in range(9)]
        (folder / "talk.jsonl").write_text("\n".join(lines))
        return InstructionData(path=folder / "talk.jsonl", end_token=end_token, **sizes)
    (folder / "book.txt").write_text("The quick brown fox. " * 300)
    return TextData(source=str(folder / "book.txt"), cache_dir=folder / "cache", **sizes)


def try_data(data: TextData | InstructionData, checkpoint: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    pl.Trainer(max_steps=1, limit_val_batches=1, enable_progress_bar=False, **options).fit(load(checkpoint), data)


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [(TextData, "bytes"), (TextData, "bpe:300"), (InstructionData, "bytes")]
)
def test_tokens_of_another_tokenizer_are_refused(
    tmp_path: Path, kind: type[TextData | InstructionData], tokenizer: str
) -> None:
    make_checkpoint("mixtral", tmp_path / "theirs", vocab_size=300)
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ConfigurationError, match=rf"data.tokenizer={tokenizer} gives other tokens .* use data.tokenizer="
    ):
        try_data(data_of(kind, tmp_path, tokenizer), tmp_path / "theirs")


def test_a_tokenizer_with_more_tokens_than_its_model_names_what_to_do(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path, vocab_size=299)
    write_tokenizer(tmp_path)
    module: Any = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16})
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(vocab_size=300, tokenizer="other.json"))
    with pytest.raises(
        ConfigurationError, match=r"the data have 300 tokens, the model has 299: use the tokenizer.json"
    ):
        module.setup("fit")


def test_samples_longer_than_the_positions_of_the_model_are_refused(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path, vocab_size=300)
    module: Any = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16})
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(context_length=64))
    module.setup("fit")
    module.trainer.datamodule.context_length = 65
    refusal = r"data.context_length=65 exceeds the 64 positions of .*=64 or less, or set model.overrides"
    with pytest.raises(ConfigurationError, match=refusal):
        module.setup("fit")


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json"])
def test_bytes_for_a_model_with_another_tokenizer_file_are_told(tmp_path: Path, name: str) -> None:
    make_checkpoint("olmoe", tmp_path, vocab_size=300)
    module: Any = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16})
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(tokenizer="bytes"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.setup("fit")
    (tmp_path / name).write_text("{}")
    with pytest.warns(UserWarning, match=f"the data are bytes, and {tmp_path / name} belongs to the tokenizer"):
        module.setup("fit")


@pytest.mark.parametrize("kind", [TextData, InstructionData])
def test_a_tokenizer_json_with_other_words_is_refused(tmp_path: Path, kind: type[TextData | InstructionData]) -> None:
    import tokenizers

    own, other, larger = (tmp_path / name / "tokenizer.json" for name in ("theirs", "other", "larger"))
    make_checkpoint("mixtral", tmp_path / "theirs", vocab_size=300)
    for path, text in ((own, b"The quick brown fox. "), (other, b"A lazy dog sleeps. "), (larger, b"")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(own.read_text() if not text else train_tokenizer("bpe:262", [text * 9]))
    added = tokenizers.Tokenizer.from_file(str(larger))
    added.add_special_tokens(["<|im_start|>"])
    added.save(str(larger))
    try_data(data_of(kind, tmp_path, str(larger)), tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match=rf"{other} does not give '\w+' the token .*data.tokenizer={own}, or"):
        try_data(data_of(kind, tmp_path, str(other)), tmp_path / "theirs")


def test_a_folder_of_tokens_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path / "theirs", vocab_size=300)
    (tmp_path / "book.txt").write_text("The quick brown fox. " * 300)
    entry = prepare_corpus(tmp_path / "book.txt", tokenizer="bpe:300", cache_dir=tmp_path / "cache").train.path.parent
    own = tmp_path / "theirs" / "tokenizer.json"
    own.write_text("{}")
    data = TextData(source=str(entry), context_length=8, global_batch_size=2, cache_dir=tmp_path / "cache")
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with pytest.raises(ConfigurationError, match=r"run moe-data tokenize with --tokenizer .*/theirs/tokenizer.json"):
        pl.Trainer(max_steps=1, **options).fit(load(tmp_path / "theirs"), data)
    own.write_text(json.dumps(json.loads((entry / "tokenizer.json").read_text()), indent=1))
    pl.Trainer(max_steps=1, limit_val_batches=1, **options).fit(load(tmp_path / "theirs"), data)


def test_an_export_takes_over_only_what_belongs_to_tokenizer_and_configuration(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    source, blobs, target = cache / "snapshots" / "0a1b", cache / "blobs", tmp_path / "target"
    for folder in (source, blobs, target, source / "vocab.json", source / "additional_chat_templates"):
        folder.mkdir(parents=True)
    for name in ("tokenizer.json", "credentials.json", "notes.txt", "x.jinja", "key.model", "trainer_state.json"):
        (source / name).write_text(name)
    for name in ("tool_use.jinja", "notes.txt"):
        (source / "additional_chat_templates" / name).write_text(name)
    (source / "additional_chat_templates" / "rag.jinja").symlink_to("../../../blobs/5f")
    (source / "generation_config.json").write_text("theirs")
    (target / "generation_config.json").write_text("ours")
    (blobs / "5f").write_text("cached")
    (source / "merges.txt").symlink_to("../../blobs/5f")
    (tmp_path / "secret").write_text("secret")
    (source / "vocab.txt").symlink_to(tmp_path / "secret")

    export: Any = None
    copy_companions(source, target, export)

    named = {"tool_use.jinja": "tool_use.jinja", "rag.jinja": "cached"}
    copied = {path.name: path.read_text() for path in target.rglob("*") if path.is_file()}
    own = {"tokenizer.json": "tokenizer.json", "merges.txt": "cached", "generation_config.json": "ours"}
    assert copied == own | named
    assert {path.name for path in (target / "additional_chat_templates").iterdir()} == set(named)


def test_export_of_a_lightning_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3", tmp_path / "theirs")
    module = load(tmp_path / "theirs")
    fit(module).save_checkpoint(tmp_path / "last.ckpt")
    target = tmp_path / "ours"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("moe_lightning.models.huggingface.card.write_card", killed)
        with pytest.raises(KeyboardInterrupt):
            main(["export-hf", str(tmp_path / "last.ckpt"), str(target)])
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "last.ckpt"}
    assert main(["export-hf", str(tmp_path / "last.ckpt"), str(target)]) == 0
    inputs = inputs_for("qwen3")
    assert_same_logits(module.eval(), logits_of(reloaded(target), inputs), inputs)
    assert main(["export-hf", str(tmp_path / "last.ckpt"), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_tokenizer_is_exported(tmp_path: Path) -> None:
    """transformers reads the tokens of the training with it."""
    from tokenizers import Tokenizer

    make_checkpoint("mixtral", tmp_path / "theirs", vocab_size=300, eos_token_id=2)
    (tmp_path / "theirs" / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    text = "The quick brown fox. " * 300
    (tmp_path / "book.txt").write_text(text)
    data = TextData(
        source=str(tmp_path / "book.txt"), tokenizer="bpe:300", context_length=8, global_batch_size=2,
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    trainer = fit(load(tmp_path / "theirs"), 1, data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "ours")]) == 0
    expected = Tokenizer.from_str(data.trained_tokenizer).encode(text).ids
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours", local_files_only=True)
    ids = tokenizer(text)["input_ids"]
    assert ids == expected
    assert tokenizer.decode(ids) == text
    assert not (tmp_path / "ours" / "special_tokens_map.json").exists()
    assert reloaded(tmp_path / "ours").generation_config.eos_token_id is None
    model = open_language_model(str(tmp_path / "run.ckpt"))
    assert not model.ends
    assert model.network.generation_config.eos_token_id is None


def test_ends_of_a_replaced_tokenizer_are_common_text_for_the_next(tmp_path: Path) -> None:
    from tests.unit.test_generate import save

    theirs = make_checkpoint("mixtral", tmp_path / "theirs", vocab_size=300, bos_token_id=7, eos_token_id=9)
    theirs.generation_config.eos_token_id = [9, 256]
    theirs.generation_config.save_pretrained(tmp_path / "theirs")
    named = write_tokenizer(tmp_path / "mine") / "tokenizer.json"
    path = save(load(tmp_path / "theirs"), tmp_path / "run.ckpt", TextData={"tokenizer_origin": str(named)})
    assert open_language_model(str(path), device="cpu").ends == {256}
    assert main(["export-hf", str(path), str(tmp_path / "ours")]) == 0
    ours = reloaded(tmp_path / "ours")
    assert ours.generation_config.eos_token_id == [256]
    assert (ours.config.bos_token_id, ours.config.eos_token_id) == (None, None)


@pytest.mark.slow
def test_the_format_of_conversations_is_exported_as_a_chat_template(tmp_path: Path) -> None:
    """Of a tokenizer without one; transformers writes a conversation as the training did."""

    make_checkpoint("mixtral", tmp_path / "theirs", vocab_size=300)
    write_tokenizer(tmp_path / "theirs")
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "x"}]} for i in range(9)
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = InstructionData(
        path=tmp_path / "talk.jsonl", tokenizer=str(tmp_path / "theirs" / "tokenizer.json"), context_length=64,
        global_batch_size=2, end_token="<e>'\"\\\N{EURO SIGN}\N{GRINNING FACE}",
    )  # fmt: skip
    trainer = fit(load(tmp_path / "theirs"), 1, data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "ours")]) == 0
    turns = [Turn("system", " Be brief. "), Turn("user", "one\n"), Turn("assistant", "two"), Turn("user", "\nthree")]
    written = templated_turns(tmp_path / "ours")
    assert written.prompt(turns) == data.written.prompt(turns)
    assert written.end == data.written.end
    assert "moe-generate . --chat" in (tmp_path / "ours" / "README.md").read_text()


def test_an_export_may_have_folders(tmp_path: Path) -> None:
    """As those of tokenizers with several chat templates."""
    with new_folder(tmp_path / "ours") as staged:
        (staged / "additional_chat_templates").mkdir()
        (staged / "additional_chat_templates" / "rag.jinja").write_text("x")
    assert (tmp_path / "ours" / "additional_chat_templates" / "rag.jinja").read_text() == "x"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TextData, InstructionData])
def test_the_tokenizer_that_the_data_name_is_exported(
    tmp_path: Path, kind: type[TextData | InstructionData], capsys: pytest.CaptureFixture[str]
) -> None:
    """With its added tokens and its template; settings that its folder lacks are those of the model."""
    theirs, mine, alone = tmp_path / "theirs", tmp_path / "mine", tmp_path / "alone" / "own.json"
    make_checkpoint("mixtral", theirs, vocab_size=300)
    write_tokenizer(theirs, chat_template=f"THEIRS{TEMPLATE}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs, local_files_only=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(mine)
    alone.parent.mkdir()
    shutil.copyfile(mine / "tokenizer.json", alone)

    def exported(named: Path, target: Path) -> Any:
        fit(load(theirs), 1, data_of(kind, tmp_path, str(named), None)).save_checkpoint(tmp_path / "run.ckpt")
        assert main(["export-hf", str(tmp_path / "run.ckpt"), str(target)]) == 0
        return transformers.AutoTokenizer.from_pretrained(target, local_files_only=True)

    ours = exported(mine / "tokenizer.json", tmp_path / "ours")
    assert ours.chat_template == TEMPLATE
    assert len(ours("<|x|>")["input_ids"]) == 1
    assert open_language_model(str(tmp_path / "run.ckpt")).text.tokenizer.encode("<|x|>")[0].tolist() == [257]
    if kind is TextData:
        ours = exported(alone, tmp_path / "with_settings")
        assert ours.chat_template == f"THEIRS{TEMPLATE}"
        assert len(ours("<|x|>")["input_ids"]) == 1
        assert capsys.readouterr().err == ""
        alone.unlink()
        with pytest.raises(ConfigurationError, match=r"own.json, the tokenizer of .* is not here: give --tokenizer"):
            open_language_model(str(tmp_path / "run.ckpt"))
        assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "gone")]) == 0
        assert f"{alone}, the tokenizer of the run, is not here, so" in capsys.readouterr().err


def test_a_tokenizer_of_the_hub_that_is_not_here_is_to_be_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    from moe_lightning.cli.huggingface import _Trained

    values = {"TextData": {"tokenizer_origin": "nobody/nothing"}, "hyper_parameters": {"origin": "/base"}}
    trained: Any = SimpleNamespace(source=SimpleNamespace(values=values), config=SimpleNamespace(pretrained="/base"))
    assert _Trained._named_tokenizer(trained) is None
    assert "has that of /base: download it and export again" in capsys.readouterr().err


def test_a_checkpoint_cannot_have_another_file_exported_as_its_tokenizer(tmp_path: Path) -> None:
    from moe_lightning.cli.huggingface import _Trained

    secret = tmp_path / ".netrc"
    secret.write_text("machine example.org login me password x\n")
    values = {"TextData": {"tokenizer_origin": str(secret)}, "hyper_parameters": {"origin": "/base"}}
    trained: Any = SimpleNamespace(source=SimpleNamespace(values=values), config=SimpleNamespace(pretrained="/base"))
    with pytest.raises(ConfigurationError, match=r"netrc is not a tokenizer.json \((?!.*password)"):
        _Trained._named_tokenizer(trained)


@pytest.mark.slow
def test_adapters_keep_the_format_and_the_end_of_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their base has no template, and its generation ends elsewhere."""
    pytest.importorskip("peft")
    from moe_lightning.cli import generate
    from moe_lightning.cli.ckpt import main
    from moe_lightning.data.instructions import InstructionData
    from tests.unit.test_generate import Answers, says, write_tokenizer

    make_checkpoint("olmoe", tmp_path / "theirs", vocab_size=300, max_position_embeddings=256, eos_token_id=7)
    write_tokenizer(tmp_path / "theirs")
    lines = [json.dumps({"prompt": f"{i}?", "response": "x"}) for i in range(9)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    tokenizer = str(tmp_path / "theirs" / "tokenizer.json")
    data = InstructionData(path=tmp_path / "talk.jsonl", tokenizer=tokenizer, context_length=64, global_batch_size=2)
    monkeypatch.chdir(tmp_path)
    module = load(Path("theirs"), adapter={"kind": "lora", "rank": 2})
    trainer = fit(module, 1, data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "ours"), "--adapter"]) == 0
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "merged")]) == 0
    for folder, used in (("ours", "AutoPeftModelForCausalLM.from_pretrained"), ("merged", "moe-generate . --chat")):
        ends = transformers.GenerationConfig.from_pretrained(tmp_path / folder).eos_token_id
        assert ends == [7, load_tokenizer(tokenizer).encode("<e>")[0][0]]
        assert used in (tmp_path / folder / "README.md").read_text()
    answers = Answers(monkeypatch, "fine<e>lost")
    says(monkeypatch, "how?")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path / "merged")
    assert generate.main([".", "--chat"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == "fine\n"
    assert answers.prompts == ["<|user|>\nhow?\n<|assistant|>\n"]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 2}])
def test_a_relative_original_is_found_from_any_folder(
    adapter: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also in a project that was moved as a whole; where the original is gone, a line or a refusal says so."""
    from moe_lightning.cli import generate

    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_checkpoint("olmoe", project / "models" / "olmoe", vocab_size=300)
    write_tokenizer(project / "models" / "olmoe")
    monkeypatch.chdir(project)
    trainer = fit(load(Path("models/olmoe"), adapter=adapter), 1)
    trainer.save_checkpoint("run/checkpoints/step-0000001.ckpt")
    data = {
        "_target_": "moe_lightning.data.instructions.InstructionData",
        "tokenizer": "models/olmoe/tokenizer.json",
        "end_token": "<e>",
    }
    Path("run/config.yaml").write_text(json.dumps({"run_dir": "run", "data": data}))

    def export(target: str, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["export-hf", str(project / "run" / "checkpoints"), str(elsewhere / target), *options])
        return code, capsys.readouterr().err

    monkeypatch.chdir(elsewhere)
    for where in (project, tmp_path / "moved"):
        if where != project:
            project.rename(where)
            project = where
            monkeypatch.chdir(where)
        assert export(f"merged_{where.name}") == (0, "")
        assert (elsewhere / f"merged_{where.name}" / "tokenizer.json").is_file()
        assert generate.main([str(where / "run"), "1", "--max-new-tokens", "2"]) == 0, capsys.readouterr().err
        if adapter is not None:
            alone = elsewhere / f"alone_{where.name}"
            assert export(alone.name, "--adapter") == (0, "")
            named = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
            assert named == str(where / "models" / "olmoe")
    (project / "models").rename(tmp_path / "away")
    if adapter is None:
        code, said = export("gone")
        assert code == 0
        assert re.fullmatch(
            r"moe-ckpt: .*gone has no tokenizer, since /.*project/models/olmoe has none here: .*\n", said
        )
    else:
        code, said = export("gone", "--adapter")
        assert code == 2
        assert f"{tmp_path / 'project' / 'models' / 'olmoe'} is not here" in said


# ---------------------------------------------------------------- model cards


def card(folder: Path) -> str:
    """The card of an exported folder, which names no folder of this machine."""
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: ")
    assert not [part for part in text.split() if part.startswith("/")]
    assert str(folder.parent) not in text
    return text


@pytest.mark.slow
def test_the_card_of_an_export_says_how_the_model_was_trained(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "theirs", vocab_size=256)
    book = tmp_path / "a | b.txt"
    book.write_text("The quick brown fox. " * 300)
    data = TextData(source=str(book), context_length=8, global_batch_size=2, cache_dir=tmp_path / "cache")
    run = tmp_path / "outputs" / "run"
    options = {"val_check_interval": 3, "limit_val_batches": 1}
    trainer = fit(load(tmp_path / "theirs"), 3, data, log_every_n_steps=1, **options, logger=CSVLogger(run, name="csv"))
    trainer.save_checkpoint(run / "checkpoints" / "step-0000003.ckpt")
    (run / "config.yaml").write_text(
        f"run_dir: here\ndata: {{source: '{book}', global_batch_size: 2, context_length: 8}}"
    )
    losses = {name: float(trainer.callback_metrics[f"{name}/loss"]) for name in ("val", "train")}
    assert main(["export-hf", str(run), str(tmp_path / "ours")]) == 0
    said = card(tmp_path / "ours")
    assert said.splitlines()[1:] == [
        "library_name: transformers",
        "tags:",
        "- mixture-of-experts",
        "- moe-lightning",
        "---",
        "",
        "# theirs, trained with moe-lightning",
        "",
        "The training began with the weights of theirs.",
        "",
        "| | |",
        "|---|---|",
        "| data | a &#124; b.txt |",
        "| steps | 3 |",
        "| samples of a step | 2 |",
        "| most tokens of a sample | 8 |",
        "| optimizer | adamw, peak learning rate 0.0003, weight decay 0.1 |",
        f"| validation loss | {losses['val']:.4f} nats per token |",
        f"| training loss of the last step | {losses['train']:.4f} nats per token |",
        "",
        "To generate text, in this folder:",
        "",
        "```bash",
        'moe-generate . "PROMPT"',
        "```",
    ]
    (run / "config.yaml").write_text(
        f"run_dir: here\ndata: {{source: [{{path: '{book}'}}, web/b], global_batch_size: 2}}"
    )
    assert main(["export-hf", str(run), str(tmp_path / "mixture")]) == 0
    assert "| data | a &#124; b.txt, b |" in card(tmp_path / "mixture")
    (run / "checkpoints" / "step-0000003.ckpt").rename(tmp_path / "copied.ckpt")
    assert main(["export-hf", str(tmp_path / "copied.ckpt"), str(tmp_path / "copied")]) == 0
    assert [line for line in card(tmp_path / "copied").splitlines() if line.startswith("| ") and line != "| | |"] == [
        "| steps | 3 |", "| most tokens of a sample | 16 |", said.splitlines()[17],
    ]  # fmt: skip


def test_the_card_names_a_model_of_a_cache_as_the_hub_does(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--allenai--OLMoE-1B--7B" / "snapshots" / "0a1b"
    for folder, upcycling in ((cached, None), (tmp_path / "gpt2", {"num_experts": 4})):
        config = HuggingFaceConfig(pretrained=str(folder), upcycling=upcycling)
        write_card(tmp_path, config, OptimizerConfig(), TrainingFacts(steps=1))
        text = card(tmp_path)
        if upcycling is None:
            assert "\nbase_model: allenai/OLMoE-1B--7B\n" in text
            assert "\n# allenai/OLMoE-1B--7B, trained" in text
        else:
            assert "base_model" not in text
            assert "the weights of gpt2, whose feed-forward layers became layers of 4 experts." in text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        slow("allenai/OLMoE-1B-7B-0924", "HF_HUB_OFFLINE forbids .* --local-dir OLMoE-1B-7B-0924, and give"),
        ("file.safetensors", r"file.safetensors is a file: give the folder"),
        slow("last.ckpt", r"is a checkpoint of Lightning: give resume=last.ckpt"),
        slow("empty", "is an empty folder: give the folder"),
        slow("other", "has no config.json among its 1 entries: give the folder"),
        ("gpt2", "a dense gpt2 without experts: recipes=upcycle_gpt2 makes experts"),
        slow("llama", "a dense llama without experts: recipes=upcycle_llama makes experts"),
    ],
)
def test_what_is_no_checkpoint_with_experts_is_told(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("empty").mkdir()
    Path("other").mkdir()
    for file in ("file.safetensors", "last.ckpt", "other/notes.txt", "chat.jsonl"):
        Path(file).touch()
    if name in ("gpt2", "llama"):
        make_checkpoint(name, tmp_path / name)
    with pytest.raises(ConfigurationError, match=sentence):
        load(Path(name))
    words = ["recipes=olmoe_finetune", f"model.pretrained={name}", "data.path=chat.jsonl", "ranks=1"]
    assert exit_code(train.main, words) == 2
    error = capfd.readouterr().err
    assert re.search(sentence, error)
    assert len(error.splitlines()) == 1


def edited(folder: Path, **values: Any) -> None:
    """Change config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"model_type": "bert"}, {}, "model_type='bert' .* is not known: use one of mixtral, olmoe"),
        ({"quantization_config": {"quant_method": "gptq"}}, {}, r"quantised \(gptq\), and only mxfp4 and fp8"),
        ({"hidden_act": "relu"}, {}, "hidden_act='relu' .* is not known"),
        ({"hidden_size": "wide"}, {}, "transformers refuses this configuration"),
        ({}, {"context_length": 65}, "context_length=65 exceeds the 64 positions"),
        ({}, {"context_length": 0}, "context_length=0 of HuggingFaceConfig must be an integer of at least 1"),
        ({}, {"router": {"top_k": 1}}, "router.top_k is fixed by the pretrained model"),
        ({}, {"router": {"aux_loss_coef": -1.0}}, "aux_loss_coef=-1.0 of RouterConfig must be a number of at least 0"),
        ({}, {"router": {"bias_update_rate": 0.1}}, "needs a selection bias, which mixtral has no room for"),
        (
            {},
            {"router": {"bias_update_rate": 0.1}, "adapter": {"rank": 2}},
            "bias_update_rate=0.1 would change selection biases, which adapters cannot hold",
        ),
        ({}, {"overrides": {"dropout": 0.0}}, "has no 'dropout': see its config.json"),
        ({}, {"overrides": {"rope_theta": 7.0}}, "has no 'rope_theta': set it in rope_parameters"),
        ({}, {"overrides": {"hidden_size": "wide"}}, "transformers refuses this configuration"),
        (
            {},
            {"upcycling": {"num_experts": 4}},
            "model_type='mixtral' of .* is not known: use one of gpt2, llama",
        ),
        ({}, {"pretrained": "nowhere"}, "pretrained=nowhere does not exist: give the folder"),
    ],
)
def test_wrong_configurations_are_one_sentence(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint("mixtral", tmp_path)
    edited(tmp_path, **config)
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, **options)


def test_other_swiglu_constants_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    edited(tmp_path, swiglu_limit=5.0)
    with pytest.raises(ConfigurationError, match=r"swiglu_limit=5.0 .* 7.0 is"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("lacks", "has no tensor 'model.layers.1.block_sparse_moe.experts.3.w2.weight'"),
        ("shape", "'model.norm.weight' .* has shape"),
        ("width", r"give w_down the shape \[1, 32\], the layer has \[48, 32\]"),  # which would fit by broadcasting
        ("cut", r"is damaged or unreadable: .*; get the folder again$"),
        ("index", r"lists 'x/../y.safetensors', which is not in the folder: get it again$"),
    ],
)
def test_damaged_weights_are_one_sentence(damage: str, message: str, tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if damage == "lacks":
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    if damage == "shape":
        tensors["model.norm.weight"] = torch.ones(31)
    if damage == "width":
        name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
        tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    if damage == "index":
        file.unlink()
        index = {"weight_map": {"model.norm.weight": "x/../y.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_configurations_of_older_versions(tmp_path: Path) -> None:
    """Names that have changed since; and router logits that nobody reads."""
    make_checkpoint("mixtral", tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"], values["dtype"]
    old = {"rope_theta": 7.0, "rope_scaling": None, "torch_dtype": "float32", "output_router_logits": True}
    file.write_text(json.dumps(values | old))
    inputs = inputs_for("mixtral")
    assert_same_logits(load(tmp_path), logits_of(reloaded(tmp_path), inputs), inputs)


@pytest.mark.parametrize("scaling", ["default", "yarn"])
@pytest.mark.parametrize("name", SPARSE)
def test_an_exported_configuration_is_read_by_names_of_both_versions(name: str, scaling: str, tmp_path: Path) -> None:
    """Also by the older ones alone, which are all that transformers 4 knows."""
    class_name, options = SPARSE[name]
    rope = {"rope_type": scaling, "rope_theta": 7.0, "partial_rotary_factor": 0.75}
    if scaling == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 16}
    config = getattr(transformers, class_name)(**SIZES | {"head_dim": 16} | options)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = rope
    architecture = SparseArchitecture(config)
    exported = plan_export(architecture, build_skeleton(architecture), "bfloat16")
    exported.write_config(tmp_path)
    file = tmp_path / "config.json"
    written = file.read_text()
    copy_companions(tmp_path / "theirs", tmp_path, exported, tokenizer="{}")
    assert file.read_text() == written, "a trained tokenizer changes special tokens only"
    values = json.loads(written)
    expected = exported.config.to_dict()
    assert config_from(values).to_dict() == expected
    for newer in ("rope_parameters", "dtype", "num_local_experts"):
        if newer != exported.family.num_experts:
            values.pop(newer, None)
    if (name, scaling) != ("gpt_oss", "default"):  # transformers 5 takes yarn where its own name is missing
        assert config_from(values).to_dict() == expected


@pytest.mark.parametrize(("name", "key"), [("glm4", "num_nextn_predict_layers"), ("qwen3_5", "mtp_num_hidden_layers")])
def test_an_export_promises_no_layers_for_multi_token_prediction(
    name: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(name, tmp_path / "theirs")
    edited(tmp_path / "theirs", **{key: 2})
    adapter = {"rank": 2, "targets": ["experts"]} if name == "glm4" else None
    fit(load(tmp_path / "theirs", adapter=adapter), 1).save_checkpoint(tmp_path / "run.ckpt")
    capsys.readouterr()
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "ours")]) == 0
    assert json.loads((tmp_path / "ours" / "config.json").read_text())[key] == 0
    assert capsys.readouterr().err.count(f"config.json says {key}=0 in the place of 2, so") == 1
    if adapter is not None:  # its model has these layers
        assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "alone"), "--adapter"]) == 0
        assert "multi-token" not in capsys.readouterr().err


def test_overrides_that_adapters_alone_cannot_hold_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("olmoe", tmp_path / "theirs")
    overrides = {"num_experts_per_tok": 1, "attention_dropout": 0.0}
    module = load(tmp_path / "theirs", adapter={"rank": 2, "targets": ["experts"]}, overrides=overrides)
    fit(module, 1).save_checkpoint(tmp_path / "run.ckpt")
    capsys.readouterr()
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "ours")]) == 0
    assert "adapters cannot hold" not in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path / "run.ckpt"), str(tmp_path / "alone"), "--adapter"]) == 0
    assert "model.overrides of num_experts_per_tok=1, which adapters cannot hold" in capsys.readouterr().err


def test_adapters_trained_with_another_alpha_are_refused(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path / "theirs")

    def module(alpha: float) -> Any:
        return load(tmp_path / "theirs", adapter={"rank": 2, "alpha": alpha, "targets": ["experts"]})

    trainer = fit(module(32.0), 1)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loader = torch.utils.data.DataLoader(RandomTokens(24), batch_size=8)
    trainer.validate(module(32.0), loader, ckpt_path=tmp_path / "run.ckpt", verbose=False)
    with pytest.raises(CheckpointError, match=r"trained with alpha=32 at rank=2, and alpha=64 at rank=2"):
        trainer.validate(module(64.0), loader, ckpt_path=tmp_path / "run.ckpt", verbose=False)


def test_an_override_of_rotary_embeddings_counts_before_their_older_name(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path)
    edited(tmp_path, rope_theta=5.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}
    assert load(tmp_path, overrides={"rope_parameters": rope}).architecture.config.rope_parameters == rope


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({"rope_scaling": LINEAR}, {"rope_theta": 7.0, **LINEAR}),
        ({"rope_parameters": LINEAR}, {"rope_theta": 7.0, **LINEAR}),
        ({"rope_scaling": None}, {"rope_theta": 7.0, "rope_type": "default"}),
        ({"rope_parameters": {"rope_theta": 9.0}}, {"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0}),
    ],
)
def test_an_override_of_rotary_embeddings_changes_nothing_else_of_them(
    tmp_path: Path, overrides: dict[str, Any], rope: dict[str, Any]
) -> None:
    make_checkpoint("olmoe", tmp_path)
    edited(tmp_path, rope_parameters={"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0})
    before = copy.deepcopy(overrides)
    module = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16, "overrides": overrides})
    assert module.architecture.config.rope_parameters == rope
    assert overrides == module.hparams["config"]["overrides"] == before


def test_an_override_that_transformers_does_not_follow_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigurationError, match=r"sliding_window=4 has no effect: .* makes sliding_window=None of it"):
        HuggingFaceConfig(pretrained=str(tmp_path), context_length=16, overrides={"sliding_window": 4}).architecture()
    window = {"sliding_window": 4, "use_sliding_window": True}
    config = HuggingFaceConfig(pretrained=str(tmp_path), context_length=16, overrides=window)
    assert config.architecture().config.sliding_window == 4


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=r"holds neither model\.safetensors nor"):
        load(tmp_path)


def test_tensors_without_use_are_named(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.extra": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"1 tensors that the model has no use for, such as 'model.extra'"):
        load(tmp_path)


def write_head(folder: Path, change: float) -> None:
    """Add a head, the embedding plus a number, to the weights of a checkpoint that ties both."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change * torch.arange(VOCABULARY)[:, None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("error::UserWarning:moe_lightning")
def test_a_head_that_equals_the_embedding_stays_tied(tmp_path: Path) -> None:
    make_checkpoint("mixtral_tied", tmp_path)
    write_head(tmp_path, 0.0)
    model = load(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 2}])
def test_a_head_that_differs_from_the_embedding_is_trained_beside_it(
    adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    """As merged adapters leave it, whose config.json still ties both: also resumed, generating and exported."""
    make_checkpoint("mixtral_tied", tmp_path / "theirs")
    write_head(tmp_path / "theirs", 0.01)
    inputs = inputs_for("mixtral_tied")
    expected = logits_of(reloaded(tmp_path / "theirs"), inputs)
    with pytest.warns(UserWarning, match=r"'lm_head.weight' of .* differs from 'model.embed_tokens.weight'"):
        module = load(tmp_path / "theirs", adapter=adapter)
    assert_same_logits(module, expected, inputs)
    checkpoint = tmp_path / "ours.ckpt"
    export(fit(module), tmp_path / "ours")
    assert_same_logits(module.eval(), logits_of(reloaded(tmp_path / "ours"), inputs), inputs)
    generating = open_language_model(str(checkpoint), tokenizer="bytes", device="cpu").network
    assert_same_logits(module, logits_of(generating, inputs), inputs)
    resumed = load(tmp_path / "theirs", adapter=adapter)
    loader = torch.utils.data.DataLoader(RandomTokens(24), batch_size=8)
    quiet_trainer(max_steps=3).fit(resumed, loader, ckpt_path=checkpoint)  # has nothing left to do
    assert_same_logits(resumed.eval(), logits_of(generating, inputs), inputs)


def test_an_export_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("olmoe", tmp_path / "theirs")
    trainer = fit(load(tmp_path / "theirs"), 1)
    export(trainer, tmp_path / "ours")
    told = [path for path in (tmp_path / "ours").iterdir() if path.suffix != ".safetensors"]
    assert not [path for path in told if str(tmp_path) in path.read_text()], "no path of this machine"
    file = str(tmp_path / "ours.ckpt")
    for target, options, sentence in (
        ("theirs", [], "theirs exists already: name another folder"),
        ("later", ["--dtype=float8"], "dtype='float8' is not known"),
    ):
        assert main(["export-hf", file, str(tmp_path / target), *options]) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "later").exists()


def test_other_modules_cannot_be_exported(tmp_path: Path) -> None:
    trainer = fit(OwnModule(), steps=1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert main(["export-hf", str(tmp_path / "own.ckpt"), str(tmp_path / "ours")]) == 2


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_text_model_of_one_with_images_is_saved_as_the_error_says(name: str, tmp_path: Path) -> None:
    make_checkpoint_with_images(name, tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match="only the text model can be trained") as refusal:
        load(tmp_path / "theirs")
    call = re.search(r"AutoModelForCausalLM.*?\(.*?\)\.save_pretrained\(.*?\)", str(refusal.value))
    assert repr(str(tmp_path / "theirs")) in call[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert ".save_pretrained('FOLDER', save_original_format=False)" in call[0]
    theirs.save_pretrained(tmp_path / "text", save_original_format=False)
    inputs = inputs_for(name)
    assert_same_logits(load(tmp_path / "text"), logits_of(theirs, inputs), inputs)


def test_a_router_that_no_entry_describes_is_refused(tmp_path: Path) -> None:
    transformers.PhimoeConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="SparseMixer"):
        load(tmp_path)
