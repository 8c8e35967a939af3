"""Which nodes of its world a rank does not reach, found out only while the world makes no step."""

from __future__ import annotations

from collections.abc import Mapping

from moe_lightning.elastic.probing import Endpoint, Prober

_STALL_SHARE = 0.15  # of the silence timeout: a world without a step for so long is looked at
_INTERVAL_SHARE = 0.05  # between two packets to a node
_UNREACHABLE_SHARE = 0.55  # nothing at all of a node for so long
_FEWEST_MISSES = 10  # packets in a row: with 20 % of round trips lost, that many are by chance once in ten million
_FEWEST_ANSWERS = 3


class LinkWatch:
    """Watches the links of one world at a time; nobody on one machine.

    Args:
        silence_s: see `ElasticSettings.silence_timeout_s`; a dead link is found within about as much.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._prober: Prober | None = None
        self._targets: dict[str, Endpoint] = {}
        self._progress = -1
        self._progress_at = 0.0
        self._probing_since: float | None = None
        self._is_waiting = False

    def use(self, prober: Prober | None) -> None:
        """Probe through this one from now on."""
        self._prober = prober
        self._probing_since = None

    def enter(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Another world, with these other nodes."""
        self._targets, self._is_waiting = dict(targets), False
        self._progress, self._progress_at = -1, now
        self._end()

    def wait(self, targets: Mapping[str, Endpoint], now: float) -> None:
        """Outside a world: try these nodes until they answer."""
        self._targets, self._is_waiting = dict(targets), True
        if self._prober is not None:
            self._prober.begin(self._targets, now)

    def unreachable(self, progress: int, now: float) -> frozenset[str]:
        """The nodes of the present world that do not answer; none while it makes steps.

        Args:
            progress: a count of this rank's steps.
        """
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
            self._end()
        if self._prober is None or not self._targets or now - self._progress_at < _STALL_SHARE * self._silence_s:
            return frozenset()
        if self._probing_since is None:
            self._probing_since = now
            self._prober.begin(self._targets, now)
        self._prober.send(now, _INTERVAL_SHARE * self._silence_s)
        since, heard_at, misses = self._probing_since, self._prober.heard_at, self._prober.misses
        return frozenset(
            node
            for node in self._targets
            if now - max(since, heard_at.get(node, since)) > _UNREACHABLE_SHARE * self._silence_s
            and misses[node] >= _FEWEST_MISSES
        )

    def reached(self, now: float) -> bool:
        """Whether all nodes that a process outside waits for answer; True once."""
        if not self._is_waiting or self._prober is None:
            return False
        self._prober.send(now, _INTERVAL_SHARE * self._silence_s)
        if not self._targets or any(self._prober.answers[node] < _FEWEST_ANSWERS for node in self._targets):
            return False
        self._is_waiting = False
        self._prober.end()
        return True

    def _end(self) -> None:
        if self._probing_since is not None and self._prober is not None:
            self._prober.end()
        self._probing_since = None
