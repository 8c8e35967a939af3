"""Sizes are those of the whole model, whatever part of its experts this process holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, MoELayer
from moe_lightning.callbacks.telemetry import ExpertModelSummary, Telemetry, WholeModelSummary
from moe_lightning.cli import capacity, training
from moe_lightning.cores import machine_memory
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPTConfig, expert_size, least_gpt_parameters, model_size, whole_parameters
from moe_lightning.models.swin import SwinModule
from moe_lightning.strategies.stages import StageMap, stages_of
from moe_lightning.strategies.worlds import Worlds
from tests.distributed.harness import connect, run_ranks
from tests.distributed.training import TINY, OwnModule, RandomTokens, make_trainer
from tests.unit.gpt_size import count_parameters
from tests.unit.test_callbacks_telemetry import Recorded


def test_parameters_in_all_and_active() -> None:
    module = GPTModule(TINY)
    module.configure_model()
    size = model_size(module)
    assert size.whole == size.here == count_parameters(module.config)
    one_expert_fewer = count_parameters(GPTModule(TINY | {"num_experts": 5}).config)
    routers = 2 * TINY["d_model"]
    assert size.whole - size.active == (TINY["num_experts"] - 2) * (size.whole - one_expert_fewer - routers)


def test_lookups_are_not_multiplied_unless_they_are_the_head_too() -> None:
    own = model_size(OwnModule())
    assert own.multiplied == 6 * 32 + 2 * 2 * 32 * 48 + 32 * 64
    tied = GPTModule(TINY | {"num_experts": 0, "num_layers": 1, "d_hidden": 8})
    tied.configure_model()
    assert model_size(tied).multiplied == 4 * 32 * 32 + 2 * 32 * 8 + 64 * 32


def test_frozen_parameters_are_not_trained() -> None:
    layer = MoELayer(8, 16, num_experts=4)
    layer.experts.requires_grad_(False)
    assert whole_parameters(layer, trained=True) == whole_parameters(layer) - 4 * expert_size(layer.experts)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_operations_of_a_batch(num_tokens: int) -> None:
    size = model_size(nn.Linear(3, 5, bias=False))
    assert size.training_flops(num_tokens, context_length=2, attention_width=11) == num_tokens * (6 * 15 + 12 * 22)


def test_modules_count_what_they_saw() -> None:
    module = GPTModule(TINY)
    module.configure_model()
    assert module.flops_per_batch is None, "before any batch"
    ids = torch.zeros(3, 10, dtype=torch.int64)
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    module.training_step((ids, ids), 0)
    training = module.flops_per_batch
    assert training == model_size(module.model).training_flops(30, 10, 2 * 32)
    module.eval()
    assert module.flops_per_batch == training // 3


def test_documents_that_share_a_sequence_attend_to_themselves() -> None:
    module = GPTModule(TINY)
    module.configure_model()
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    ids = torch.zeros(2, 10, dtype=torch.int64)
    is_token = torch.arange(10) < torch.tensor([[9], [10]])
    begins = torch.tensor([[0] * 4 + [4] * 5 + [9], [0] * 10])  # documents of 4, 5 and 10, and padding
    module.training_step((ids, ids, is_token, begins), 0)
    size, width = model_size(module.model), 2 * 32
    alone = [size.training_flops(length, length, width) for length in (4, 5, 10)]
    assert module.flops_per_batch == sum(alone)


def _sizes_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    from moe_lightning.strategies.placed_experts import PlacementOptions

    pl.seed_everything(1, verbose=False)
    module = OwnModule()
    PlacementOptions(replicas=1, slots=4).place(module, connect(), StageMap(module, Worlds()))
    summary = WholeModelSummary(module, max_depth=2)
    columns = {name: [cell.strip() for cell in cells] for name, cells in summary._get_summary_data()}
    return {
        "size": model_size(module),
        "total": summary.total_parameters,
        "params": dict(zip(columns["Name"], columns["Params"], strict=True)),
        "here": dict(zip(columns["Name"], columns["Params per Device"], strict=True)),
    }


def test_experts_of_other_ranks_count_once() -> None:
    alone = model_size(OwnModule())
    for found in run_ranks(2, _sizes_on_ranks):
        assert (found["size"].whole, found["size"].active) == (alone.whole, alone.active)
        assert found["size"].multiplied == alone.multiplied
        assert found["size"].here == alone.here - 2 * 2 * 32 * 48, "four slots, one of them vacant, instead of six"
        assert found["total"] == alone.whole
        assert found["params"]["moe.experts"] == "18.4 K"
        assert found["here"]["moe.experts"] == "12.3 K"
        assert found["params"]["embed"] == found["here"]["embed"] == "2.0 K"


class _Counted(WholeModelSummary):
    found: ClassVar[dict[str, Any]] = {}

    def columns(self, stock: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        self.found.update(total=self.total_parameters, rows=self.param_nums)
        return super().columns(stock)


class _CountedSummary(ExpertModelSummary):
    table = _Counted


class _Sized(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with stages_of(trainer).whole_module():
            self.size = model_size(pl_module)


def _trained_sizes(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    logger, sized, telemetry = Recorded(), _Sized(), Telemetry(peak_flops_per_s=1e12)
    callbacks = [telemetry, _CountedSummary(), sized]
    trainer = make_trainer(rank, world_size, strategy, callbacks=callbacks, logger=logger, max_steps=1)
    module = GPTModule(TINY | {"tie_embeddings": False})
    trainer.fit(module, DataLoader(RandomTokens(8), batch_size=8))
    return {
        "size": replace(sized.size, here=0),
        "held": sized.size.here,
        "logged": logger.parameters,
        "summary": _Counted.found,
        "flops": module.flops_per_batch,
        "has_mfu": "train/mfu_ratio" in trainer.callback_metrics,
    }


@pytest.mark.parametrize("strategy", [{"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}, {"dense": "fsdp"}])
def test_shards_and_stages_count_as_the_whole_model(strategy: dict[str, Any]) -> None:
    alone = _trained_sizes(0, 1, {})
    assert alone["has_mfu"]
    assert alone["summary"]["total"] == alone["size"].whole
    assert alone["logged"]["parameters/whole"] == alone["size"].whole
    ranks = run_ranks(2, partial(_trained_sizes, strategy=strategy))
    assert sum(found["held"] for found in ranks) < 1.1 * alone["held"]
    for found in ranks:
        for name in ("size", "logged", "summary"):
            assert found[name] == alone[name], name
        assert found["has_mfu"] == ("pp" not in strategy.get("mesh", {}))
        if strategy == {"mesh": {"tp": 2}}:
            assert found["flops"] == alone["flops"], "both ranks compute a part of every sample"


def test_a_row_for_what_no_layer_owns() -> None:
    class Scaled(OwnModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

    columns = dict(WholeModelSummary(Scaled())._get_summary_data())
    assert columns["Name"][-1] == "other params"
    assert columns["Params per Device"][-1] == "n/a"


def test_the_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[ExpertModelSummary(max_depth=1)]
    )
    assert sum(isinstance(callback, pl.callbacks.ModelSummary) for callback in trainer.callbacks) == 1
    trainer.strategy.connect(module := OwnModule())
    trainer.callbacks[0].on_fit_start(trainer, module)
    out = capsys.readouterr().out
    assert "Params per Device" in out
    assert "18.6 K" in out


# ----------------------------------------------------------------------
# Estimates of what fits, against models that are built and against sizes that no machine has.


@settings(deadline=None, max_examples=40)
@given(
    layers=st.integers(1, 5),
    every=st.integers(1, 3),
    first=st.integers(0, 2),
    experts=st.integers(0, 4),
    shared=st.integers(0, 2),
    style=st.sampled_from(
        [("gelu", "learned", True, True), ("swiglu", "rope", False, False), ("swiglu_clamped", "rope", True, False)]
    ),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_the_estimate_is_below_the_model_and_near_it(
    layers: int, every: int, first: int, experts: int, shared: int, style: Any, kv_heads: int
) -> None:
    activation, position, bias, tied = style
    sizes = {"num_layers": layers, "moe_every": every, "num_dense_layers": first, "num_experts": experts}
    if experts and not any(i >= first and (i + 1) % every == 0 for i in range(layers)):
        with pytest.raises(ConfigurationError, match="leave no MoE layer"):
            GPTConfig(**sizes, router={"top_k": 1}, d_model=64, num_heads=4)
        return
    config = GPTConfig(
        **sizes,
        router={"top_k": 1},
        num_shared_experts=shared,
        vocab_size=100,
        context_length=16,
        d_model=64,
        num_heads=4,
        num_kv_heads=kv_heads,
        d_expert=32,
        activation=activation,
        position=position,
        bias=bias,
        tie_embeddings=tied,
    )
    assert config.num_moe_layers == sum(config.is_moe_layer(index) for index in range(layers))
    assert 0.9 * count_parameters(config) <= least_gpt_parameters(config) <= count_parameters(config)


@pytest.mark.parametrize("size", ["num_layers", "d_model", "num_experts", "vocab_size", "context_length", "d_hidden"])
def test_sizes_that_no_machine_holds_are_known_at_once(size: str) -> None:
    config = GPTConfig(**{"num_heads": 1, size: 10**14})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=rf"^model\.{size}=100000000000000 makes a model of .* parameters"):
        capacity.check_model(config, least_gpt_parameters(config), machine_memory())


@pytest.mark.parametrize("size", ["embed_dim", "image_size", "num_experts"])
def test_sizes_of_a_swin_that_no_machine_holds(size: str) -> None:
    sizes = {"num_classes": 10, "image_size": 64, "patch_size": 4, "depths": (2, 2), "num_heads": (2, 4)}
    module = SwinModule({**sizes, "embed_dim": 8, size: 2**40})
    config = {"trainer": {"devices": 1, "accelerator": "cpu"}, "data": {}, "elastic": {}, "check_memory": False}
    with pytest.raises(ConfigurationError, match=rf"^model\.{size}={2**40} makes .* GiB of memory; lower it"):
        training.check_room(config, module)


def test_weights_may_fill_the_memory() -> None:
    config = GPTModule(TINY).config
    needed = 2 * least_gpt_parameters(config)
    capacity.check_model(config, needed // 2, needed)
    with pytest.raises(ConfigurationError, match=r"model\.\w+=\d+ .* at 2 bytes each: .* lower it"):
        capacity.check_model(config, needed // 2, needed - 1)


def test_as_many_processes_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "machine_memory", lambda: 4 * capacity.GIB)
    capacity.check_processes(16)
    capacity.check_processes(4, num_workers=3)
    with pytest.raises(ConfigurationError, match=r"ranks=17 is more than the 16 processes"):
        capacity.check_processes(17)
    with pytest.raises(
        ConfigurationError, match=r"ranks=4, each with data\.num_workers=4, is more than the 16 processes"
    ):
        capacity.check_processes(4, num_workers=4)
