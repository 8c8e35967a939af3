"""Races are fair and outlive their contenders: turns, values, exceptions; the GPU's tables made of them, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_contenders, kernels_cuda
from benchmarks.kernel_contenders import Contender, Shape
from benchmarks.kernels_exchange import measure
from benchmarks.race import disagreements, race
from tests.distributed.harness import connect, run_ranks

TINY = Shape(name="tiny", tokens=24, d_model=16, d_expert=8, experts=4, top_k=2)


def test_turns_are_taken_and_who_raises_is_out() -> None:
    calls: list[str] = []

    def clock(name: str, *seconds: float) -> Callable[[], float]:
        left = iter(seconds)

        def measure() -> float:
            calls.append(name)
            found = next(left, None)
            if found is None:
                raise RuntimeError("out of memory\nand a long trace")
            return found

        return measure

    ended = race(
        {"a": {"both": clock("a", 9, 1, 2, 3)}, "b": {"both": clock("b", 9, 5)}, "c": {"both": clock("c", 9, 6, 8, 7)}},
        rounds=3,
        warmup=1,
    )
    assert "".join(calls) == "abc" * 3 + "ac"
    assert ended.medians == {"a": {"both": 2}, "c": {"both": 7}}
    assert ended.left_out == {"b": "RuntimeError: out of memory"}


def test_other_values_are_told() -> None:
    def breaks() -> list[Tensor]:
        raise TypeError

    right = torch.ones(4)
    results: dict[str, Callable[[], list[Tensor]]] = {
        "right": lambda: [right * 1.001],
        "wrong": lambda: [right * 1.1],
        "lost": lambda: [right * torch.nan],
        "short": lambda: [right[:2]],
        "breaks": breaks,
    }
    found = disagreements(results, [right], 0.01)
    assert found.pop("short").startswith("ValueError: the shape [2]")
    assert found.pop("breaks") == "TypeError: "
    assert set(found) == {"wrong", "lost"}
    assert "relative error 0.1, at most 0.01" in found["wrong"]


def test_layers_race_with_router_and_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that computes something else, one that cannot be built and one that breaks end nobody's row."""
    builders = kernel_contenders._builders

    def more(up_EDH: Tensor, down_EFD: Tensor, top_k: int) -> dict[str, Callable[[], Contender]]:
        def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            return x_TD * (weights_TK[:, :1] * 3).to(x_TD.dtype)

        def breaks(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            raise RuntimeError("no kernel image")

        def not_built() -> Contender:
            raise OSError("no such library")

        return {
            "wrong": lambda: Contender(forward=forward, parameters=(up_EDH,)),
            "broken": lambda: Contender(forward=breaks, parameters=(up_EDH,)),
            "unbuilt": not_built,
            **builders(up_EDH, down_EFD, top_k),
        }

    monkeypatch.setattr(kernel_contenders, "_builders", more)
    told = kernels_cuda.layer_table(TINY, torch.device("cpu"), rounds=1, peak=1e9)
    for words in ("\nours ", "\nloop ", "\ntorch grouped_mm ", "tiny: unbuilt left out: OSError", "other values"):
        assert words in told, told
    assert "broken left out: RuntimeError: no kernel image" in told
    assert "\nwrong " not in told


def row(rank: int, world_size: int) -> list[tuple[str, int, int, str, str]]:
    return measure(connect(), num_rows=10, width=4, rounds=1)


@pytest.mark.slow
def test_the_exchange_row() -> None:
    names = [(name, rows, width) for name, rows, width, *_ in run_ranks(2, row)[0]]
    assert names == [("all-to-all", 10, 4)]
