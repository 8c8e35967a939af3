"""Law L7: a wrong strategy, placement or loader is one sentence with value, limit and cure, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from moe_lightning import ConfigurationError, GPTModule, MoELayer
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint
from moe_lightning.strategies.checks import check_for_pipeline
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, OwnModule, RandomTokens, make_trainer


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield RandomTokens()[0]


class Validated(OwnModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class UnlikeLayers(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.other = MoELayer(32, 8, num_experts=4)


class SharedTrunk(OwnModule):
    """Two optimizers take turns with the same weights."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.parameters()), torch.optim.AdamW(self.parameters())]


class SparseTable(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, sparse=True)


class Adapted(OwnModule):
    """Each rank uses another adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([nn.Linear(32, 1), nn.Linear(32, 1)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.adapters[self.global_rank](torch.ones(32)).sum()


class MaskedTable(OwnModule):
    """Trains some rows of its embedding."""

    def __init__(self, begins: str = "__init__") -> None:
        super().__init__()
        self.begins = begins
        self.mask(begins="__init__")

    def mask(self, begins: str) -> None:
        if begins == self.begins:
            self.embed.weight.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]

    def on_fit_start(self) -> None:
        self.mask(begins="on_fit_start")


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(RandomTokens(options.pop("size", 24)), **{"batch_size": 8} | options)


def file(name: str, content: bytes) -> str:
    """In the rank's own working folder."""
    Path(name).write_bytes(content)
    return name


Case = dict[str, Any]
CASES: dict[str, Callable[[], Case]] = {
    "static_graph=True fails in torch where gradients of 2 batches are accumulated": lambda: {
        "strategy": {"static_graph": True},
        "trainer": {"accumulate_grad_batches": 2},
    },
    "ep_size=3 does not divide the 2 ranks: use one of [1, 2]": lambda: {"strategy": {"ep_size": 3}},
    "need between 1 and 2 (the number of ranks): lower replicas, or start more ranks": lambda: {
        "strategy": {"replicas": 3}
    },
    "placement has shape [1, 4, 2], but this run needs [1, 6, 2]": lambda: {"strategy": {"placement": [[1, 1]] * 4}},
    "no rank holds expert 5": lambda: {"strategy": {"placement": [[1, 0]] * 5 + [[0, 0]]}},
    "ranks [1] holds no replica of expert 0": lambda: {"strategy": {"placement": [[1, 0]] * 6, "ep_size": 1}},
    "none.json does not exist: give a .json or .npy table": lambda: {"strategy": {"placement": "none.json"}},
    "bad.json is not a .json or .npy table": lambda: {"strategy": {"placement": file("bad.json", b"[[1, 0],")}},
    "bytes.json is not a .json or .npy table": lambda: {
        "strategy": {"placement": Path(file("bytes.json", b"\xff\xfe"))}
    },
    "bad.npy is not a .json or .npy table": lambda: {"strategy": {"placement": file("bad.npy", b"no array")}},
    "empty.npy is not a .json or .npy table": lambda: {"strategy": {"placement": file("empty.npy", b"")}},
    "words.json must hold integers": lambda: {"strategy": {"placement": file("words.json", b'{"layers": 1}')}},
    "the same number of experts in every MoE layer": lambda: {
        "strategy": {"placement": [[1, 1]] * 6},
        "module": UnlikeLayers(),
    },
    "StochasticWeightAveraging copies the module": lambda: {
        "trainer": {"callbacks": [StochasticWeightAveraging(swa_lrs=0.1)]}
    },
    "EMAWeightAveraging and WeightAveraging would both be validated": lambda: {
        "trainer": {"callbacks": [EMAWeightAveraging(), WeightAveraging()]}
    },
    "EMAWeightAveraging keeps averages beside the weights on cpu, not on meta": lambda: {
        "trainer": {"callbacks": [EMAWeightAveraging(device="meta")]}
    },
    "embed.weight is in 2 optimizers, and PartialExpertsCheckpoint keeps the states of one": lambda: {
        "trainer": {"callbacks": [PartialExpertsCheckpoint("checkpoints")], "enable_checkpointing": True},
        "module": SharedTrunk(),
    },
    "does not state where a step ends: use automatic optimization, or dense=ddp or zero1": lambda: {
        "strategy": {"dense": "fsdp"},
        "module": SharedTrunk(),
    },
    "the embedding embed has sparse=True, and dense=fsdp or hsdp sums dense gradients only": lambda: {
        "strategy": {"dense": "fsdp"},
        "module": SparseTable(),
    },
    "adapters.0.weight got a gradient on rank 0 and none on rank 1, and dense=fsdp and hsdp": lambda: {
        "strategy": {"dense": "fsdp"},
        "module": Adapted(),
    },
    "embed.weight has a hook of its gradient, which dense=fsdp and hsdp never call": lambda: {
        "strategy": {"dense": "fsdp"},
        "module": MaskedTable(),
    },
    "embed.weight has a hook of its gradient, which dense=fsdp and hsdp never call: use": lambda: {
        "strategy": {"dense": "fsdp"},
        "module": MaskedTable("on_fit_start"),
    },
    "ddp_comm_hook is taken": lambda: {"strategy": {"ddp_comm_hook": default_hooks.allreduce_hook}},
    "num_workers=2 processes would each read a part of the stream Stream": lambda: {
        "loader": DataLoader(Stream(), batch_size=2, num_workers=2)
    },
    "batch sampler Pairs cannot be cut": lambda: {
        "loader": DataLoader(RandomTokens(24), batch_sampler=Pairs([], 2, True))
    },
    "batch_size=None": lambda: {"loader": loader(batch_size=None)},
    "global_batch_size=1 in 1 micro-batches leaves 1 samples for 2 ranks": lambda: {"loader": loader(batch_size=1)},
    "24 samples, fewer than one step of 25": lambda: {"loader": loader(batch_size=25, drop_last=True)},
    "a loader of type Batches cannot be cut over 2 ranks": lambda: {"loader": Batches()},
}


