"""moe-bench kernels: the contenders compute the same thing, the tables come out, wrong sizes are refused."""

import math
import os
from dataclasses import replace

import pytest
import torch

from benchmarks import kernels as bench
from benchmarks import kernels_cuda
from benchmarks.kernel_contenders import Shape, contenders, layer_contenders
from moe_lightning import kernels as ops
from tests.options import options_of


def options(*arguments: str) -> bench.Options:
    sizes = ["--tokens", "12", "--d-model", "16", "--d-expert", "8", "--experts", "4", "--top-k", "2", "--rounds", "1"]
    return options_of(bench.Options, *sizes, *arguments)


def test_contenders_agree_in_value_and_gradient():
    shape = Shape(name="tiny", tokens=20, d_model=16, d_expert=8, experts=4, top_k=2)
    built, _ = contenders(shape, torch.device("cpu"), torch.float32)
    assert {"ours", "ours, grouped", "loop", "torch grouped_mm"} <= set(built)
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scores = torch.rand(20, 4, generator=torch.Generator().manual_seed(1))
    ids = ops.top_k_experts(scores, 2)
    weights = scores.gather(1, ids)
    results = {}
    for name, contender in built.items():
        y = contender.forward(x, ids, weights)
        results[name] = (y, torch.autograd.grad(y.square().sum(), x)[0])
    for name, (y, grad) in results.items():
        torch.testing.assert_close(y, results["loop"][0], msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]
        torch.testing.assert_close(grad, results["loop"][1], msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]


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


def test_a_gpu_table_that_fails_says_why_and_ends_no_other(capsys):
    kernels_cuda.print_or_say("wide", math.sqrt, -1.0)
    assert capsys.readouterr().out.startswith("wide left out: ValueError: ")


@pytest.mark.slow
def test_a_gpu_table_whose_process_dies_ends_no_other(capsys):
    kernels_cuda.apart("wide", os._exit, 3)
    assert capsys.readouterr().out == "wide left out: its process ended with 3\n"


def test_a_judge_that_fails_leaves_times(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    shape, cpu = Shape(name="tiny", tokens=20, d_model=16, d_expert=8, experts=4, top_k=2), torch.device("cpu")
    layers, left_out = layer_contenders(shape, cpu)
    layers = {"ours": layers["ours"], "torch grouped_mm": replace(layers["torch grouped_mm"], forward=broken)}
    monkeypatch.setattr(kernels_cuda, "layer_contenders", lambda *_: (layers, left_out))
    told = kernels_cuda.layer_table(shape, cpu, 1, 1e12)
    assert "values not checked, for torch grouped_mm said RuntimeError: no such kernel" in told
    assert "torch grouped_mm left out" in told
    assert any(line.split()[:1] == ["ours"] for line in told.splitlines())
