"""`moe-bench` as a user runs it, in this process: its smallest benchmark, and mistakes as one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_lightning.cli import bench
from moe_lightning.cli.bench import main
from tests.programs import exit_code

LAYER = ["layer", "--rounds", "1", "--tokens", "16", "--d-model", "8", "--d-expert", "8", "--experts", "4"]


def test_a_layer_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LAYER) == 0
    assert "zipf 1.2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["layer", "balance-trace", "nothing"])
def test_the_installed_package_has_no_benchmarks(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "benchmarks", dict)
    assert exit_code(main, [name, "--rounds", "1"]) == 2
    error = capsys.readouterr().err
    assert f"invalid choice: '{name}' (choose from " in error
    assert "benchmarks" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["recovery", "--etcd", "abc"], "argument --etcd: rdzv_endpoint='abc' must be http://HOST:PORT"),
        (["recovery", "--etcd", ""], "argument --etcd: rdzv_endpoint='' must be http://HOST:PORT"),
        (["paper", "--plots", "/proc/out"], "argument --plots: '/proc/out' is not a folder"),
        (["paper", "--plots", f"made/{'n' * 300}"], "n... is not a folder"),
        (["paper", "--plots", ""], "argument --plots: '' is not a folder"),
    ],
)
def test_what_no_option_can_be_is_refused_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(main, arguments) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_packing_is_measured_beside_padding(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--conversations", "60", "--rounds", "1", "--batch", "2", "--d-model", "8", "--layers", "1"]
    assert main(["packing", *small, "--context", "256"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\npadded .*\npacked .*\n(met   |missed)  packed over padded: \d", said), said
    assert main(["packing", *small, "--context", "8"]) == 2
    assert "there is nothing to learn, raise it" in capsys.readouterr().err


@pytest.mark.slow
def test_members_of_a_lost_node_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--members", "8", "--per-node", "4", "--processes", "1", "--rounds", "1", "--scenarios", "lost"]
    assert main(["members", *small, "--patience", "60"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines() if line.split()[0] == "8"] == [
        ["8", scenario] for scenario in ("form", "lost", "back")
    ]
    assert "evictions in error: 0" in said
    assert main(["members", "--members", "9"]) == 2
    assert "--members 9 must be a multiple of --per-node 8" in capsys.readouterr().err
