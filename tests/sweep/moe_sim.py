"""Every key of moe-sim, and the files that it reads and writes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moe_lightning.cli import sim, simulation
from tests.sweep.cases import Case
from tests.sweep.files import damaged_csv, damaged_json, damaged_traces, unwritable, write_trace
from tests.sweep.values import VALUES, keys_of

FAST = ["model=moe_gpt_s", "nodes=8", "hours=0.1", "failures.node_mtbf_hours=1"]
_TEXTS = {"null": "null", "empty": "''", "nan": "nan", "inf": "inf", "1e14": "100000000000000"}
_WITHOUT_A_WORD = {"-1", "empty", "nan", "inf", "1e30", "[]", "{}"}
"""No number of moe-sim may be any of these, and no name."""
_ADVISED = {"null", "0", "1e14"}
"""With these the advice, too: what both refuse is refused in one place."""


def simulating(folder: Path) -> Iterator[Case]:
    """Values in every key, for the simulation and for the advice, and files of every wrong kind."""
    write_trace(Path("good.npz"))
    with contextlib.redirect_stdout(io.StringIO()):  # what every case would import
        sim.main(FAST)
        sim.main(["recommend", *FAST])
    keys = dict(keys_of(simulation.compose_simulation(FAST)))
    for key, current in keys.items():
        for name in VALUES:
            text = f"{key}={_TEXTS.get(name, name)}"
            sensible = _is_sensible(key, name, current)
            yield _case([text], key, sensible)
            if name in _ADVISED:
                yield _case(["recommend", text], key, sensible)
    for path in damaged_traces(folder):
        yield _case(["routing.kind=trace", f"routing.path={path}"], path.name[:50])
    for path in damaged_csv(folder):
        yield _case(["failures.kind=trace", f"failures.path={path}"], path.name[:50], path.name == "half.csv")
    for path in damaged_json(folder):
        yield _case([f"hardware.preset={path}"], path.name[:50])
    for path in unwritable(folder):
        yield _case(["recommend", f"recipe={path}"], "recipe")


def _case(arguments: list[str], key: str, sensible: bool = False) -> Case:
    command = [word for word in arguments if word == "recommend"]
    given = [word for word in arguments if word != "recommend"]
    return Case(
        label=f"moe-sim {' '.join(arguments)}",
        run=partial(sim.main, [*command, *FAST, *given]),
        subjects=(key, f"{key.rpartition('.')[2]}="),
        sensible=sensible,
    )


def _is_sensible(key: str, name: str, current: Any) -> bool:
    if name in _WITHOUT_A_WORD:
        return (name == "[]" and isinstance(current, list)) or (name == "{}" and isinstance(current, Mapping | None))
    return True
