"""Dense parts that are computed again in the backward pass: the same numbers from less memory."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from moe_lightning import CompileDense, ConfigurationError, GPTModule, OptimizerConfig, RecomputeDense
from moe_lightning.callbacks.dense_blocks import dense_parts
from moe_lightning.parallel.tensor import Gathered, PartedForward
from tests.distributed.harness import run_pooled
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer
from tests.parameters import slow

DROPOUT = {"dropout": 0.2, "router": {"top_k": 2, "jitter": 0.1}}


def fit(rank: int, world_size: int, strategy: dict[str, Any], again: bool) -> tuple[list[float], dict[str, int]]:
    """The losses, and the bytes that the last forward pass kept for its backward one."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    recorder, module = Recorder(), GPTModule({**TINY, **DROPOUT}, OptimizerConfig(lr=3e-3, warmup_steps=2))
    callbacks = [recorder, *([RecomputeDense()] if again else [])]
    trainer = make_trainer(rank, world_size, strategy, max_steps=3, callbacks=callbacks)
    own_step = module.training_step

    def watched(*args: Any) -> Any:
        kept.clear()  # memory of an earlier step may serve again, or not
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return own_step(*args)

    module.training_step = watched  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=12, shuffle=True))
    left = sum("forward" in vars(part) for _, part in dense_parts(module))
    return recorder.losses, {"kept": sum(kept.values()), "left": left}


def fit_both(rank: int, world_size: int, strategy: dict[str, Any]) -> Any:
    return [fit(rank, world_size, strategy, again) for again in (False, True)]


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, {}), slow(2, {}), (2, {"dense": "fsdp"}), (2, {"mesh": {"tp": 2}})]
)
def test_losses_are_the_same_to_the_bit(ranks: int, strategy: dict[str, Any]) -> None:
    for (plain, before), (again, after) in run_pooled(ranks, fit_both, strategy):
        assert again == plain
        assert after["left"] == 0
        assert after["kept"] < before["kept"]


@pytest.mark.parametrize("argument", [0, "input"])
def test_a_part_that_is_cut_gathers_an_argument_given_in_the_other_way(argument: int | str) -> None:
    """The names are those of its class, whatever is in the place of its forward pass."""
    module, x = pl.LightningModule(), torch.zeros(1, 2, 3)
    module.inside = nn.Sequential(nn.Identity())
    ranks: Any = SimpleNamespace(gather=lambda part, dim: torch.cat([part, part], dim=dim))
    PartedForward(module.inside, Gathered(argument), ranks)
    trainer, callback = cast(pl.Trainer, SimpleNamespace(callbacks=[])), RecomputeDense()
    callback.on_fit_start(trainer, module)
    given = module.inside(input=x) if argument == 0 else module.inside(x)
    assert given.shape == (1, 4, 3)
    callback.teardown(trainer, module, "fit")
    assert module.inside(x).shape == (1, 4, 3), "it stays cut"
    module.inside.forward.undo()
    assert "forward" not in vars(module.inside)


def test_noise_that_nobody_drives_is_drawn_once() -> None:
    """Under another strategy streams ask torch's generator."""
    module = GPTModule({**TINY, **DROPOUT}, OptimizerConfig())
    module.configure_model()
    plain = copy.deepcopy(module)
    recomputed = RecomputeDense()
    recomputed.on_fit_start(make_trainer(0, 1, {}), module)
    copied = copy.deepcopy(module)
    ids = torch.arange(32).view(2, 16)
    gradients = []
    for model in (plain, module, copied):
        model.train()
        torch.manual_seed(1)
        model(ids).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True) if a is not None)
    for name in recomputed.recomputed:
        assert copied.get_submodule(name).forward.__self__ is copied.get_submodule(name)  # type: ignore[union-attr]


def test_copies_of_a_compiled_module_have_their_own_dropout() -> None:
    module = GPTModule({**TINY, **DROPOUT}, OptimizerConfig())
    module.configure_model()
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected = module.eval()(ids)
        CompileDense(backend="eager").on_fit_start(make_trainer(0, 1, {}), module)
        copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))  # noqa: S301
        module.train()
        for copied in copies:
            assert torch.equal(copied.eval()(ids), expected)


def test_not_beside_a_compiler() -> None:
    trainer = make_trainer(0, 1, {}, callbacks=[RecomputeDense(), CompileDense(backend="eager")], max_steps=1)
    with pytest.raises(ConfigurationError, match="CompileDense and RecomputeDense both take the dense parts"):
        trainer.fit(GPTModule(TINY, OptimizerConfig()), DataLoader(RandomTokens(24), batch_size=12))
