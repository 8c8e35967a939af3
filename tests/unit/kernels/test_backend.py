"""The choice of bodies: by device, overridable, logged once, refused in one sentence."""

import logging

import pytest
import torch

from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import operations as choice
from tests.programs import run_program

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_choice():
    choice._implementation.cache_clear()
    with ops.backend("auto"):
        yield
    choice._implementation.cache_clear()


def test_auto_takes_torch_on_the_cpu_and_logs_it_once(caplog):
    with caplog.at_level(logging.INFO, logger="moe_lightning.kernels.operations"):
        for _ in range(3):
            ops.permute(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([[0]]))
    assert [record.getMessage() for record in caplog.records] == ["kernels on cpu: torch"]


def test_the_context_restores_the_choice_after_an_error():
    with ops.backend("reference"):
        assert choice.implementation(CPU) is None
        with pytest.raises(ConfigurationError), ops.backend("torch"):
            ops.pack([])
        assert choice.implementation(CPU) is None
    assert choice.implementation(CPU) is not None


def test_unknown_names_are_refused():
    with pytest.raises(ConfigurationError, match="'fast' does not exist: use one of auto, torch, triton, grouped, "):
        ops.set_backend("fast")


def test_triton_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    with ops.backend("triton"), pytest.raises(ConfigurationError, match="'triton' cannot run on device 'cpu'"):
        choice.implementation(CPU)


def test_absent_triton_is_refused_by_name_and_skipped_by_auto(monkeypatch):
    monkeypatch.setattr(choice, "_has_triton", lambda: False)
    with pytest.raises(ConfigurationError, match="needs the package triton"):
        ops.set_backend("triton")
    assert choice._implementation("auto", "cuda") is choice._TORCH


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_gpus_that_triton_does_not_compile_for_run_the_torch_kernels(monkeypatch, capability):
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert choice._implementation("auto", "cuda") is choice._TORCH
    with pytest.raises(ConfigurationError, match="needs a GPU of compute capability 8"):
        choice._implementation("triton", "cuda")


def test_triton_is_not_imported_where_it_is_not_chosen():
    code = (
        "import sys, torch; from moe_lightning import kernels as ops;"
        "ops.permute(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([[0]]));"
        "assert not any(m.startswith('moe_lightning.kernels.triton') for m in sys.modules)"
    )
    done = run_program("-c", code)
    assert done.returncode == 0, done.stderr
