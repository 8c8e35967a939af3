"""moe-ckpt export-loads: files that SGLang's own rules accept, read here as its public format says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_lightning.cli.ckpt import main
from moe_lightning.cli.serving import measured_counts

LAYERS, EXPERTS, RANKS, SLOTS = 3, 8, 4, 3


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Skewed routing: in layer l expert l gets half of all."""
    counts = np.ones((2, LAYERS, 2, EXPERTS), dtype=np.int64)
    for layer in range(LAYERS):
        counts[:, layer, :, layer] = EXPERTS - 1
    np.savez(tmp_path / "trace.npz", counts=counts, iteration=np.array([1, 2]))
    return tmp_path / "trace.npz"


def exported(trace: Path, name: str, *options: str) -> Path:
    path = trace.with_name(name)
    assert main(["export-loads", str(trace), str(path), f"--ranks={RANKS}", f"--slots={SLOTS}", *options]) == 0
    return path


def read_sglang(path: Path) -> NDArray[np.int64]:
    """As the engine loads `--init-expert-location`."""
    ((key, table),) = json.loads(path.read_text()).items()
    assert key == "physical_to_logical_map"
    return np.array(table)


def check_map(table: NDArray[np.int64], layers: int = LAYERS) -> None:
    """The engine asserts a row for each layer, equally many slots on each rank, every expert somewhere."""
    assert table.shape == (layers, RANKS * SLOTS)
    assert all(set(row) == set(range(EXPERTS)) for row in table.tolist())


def test_sglang_reads_the_map(trace: Path) -> None:
    table = read_sglang(exported(trace, "sglang.json"))
    check_map(table)
    for layer, row in enumerate(table):
        assert int((row == layer).sum()) == RANKS, "half of all tokens need every rank"
        assert all(len(set(held)) == SLOTS for held in np.split(row, RANKS)), "no rank holds one twice"


def test_layers_without_experts_have_rows_too(trace: Path) -> None:
    maps = read_sglang(exported(trace, "map.json", "--dense-layers", "0", "2"))
    check_map(maps, LAYERS + 2)
    plain = np.arange(RANKS * SLOTS) % EXPERTS
    assert [bool((row == plain).all()) for row in maps] == [True, False, True, False, False]


def test_the_placement_evens_out_what_was_measured(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of all tokens on one of four ranks are 2.29 of the mean there, with a second expert; replicas help."""
    exported(trace, "x.json")
    assert "busiest rank over mean 2.29 without replicas, 1.07 so" in capsys.readouterr().out
    shares = "\n".join(f"{step},0,0.5,0.2,0.1,0.1,0.1,0,0,0" for step in (10, 20))
    (trace.parent / "expert_load.csv").write_text("step,layer,experts\n" + shares + "\n30,0,0,0,0,0,0,0,0,1\n")
    loads = trace.parent / "expert_load.csv"
    assert measured_counts(loads).tolist() == [[100000, 40000, 20000, 20000, 20000, 0, 0, 100000]]


@pytest.mark.parametrize(
    ("target", "options", "sentence"),
    [
        ("x.json", ["--ranks=2", "--slots=3"], "cannot hold 8 experts: raise --ranks or --slots"),
        ("x.json", ["--ranks=2", "--slots=9"], "--slots=9 is more than the 8 experts"),
        ("x.txt", ["--ranks=2", "--slots=4"], "must end with .json"),
        ("x.json", ["--ranks=2", "--slots=4", "--dense-layers", "9"], "9 is no place"),
        ("x.json", ["--ranks=0", "--slots=4"], "--ranks: 0 must be"),
        ("x.json", ["--ranks=1000000", "--slots=4"], "--ranks: 1000000 must be"),
    ],
)
def test_mistakes(
    trace: Path, target: str, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-loads", str(trace), str(trace.with_name(target)), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not trace.with_name(target).exists()
