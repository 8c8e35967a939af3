"""What it costs to train on nodes of unlike speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moe_lightning.simulate.scenario import Scenario
from moe_lightning.simulate.step_model import StepModel


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Samples a second of a cluster whose nodes differ, without faults.

    Attributes:
        mixed: as the policy divides the work.
        even: with the same work for all ranks.
        alike: of as many nodes that all have the mean speed: what mixing costs is the rest.
        fastest: of the fastest nodes alone; 0 where they cannot hold the experts.
        num_fastest, num_nodes: how many there are.
    """

    mixed: float
    even: float
    alike: float
    fastest: float
    num_fastest: int
    num_nodes: int

    def sentence(self) -> str:
        """The costs in percent."""
        alone = f"would train at {self.fastest / self.mixed:.2f} of this rate" if self.fastest else "lack slots"
        return (
            f"mixing costs {100 * (1 - self.mixed / self.alike):.1f} % against {self.num_nodes} nodes of the mean "
            f"speed, {100 * (1 - self.even / self.alike):.1f} % if all ranks got the same work; the {self.num_fastest} "
            f"fastest nodes alone {alone}"
        )


def mixture_of(scenario: Scenario, nodes: int) -> Mixture | None:
    """For a cluster of so many nodes; None where they are all alike."""
    hardware = scenario.hardware
    speeds = hardware.rank_speeds(nodes * hardware.ranks_per_node)[:: hardware.ranks_per_node]
    if (speeds == speeds[0]).all():
        return None
    fastest = int((speeds == speeds.max()).sum())

    def rate(count: int, **changes: object) -> float:
        by_speed = bool(changes.pop("by_speed", scenario.policy.by_speed))
        machine = replace(hardware, **changes)  # type: ignore[arg-type]
        policy = replace(scenario.policy, by_speed=by_speed)
        model = StepModel(scenario.workload, machine, policy, scenario.routing, nodes, scenario.mesh)
        usable = model.usable_nodes(count)
        if not usable:
            return 0.0
        return scenario.workload.samples_per_step(usable * machine.ranks_per_node) / model.cost(usable, 0, 0).step_s

    return Mixture(
        mixed=rate(nodes),
        even=rate(nodes, by_speed=False),
        alike=rate(nodes, speeds=[float(np.mean(speeds))]),
        fastest=rate(fastest, speeds=[float(speeds.max())]),
        num_fastest=fastest,
        num_nodes=nodes,
    )
