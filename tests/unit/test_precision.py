"""Half precision: which buffers stay in float32, bit by bit, from loading to checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from moe_lightning import ExpertParallelStrategy, MoELayer
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.models.gpt import GPTConfig, Rotary
from moe_lightning.moe.router import Router, RouterConfig
from moe_lightning.strategies.precision import convert_by_rule
from moe_lightning.strategies.stages import StageCut
from tests.agents import ForkedAgent
from tests.distributed.training import quiet_trainer
from tests.huggingface_models import export, make_checkpoint, reloaded

HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def set_precision(module: nn.Module, precision: str) -> None:
    module.to(HALF[precision])


@pytest.mark.parametrize("precision", HALF)
def test_small_steps_of_the_selection_bias_are_not_lost(precision: str) -> None:
    router = Router(4, 4, RouterConfig(top_k=1, bias_update_rate=1e-3))
    router.expert_bias_E.copy_(torch.tensor([1.6, -0.2, -0.2, -0.2]))
    set_precision(router, precision)
    assert router.weight.dtype == HALF[precision]
    for _ in range(900):
        router.count_for_bias(torch.tensor([2, 0, 0, 0]))
        router.update_bias()
    torch.testing.assert_close(router.expert_bias_E, torch.full((4,), 0.7), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("is_quantised", [False, True])
def test_assigned_tensors_stay_in_float32(is_quantised: bool) -> None:
    layer = MoELayer(64, 64, 2, router={"bias_update_rate": 1e-3})
    if is_quantised:
        layer.experts.freeze(rank=2, scale=1.0, in_4_bits=True)
    state = {name: t.bfloat16() if t.is_floating_point() else t for name, t in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    here = layer.state_dict()
    kept = {name for name, tensor in here.items() if tensor.dtype == torch.float32}
    expected = {name for name in here if name.endswith(("expert_bias_E", "_scales"))}
    assert kept == expected
    assert len(kept) == (3 if is_quantised else 1)
    assert {t.dtype for t in state.values()} <= {torch.bfloat16, torch.uint8, torch.int64}  # the user's own tensors


def test_what_is_built_in_half_precision_has_a_float32_bias() -> None:
    with pl.Trainer(precision="bf16-true", accelerator="cpu", logger=False).precision_plugin.module_init_context():
        router = Router(4, 4, RouterConfig(bias_update_rate=1e-3))
    assert router.expert_bias_E.dtype == torch.float32


def test_rotary_tables_are_those_of_float32() -> None:
    config = GPTConfig(position="rope", context_length=2048)
    rotary, exact = Rotary(config).bfloat16(), Rotary(config)
    assert torch.equal(rotary.cos_LC, exact.cos_LC)
    assert torch.equal(rotary.sin_LC, exact.sin_LC)


def test_scales_of_four_bits_stay_exact() -> None:
    layer = MoELayer(64, 64, 2)
    layer.experts.freeze(rank=2, scale=1.0, in_4_bits=True)
    names = list(layer.experts.stacked_parameters())
    scales = layer.experts.get_parameter("w_up_scales").detach().clone()
    layer.bfloat16()
    assert torch.equal(layer.experts.get_parameter("w_up_scales"), scales)
    assert layer.experts.get_parameter("lora_w_up_a").dtype == torch.bfloat16
    assert list(layer.experts.stacked_parameters()) == names


class Module(pl.LightningModule):
    """Has buffers of its own, of which it names one and the module around another."""

    _keep_in_fp32_modules = ("named", "inner.table")

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(8, 8, 4, router={"top_k": 2, "bias_update_rate": 1e-3})
        self.inner = nn.Module()
        for owner, name in ((self, "named"), (self, "other"), (self.inner, "table"), (self.inner, "unnamed")):
            owner.register_buffer(name, torch.tensor([0.1]))
        with torch.no_grad():
            self.moe.router.expert_bias_E.copy_(torch.tensor([0.1001, 0.1002, 0.1003, 0.1004]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.moe(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: pl.LightningModule, folder: Path, precision: str, steps: int, **options: Any) -> pl.Trainer:
    callbacks, strategy = options.pop("callbacks", []), ExpertParallelStrategy()
    trainer = quiet_trainer(
        strategy=strategy, precision=precision, max_steps=steps, default_root_dir=folder, callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, options.pop("loader", DataLoader(TensorDataset(x), batch_size=8)), **options)
    return trainer


@pytest.mark.parametrize("precision", HALF)
def test_buffers_of_a_run_and_of_its_resume(precision: str, tmp_path: Path) -> None:
    def buffers(steps: int, name: str, **options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Module()
        trainer = fit(module, tmp_path, precision, steps, **options)
        trainer.save_checkpoint(tmp_path / name)
        saved = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        found = dict(module.named_buffers())
        assert all(torch.equal(saved[key], found[key]) for key in found if key in saved)
        assert trainer.precision_plugin.convert_module(nn.Linear(1, 1)).weight.dtype == HALF[precision]
        return found

    found = buffers(4, "four.ckpt")
    for name, value in (("named", 0.1), ("inner.table", 0.1)):
        assert torch.equal(found[name], torch.tensor([value])), name
    assert found["other"].dtype == found["inner.unnamed"].dtype == HALF[precision]  # as in stock Lightning
    exact = torch.tensor([0.1001, 0.1002, 0.1003, 0.1004])
    steps = (found["moe.router.expert_bias_E"] - exact) / 1e-3
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0.0)
    buffers(2, "two.ckpt")
    resumed = buffers(4, "resumed.ckpt", ckpt_path=tmp_path / "two.ckpt")
    assert all(torch.equal(found[name], resumed[name]) for name in found)


class Momenta(Module):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


@pytest.mark.filterwarnings("ignore:Precision bf16-true")
@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_moments_follow_the_weights_into_another_precision(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lightning.checkpoint.agent_handle.start_agent", ForkedAgent)
    checkpoints = PartialExpertsCheckpoint(str(tmp_path / "checkpoints"), every_n_steps=1)
    fit(Momenta(make), tmp_path, "bf16-true", 2, callbacks=[checkpoints])
    trainer = fit(Momenta(make), tmp_path, "32-true", 4, ckpt_path=tmp_path / "checkpoints")
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values() if value.ndim]
    assert len(moments) >= len(list(trainer.model.parameters()))
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert all(moment.abs().max() > 0 for moment in moments)


class LateBuffers(Module):
    """Builds a module with buffers in `configure_model`, where half precision is the default."""

    def configure_model(self) -> None:
        if hasattr(self, "late"):
            return
        self.late = nn.Module()
        self.late._keep_in_fp32_modules = "table"
        self.late.register_buffer("table", torch.tensor([0.1]))
        self.late.register_buffer("zeros", torch.zeros(1))
        self.late.register_buffer("rotations", torch.tensor([1 + 2j], dtype=torch.complex64))


@pytest.mark.filterwarnings("ignore:Precision bf16-true")
def test_buffers_that_are_built_in_half_precision_are_named(tmp_path: Path) -> None:
    module = LateBuffers()
    said = r"buffer table of Module is to stay in float32, but was built in bfloat16.*dtype=torch.float32"
    with pytest.warns(UserWarning, match=said):
        fit(module, tmp_path, "bf16-true", 1)
    assert module.late.table.dtype == torch.float32
    assert module.late.zeros.dtype == torch.bfloat16
    assert module.late.rotations.dtype == torch.complex64
    assert module.late.rotations.imag.abs().min() > 0


def test_pretrained_biases_and_rotary_frequencies_stay_exact(tmp_path: Path) -> None:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    theirs = make_checkpoint("deepseek_plain", tmp_path / "theirs")
    exact, module = (HuggingFaceModule({"pretrained": str(tmp_path / "theirs"), "context_length": 16}) for _ in "ab")
    exact.configure_model()
    ids = torch.arange(17).repeat(2, 1)
    loader = DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=2)
    export(fit(module, tmp_path, "bf16-true", 1, loader=loader), tmp_path / "ours")
    expected, found = dict(exact.named_buffers()), dict(module.named_buffers())
    kept = [name for name in expected if name.endswith(("expert_bias_E", "inv_freq"))]
    assert len(kept) > 2
    for name in kept:
        assert torch.equal(found[name], expected[name]), name
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    biases = {name: b for name, b in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    exported = dict(reloaded(tmp_path / "ours").named_buffers())
    assert biases
    assert all(torch.equal(exported[name], bias) for name, bias in biases.items())


class Buffered(nn.Module):
    """Blocks with a buffer, and a part outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for block in self.blocks:
            block.register_buffer("scale", torch.ones(4))


def test_parts_of_other_stages_have_the_precision_of_the_run() -> None:
    """They may come to this rank later, and in their place are zeros for now."""
    module, precision = Buffered(), DoublePrecision()
    cut = StageCut(module, (1,), 2)
    cut.apply(torch.device("cpu"))
    convert_by_rule(precision, cut.whole)
    precision.convert_module(module)
    with cut.whole():
        pass
    assert module.embed.weight.dtype == torch.float64
    cut.hold((0, 1), training=True)
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}
