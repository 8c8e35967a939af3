"""moe-bench silent: small trainings after public reports of silent errors, run against this project.

Each case trains three steps on 1, 2 or 4 ranks, saves, and resumes for three more; losses, gradients, norms, parameters
and moments are compared with one process. Then the fault of the report is put into the code, and the comparison must
see it; the parity doctor runs beside.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from moe_lightning.arguments import OutputFile, option
from moe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    case: list[str] = option("names of cases or of kinds; all without it", [])
    names: bool = option("list all cases with their kinds and reports, and run none", False)
    compositions: Annotated[int, Interval(ge=0, le=100_000)] = option(
        "trainings drawn by number beside the cases, from 0 on", 0
    )
    flips: Annotated[int, Interval(ge=0, le=100_000)] = option(
        "instead of cases, so many random bit flips in the memory of trainings", 0
    )
    calm: Annotated[int, Interval(ge=1, le=1_000_000)] = option(
        "steps of each run without a flip beside them, on every mesh in float32 and bf16-mixed", 40
    )
    products: Annotated[int, Interval(ge=0, le=100_000)] = option(
        "instead of cases, so many times flipped bits in the matrix products of one rank", 0
    )
    json: OutputFile | None = option("where to leave the results", None)
    page: OutputFile | None = option("where to write them as a page of the documentation (.md), of all cases", None)


def run(options: Options) -> int:
    """Print one table; 0 if every case holds and sees its fault.

    Raises:
        ConfigurationError: an unknown case, or a page of some cases only.
    """
    from benchmarks.silent.catalogue import CASES
    from benchmarks.silent.compositions import composition
    from benchmarks.silent.page import heading, line, line_of_composition, written
    from benchmarks.silent.runner import run_case, run_healthy

    if options.flips:
        from benchmarks.silent.flips import run_flips

        return run_flips(options.flips, options.calm)
    if options.products:
        from benchmarks.silent.products import run_products

        return run_products(options.products)
    kinds = {case.kind for case in CASES.values()}
    for name in options.case:
        if name not in CASES and name not in kinds:
            near = difflib.get_close_matches(name, [*sorted(kinds), *CASES], n=3, cutoff=0.6)
            hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            raise ConfigurationError(f"--case {name} is no case{hint}: moe-bench silent --names lists them all")
    if options.names:
        width = max(map(len, CASES))
        for case in CASES.values():
            print(f"{case.id:<{width}}  {case.kind:<20}  {case.report}")
        return 0
    if options.case and options.page is not None:
        raise ConfigurationError("--page is for the results of all cases: drop --case")
    start, results = time.perf_counter(), []
    print(heading())
    for case in CASES.values():
        if not options.case or case.id in options.case or case.kind in options.case:
            results.append(run_case(case))
            print(line(case, results[-1]), flush=True)
    drawn = []
    for number in range(options.compositions):
        drawn.append(run_healthy(composition(number)))
        print(line_of_composition(drawn[-1]), flush=True)
    failed = [result for result in results if not result.is_good(CASES[result.id])]
    failed += [result for result in drawn if not result.holds]
    for result in failed:
        print(f"\n{result.id}: {result.problem or 'the fault of the report is not seen'}")
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results + drawn], indent=1))
    seconds = time.perf_counter() - start
    if options.page is not None:
        options.page.write_text(written(CASES, {result.id: result for result in results}, drawn))
    named = sum(result.doctor == "named" for result in results)
    count = len(results) + len(drawn)
    print(f"\n{count - len(failed)} of {count} hold; {named} named by the doctor; {seconds:.0f} s")
    return int(bool(failed))
