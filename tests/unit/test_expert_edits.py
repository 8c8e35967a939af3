"""Experts of a checkpoint pruned, merged and duplicated: what must stay the same does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from moe_lightning import GPTModule
from moe_lightning.checkpoint.files import read_file, write_file
from moe_lightning.cli.ckpt import main
from moe_lightning.cli.expert_edits import ExpertEdit, edit_checkpoint, edit_file, mixed, parse_edits
from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.adapters import add_adapters
from moe_lightning.moe.layer import MoELayer
from moe_lightning.moe.router import Router, RouterConfig
from moe_lightning.strategies.averaging import CURRENT
from tests.distributed.training import TINY, RandomTokens, quiet, quiet_trainer

E = TINY["num_experts"]


def test_tables_say_what_new_experts_are_made_of() -> None:
    edit = ExpertEdit(prune=(1,), merge=((0, 3),), duplicate=(2,))
    np.testing.assert_array_equal(edit.table(4), [[0.5, 0, 0, 0.5], [0, 0, 1, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (ExpertEdit(prune=(4,)), "expert 4 is not in the layer"),
        (ExpertEdit(prune=(1,), merge=((1, 2),)), "expert 1 is named twice"),
        (ExpertEdit(prune=(1,), duplicate=(1,)), "expert 1 is named twice"),
        (ExpertEdit(merge=((1,),)), "needs two experts at least"),
        (ExpertEdit(prune=(0, 1, 2, 3)), "keep one at least"),
    ],
)
def test_edits_that_cannot_be(edit: ExpertEdit, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        edit.table(4)


def trained(folder: Path, **model: Any) -> Path:
    """A checkpoint of three steps."""
    quiet()
    pl.seed_everything(3, verbose=False)
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(GPTModule(TINY | model), DataLoader(RandomTokens(24), batch_size=8))
    trainer.save_checkpoint(folder / "whole.ckpt")
    write_file(read_file(folder / "whole.ckpt"), folder / "whole.ckpt")
    return folder / "whole.ckpt"


def module_of(path: Path) -> GPTModule:
    checkpoint = read_file(path)
    module = GPTModule(checkpoint["hyper_parameters"]["config"])
    module.configure_model()
    module.load_state_dict(checkpoint["state_dict"])
    return module.eval()


def logits(path: Path) -> Tensor:
    with torch.no_grad():
        found: Tensor = module_of(path)(torch.stack([RandomTokens()[i][0] for i in range(8)]))
    return found


def edited(source: Path, name: str, **words: Any) -> Path:
    target = source.with_name(name)
    edit_file(source, target, lambda layers: parse_edits(layers, **words))
    return target


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole"))


def test_merging_undoes_duplicating_and_the_command_that_goes_on_is_printed(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    double = whole.with_name(f"{'double ' * 9}[b].ckpt")  # quoted for the shell, at any width
    everyone = ",".join(map(str, range(E)))
    assert main(["edit", str(whole), str(double), "--duplicate", everyone, "--batches", "0"]) == 0
    assert capsys.readouterr().out.endswith(f"run_name=NAME 'resume={double}' model.num_experts={2 * E}\n")
    assert read_file(double)["hyper_parameters"]["config"]["num_experts"] == 2 * E

    again = read_file(edited(double, "again.ckpt", merge=[",".join(f"{e}+{e + E}" for e in range(E))]))
    before = read_file(whole)
    assert all(torch.equal(value, again["state_dict"][name]) for name, value in before["state_dict"].items())
    for number, entry in before["optimizer_states"][0]["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, again["optimizer_states"][0]["state"][number][name]), (number, name)


def test_weights_alone_are_edited_and_cannot_be_resumed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `ModelCheckpoint(save_weights_only=True)` saves them."""
    of_training = {"optimizer_states", "lr_schedulers", "callbacks"}
    weights = {key: value for key, value in read_file(whole).items() if key not in of_training}
    write_file(weights, tmp_path / "weights.ckpt")
    source, target = tmp_path / "weights.ckpt", tmp_path / "new.ckpt"
    assert main(["edit", str(source), str(target), "--prune", "2", "--batches", "0"]) == 0
    assert "resume=" not in capsys.readouterr().out
    made = read_file(target)
    assert made.keys() == weights.keys()
    assert torch.equal(logits(target), logits(edited(whole, "pruned.ckpt", prune=["2"])))


def test_both_models_of_a_run_that_averages_its_weights_are_edited(whole: Path) -> None:
    checkpoint, module = read_file(whole), module_of(whole)
    trains_on = {name: value + 1 for name, value in checkpoint["state_dict"].items()}
    table = ExpertEdit(prune=(2,)).table(E)
    made = edit_checkpoint({**checkpoint, CURRENT: trains_on}, module, [table] * TINY["num_layers"])
    assert len(made["optimizer_states"]) == 1
    for part, before in (("state_dict", checkpoint["state_dict"]), (CURRENT, trains_on)):
        for name, value in before.items():
            is_edited = ".experts." in name or ".router." in name
            assert torch.equal(made[part][name], mixed(value, table) if is_edited else value), name


