"""Tiles come from a table: the shipped one is the model's, a user's own goes before it, wrong ones are left out."""

import importlib.util
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from benchmarks import tiles
from moe_lightning import kernels
from moe_lightning.cli.bench import main
from moe_lightning.errors import ConfigurationError
from moe_lightning.kernels import tile_table

TILE = tile_table.Tile(128, 128, 32, 8, 3)

needs_tiles = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="Triton is not installed, or its interpreter has tiles of its own",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tile_table._tables.cache_clear()
    yield
    tile_table._tables.cache_clear()


def test_the_shipped_table_is_what_the_command_writes(tmp_path, capsys):
    assert main(["tiles", "--write-table", str(tmp_path / "tiles.json")]) == 0
    assert (tmp_path / "tiles.json").read_bytes() == tile_table.SHIPPED.read_bytes()
    assert "modelled, not measured" in capsys.readouterr().out


def test_a_users_own_table_goes_first():
    before = tile_table.chosen(90, 2, "many")
    assert before != TILE
    tile_table.write(tile_table.user_file(), "by hand", {"sm_90 2 many": TILE})
    assert tile_table.chosen(90, 2, "many") == before, "read once"
    tile_table._tables.cache_clear()
    assert tile_table.chosen(90, 2, "many") == TILE
    assert tile_table.chosen(90, 2, "few") == tile_table.read(tile_table.SHIPPED)["sm_90 2 few"]
    assert tile_table.chosen(75, 2, "few") is None


def test_a_user_without_a_home_has_the_shipped_table(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert tile_table.chosen(90, 2, "many") == tile_table.read(tile_table.SHIPPED)["sm_90 2 many"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        pickle.dumps({"tiles": {}}),
        b"[]",
        b"[" * 60000,
        b'{"tiles": []}',
        b" " * 70000,
        *(
            json.dumps({"tiles": {name: tile}}).encode()
            for name, tile in [
                ("sm_90 2 most", TILE),
                ("sm_90 2 many", TILE[:4]),
                ("sm_90 2 many", (48, *TILE[1:])),
                ("sm_90 2 many", (*TILE[:4], 0)),
                ("sm_90 2 many", (128.0, *TILE[1:])),
                ("sm_90 2 many", "12884"),
            ]
        ),
    ],
)
def test_a_wrong_table_is_left_out_with_a_sentence(content, caplog):
    path = tile_table.user_file()
    path.parent.mkdir()
    path.write_bytes(content)
    assert tile_table.chosen(90, 2, "many") == tile_table.read(tile_table.SHIPPED)["sm_90 2 many"]
    (record,) = caplog.records
    assert "is left out" in record.getMessage()
    assert "delete it, or write it anew" in record.getMessage()


def test_the_fastest_that_runs_is_measured():
    broken, slow, fast, _ = tile_table.CANDIDATES["many"]

    def seconds(rows, tile):
        if tile == broken:
            raise RuntimeError("out of resources")
        return {slow: 2.0, fast: 0.5}.get(tile, 1.0)

    assert tiles.measured(90, 2, seconds)["sm_90 2 many"] == fast


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_needs_a_gpu(capsys):
    assert main(["tiles", "--measure"]) == 2
    assert "no GPU here to measure" in capsys.readouterr().err


def test_nothing_is_tuned_in_a_step():
    for path in Path(kernels.__path__[0]).rglob("*.py"):
        assert "autotune" not in path.read_text(), path


@needs_tiles
def test_an_entry_that_does_not_fit_the_device_is_passed_over():
    from moe_lightning.kernels.triton.tiles import Limits, tiles_for

    def found(shared):
        return tiles_for(torch.bfloat16, 1024, Limits(capability=90, shared=shared << 10, multiprocessors=132))

    assert found(227) == tile_table.chosen(90, 2, "many")
    assert found(99) == TILE


@needs_tiles
def test_a_gpu_that_no_tile_fits_is_named_and_does_not_end_the_epoch():
    from moe_lightning.kernels.triton.tiles import Limits, tiles_for

    with pytest.raises(ConfigurationError, match="fits the 65536 bytes of shared memory of this GPU: use the kernel"):
        tiles_for(torch.bfloat16, 1024, Limits(capability=94, shared=64 << 10, multiprocessors=304))
