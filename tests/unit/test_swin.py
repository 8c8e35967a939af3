"""SwinV2-MoE: which blocks have experts, stochastic depth by sample, heads of checkpoints, accuracy, wrong sizes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from moe_lightning import ConfigurationError
from moe_lightning.callbacks.console import Console
from moe_lightning.callbacks.summary import Summary
from moe_lightning.callbacks.telemetry import Telemetry
from moe_lightning.cli.train import main
from moe_lightning.cli.training import with_sizes_of_data
from moe_lightning.data.images import ImageData
from moe_lightning.models.huggingface.architecture import DroppingLayerNorm
from moe_lightning.models.huggingface.loading import build_skeleton
from moe_lightning.models.optimizers import parameter_groups
from moe_lightning.models.swin import SwinConfig, SwinModule, top_k_accuracy
from moe_lightning.moe.layer import moe_layers
from moe_lightning.moe.randomness import SampleStream, attach_stream
from tests.distributed.training import quiet_trainer
from tests.huggingface_models import inputs_for, logits_of, make_checkpoint, transformers
from tests.programs import exit_code
from tests.unit.test_conf import composed_model

TINY: dict[str, Any] = {
    "num_classes": 12,
    "image_size": 16,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 2),
    "mlp_ratio": 2.0,
    "drop_path_rate": 0.0,
    "num_experts": 4,
}


def built(**options: Any) -> SwinModule:
    torch.manual_seed(0)
    module = SwinModule({**TINY, **options})
    module.configure_model()
    return module


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ("moe_every", "num_dense_layers", "blocks"),
    [(1, 0, ["0.0", "0.1", "1.0", "1.1"]), (2, 0, ["0.1", "1.1"]), (2, 2, ["1.1"]), (1, 3, ["1.1"])],
)
def test_the_chosen_blocks_have_experts(moe_every: int, num_dense_layers: int, blocks: list[str]) -> None:
    module = built(moe_every=moe_every, num_dense_layers=num_dense_layers)
    expected = ["swinv2.encoder.layers.{}.blocks.{}.intermediate".format(*name.split(".")) for name in blocks]
    assert list(module.architecture.layers) == expected
    assert moe_layers(module) == list(module.architecture.layers.values())
    assert module(inputs_for("swinv2")).shape == (3, 12)


def test_branches_start_at_zero_and_everything_learns() -> None:
    """With every branch at zero the blocks change nothing; after two steps all parameters have moved."""
    module = built(router={"top_k": 1})
    norms = [layer for layer in module.modules() if isinstance(layer, DroppingLayerNorm)]
    assert len(norms) == 8
    assert all(not norm.weight.any() for norm in norms)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    x, y = inputs_for("swinv2"), torch.tensor([0, 5, 11])
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module.loss((x, y))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[2] < losses[0]
    unmoved = [name for name, parameter in module.named_parameters() if torch.equal(parameter, before[name])]
    assert not unmoved


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for recomputes in (False, True):
        module = built(gradient_checkpointing=recomputes, drop_path_rate=0.5).train()
        attach_stream(module, stream := SampleStream(3))
        stream.advance(step=1, first_sample=0, num_samples=3)
        module.loss((inputs_for("swinv2"), torch.tensor([0, 5, 11]))).backward()
        gradients.append([p.grad for p in module.parameters()])
    assert any(gradient is not None and gradient.any() for gradient in gradients[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_stochastic_depth_follows_the_sample() -> None:
    """A slice of the batch loses the branches that it loses in the whole batch; about a share p of all is lost."""
    norm = DroppingLayerNorm(torch.nn.LayerNorm(4), 0.25).train()
    stream = SampleStream(seed=5)
    norm.stream = stream
    x = torch.randn(400, 3, 4, generator=torch.Generator().manual_seed(0))
    stream.advance(step=7, first_sample=0, num_samples=400)
    whole = norm(x)
    stream.advance(step=7, first_sample=100, num_samples=50)
    assert torch.equal(norm(x[100:150]), whole[100:150])
    lost = ~whole.flatten(1).any(dim=1)
    assert 60 < int(lost.sum()) < 140
    expected = torch.nn.functional.layer_norm(x, (4,)) / 0.75
    torch.testing.assert_close(whole[~lost], expected[~lost])
    torch.testing.assert_close(norm.eval()(x), torch.nn.functional.layer_norm(x, (4,)))


def test_each_branch_is_dropped_on_its_own() -> None:
    module = built(drop_path_rate=0.5).train()
    attach_stream(module, stream := SampleStream(1))
    stream.advance(step=0, first_sample=0, num_samples=64)
    norms = [layer for layer in module.modules() if isinstance(layer, DroppingLayerNorm)]
    assert [round(norm.p, 3) for norm in norms[::2]] == [0.0, 0.167, 0.333, 0.5]
    for norm in norms:
        torch.nn.init.ones_(norm.weight)
    last, other = (norm(torch.randn(64, 2, 16)).flatten(1).any(dim=1) for norm in norms[-2:])
    assert not torch.equal(last, other)


def test_temperatures_do_not_decay() -> None:
    """A temperature for each head, [heads, 1, 1], is a vector; stacks of matrices are none."""
    module = built()
    decayed = {id(parameter) for parameter in parameter_groups(module, 0.1)[0]["params"]}
    decays = {
        ending: {id(parameter) in decayed for name, parameter in module.named_parameters() if name.endswith(ending)}
        for ending in ("logit_scale", "w_up", "w_down", "query.weight")
    }
    assert decays == {"logit_scale": {False}, "w_up": {True}, "w_down": {True}, "query.weight": {True}}


# ---------------------------------------------------------------------- checkpoints of dense models


def test_an_upcycled_checkpoint_keeps_its_function(tmp_path: Path) -> None:
    dense = make_checkpoint("swinv2", tmp_path)
    module = SwinModule({"num_classes": 5, "pretrained": str(tmp_path), "image_size": 16, "moe_every": 2})
    module.configure_model()
    inputs = inputs_for("swinv2")
    with torch.no_grad():
        error = float((module.eval()(inputs) - logits_of(dense, inputs)).abs().max())
    assert error <= 1e-5
    assert len(moe_layers(module)) == 2


def test_a_head_for_other_classes_is_new(tmp_path: Path) -> None:
    dense = make_checkpoint("swinv2", tmp_path)
    module = SwinModule({"num_classes": 9, "pretrained": str(tmp_path), "image_size": 16})
    with pytest.warns(UserWarning, match="2 tensors that the model has no use for, such as 'classifier.bias'"):
        module.configure_model()
    inputs = inputs_for("swinv2")
    with torch.no_grad():
        theirs = dense.swinv2(inputs).pooler_output
        ours = module.model.eval().swinv2(inputs).pooler_output
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    head = module.model.classifier
    assert head.weight.shape == (9, 16)
    assert 0.1 < float(head.weight.detach().std()) < 0.3, "drawn with the checkpoint's initializer_range of 0.2"
    assert not head.bias.any()


def test_hyperparameters_are_plain_and_rebuild_the_module() -> None:
    module = built(router={"top_k": 1})
    hyperparameters = json.loads(json.dumps(dict(module.hparams)))
    again = SwinModule(**hyperparameters)
    assert again.config == module.config
    assert again.optimizer_config == module.optimizer_config


# ---------------------------------------------------------------------- training


def fit(module: SwinModule, data: ImageData, **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(**{"max_steps": 2} | options)
    trainer.fit(module, data)
    return trainer


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_metrics_of_a_run() -> None:
    data = ImageData(image_size=16, num_shapes=24, global_batch_size=6)
    trainer = fit(built(), data, max_epochs=1, max_steps=-1, log_every_n_steps=1)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    stages = {f"{stage}/{name}" for stage in ("train", "val") for name in ("loss", "accuracy", "top_5_accuracy")}
    assert stages <= set(logged)
    assert 0 <= logged["val/accuracy"] <= logged["val/top_5_accuracy"] <= 1
    tested = trainer.test(trainer.lightning_module, data, verbose=False)[0]
    assert tested["test/loss"] == pytest.approx(logged["val/loss"], abs=1e-5)
    assert tested["test/accuracy"] == pytest.approx(logged["val/accuracy"])


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_what_a_user_sees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module, data = built(), ImageData(image_size=16, num_shapes=24, global_batch_size=6)
    callbacks = [Telemetry(), Console("plain"), Summary(str(tmp_path / "summary.json"))]
    steps = {"max_epochs": 1, "max_steps": -1, "log_every_n_steps": 2}
    trainer = fit(module, data, callbacks=callbacks, enable_progress_bar=True, **steps)
    trainer.validate(module, data, verbose=False)
    said = capsys.readouterr().out.splitlines()
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert said[0].endswith("4 experts in 2 layers, top-2")
    assert said[1] == "data   coloured shapes: 24 training and 6 validation images, 12 classes"
    assert "images/s" in said[3]
    assert f"validation loss {numbers['val_loss']:.4f}, accuracy {numbers['val_accuracy']:.1%}" in said[5]
    summary = said[said.index("") + 1 :]
    assert summary[0] == f"validation loss  {numbers['val_loss']:.4f} nats"
    assert f"{numbers['val_accuracy']:.1%}, {numbers['val_top_5_accuracy']:.1%} in the first five" in summary[1]
    assert "images/s over 4 steps" in summary[2]


def test_accuracy() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0], [1.0, 0.0, 3.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    classes = torch.tensor([0, 2, 1, 3])
    assert float(top_k_accuracy(logits, classes, 1)) == 0.5
    assert float(top_k_accuracy(logits, classes, 2)) == 0.75
    assert float(top_k_accuracy(logits, classes, 5)) == 1.0


# ---------------------------------------------------------------------- mistakes


def test_too_many_dense_layers() -> None:
    module = SwinModule({**TINY, "num_dense_layers": 4})
    with pytest.raises(ConfigurationError, match="moe_every=2 and num_dense_layers=4 leave no MoE layer among 4"):
        module.configure_model()


def test_wrong_checkpoints(tmp_path: Path) -> None:
    make_checkpoint("swinv2", tmp_path / "swinv2")
    make_checkpoint("gpt2", tmp_path / "gpt2")
    for folder, options, message in (
        ("nowhere", {}, "nowhere does not exist: give the folder of a Hugging Face checkpoint"),
        ("gpt2", {}, "model_type='gpt2' of .* is not known: use one of swinv2"),
        ("swinv2", {"image_size": 32}, "image_size=32 is not the 16 of .*: set it to that"),
        ("swinv2", {"router": {"top_k": 1}}, "top_k=1 cannot keep the function of the pretrained dense model"),
    ):
        config = {"num_classes": 5, "pretrained": str(tmp_path / folder), "image_size": 16, **options}
        with pytest.raises(ConfigurationError, match=message):
            SwinModule(config)


def test_data_that_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"images of 8 x 8 pixels came to a model of image_size=16"):
        built()(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ConfigurationError, match="the data have 12 classes, the model has 5: set num_classes=12"):
        fit(built(num_classes=5), ImageData(image_size=16, num_shapes=8, global_batch_size=2))


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_upcycling_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    make_checkpoint("swinv2", tmp_path / "dense", num_labels=12)
    choice = ["recipes=swinv2_moe", "model=swinv2_upcycled", "model.pretrained=dense", "model.image_size=16"]
    small = ["ranks=1", "logger=none", "data.global_batch_size=4", "data.num_shapes=8", "trainer.accelerator=cpu"]
    steps = ["trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.log_every_n_steps=2"]
    assert exit_code(main, [*choice, *small, *steps]) == 0
    said = capfd.readouterr()
    assert "8 experts in 2 layers, top-2" in said.out
    assert "step 2/2  validation loss" in said.out


def test_sizes_that_the_data_decide() -> None:
    images, text = ImageData(), SimpleNamespace(vocab_size=256)

    def decided(data: object, **model: object) -> Any:
        return with_sizes_of_data({"module": {"config": model}}, data)["module"]["config"]

    assert decided(images, num_classes="auto") == {"num_classes": 12}
    assert decided(images, num_classes=20) == {"num_classes": 20}
    assert decided(text, vocab_size="auto", d_model=8) == {"vocab_size": 256, "d_model": 8}
    assert decided(text, d_model=8) == {"d_model": 8}
    with pytest.raises(ConfigurationError, match="num_classes=5 is below the 12 classes of the data"):
        decided(images, num_classes=5)
    with pytest.raises(ConfigurationError, match="num_classes=auto asks SimpleNamespace for its classes"):
        decided(text, num_classes="auto")


def test_the_papers_size() -> None:
    """PEC prints 157M parameters, MoC-System 10 MoE layers."""
    config = SwinConfig(**{**composed_model("swinv2_moe"), "num_classes": 1000})
    model = build_skeleton(config.architecture())
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(157e6, abs=0.5e6)
    layers = moe_layers(model)
    assert [layer.experts.w_up.shape[1] for layer in layers] == [384] * 9 + [768]
    assert all(layer.num_experts == 8 for layer in layers)
    assert isinstance(model, transformers.Swinv2ForImageClassification)


def test_a_model_far_larger_than_the_vocabulary_is_told() -> None:
    data = SimpleNamespace(vocab_size=256)
    with pytest.warns(
        UserWarning, match=r"model.vocab_size=50257 is 196 times the 256 tokens .* model.vocab_size=auto"
    ):
        with_sizes_of_data({"module": {"config": {"vocab_size": 50257}}}, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_sizes_of_data({"module": {"config": {"vocab_size": 1024}}}, data)
