"""The planner's view of a run: memory that is counted, against a real forward pass; refusals and what they advise."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf

from moe_lightning import cores
from moe_lightning.cli import capacity, planning, training
from moe_lightning.cli.composition import config_folder
from moe_lightning.cli.footprint import TrainingShape, count_footprint
from moe_lightning.cli.planning import PlannedRun, check_memory, memory_refusal, planned_run
from moe_lightning.data.documents import source_files
from moe_lightning.data.token_folder import Recipe, write_token_folder
from moe_lightning.elastic.membership import ELASTIC_VARIABLE, ElasticTask
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPT, GPTConfig
from moe_lightning.moe.experts import deferred_experts
from moe_lightning.simulate.memory import rank_memory
from moe_lightning.simulate.mesh import MeshSpec
from moe_lightning.simulate.workload import Footprint, StateBytes
from tests.unit.simulated import small_workload
from tests.unit.test_generate import write_tokenizer

STYLES: dict[str, dict[str, Any]] = {
    "llama": {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "qk_norm": True, "bias": False},
    "gpt-2": {"moe_every": 2},
    "grouped heads": {"num_kv_heads": 2, "position": "rope", "tie_embeddings": False},
    "shared": {"num_shared_experts": 1, "router": {"top_k": 3}, "moe_every": 1},
}


def _gpt(**changes: Any) -> GPTConfig:
    sizes = {"vocab_size": 64, "context_length": 64, "num_layers": 4, "num_heads": 4, "d_model": 64, "d_expert": 96}
    return GPTConfig(**(sizes | changes))


def _saved_bytes(model: GPT, samples: int) -> int:
    """Bytes that autograd saves for one more sequence, parameters left out."""
    counts = []
    for number in (samples, samples + 1):
        held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        seen: dict[int, Any] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, Any] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        ids = torch.arange(number * 64).remainder(64).view(number, 64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(ids)
        counts.append(sum(t.untyped_storage().nbytes() for p, t in seen.items() if p not in held))
        del out
    return counts[1] - counts[0]


@pytest.mark.parametrize("style", STYLES)
def test_activations_are_those_of_a_forward_pass(style: str) -> None:
    torch.manual_seed(0)
    config = _gpt(**STYLES[style])
    with torch.device("meta"), deferred_experts():
        skeleton = GPT(config)
    counted = count_footprint(skeleton, TrainingShape(context_length=64, vocab_size=64))
    layers, top_k = config.num_moe_layers, config.router.top_k
    predicted = 64 * (config.num_layers * counted.block + layers * top_k * counted.row + counted.ends)
    assert predicted == pytest.approx(_saved_bytes(GPT(config), 2), rel=0.05)


def test_recomputed_parts_keep_their_inputs() -> None:
    found = []
    for recomputes in (False, True):
        with torch.device("meta"), deferred_experts():
            model = GPT(_gpt(moe_every=1, dropout=0.1))
        found.append(count_footprint(model, TrainingShape(context_length=64, vocab_size=64, recomputes=recomputes)))
    plain, again = found
    assert again.block < 0.6 * plain.block
    assert again.working >= 64 * 4 * 4  # what attention makes again
    assert (again.row, again.ends) == (plain.row, plain.ends)


@pytest.mark.parametrize(
    ("precision", "optimizer", "weight", "moments", "cast"),
    [("32-true", "adamw", 4, 8, 0), ("bf16-mixed", "adamw", 4, 8, 2), ("bf16-true", "adamw", 2, 4, 0)],
)
def test_bytes_of_a_parameter(precision: str, optimizer: str, weight: int, moments: int, cast: int) -> None:
    with torch.device("meta"), deferred_experts():
        model = GPT(_gpt(bias=False))
    training = TrainingShape(context_length=64, vocab_size=64, precision=precision, optimizer=optimizer)
    assert count_footprint(model, training).expert == StateBytes(weight, weight, moments, cast)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_averages_are_one_more_state_of_each_trained_parameter(optimizer: str) -> None:
    found = []
    for averages in (False, True):
        with torch.device("meta"), deferred_experts():
            model = GPT(_gpt())
        training = TrainingShape(context_length=64, vocab_size=64, optimizer=optimizer, averages=averages)
        found.append(count_footprint(model, training))
    for plain, averaged in ((found[0].dense, found[1].dense), (found[0].expert, found[1].expert)):
        assert averaged.optimizer == pytest.approx(plain.optimizer + plain.weight)
        assert (averaged.weight, averaged.gradient) == (plain.weight, plain.gradient)


def test_memory_with_a_footprint_written_out() -> None:
    state = StateBytes(4, 4, 8)
    footprint = Footprint(
        dense=state, expert=state, block=10.0, row=5.0, ends=2.0, loss_forward=3.0, loss_backward=9.0, buckets=True
    )
    work = small_workload(
        dense_params=1000, expert_params=100, d_model=10, depth=4, context_length=8, rank_batch=2, footprint=footprint
    )
    plain = rank_memory(work, MeshSpec(), 2, slots=3, ranks_per_node=2)
    assert plain.parameters == 4 * (1000 + 4 * 3 * 100)
    assert plain.gradients == plain.parameters + 4 * 1000  # in buckets
    assert plain.activations == 16 * (4 * 10 + 4 * 5 + 2 + 3)  # gradients of the last step go before the backward pass
    again = rank_memory(work, MeshSpec(micro_batches=2), 2, slots=3, ranks_per_node=2)
    assert again.activations == 8 * (4 * 10 + 4 * 5 + 2 + 9)  # those of the first micro-batch stay
    updated = rank_memory(
        replace(work, footprint=replace(footprint, expert_update=1e6)), MeshSpec(), 2, slots=3, ranks_per_node=2
    )
    assert updated.total == updated.state + updated.gradients + 3e6


# ---------------------------------------------------------------- runs


def _config(*overrides: str, ranks: int = 2) -> dict[str, Any]:
    with config_folder():
        composed = compose("train", [*overrides, "run_name=x", "run_dir=x"], return_hydra_config=True)
    del composed.hydra
    config = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(config, dict)
    config["trainer"] |= {"accelerator": "cpu", "devices": ranks}
    return {str(key): value for key, value in config.items()}


@cache
def _run(*overrides: str, ranks: int = 2) -> PlannedRun:
    run = planned_run(_config(*overrides, ranks=ranks), ranks, ranks)
    assert run is not None
    return run


@pytest.mark.parametrize("name", ["olmoe", "deepseek"])
def test_attention_is_planned_as_training_counts_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from moe_lightning.models.huggingface.module import HuggingFaceModule
    from tests.huggingface_models import make_checkpoint

    make_checkpoint(name, tmp_path)
    module = HuggingFaceModule({"pretrained": str(tmp_path), "context_length": 16})
    run = _run("model=huggingface", f"model.pretrained={tmp_path}", "model.context_length=16")
    assert run.model.sizes.attention_width == module.attention_width


@pytest.mark.parametrize("name", ["WeightAveraging", "EMAWeightAveraging"])
def test_a_run_with_averages_needs_their_memory(name: str) -> None:
    callback = f"+callbacks.mean={{_target_: lightning.pytorch.callbacks.{name}}}"
    plain, averaged = _run(), _run(callback)
    assert not plain.training.averages
    more = averaged.memory().optimizer - plain.memory().optimizer
    assert more == pytest.approx(plain.memory().parameters)


@pytest.mark.parametrize("counted", [True, False])
def test_moments_in_the_memory_of_the_host_are_not_on_the_gpu(counted: bool) -> None:
    config = _config("strategy.offload_optimizer=true", "trainer.precision=bf16-mixed", ranks=2)
    config["trainer"]["accelerator"] = "gpu"
    offloaded = planned_run(config, 2, 2)
    config["strategy"]["offload_optimizer"] = False
    plain = planned_run(config, 2, 2)
    assert plain is not None
    assert offloaded is not None
    plain, offloaded = (replace(run, counts=counted) for run in (plain, offloaded))
    assert plain.memory().parameters == offloaded.memory().parameters
    bytes_each = 8 if counted else 12  # the closed form also keeps a copy of the weights there
    moved = plain.memory().optimizer - offloaded.memory().optimizer
    assert moved == pytest.approx(bytes_each * plain.workload.dense_params, rel=0.01)


def test_settings_reach_the_planner() -> None:
    run = _run("strategy.mesh.tp=2", "trainer.accumulate_grad_batches=2", "callbacks=[recompute,fault_recovery]")
    assert (run.mesh.tp, run.mesh.micro_batches, run.training.recomputes, run.replicas) == (2, 2, True, 2)
    assert run.stage_slots == 8
    assert run.memory().snapshots > 0
    accumulating = _run("strategy.mesh.pp=2", "strategy.micro_batches=4", "trainer.accumulate_grad_batches=2")
    assert accumulating.mesh.micro_batches == 8, "a step's batch is cut by both"
    assert _run().stage_slots == 4
    assert _run("strategy.slots=6").stage_slots == 6
    assert _run("data.tokenizer=bpe:4096").training.vocab_size == 4096
    assert planned_run(_config("model.num_experts=0"), 2, 2) is None
    assert planned_run(_config("recipes=swinv2_moe"), 2, 2) is None


def test_logits_are_counted_for_the_tokenizer_of_the_data(tmp_path: Path) -> None:
    """A folder of tokens names its own."""
    folder = write_tokenizer(tmp_path / "model")
    (tmp_path / "a.txt").write_text("text")
    recipe = Recipe(tokenizer=(folder / "tokenizer.json").read_text(), text_field="", end_of_document=None)
    write_token_folder(tmp_path / "tokens", source_files([str(tmp_path / "a.txt")]), recipe)
    for setting in (f"data.source={tmp_path}/tokens", f"data.tokenizer={folder}/tokenizer.json"):
        assert _run(setting).training.vocab_size == 257, setting


def test_more_of_anything_needs_more() -> None:
    least = _run().memory().total
    for more in ("data.global_batch_size=64", "model.num_layers=6", "strategy.slots=8", "model.d_expert=512"):
        assert _run(more).memory().total > least, more
    assert _run("strategy.dense=fsdp").memory().state < _run().memory().state


DENSE = ("model.num_dense_layers=2", "model.d_hidden=8192", "model.num_experts=2")
LARGE = ("model.d_model=512", "model.num_heads=8", "data.global_batch_size=64", "model.d_expert=1024")


@pytest.mark.parametrize(
    ("share", "settings", "cure"),
    [
        (0.8, (), "trainer.accumulate_grad_batches="),
        (0.85, (*DENSE, "trainer.accumulate_grad_batches=32"), "strategy.dense=zero1"),
        (0.6, (*DENSE, "trainer.accumulate_grad_batches=32"), "strategy.dense=fsdp"),
    ],
)
def test_the_cheapest_cure_that_fits(share: float, settings: tuple[str, ...], cure: str) -> None:
    run = _run(*LARGE, *settings)
    assert f" are free: use {cure}" in memory_refusal(run, share * run.memory().total)


def test_recomputation_is_advised_beside_the_callbacks_of_the_run() -> None:
    run = _run(*LARGE, "data.global_batch_size=62", "strategy.dense=fsdp", "callbacks=fault_recovery")
    less = replace(run, training=replace(run.training, recomputes=True)).memory().total
    assert ": use callbacks=recompute or, beside others, callbacks=[OTHERS,recompute] (" in memory_refusal(run, less)


def test_a_refusal_is_one_line() -> None:
    run = _run(*LARGE)
    total = run.memory().total
    assert memory_refusal(run, total) is None
    sentence = memory_refusal(run, 0.6 * total)
    assert "this run needs" in sentence
    assert " are free: use trainer.accumulate_grad_batches=" in sentence
    assert "check_memory=false starts it anyway" in sentence
    assert "\n" not in sentence
    assert "no setting saves enough alone: use a smaller model or model.context_length" in memory_refusal(run, 1e6)


def test_a_run_is_compared_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(*LARGE)
    monkeypatch.setattr(planning, "free_bytes", lambda trainer: 1e12)
    check_memory(config)
    monkeypatch.setattr(planning, "free_bytes", lambda trainer: capacity.RANK_BYTES + 1e9)
    with pytest.raises(ConfigurationError, match=r"this run needs .* GB a rank, 1\.27 GB are free: use trainer\."):
        check_memory(config)
    check_memory(_config("model.d_model=-1"))  # told where the model is built


def test_a_worker_started_again_is_not_refused_for_the_memory_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda trainer: capacity.RANK_BYTES + 1e9)
    config, module = _config(*LARGE), LightningModule()
    for starts in (1, 2):
        task = ElasticTask(address="unix:relay", secret_file="secret", node="a", starts=starts)
        monkeypatch.setenv(ELASTIC_VARIABLE, task.to_environment()[ELASTIC_VARIABLE])
        with pytest.raises(ConfigurationError, match="this run needs") if starts == 1 else nullcontext():
            training.check_room(config, module)


@pytest.mark.parametrize(
    ("devices", "variables", "asked"),
    [
        (1, {}, 0),
        ([3], {}, 3),
        ([2, 3], {"LOCAL_RANK": "1"}, 3),
        (8, {"SLURM_LOCALID": "5"}, 5),
        (8, {"SLURM_LOCALID": "0", "LOCAL_RANK": "2"}, 2),
    ],
)
def test_a_rank_asks_its_own_gpu(
    devices: int | list[int], variables: dict[str, str], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index, 80))
    assert capacity.free_bytes({"accelerator": "gpu", "devices": devices}) == asked


def test_the_process_that_starts_the_ranks_does_not_ask_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda trainer: pytest.fail("the context on a GPU would stay"))
    config = _config()
    training.check(config)


@pytest.mark.parametrize("dense", ["ddp", "zero1", "fsdp", "hsdp"])
def test_axes_that_the_ranks_do_not_have_are_told_where_the_world_is_built(dense: str) -> None:
    """No memory is computed for them."""
    config = _config("strategy.mesh.tp=2", f"strategy.dense={dense}", ranks=1)
    with pytest.raises(ConfigurationError, match=r"tp=2"):
        planned_run(config, 1, 1)
    check_memory(config)


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_CONTAINER", ((tmp_path, "memory.max", "memory.current"),))
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "cgroup")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100\nactive_file 50\n")
    assert cores.available_memory() > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert cores.available_memory() == 1000 - (300 - 150)
    assert capacity.free_bytes({"accelerator": "cpu", "devices": 2}) == 425
    job = tmp_path / "job 1:2"
    (job / "step").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/job 1:2/step\n")
    for name, text in (("max", "500"), ("current", "200"), ("stat", "anon 200\n")):
        (job / f"memory.{name}").write_text(text)
    assert cores.available_memory() == 500 - 200, "of a batch job, in one of whose groups this process is"
