"""Every command that README.md and docs/ show runs, at a reduced size; every Python snippet too.

Commands that need Hugging Face checkpoints are in tests/distributed/test_huggingface_cli.py, launchers and hosts of
elastic runs in tests/chaos, measurements in the benchmarks' own tests: here these only answer --help.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import moe_lightning
from moe_lightning import GPT, GPTConfig, GPTModule, MoELayer, kernels
from moe_lightning.cli import bench, ckpt, sim, train
from moe_lightning.strategies.worlds import RecoveryReport
from tests.commands import SMALL_MODEL, WORDS, moe_train, write_words
from tests.distributed.training import TINY, OwnModule, RandomTokens
from tests.documented import PAGES, PLUGINS, ROOT, blocks, commands
from tests.programs import exit_code

SMALL = [
    "ranks=2",
    *SMALL_MODEL,
    "model.vocab_size=auto",
    "data.tokenizer=bytes",
    *WORDS,
    "data.global_batch_size=4",
    "data.val_samples=4",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=1",
    "logger=csv",
    "elastic.enabled=false",
]
FITTED = {  # what a smaller world needs besides
    "strategy.ep_size=4": ["strategy.ep_size=1"],
    "pro_prophet": ["model.num_experts=4"],
    "callbacks=compile": ["callbacks.compile_dense.backend=eager"],
    "recipes=optuna": ["hydra.sweeper.n_trials=1"],
    "recipes=single_gpu": ["trainer.accumulate_grad_batches=1"],
    "strategy.shard_size=8": ["ranks=4", "strategy.shard_size=2"],
    "strategy.mesh.tp=2 strategy.mesh.cp=2": ["ranks=4"],
    "strategy.mesh.pp=4": ["ranks=4", "model.num_layers=4", "strategy.micro_batches=4"],
    "strategy.schedule=interleaved": ["model.num_layers=4"],
    "callbacks=[load_balancer,fault_recovery]": ["ranks=4"],
}
ELSEWHERE = (
    "olmoe_finetune",
    "olmoe_fsdp",
    "olmoe_qlora",
    "upcycle_gpt2",
    "upcycle_llama",
    "model.pretrained",
    "swin",
    "data.path",
    "--config-dir",
    "rdzv_endpoint",
    "recipes=submitit",  # test_searches
    "resume=edited.ckpt",
    "--info",  # tests/unit/test_cli_dial.py
)
QUICK = ("strategy.replicas=2",)
"""Beginnings of the commands that run by default; the others are composed (tests/unit/test_docs.py)."""
KNOWN = (
    "moe-train|moe-generate|moe-eval|moe-bench|moe-ckpt|moe-sim|moe-data|pip install|python -m moe_lightning"
    "|hf download|sphinx-build|python -m tests|echo|wandb|ruff|pytest|#SBATCH|#!|#|host=|secret=|until |srun|for |done"
    "|wait|TORCH_DISABLE|torchrun|sbatch|pre-commit|export ETCDCTL|ETCD=|NODES="
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="partial checkpoints need Linux's shared memory")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_words(tmp_path)
    (tmp_path / "placement.json").write_text(json.dumps([[1, 1]] * 8))
    (tmp_path / "spot_trace.csv").write_text("0,add,0\n0,add,1\n60000,remove,1\n120000,add,1\n")
    counts = np.ones((2, 2, 1, 8), dtype=np.uint16)
    np.savez(tmp_path / "trace.npz", counts=counts, iteration=np.array([1, 2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


def _trainings() -> Iterator[Any]:
    """Each command once, the quick ones first among the marks."""
    seen = set()
    for page in PAGES:
        for arguments in commands(page, "moe-train"):
            text = " ".join(arguments)
            if text in seen or any(word in text for word in ELSEWHERE) or (text.startswith("-") and "-m " not in text):
                continue
            seen.add(text)
            marks = [] if any(text.startswith(quick) for quick in QUICK) else [pytest.mark.slow]
            yield pytest.param(arguments, id=f"{page.name}: {text}"[:90], marks=marks)


def fitted(arguments: list[str]) -> list[str]:
    text = " ".join(arguments)
    return [*SMALL, *(more for part, extra in FITTED.items() if part in text for more in extra)]


def test_only_known_programs_are_shown() -> None:
    shown = [(page.name, block) for page in PAGES for block in blocks(page, "bash")]
    assert len(shown) > 20
    for name, block in shown:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            assert not line.strip() or re.match(KNOWN, line.strip()), f"{name}: {line}"


@pytest.mark.parametrize("arguments", list(_trainings()))
def test_trainings_run(arguments: list[str], tmp_path: Path) -> None:
    if "recipes=optuna" in arguments:
        pytest.importorskip(PLUGINS["optuna"])
    if "callbacks.routing_replay.mode=replay" in arguments:
        assert moe_train(tmp_path, "callbacks=routing_replay", "run_name=first", *SMALL).returncode == 0
    done = moe_train(tmp_path, *arguments, *fitted(arguments))
    assert done.returncode == 0, done.stderr
    if "--cfg" in arguments:
        assert "run_name:" in done.stdout
        return
    if "doctor=true" in arguments:
        assert re.search(r"doctor +2 steps, \d\d+ tensors, largest difference .*: the same", done.stdout)
        return
    assert "step 2/2" in done.stdout
    if "validate" not in " ".join(arguments):
        assert list(tmp_path.glob("outputs/**/checkpoints/*2*"))


@pytest.mark.slow
def test_checkpoints_as_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_train(tmp_path, "recipes=partial_checkpoints", *SMALL).returncode == 0
    shown = {tuple(arguments) for page in PAGES for arguments in commands(page, "moe-ckpt")}
    ours = sorted(arguments for arguments in shown if "outputs/partial_checkpoints/checkpoints" in arguments)
    assert {arguments[0] for arguments in ours} == {"inspect", "verify", "export"}
    for arguments in ours:
        assert ckpt.main(arguments) == 0, arguments
    assert "whole" in capsys.readouterr().out
    assert bench.main(["report", "outputs/partial_checkpoints"]) == 0
    page = Path("outputs/partial_checkpoints/report.html").read_text()
    for title in ("costs of checkpoints", "loads of the experts of MoE layer 0", "proportion of lost tokens"):
        assert title in page, title


@pytest.mark.slow
def test_experts_are_edited_as_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "editing-experts.md"
    Path("corpus").mkdir()
    write_words(Path("corpus"), 400)
    trained = moe_train(tmp_path, *SMALL, "recipes=text", "data.source=corpus/")
    assert trained.returncode == 0, trained.stderr
    shown = [arguments for arguments in commands(page, "moe-ckpt") if arguments[:1] == ["edit"] and arguments[1:]]
    assert len(shown) == 2
    saved = next(Path("outputs/text/checkpoints").glob("*.ckpt"))
    for _, source, target, *options in shown:
        assert Path(source).parent == saved.parent
        assert ckpt.main(["edit", str(saved), target, *options]) == 0, capsys.readouterr().err
    losses = re.findall(r"validation loss +([\d.]+) -> ([\d.]+), 8 batches at most", capsys.readouterr().out)
    assert len(losses) == 2
    (again,) = (arguments for arguments in commands(page, "moe-train") if "resume=edited.ckpt" in arguments)
    done = moe_train(tmp_path, *SMALL, "trainer.max_steps=4", *again)
    assert done.returncode == 0, done.stderr
    assert "6 experts in" in done.stdout
    assert "step 4/4" in done.stdout


def test_loads_are_exported_as_shown() -> None:
    (shown,) = (a for a in commands(ROOT / "docs" / "huggingface.md", "moe-ckpt") if a[:1] == ["export-loads"])
    assert ckpt.main(shown) == 0
    assert Path(shown[2]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(a, id=" ".join(a)[:90]) for page in PAGES for a in commands(page, "moe-sim") if "=" in " ".join(a)],
)
def test_simulations_run(arguments: list[str]) -> None:
    fitting = ["model.num_experts=8"] if "routing.path=trace.npz" in arguments else []  # as the trace has
    assert sim.main([*arguments, *fitting, "hours=0.1"]) == 0


@pytest.mark.parametrize("name", [*bench.COMMANDS, *bench.benchmarks()])
def test_benchmarks_say_how(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(bench.main, [name, "--help"]) == 0
    assert f"moe-bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_answers_without_a_run(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(train.main, [option]) == 0
    assert "moe-train" in capsys.readouterr().out


# ---------------------------------------------------------------------- Python


def snippet(page: str, containing: str) -> str:
    (found,) = (block for block in blocks(ROOT / page, "python") if containing in block)
    return found


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "<documentation>", "exec"), names)
    return names


def test_a_callback_prints_recoveries(capsys: pytest.CaptureFixture[str]) -> None:
    callback = run(snippet("docs/lightning.md", "class PrintRecoveries"), {})["PrintRecoveries"]()
    report = RecoveryReport(
        reason="rank 1 was killed", step=7, steps_lost=0, lost_ranks=(1,), ranks_before=2, ranks_after=1,
        restored="2 experts from replicas", stale_experts=0, min_replicas=1, began_at=0.0, seconds={"total": 0.25},
    )  # fmt: skip
    callback.on_recovered(SimpleNamespace(is_global_zero=True), None, report)
    assert capsys.readouterr().out == "step 7: rank 1 was killed, 0.25 s\n"


def test_every_snippet_is_run_here() -> None:
    known = (
        "class Classifier",
        "PartialExpertsCheckpoint(",
        "kernels.set_backend",
        "ThroughputMonitor",
        "class Counting",
        "class Masked",
        "replay_routing",
        "def tensor_parallel_plan",
        "class Attention",
        "add_adapters(",
        "Packed(",
        "class Lines",
        "import load_dataset",
        "import StreamingDataset",
        "import LocalDataset",
        "ParityDoctor(",
        "torch.autograd.grad(penalty",
        "class PrintRecoveries",
        "moe_lightning.train(",
        "EMAWeightAveraging(",
        "Classifier.load_from_checkpoint(",
        "Qwen3MoeForCausalLM(",
    )
    shown = [block for page in PAGES if page.name != "extending.md" for block in blocks(page, "python")]  # test_plugins
    assert all(sum(part in block for block in shown) for part in known)
    for block in shown:
        assert sum(part in block for part in known) == 1, block


@pytest.mark.slow
def test_checkpoints_in_a_script(tmp_path: Path) -> None:
    source = snippet("docs/own-module.md", "PartialExpertsCheckpoint(").replace("every_n_steps=50", "every_n_steps=2")
    small = source.replace("max_steps=1000", 'max_steps=4, accelerator="cpu", devices=1, logger=False')
    assert small.count("max_steps=4") == 1
    assert "every_n_steps=2" in small
    run(small, {"L": L, "module": OwnModule(), "loader": DataLoader(RandomTokens(48), batch_size=12)})
    assert (tmp_path / "checkpoints" / "step-00000004" / "MANIFEST.json").is_file()


def test_the_doctor_in_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    small = 'accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, '
    source = snippet("docs/doctor.md", "ParityDoctor(").replace('strategy="ddp", ', small)
    assert small in source
    run(source, {"module": OwnModule(), "loader": DataLoader(RandomTokens(24), batch_size=6)})
    assert "doctor    2 steps" in capsys.readouterr().out


def test_a_module_takes_adapters(tmp_path: Path) -> None:
    module, loader = GPTModule(TINY), DataLoader(RandomTokens(24), batch_size=12)
    small = {"max_steps": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    L.Trainer(**small).fit(module, loader)
    module.trainer.save_checkpoint(tmp_path / "base.ckpt")
    trainer = L.Trainer(strategy=moe_lightning.ExpertParallelStrategy(), **small)
    names = run(snippet("docs/huggingface.md", "add_adapters("), {"trainer": trainer, "loader": loader})
    changed = {n for n, p in names["module"].named_parameters() if n.endswith("_b") and p.abs().sum() > 0}
    assert len(changed) == 2 * 4, "two layers, each with B of w_up, w_down, qkv and out"


def test_a_dataset_is_packed(capsys: pytest.CaptureFixture[str]) -> None:
    documents = RandomTokens(40)
    lengths = [1 + i % 16 for i in range(40)]
    small = 'max_steps=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False'
    source = snippet("docs/recipes.md", "Packed(").replace("max_steps=2", small)
    names = run(source, {"documents": documents, "lengths": lengths})
    assert names["trainer"].global_step == 2
    assert "packing: 40 documents in" in capsys.readouterr().out


def test_routing_can_be_replayed() -> None:
    model, ids = GPT(GPTConfig(**TINY)), torch.arange(16)[None]
    names = run(snippet("docs/lightning.md", "replay_routing"), {"model": model, "engine_model": model, "ids": ids})
    assert torch.equal(names["logits"], model(ids))


def test_a_stream_of_ones_own() -> None:
    names = {"DataLoader": DataLoader, "IterableDataset": IterableDataset, "lines": range(20), "__name__": "example"}
    loader = run(snippet("docs/streams.md", "class Lines"), names)["loader"]
    assert seen_in_steps(loader, 3) == [*range(20), *range(4)]


def test_a_stream_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"i": {i}}}\n' for i in range(20)))
    names = {"DataLoader": DataLoader, "files": str(tmp_path / "rows.jsonl")}
    loader = run(snippet("docs/streams.md", "import load_dataset"), names)["loader"]
    assert sorted(seen_in_steps(loader, 5)[:20]) == list(range(20))


@pytest.mark.parametrize(("package", "containing"), [("litdata", "StreamingDataset"), ("streaming", "LocalDataset")])
def test_sharded_files_by_index(package: str, containing: str, tmp_path: Path) -> None:
    module = pytest.importorskip(package)
    if package == "streaming":
        with module.MDSWriter(out=str(tmp_path), columns={"i": "int"}) as writer:
            for index in range(20):
                writer.write({"i": index})
    else:
        writer = pytest.importorskip("litdata.streaming.writer").BinaryWriter(str(tmp_path), chunk_size=5)
        for index in range(20):
            writer[index] = {"i": index}
        writer.done()
        writer.merge()
    names = {"DataLoader": DataLoader, "folder": str(tmp_path)}
    loader = run(snippet("docs/streams.md", f"import {containing}"), names)["loader"]
    assert sorted(seen_in_steps(loader, 3)) == list(range(20))


def seen_in_steps(loader: Any, steps: int) -> list[int]:
    """The numbers that so many steps of a training on one rank see."""

    class Seeing(OwnModule):
        seen: list[int] = []  # noqa: RUF012

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.extend((batch["i"] if isinstance(batch, dict) else batch).tolist())
            ids = torch.arange(16).repeat(2, 1)
            return super().training_step((ids, ids), batch_idx)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": steps}
    trainer = L.Trainer(strategy=moe_lightning.ExpertParallelStrategy(), accelerator="cpu", devices=1, **options)
    module = Seeing()
    trainer.fit(module, loader)
    assert trainer.global_step == steps
    return module.seen


def test_attention_may_keep_a_context() -> None:
    names = run(snippet("docs/expert-parallelism.md", "class Attention"), {"nn": nn, "moe_lightning": moe_lightning})
    attention = names["Attention"]()
    assert attention.context.whole(7) == 7
    assert attention.context.first(7) == 0


def test_a_plan_says_what_is_cut() -> None:
    """The page's is a part of our own."""
    page = run(snippet("docs/expert-parallelism.md", "def tensor_parallel_plan"), {"D": 32, "K": 16, "head_size": 8})
    ours = GPT(GPTConfig(vocab_size=64, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2)).tensor_parallel_plan()
    assert page["tensor_parallel_plan"](None).items() <= ours.items()


