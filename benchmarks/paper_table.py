"""A paper's figure beside ours: what it prints, what we compute, their ratio, and why they differ where they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lightning.errors import ConfigurationError
from moe_lightning.moe.forced_routing import read_routing_trace
from moe_lightning.simulate.failures import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLOSE = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One printed value.

    Attributes:
        what: in the paper's words, short.
        printed: by the paper; None where it shows a curve without numbers.
        ours: computed.
        unit: of both.
        why: where ours differs by more than five percent: the reason, in one line.
        explains: the ratios that the reason accounts for; beyond them the value counts as not reproduced.
    """

    what: str
    printed: float | None
    ours: float
    unit: str = ""
    why: str = ""
    explains: tuple[float, float] = (0.8, 1.25)

    @property
    def ratio(self) -> float | None:
        return self.ours / self.printed if self.printed else None

    @property
    def agrees(self) -> bool:
        """Within five percent of what is printed; nothing printed is nothing to contradict."""
        return self.ratio is None or abs(self.ratio - 1) <= _CLOSE

    @property
    def is_explained(self) -> bool:
        """Whether ours differs, and the reason accounts for it."""
        low, high = self.explains
        return not self.agrees and bool(self.why) and self.ratio is not None and low <= self.ratio <= high

    @property
    def remark(self) -> str:
        """What is said beside the ratio."""
        if self.agrees:
            return ""
        return self.why if self.is_explained else f"NOT REPRODUCED {f'({self.why})' if self.why else ''}".rstrip()


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One reproduction.

    Attributes:
        title: paper and item.
        rows: values.
        assumptions: what the paper leaves open, one line each.
        chart: draws a picture; None: there is none.
    """

    title: str
    rows: tuple[Row, ...]
    assumptions: tuple[str, ...] = ()
    chart: Callable[[], Figure] | None = None

    def text(self) -> str:
        width = max(len(row.what) for row in self.rows)
        lines = [self.title, f"{'':<{width}}{'paper':>11}{'ours':>11}{'ratio':>8}"]
        for row in self.rows:
            printed = f"{row.printed:>11.4g}" if row.printed is not None else f"{'-':>11}"
            ratio = f"{row.ratio:>8.3f}" if row.ratio is not None else f"{'':>8}"
            lines.append(f"{row.what:<{width}}{printed}{row.ours:>11.4g}{ratio}  {row.unit:<9}{row.remark}".rstrip())
        return "\n".join([*lines, *(f"assumed: {line}" for line in self.assumptions), *self._verdict()])

    def _verdict(self) -> list[str]:
        printed = [row for row in self.rows if row.printed is not None]
        explained = sum(row.is_explained for row in printed)
        missed = sum(not row.agrees and not row.is_explained for row in printed)
        agree = len(printed) - explained - missed
        return [
            f"of {len(printed)} printed values {agree} agree within 5 %, {explained} differ for the reason given, "
            f"{missed} are not reproduced"
        ] * bool(printed)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Files of third parties that some reproductions need."""

    routing: Path | None = None
    spot: Path | None = None

    def routing_path(self) -> Path:
        """The recorded routing.

        Raises:
            MissingTrace: none was given.
        """
        return _given(self.routing, "--routing")

    def spot_path(self) -> Path:
        """The trace of spot instances.

        Raises:
            MissingTrace: none was given.
        """
        return _given(self.spot, "--spot")

    def check(self) -> None:
        """Read what was given, whether or not it is needed.

        Raises:
            ConfigurationError: it is not what it should be.
        """
        if self.routing is not None:
            read_routing_trace(self.routing_path())
        if self.spot is not None:
            read_trace(self.spot_path())


class MissingTrace(ConfigurationError):
    """A reproduction needs a recorded trace that was not given."""


def _given(path: Path | None, option: str) -> Path:
    if path is None:
        raise MissingTrace(f"this figure needs a recorded trace: give it with {option} PATH")
    if not path.is_file():
        raise ConfigurationError(f"{option} {path} is not a file: give the path of a recorded trace")
    return path


Reproduction = Callable[[Sources], PaperTable]
