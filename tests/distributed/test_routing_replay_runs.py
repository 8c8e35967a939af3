"""A training that takes the routing of another one, on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from moe_lightning import GPTModule, OptimizerConfig, RoutingReplay
from moe_lightning.moe.replayed_routing import TokenRange, read_samples
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.training import TINY, RandomTokens, Recorder, make_trainer

STEPS, BATCH = 6, 6


def fit(rank: int, world_size: int, replays: list[tuple[str, Any]], lr: float) -> list[float]:
    recorder = Recorder()
    callbacks = [recorder, *(RoutingReplay(path, mode) for path, mode in replays)]
    trainer = make_trainer(
        rank, world_size, {"seed": 1}, max_steps=STEPS, callbacks=callbacks, accumulate_grad_batches=2
    )
    module = GPTModule({**TINY, "router": {"top_k": 2, "jitter": 0.2}}, OptimizerConfig(lr=lr, warmup_steps=2))
    trainer.fit(module, DataLoader(RandomTokens(96), batch_size=BATCH, shuffle=True))
    return recorder.losses


def test_the_same_tokens_take_the_same_experts_on_any_ranks(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    (plain,) = run_ranks(1, fit, [(first, "record")], 3e-3)
    one = run_ranks(1, fit, [(first, "replay")], 3e-3)[0]
    two = run_ranks(2, fit, [(first, "replay")], 3e-3)[0]
    assert one == plain
    assert two == pytest.approx(plain, abs=1e-5)
    run_ranks(2, fit, [(second, "record")], 3e-2)
    for step in range(STEPS):
        at = TokenRange(step=step, first_sample=0)
        ours, theirs = (read_samples(tmp_path / name, at, 2 * BATCH) for name in ("first", "second"))
        assert ours.shape == (12, 16, 2, 2)
        if step == STEPS - 1:
            assert not (ours == theirs).all(), "another learning rate would have routed otherwise"
    (forced,) = run_ranks(1, fit, [(first, "replay")], 3e-2)
    assert run_ranks(3, fit, [(first, "replay")], 3e-2)[0] == pytest.approx(forced, abs=1e-5)


def test_the_end_of_a_recording_is_a_sentence(tmp_path: Path) -> None:
    folder = str(tmp_path / "routing")
    run_ranks(1, fit, [(folder, "record")], 3e-3)
    for path in (tmp_path / "routing").glob("step-00000003*"):
        path.unlink()
    with pytest.raises(RankFailure, match="no routing of sample 0 of step 3 in whole"):
        run_ranks(1, fit, [(folder, "replay")], 3e-3)