def test_kernels_can_be_chosen() -> None:
    # An unknown name would raise.
    run(snippet("docs/kernels.md", "kernels.set_backend"), {})
    kernels.set_backend("auto")


def test_a_masked_mean_in_the_own_module() -> None:
    names = run(snippet("README.md", "class Classifier"), {"__name__": "example"})
    run(snippet("docs/lightning.md", "class Masked"), names)
    x = torch.randn(32, 32)
    y = x[:, :4].argmax(dim=1).masked_fill(x[:, 0] > 0, -100)
    data = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    options = {"max_steps": 4, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy="expert_parallel", accelerator="cpu", devices=1, **options)
    trainer.fit(names["Masked"](), data)
    assert 0 < float(trainer.callback_metrics["loss"]) < 10


def test_a_file_of_the_own_module(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(32, 32)
    data = DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=8)
    names = run(snippet("README.md", "class Classifier"), {"__name__": "example"}) | {"x": x}
    options = {"max_steps": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy="expert_parallel", accelerator="cpu", devices=1, **options)
    trainer.fit(names["Classifier"](), data)
    trainer.save_checkpoint("model.ckpt")
    capsys.readouterr()
    run(snippet("docs/own-module.md", "Classifier.load_from_checkpoint("), names)
    assert "grad_fn" in capsys.readouterr().out


