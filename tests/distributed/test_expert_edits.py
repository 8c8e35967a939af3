"""An edited checkpoint trains on with the same losses on any number of ranks (law L1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_lightning.cli.expert_edits import edit_file, parse_edits
from tests.distributed.harness import run_pooled
from tests.distributed.training import train


@pytest.mark.slow
def test_an_edited_checkpoint_goes_on_alike_on_one_rank_and_two(tmp_path: Path) -> None:
    words: dict[str, Any] = {"prune": ["0:1", "1:4"], "merge": ["0+3"], "duplicate": ["2,5,5"]}
    run_pooled(2, partial(train, steps=3, save_to=str(tmp_path / "whole.ckpt")))
    report = edit_file(tmp_path / "whole.ckpt", tmp_path / "edited.ckpt", lambda layers: parse_edits(layers, **words))
    assert report.experts == (6, 7)
    options = {"steps": 7, "model": {"num_experts": 7}, "ckpt_path": str(tmp_path / "edited.ckpt")}
    one, two = (run_pooled(ranks, partial(train, **options))[0]["losses"] for ranks in (1, 2))
    assert len(one) == 4
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
