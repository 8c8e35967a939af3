"""Hugging Face models over ranks: every rank reads and keeps its own experts only, the logits stay those of
transformers, a round trip changes no bit, and training gives one loss sequence that plain transformers takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moe_lightning.errors import ConfigurationError
from tests.distributed.balanced_training import Moving
from tests.distributed.harness import run_pooled
from tests.distributed.training import RandomTokens, Recorder, make_trainer, replicas_of
from tests.huggingface_models import export, files_equal, inputs_for, logits_of, make_checkpoint, reloaded
from tests.parameters import slow

TOLERANCE = 1e-5
NAMES = ("mixtral_tied", "olmoe", "qwen3", "deepseek", "gpt_oss", "ernie", "llama4")
IN_LAYERS = ("mixtral_tied", "olmoe", "qwen3", "deepseek", "gpt_oss")
DENSE = ("llama", "mistral", "qwen3_dense")
TP2 = {"mesh": {"tp": 2}}
IN_PARTS = ("mixtral_tied", "olmoe", "qwen3", "deepseek", "ernie", "granite", "qwen2", "glm4", "deepseek_v2")
UPCYCLED = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "llama": {}}
STEPS = 4
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 2, "decay": "constant"}


class Probe(pl.Callback):
    """Takes the logits of one batch, exports the model where a folder is given, and notes which experts live here."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self._inputs, self._folder = inputs_for(name), folder
        self.logits: list[Any] = []
        self.slots: dict[str, tuple[int, ...]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._take(trainer, pl_module, "start")
        self.slots = {block: layer.experts.slot_experts for block, layer in pl_module.architecture.layers.items()}

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._take(trainer, pl_module, "end")

    def _take(self, trainer: pl.Trainer, module: Any, when: str) -> None:
        module.eval()
        with torch.no_grad():
            self.logits.append(module(self._inputs).numpy())
        module.train()
        if self._folder is not None:
            export(trainer, self._folder / when)


def train(
    rank: int,
    world_size: int,
    root: Path,
    names: tuple[str, ...],
    strategy: dict[str, Any],
    moving: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train every architecture for some steps; what the probe saw, by name."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule
    from moe_lightning.models.huggingface.weights import WeightsFolder

    results = {}
    for name in names:
        read: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:
            original = WeightsFolder.read

            def recorded(self: Any, key: str, row: int | None = None, seen: set[str] = read, f: Any = original) -> Any:
                seen.add(f"{key}/{row}")
                return f(self, key, row)

            patch.setattr(WeightsFolder, "read", recorded)
            mover = [] if moving is None else [Moving(**moving)]
            results[name] = _train_one(rank, world_size, root, name, strategy, HuggingFaceModule, mover)
        results[name]["experts_read"] = {key for key in read if ".experts." in key}
    return results


def run_name(world_size: int, strategy: dict[str, Any], *, moves: bool = False) -> str:
    return f"{world_size}{'m' * moves}{''.join(strategy.get('mesh', ()))}"


def _train_one(
    rank: int,
    world_size: int,
    root: Path,
    name: str,
    strategy: dict[str, Any],
    module_class: Any,
    mover: list[Moving],
) -> dict[str, Any]:
    folder = root / name / run_name(world_size, strategy, moves=bool(mover))
    folder.mkdir(parents=True, exist_ok=True)
    probe = Probe(name, folder)
    router = {"bias_update_rate": 0.01} if name == "deepseek" else {"aux_loss_coef": 0.05}
    pretrained = str(root / name / "theirs")
    # Recomputing layers in the backward pass repeats their exchanges, and must change nothing.
    recomputes = world_size > 1 and name in ("mixtral_tied", "deepseek")
    config = {
        "pretrained": pretrained,
        "context_length": 16,
        "router": router,
        "gradient_checkpointing": recomputes,
    }
    return _fit(rank, world_size, strategy, module_class(config, OPTIMIZER), probe, mover)


def _fit(
    rank: int, world_size: int, strategy: dict[str, Any], module: Any, probe: Probe, mover: Sequence[Moving] = ()
) -> dict[str, Any]:
    recorder = Recorder()
    options = {"max_steps": STEPS, "gradient_clip_val": 1.0, "callbacks": [probe, recorder, *mover]}
    trainer = make_trainer(rank, world_size, strategy, **options)
    trainer.fit(module, DataLoader(RandomTokens(48), batch_size=12, shuffle=True))
    return {
        "losses": recorder.losses,
        "logits": probe.logits,
        "slots": probe.slots,
        "replicas": replicas_of(module),
        "moved": sum(callback.moved_states + callback.shadow_copies for callback in mover),
    }


def upcycle(rank: int, world_size: int, root: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    """Train upcycled models for some steps; what the probe saw, by name."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    results = {}
    for name, overrides in UPCYCLED.items():
        torch.manual_seed(11)
        config = {"pretrained": str(root / name / "theirs"), "context_length": 16, "overrides": overrides}
        module = HuggingFaceModule({**config, "upcycling": {"num_experts": 4}}, OPTIMIZER)
        results[name] = _fit(rank, world_size, strategy, module, Probe(name, None))
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("huggingface")
    for name in {*NAMES, *UPCYCLED}:
        make_checkpoint(name, folder / name / "theirs")
    return folder


@pytest.fixture(scope="module")
def reference(root: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_pooled(1, train, root, NAMES, {})[0]
    return result


def assert_close(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def check(name: str, root: Path, reference: dict[str, Any], ranks: list[dict[str, Any]], run: str) -> None:
    """All that must hold of one architecture on some ranks."""
    ours, expected = root / name / run, logits_of(reloaded(root / name / "theirs"), inputs_for(name))
    files_equal(root / name / "theirs", ours / "start")
    for result in ranks:
        assert_close(result[name]["logits"][0], expected.numpy())
        np.testing.assert_allclose(result[name]["losses"], reference[name]["losses"], rtol=0, atol=TOLERANCE)
    trained = logits_of(reloaded(ours / "end"), inputs_for(name)).numpy()
    assert_close(trained, ranks[0][name]["logits"][1])
    assert np.abs(trained - expected.numpy()).max() > 0.01, "nothing was learned, so nothing was tested"


def check_shards(name: str, ranks: list[dict[str, Any]]) -> None:
    """Ranks read the experts of their slots, and replicas hold the same bytes."""
    for result in ranks:
        assert result[name]["slots"]
        for block, slots in result[name]["slots"].items():
            layer = block.split(".")[2]
            keys = [key for key in result[name]["experts_read"] if f"layers.{layer}." in key]
            by_row = {int(key.rpartition("/")[2]) for key in keys if not key.endswith("/None")}
            by_name = {int(key.split(".experts.")[1].split(".")[0]) for key in keys if key.endswith("/None")}
            assert by_row | by_name == set(slots)
    check_replicas([result[name]["replicas"] for result in ranks])


def check_replicas(ranks: list[dict[str, dict[int, bytes]]]) -> None:
    """Replicas hold the same bytes."""
    seen: dict[str, bytes] = {}
    for held in ranks:
        for parameter, experts in held.items():
            for expert, content in experts.items():
                assert seen.setdefault(f"{parameter}/{expert}", content) == content, f"{parameter} of expert {expert}"


def test_one_rank(root: Path, reference: dict[str, Any]) -> None:
    for name in NAMES:
        check(name, root, reference, [reference], "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "names", "strategy"),
    [
        slow(2, NAMES, {}),
        slow(4, NAMES, {"replicas": 2, "dense": "zero1", "slots": 4}),
        (2, IN_LAYERS, TP2),
        slow(4, IN_LAYERS, TP2),
    ],
)
def test_ranks(
    world_size: int, names: tuple[str, ...], strategy: dict[str, Any], root: Path, reference: dict[str, Any]
) -> None:
    ranks = run_pooled(world_size, train, root, names, strategy)
    for name in names:
        check(name, root, reference, ranks, run_name(world_size, strategy))
        if "mesh" in strategy:
            continue
        if "slots" not in strategy:
            assert all(len(slots) == 3 for slots in ranks[0][name]["slots"].values())
        check_shards(name, [{name: _without_vacant(result[name])} for result in ranks])


@pytest.mark.slow
def test_experts_that_move_and_visit(root: Path, reference: dict[str, Any]) -> None:
    moving = {"move_at": (1, 3), "slots": 5, "shadows": True}
    ranks = run_pooled(2, train, root, NAMES, {"slots": 5}, moving)
    for name in NAMES:
        assert ranks[0][name]["moved"] > 0
        check(name, root, reference, ranks, "2m")


def test_upcycled_models(root: Path) -> None:
    """Every rank copies the dense layer into its own slots; routers start alike; one loss sequence."""
    reference = run_pooled(1, upcycle, root, {})[0]
    ranks = run_pooled(2, upcycle, root, {"replicas": 2})
    for name in UPCYCLED:
        dense = make_checkpoint(name, root / name / "again")
        expected = logits_of(dense, inputs_for(name)).numpy()
        for result in (reference, *ranks):
            assert_close(result[name]["logits"][0], expected)
            np.testing.assert_allclose(result[name]["losses"], reference[name]["losses"], rtol=0, atol=TOLERANCE)
            assert np.abs(result[name]["logits"][1] - expected).max() > 0.01
        check_replicas([result[name]["replicas"] for result in ranks])


def _without_vacant(result: dict[str, Any]) -> dict[str, Any]:
    slots = {block: tuple(e for e in slots if e >= 0) for block, slots in result["slots"].items()}
    replicas = {p: {e: b for e, b in held.items() if e >= 0} for p, held in result["replicas"].items()}
    return {**result, "slots": slots, "replicas": replicas}


# ---------------------------------------------------------------------- sequences over ranks


@pytest.mark.slow
def test_models_train_alike_on_parts_of_sequences(tmp_path: Path) -> None:
    for name in IN_PARTS:
        make_checkpoint(name, tmp_path / name / "theirs")
    (reference,) = run_pooled(1, train, tmp_path, IN_PARTS, {})
    for result in run_pooled(2, train, tmp_path, IN_PARTS, {"mesh": {"cp": 2}}):
        for name in IN_PARTS:
            np.testing.assert_allclose(result[name]["losses"], reference[name]["losses"], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(result[name]["logits"], reference[name]["logits"], rtol=0, atol=1e-3)


def test_a_window_looks_back_over_parts(tmp_path: Path) -> None:
    names, changes = ("mixtral_tied",), {"sliding_window": 6}
    make_checkpoint(names[0], tmp_path / names[0] / "theirs", **changes)
    alone = run_pooled(1, train, tmp_path, names, {})[0][names[0]]["losses"]
    for result in run_pooled(2, train, tmp_path, names, {"mesh": {"cp": 2}}):
        np.testing.assert_allclose(result[names[0]]["losses"], alone, rtol=0, atol=TOLERANCE)


REFUSED_IN_PARTS = {
    "gpt_oss": "GptOssAttention",
    "llama4": "Llama4TextAttention",
    "jamba": "JambaMambaMixer",
    "minimax": "MiniMaxAttention",
    "qwen3_5": "Conv1d",
}


def refusal(rank: int, world_size: int, root: Path) -> list[str]:
    sentences = []
    for name in REFUSED_IN_PARTS:
        with pytest.raises(ConfigurationError) as caught:
            train(rank, world_size, root, (name,), {"mesh": {"cp": 2}})
        sentences.append(str(caught.value))
    return sentences


def test_what_does_not_ask_for_other_parts_is_refused_on_parts(root: Path) -> None:
    """Attention with sinks, in chunks, and layers that carry a state."""
    for name in REFUSED_IN_PARTS:
        make_checkpoint(name, root / name / "theirs")
    for sentences in run_pooled(2, refusal, root):
        for kind, sentence in zip(REFUSED_IN_PARTS.values(), sentences, strict=True):
            assert f"({kind}) of HuggingFaceModule" in sentence


# ---------------------------------------------------------------------- layers in parts over ranks


class Padded(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Sequences of unlike lengths."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, targets = RandomTokens()[index]
        is_token = torch.arange(16) < 6 + index % 9
        return ids.masked_fill(~is_token, 0), targets.masked_fill(~is_token, -100), is_token


def upcycle_in_layers(rank: int, world_size: int, root: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    """Losses of upcycled models, and of one that learns from padded sequences."""
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    results = {}
    for name in DENSE:
        torch.manual_seed(11)
        config = {"pretrained": str(root / name / "theirs"), "context_length": 16}
        sparse = {"num_experts": 4, "moe_every": 2}
        module = HuggingFaceModule({**config, "upcycling": sparse}, OPTIMIZER)
        results[name] = _fit(rank, world_size, strategy, module, Probe(name, None))["losses"]
    recorder = Recorder()
    trainer = make_trainer(rank, world_size, strategy, max_steps=4, gradient_clip_val=1.0, callbacks=[recorder])
    config = {"pretrained": str(root / "mixtral_tied" / "theirs"), "context_length": 16, "gradient_checkpointing": True}
    trainer.fit(HuggingFaceModule(config, OPTIMIZER), DataLoader(Padded(), batch_size=12))
    return {**results, "padded": recorder.losses}


@pytest.mark.slow
def test_upcycled_and_padded(root: Path) -> None:
    for name in DENSE:
        make_checkpoint(name, root / name / "theirs")
    (alone,) = run_pooled(1, upcycle_in_layers, root, {})
    for result in run_pooled(4, upcycle_in_layers, root, TP2):
        for name, losses in alone.items():
            np.testing.assert_allclose(result[name], losses, rtol=0, atol=TOLERANCE, err_msg=name)


def refusal_in_layers(rank: int, world_size: int, root: Path) -> str:
    from moe_lightning.models.huggingface.module import HuggingFaceModule

    config = {"pretrained": str(root / "gpt2" / "theirs"), "context_length": 16, "upcycling": {"num_experts": 4}}
    trainer = make_trainer(rank, world_size, TP2, max_steps=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(HuggingFaceModule(config, OPTIMIZER), DataLoader(RandomTokens(), batch_size=12))
    return str(caught.value)


def test_unknown_layers_are_refused(root: Path) -> None:
    assert all(
        "does not know the layers of a gpt2" in found for found in run_pooled(2, partial(refusal_in_layers, root=root))
    )
