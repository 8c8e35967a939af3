"""moe-bench kernels: the contenders compute the same thing, the tables come out, wrong sizes are refused."""

import pytest
import torch

from moe_lightning import kernels as ops
from moe_lightning.bench import kernels as bench
from moe_lightning.bench.kernel_contenders import Shape, contenders
from moe_lightning.errors import ConfigurationError
from tests.options import options_of


def options(*arguments: str) -> bench.Options:
    sizes = ["--tokens", "12", "--d-model", "16", "--d-expert", "8", "--experts", "4", "--top-k", "2", "--rounds", "1"]
    return options_of(bench.Options, *sizes, *arguments)


def test_contenders_agree_in_value_and_gradient():
    shape = Shape(name="tiny", tokens=20, d_model=16, d_expert=8, experts=4, top_k=2)
    built, _ = contenders(shape, torch.device("cpu"), torch.float32)
    assert {"ours", "loop", "torch grouped_mm"} <= set(built)
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights, ids = ops.top_k_routing(torch.rand(20, 4, generator=torch.Generator().manual_seed(1)), 2)
    results = {}
    for name, contender in built.items():
        y = contender.forward(x, ids, weights)
        results[name] = (y, torch.autograd.grad(y.square().sum(), x)[0])
    for name, (y, grad) in results.items():
        torch.testing.assert_close(y, results["loop"][0], msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(grad, results["loop"][1], msg=lambda m, name=name: f"{name}: {m}")


def test_run_prints_every_table(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.run(options()) == 0
    printed = capsys.readouterr().out
    for words in (
        "against torch",
        "against reference",
        "grouped_mm",
        "torch grouped_mm",
        "balanced quota",
        "No GPU here",
    ):
        assert words in printed


def test_impossible_shapes_are_refused():
    with pytest.raises(ConfigurationError, match="K=9 with 1 rounds cannot be measured"):
        bench.run(options("--top-k", "9"))
