"""kill -9 of the agent while it speaks to an object store that fails as well: what has a name is whole, and the next
agent goes on."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from pathlib import Path

import pytest

from moe_lightning.checkpoint.agent import main as agent_main
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.inspect import verify_all
from moe_lightning.checkpoint.loader import find_newest
from moe_lightning.checkpoint.names import MANIFEST
from moe_lightning.checkpoint.storage import objects, place_of
from moe_lightning.checkpoint.storage.interface import Place
from moe_lightning.errors import ConfigurationError
from tests.forks import PATIENCE_S, forked
from tests.object_stores import BUCKET, FAULTS, Faults
from tests.parameters import soak
from tests.unit.checkpoint_state import EXPERTS, Node, assert_holds

KILLS = 3


def agent(arenas: str, root: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    objects._FIRST_PAUSE_S = 0.01
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.exit(
        agent_main(["--arenas", arenas, "--checkpoints", root, "--poll-s=0.005", "--retry-s=0.05", "--grace-s=60"])
    )


def assert_all_whole(root: Place) -> int:
    """Every checkpoint that has a name verifies, and the newest holds what the model was; its step, 0 without one."""
    try:
        assert [verdict for verdict in verify_all(root) if verdict.problem] == []
    except ConfigurationError:
        return 0  # nothing is committed yet
    found = find_newest(root, run="run")
    assert found.problems == ()
    table = found.checkpoint.expert_versions()
    assert_holds(found.checkpoint, dict(enumerate(table[0].tolist())))
    return found.checkpoint.step


def run_schedule(base: Path, seed: int, faults: Faults) -> None:
    """Agents that are killed at random instants while they write one snapshot after the other."""
    rng = random.Random(seed)
    root = place_of(f"s3://{BUCKET}/{uuid.uuid4().hex}/checkpoints")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    made = Node(base, root=root)
    step = newest = 0
    try:
        for _ in range(KILLS):
            # A manifest that a store keeps half of is written again at once, unless its writer is killed first.
            faults.at_random(rng.randrange(1 << 30), 0.05, *FAULTS, never_cut=MANIFEST)
            with forked(agent, str(made.arenas), str(root), environment) as process:
                deadline = time.monotonic() + rng.uniform(0.3, 1.8)  # the schedule itself: the instant of the kill
                while time.monotonic() < deadline:
                    step += 1
                    made.snapshot(step, fresh=None if step == 1 else [step % EXPERTS])
                    time.sleep(0.1)  # the next steps of the training
                process.kill()
                process.join(PATIENCE_S)
            faults.choose = lambda *_: None
            assert assert_all_whole(root) >= newest, "the last committed checkpoint never goes back"
            newest = assert_all_whole(root)
        made.save(step + 1, fresh=[0])
        assert made.agent.status.error is None
        assert assert_all_whole(root) == step + 1
        assert len(checkpoints(root)) <= 2
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *map(soak, range(1000, 1067))])
def test_kill_9_while_a_store_fails(seed: int, tmp_path: Path, faults: Faults) -> None:
    run_schedule(tmp_path, seed, faults)  # asserts after every kill
