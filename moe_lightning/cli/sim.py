"""`moe-sim`: simulation of runs on clusters, and recommended recipes.

    moe-sim [key=value ...]             simulate one policy, or several on the same failures (compare=[ds,lazarus])
    moe-sim recommend [key=value ...]   choose slots, replicas, protection, checkpoints and write a recipe for moe-train

The configuration is conf/simulate.yaml, composed by Hydra as for moe-train. Exit codes: 0 done, 1 a defect, 2 a user
error. What is imported here takes a fraction of a second, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moe_lightning import __version__, user_errors
from moe_lightning.simulate.policy import POLICIES

_HELP = """\
moe-sim: what-if simulation of training on a cluster whose nodes fail

usage: moe-sim [recommend] [key=value ...] [--cfg]

  model=NAME                        of conf/model, and model.num_experts=N ...
  nodes=N hours=X seed=N            the cluster and how long
  rank_batch=N | global_batch=N     samples of a step (the other one null)
  hardware.preset=NAME              rtx3090, a30, v100, a800, h100, h200, or a file of moe-bench calibrate
  hardware.link_bytes_per_s=X       and every other number (moe-sim --cfg shows all)
  mesh.pp=N mesh.cp=N mesh.tp=N     stages, parts of a sequence, parts of a layer; the rest is data parallel
  mesh.dense=NAME                   ddp, zero1, fsdp, hsdp
  mesh.search=true                  recommend chooses what of the mesh is null
  policy.name=NAME                  {policies}
  policy.slots=N                    and every other part of a policy
  compare=[ds,lazarus]              the same failures under other policies
  world_sizes=[512,4096]            what a change of the world costs at these numbers of ranks
  routing.kind=zipf                 uniform; trace with routing.path=FILE.npz
  failures.kind=exponential         none, weibull, periodic; trace with failures.path=FILE.csv
  recipe=recipes/NAME.yaml          of recommend: a recipe for moe-train

examples
  moe-sim compare=[lazarus,ds,ds_ft] failures.kind=periodic failures.period_s=300 hours=0.5
  moe-sim model=gpt_350m_16e nodes=128 hardware.preset=h100 hardware.ranks_per_node=8 hours=720
  moe-sim recommend model=gpt_m nodes=16 failures.node_mtbf_hours=50 recipe=recipes/mine.yaml
  moe-sim recipes=deepseek_v3_sim
  moe-sim recommend recipes=deepseek_v3_sim mesh.search=true
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments) or arguments == ["help"]:
        print(_HELP.format(policies=", ".join(POLICIES)), end="")
        return 0
    if "--version" in arguments:
        print(f"moe-sim {__version__}")
        return 0
    try:
        from moe_lightning.cli.simulation import run

        return run(arguments)
    except Exception as error:
        return user_errors.report("moe-sim", error)


if __name__ == "__main__":
    sys.exit(main())