class Pairs(BatchSampler):
    """A batch sampler of a user's own."""


class Batches:
    """An iterable of a user's own, which is no DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)


def provoke(rank: int, world_size: int) -> list[tuple[str, str]]:
    outcomes = []
    for make in CASES.values():
        case = make()
        module, options = case.get("module") or OwnModule(), {"max_steps": 1} | case.get("trainer", {})
        try:
            trainer = make_trainer(rank, world_size, case.get("strategy"), **options)
            trainer.fit(module, case["loader"] if "loader" in case else loader())
            outcomes.append(("trained", ""))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes


def test_sparse_gradients_of_stages_are_refused() -> None:
    check_for_pipeline(SparseTable(), stage_size=1)
    with pytest.raises(ConfigurationError, match="the embedding embed has sparse=True"):
        check_for_pipeline(SparseTable(), stage_size=2)


def test_wrong_runs_are_one_sentence_on_every_rank() -> None:
    for outcomes in run_pooled(2, provoke):
        for expected, (kind, message) in zip(CASES, outcomes, strict=True):
            assert kind == ConfigurationError.__name__, f"{expected}: {kind}: {message}"
            assert expected in message, f"{expected!r} is not in {message!r}"
            assert "\n" not in message


def test_static_graph_is_refused_where_ddp_accumulates_only() -> None:
    run_pooled(2, accumulate_without_ddp)


def accumulate_without_ddp(rank: int, world_size: int) -> None:
    options = {"max_steps": 1, "accumulate_grad_batches": 2}
    make_trainer(rank, world_size, {"static_graph": True, "dense": "fsdp"}, **options).fit(OwnModule(), loader())
    make_trainer(rank, world_size, {"static_graph": True}, **options).validate(Validated(), loader())


def test_a_placement_file_is_read(tmp_path: Path) -> None:
    table = np.array([[[1, 0]] * 3 + [[0, 2]] * 3])
    np.save(tmp_path / "placement.npy", table)
    (tmp_path / "placement.json").write_text(str(table.tolist()))
    for name in ("placement.npy", "placement.json"):
        held = run_pooled(2, experts_held, str(tmp_path / name))
        assert held == [(0, 1, 2), (3, 4, 5)]


def experts_held(rank: int, world_size: int, path: str) -> tuple[int, ...]:
    trainer, module = make_trainer(rank, world_size, {"placement": path}, max_steps=1), OwnModule()
    trainer.fit(module, loader())
    return module.moe.experts.slot_experts


def test_a_setup_that_fails_before_experts_have_values_says_why() -> None:
    """Tearing down must not hide the mistake behind an error about tensors without data."""
    assert "no-such-file.json does not exist" in run_pooled(1, _fit_without_placement)[0]


def _fit_without_placement(rank: int, world_size: int) -> str:
    trainer = make_trainer(rank, world_size, {"placement": "no-such-file.json"}, max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(GPTModule(TINY), DataLoader(RandomTokens(12), batch_size=12))
    return str(caught.value)
