"""torch's grouped_mm as the experts' body: values and gradients of the reference, its demands on rows, its place."""

import pytest
import torch

from moe_lightning import ExpertParallelStrategy
from moe_lightning import kernels as ops
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import operations, torch_grouped
from moe_lightning.moe.layer import MoELayer
from moe_lightning.parallel.context import World
from moe_lightning.strategies.stages import StageMap
from tests.unit.kernels.kernel_cases import DEVICE, assert_close, assert_equals_reference, randn

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _grouped():
    with ops.backend("grouped"):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "tail"), [([0], 0), ([], 3), ([3, 0, 5], 0), ([0, 33, 0, 1, 0], 3), ([0, 0], 2)])
def test_values_and_gradients_are_those_of_the_reference(sizes, tail, dtype):
    x, weight = randn(sum(sizes) + tail, 16, dtype=dtype), randn(len(sizes), 16, 24, dtype=dtype, seed=1)
    turned, wide = weight.transpose(1, 2).contiguous().transpose(1, 2), randn(len(sizes), 16, 48, dtype=dtype)
    for one in (weight, turned, wide[..., ::2]):
        assert_equals_reference(lambda x, w: ops.grouped_mm(x, w, sizes), x, one)
        assert_close(ops.grouped_mm(x, one, sizes)[sum(sizes) :], x.new_zeros(tail, 24))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_what_the_reference_does(activation, bias):
    torch.manual_seed(0)
    layer = MoELayer(16, 24, 5, {"top_k": 2}, activation=activation, bias=bias).to(DEVICE)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def compute(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert_equals_reference(compute, randn(33, 16), *parameters)


def test_double_precision_goes_the_other_way():
    assert_equals_reference(lambda x, w: ops.grouped_mm(x, w, [2, 1]), randn(3, 5).double(), randn(2, 5, 3).double())


@pytest.mark.parametrize(("width", "dtype", "unit"), [(6, torch.float32, 4), (12, torch.bfloat16, 8)])
def test_broken_rows_are_refused(width, dtype, unit):
    said = f"{width} columns of {dtype} are 24: use widths that are multiples of {unit}"
    for widths in ((width, 16), (16, width)):
        with pytest.raises(ConfigurationError, match=said):
            ops.grouped_mm(randn(3, widths[0], dtype=dtype), randn(2, *widths, dtype=dtype), [1, 2])


def test_more_rows_than_offsets_count_are_refused(monkeypatch):
    monkeypatch.setattr(torch_grouped, "_MOST_ROWS", 2)
    with pytest.raises(ConfigurationError, match="counts up to 2 rows, but there are 3"):
        ops.grouped_mm(randn(3, 8), randn(1, 8, 8), [3])


def test_only_the_matmuls_are_others():
    own, usual = operations.implementation(DEVICE), operations._implementation("auto", DEVICE.type)
    assert own.matmul is torch_grouped
    assert own.fused is None
    assert (own.rows, own.routing, own.activation) == (usual.rows, usual.routing, usual.activation)


def test_the_strategy_chooses_it(monkeypatch):
    chosen = []
    monkeypatch.setattr("moe_lightning.strategies.placed_experts.set_backend", chosen.append)
    layer = MoELayer(16, 16, 2)
    for kernels in ("grouped", None):
        strategy = ExpertParallelStrategy(kernels=kernels)
        strategy.placing.place(layer, World.single(), StageMap(layer, strategy.worlds))
    assert chosen == ["grouped"]
    with pytest.raises(ConfigurationError, match="kernels='fast'"):
        ExpertParallelStrategy(kernels="fast")
