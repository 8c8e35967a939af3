"""Estimates of what fits, against models that are built and against sizes that no machine has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lightning.cli import capacity
from moe_lightning.errors import ConfigurationError
from moe_lightning.models.gpt import GPTConfig, least_gpt_parameters
from tests.unit.gpt_size import count_parameters


@settings(deadline=None, max_examples=40)
@given(
    layers=st.integers(1, 5),
    every=st.integers(1, 3),
    first=st.integers(0, 2),
    experts=st.integers(0, 4),
    shared=st.integers(0, 2),
    style=st.sampled_from([("gelu", "learned", True, True), ("swiglu", "rope", False, False)]),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_the_estimate_is_below_the_model_and_near_it(
    layers: int, every: int, first: int, experts: int, shared: int, style: Any, kv_heads: int
) -> None:
    activation, position, bias, tied = style
    sizes = {"num_layers": layers, "moe_every": every, "num_dense_layers": first, "num_experts": experts}
    if experts and not any(i >= first and (i + 1) % every == 0 for i in range(layers)):
        with pytest.raises(ConfigurationError, match="leave no MoE layer"):
            GPTConfig(**sizes, router={"top_k": 1}, d_model=64, num_heads=4)
        return
    config = GPTConfig(
        **sizes,
        router={"top_k": 1},
        num_shared_experts=shared,
        vocab_size=100,
        context_length=16,
        d_model=64,
        num_heads=4,
        num_kv_heads=kv_heads,
        d_expert=32,
        activation=activation,
        position=position,
        bias=bias,
        tie_embeddings=tied,
    )
    assert config.num_moe_layers == sum(config.is_moe_layer(index) for index in range(layers))
    assert 0.9 * count_parameters(config) <= least_gpt_parameters(config) <= count_parameters(config)


@pytest.mark.parametrize("size", ["num_layers", "d_model", "num_experts", "vocab_size", "context_length", "d_hidden"])
def test_sizes_that_no_machine_holds_are_known_at_once(size: str) -> None:
    config = GPTConfig(**{"num_heads": 1, size: 10**14})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=rf"^model\.{size}=100000000000000 makes a model of .* parameters"):
        capacity.check_model(
            {f"model.{size}": getattr(config, size), "model.num_heads": 1},
            least_gpt_parameters(config),
            capacity.machine_memory(),
        )


@pytest.mark.parametrize(("optimizer", "most"), [("adamw", 64), ("muon", 85), ("adafactor", 128)])
def test_what_an_optimizer_keeps_counts(optimizer: str, most: int) -> None:
    capacity.check_model({"model.d_model": 8}, most, 1024, optimizer)
    with pytest.raises(ConfigurationError, match=r"model\.d_model=8"):
        capacity.check_model({"model.d_model": 8}, most + 1, 1024, optimizer)


def test_as_many_processes_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "machine_memory", lambda: 4 * capacity.GIB)
    capacity.check_processes(16)
    capacity.check_processes(4, num_workers=3)
    with pytest.raises(ConfigurationError, match=r"ranks=17 is more than the 16 processes"):
        capacity.check_processes(17)
    with pytest.raises(ConfigurationError, match=r"data\.num_workers=4 for each of 4 ranks .* use at most 3"):
        capacity.check_processes(4, num_workers=4)


def test_a_sample_as_large_as_the_memory() -> None:
    capacity.check_sample("data.global_batch_size", 128, 128, 1024)
    with pytest.raises(ConfigurationError, match=r"data\.global_batch_size=129 needs .* use less than 128"):
        capacity.check_sample("data.global_batch_size", 129, 129, 1024)