def test_pruning_changes_only_tokens_that_chose_the_expert(tmp_path: Path) -> None:
    whole = trained(tmp_path, num_layers=1)
    pruned = edited(whole, "pruned.ckpt", prune=["2"])
    module = module_of(whole)
    chosen: list[Tensor] = []
    layer = next(m for m in module.modules() if type(m).__name__ == "MoELayer")
    layer.router.register_forward_hook(lambda *given: chosen.append(given[2].expert_ids_TK))
    ids = torch.stack([RandomTokens()[i][0] for i in range(8)])
    with torch.no_grad():
        before, after = module(ids).flatten(0, 1), module_of(pruned)(ids).flatten(0, 1)
    without = (chosen[0] != 2).all(dim=1)
    assert 0 < int(without.sum()) < len(without)
    torch.testing.assert_close(after[without], before[without], rtol=0, atol=1e-6)
    assert not torch.allclose(after[~without], before[~without])


def test_copies_learn_apart(whole: Path) -> None:
    """By the tokens that choose one of the two only."""
    module = module_of(edited(whole, "twins.ckpt", duplicate=["1"]))
    module(torch.stack([RandomTokens()[i][0] for i in range(8)])).square().sum().backward()
    for name, parameter in module.named_parameters():
        if ".experts.w_" in name:
            assert torch.equal(parameter[E], parameter[1]), name
            assert not torch.equal(parameter.grad[E], parameter.grad[1]), name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prune", "x"], "--prune 'x' must be experts such as 3,5"),
        (["--merge", "3"], "needs two experts at least"),
        (["--duplicate", "7:1"], "names layer 7 of 2 MoE layers"),
        (["--prune", "0:1"], "the layers would have [5, 6] experts"),
        (
            ["--prune", "0,1,2,3,4"],
            "1 of 6 experts would be left, and each token goes to top_k=2: prune or merge fewer",
        ),
        ([], "the edited checkpoint would be the same one: give --prune"),
    ],
)
def test_mistakes(
    options: list[str], sentence: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["edit", str(whole), str(tmp_path / "new.ckpt"), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "new.ckpt").exists()


def test_data_that_cannot_be_loaded_are_said_before_anything_is_written(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "run" / "checkpoints" / "whole.ckpt", tmp_path / "new.ckpt"
    source.parent.mkdir(parents=True)
    source.write_bytes(whole.read_bytes())
    config = {"run_dir": "run", "seed": 0, "data": {"_target_": "my_package.Corpus"}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config))
    assert main(["edit", str(source), str(target), "--prune", "0"]) == 2
    said = capsys.readouterr().err
    assert "set MOE_LIGHTNING_ALLOW=my_package in the environment" in said
    assert "; --batches 0 edits without measuring the loss" in said
    assert not target.exists()
    assert main(["edit", str(source), str(target), "--prune", "0", "--batches", "0"]) == 0


def test_twins_have_one_score_until_they_learn() -> None:
    router = Router(32, 7, RouterConfig())
    with torch.no_grad():
        router.weight[6] = router.weight[2]
    x_TD = torch.randn(64, 32, requires_grad=True)
    apart = router.logits(x_TD)
    router.find_twins()
    logits_TE = router.logits(x_TD)
    assert torch.equal(logits_TE[:, 6], logits_TE[:, 2])
    assert router._alike(torch.tensor([[0, 0, 1e-10, 0, 0, 0, 1.0]]))[0, 6] == torch.tensor(1e-10), "to the last bit"
    torch.testing.assert_close(logits_TE, apart, rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(logits_TE[:, 6].sum(), router.weight)
    assert gradient[6].any()
    assert not gradient[:6].any()
    with torch.no_grad():
        router.weight[6] += 1
    router.update_bias()
    assert torch.equal(router.logits(x_TD), F.linear(x_TD, router.weight))


def test_twins_are_told_apart_by_adapters_and_noise() -> None:
    torch.manual_seed(0)
    layer = MoELayer(8, 16, 4, router={"top_k": 1, "noisy_top_k": True})
    router, x_TD = layer.router, torch.randn(64, 8)
    assert isinstance(router, Router)
    router.stream.advance(step=0, first_sample=0, num_samples=64)
    with torch.no_grad():
        router.weight[1] = router.weight[0]
        noisy = router(x_TD).expert_ids_TK
        router.find_twins()
        assert torch.equal(router(x_TD).expert_ids_TK, noisy)
        router._twins_E = None
        add_adapters(layer, {"targets": ["router"], "rank": 2})
        router.adapter.lora_b[1] = 3.0  # type: ignore[union-attr, index, operator]
        adapted = router.eval()(x_TD).expert_ids_TK
        router.find_twins()
        assert torch.equal(router(x_TD).expert_ids_TK, adapted)