def test_averages_of_the_own_module() -> None:
    x = torch.randn(32, 32)
    data = DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=8)
    names = run(snippet("README.md", "class Classifier"), {"__name__": "example"}) | {"loader": data}
    shown, small = "devices=2", 'devices=1, accelerator="cpu", logger=False, enable_checkpointing=False'
    source = snippet("docs/python.md", "EMAWeightAveraging(")
    assert source.count(shown) == 1
    run(source.replace(shown, small), names)
    assert names["trainer"].global_step == 4 * 4


def test_throughput_of_the_own_module() -> None:
    names = run(snippet("README.md", "class Classifier"), {"__name__": "example"})
    run(snippet("docs/lightning.md", "class Counting"), names)
    run(snippet("docs/lightning.md", "ThroughputMonitor"), names)
    monitor, module = names["monitor"], names["Counting"]()
    monitor.kwargs["window_size"] = 2
    x = torch.randn(32, 32)
    data = DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=8)
    logger = L.pytorch.loggers.CSVLogger(".")
    trainer = L.Trainer(
        strategy="expert_parallel",
        accelerator="cpu",
        devices=1,
        callbacks=[monitor],
        logger=logger,
        max_steps=4,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)
    matrices = 8 * 32 + 2 * 2 * 32 * 64 + 32 * 4  # the router, two experts, the head
    assert module.flops_per_batch == 8 * 6 * matrices
    assert monitor._throughputs[trainer.state.stage or "train"]._samples[-1] == 32


def test_a_penalty_on_experts_adds_its_gradient() -> None:
    hook = run(snippet("docs/limits.md", "torch.autograd.grad(penalty"), {"torch": torch})["on_before_optimizer_step"]
    module = SimpleNamespace(moe=MoELayer(8, 8, 4))
    module.moe(torch.randn(16, 8)).sum().backward()
    before = {name: p.grad.clone() for name, p in module.moe.experts.named_parameters()}
    hook(module, None)
    for name, parameter in module.moe.experts.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] + 2 * 0.01 * parameter.detach())
