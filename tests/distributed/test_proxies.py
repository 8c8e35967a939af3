"""Connections between ranks that pass a proxy, as in a service mesh, are announced, and used."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moe_lightning.parallel import abort
from moe_lightning.parallel.abort import build_world, destroy_groups
from moe_lightning.parallel.collectives import all_gather_json
from tests.distributed.harness import run_ranks


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warnings_of_build(rank: int, world_size: int, folder: Path, behind_proxy: int | None) -> list[str]:
    """Build a world, one rank of which sees the address of its proxy as the other end of each connection."""

    def reported(value: Any, world: Any) -> list[Any]:
        if rank == behind_proxy:
            value["connections"] = [[local, ["127.0.0.6", 1]] for local, _ in value["connections"]]
        return all_gather_json(value, world)

    dist.destroy_process_group()
    kept = Kept()
    abort.logger.addHandler(kept)
    with patch.object(abort, "all_gather_json", reported):
        build_world(
            "world",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            size=world_size,
            backend="gloo",
            timeout=timedelta(seconds=60),
            build_timeout_s=60.0,
            device=torch.device("cpu"),
            guard=lambda cut: None,
        )
    abort.logger.removeHandler(kept)
    destroy_groups()
    return kept.messages


@pytest.mark.parametrize("behind_proxy", [None, 2])
def test_a_proxy_between_ranks_is_announced_once(tmp_path: Path, behind_proxy: int | None) -> None:
    first, *others = run_ranks(3, warnings_of_build, tmp_path, behind_proxy)
    assert others == [[], []]
    assert [message.partition(",")[0] for message in first] == (
        [] if behind_proxy is None else ["connections to 1 of 2 other ranks pass a proxy"]
    )
