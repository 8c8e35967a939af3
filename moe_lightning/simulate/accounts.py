"""The books of a simulation: every nanosecond of every live node goes to exactly one account.

useful: steps that still count at the end. lost: steps, and parts of steps, that a fault undid. overhead: what training
waited for: stalls of snapshots, detection, restarts, migrations. idle: nodes that are there and have no work. All in
integers, so that nothing is lost in rounding.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What had been achieved when a state was taken: the point to which a rollback returns.

    Attributes:
        step: steps done.
        useful_ns: node-nanoseconds of them.
        samples: trained in them.
    """

    step: int = 0
    useful_ns: int = 0
    samples: int = 0


@dataclass(kw_only=True)
class Accounts:
    """Node-nanoseconds by account, steps and samples; `partial_ns` is work on the step that is running."""

    step: int = 0
    samples: int = 0
    useful_ns: int = 0
    lost_ns: int = 0
    overhead_ns: int = 0
    idle_ns: int = 0
    partial_ns: int = 0
    provided_ns: int = 0
    lost_steps: int = 0

    def work(self, duration_ns: int, nodes: int, live: int) -> None:
        """`nodes` of the `live` ones compute on the running step."""
        self.partial_ns += duration_ns * nodes
        self._provide(duration_ns, nodes, live)

    def finish_steps(self, count: int, samples: int) -> None:
        """The running step and all the work since the last call belong to `count` finished steps."""
        self.useful_ns += self.partial_ns
        self.partial_ns = 0
        self.step += count
        self.samples += samples

    def wait(self, duration_ns: int, nodes: int, live: int) -> None:
        """`nodes` wait for something that training needs; the other live ones are idle."""
        self.overhead_ns += duration_ns * nodes
        self._provide(duration_ns, nodes, live)

    def _provide(self, duration_ns: int, nodes: int, live: int) -> None:
        assert duration_ns >= 0
        assert 0 <= nodes <= live
        self.idle_ns += duration_ns * (live - nodes)
        self.provided_ns += duration_ns * live

    def abort_step(self) -> None:
        """The running step is not applied."""
        self.lost_ns += self.partial_ns
        self.partial_ns = 0

    def mark(self) -> Mark:
        return Mark(step=self.step, useful_ns=self.useful_ns, samples=self.samples)

    def roll_back(self, mark: Mark) -> None:
        """Everything after the mark is lost."""
        self.abort_step()
        assert mark.step <= self.step
        self.lost_ns += self.useful_ns - mark.useful_ns
        self.lost_steps += self.step - mark.step
        self.step, self.useful_ns, self.samples = mark.step, mark.useful_ns, mark.samples

    def close(self) -> None:
        """The simulation ends: a step that is half done was of no use. Checks that nothing is missing."""
        self.abort_step()
        assert self.provided_ns == self.useful_ns + self.lost_ns + self.overhead_ns + self.idle_ns
