"""moe-bench paper NAME: figures and tables of the papers, recomputed with this library's algorithms and simulator."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import paper_lazarus, paper_moc, paper_pec, paper_prophet, paper_recovery, paper_reft
from benchmarks.paper_table import MissingTrace, Reproduction, Sources
from moe_lightning.arguments import InputFile, OutputFolder, option
from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.plots import require, svg

ALL = "all"
PAPERS: dict[str, Reproduction] = {
    **paper_pec.PAPERS,
    **paper_recovery.PAPERS,
    **paper_lazarus.PAPERS,
    **paper_moc.PAPERS,
    **paper_reft.PAPERS,
    **paper_prophet.PAPERS,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of this benchmark."""

    figure: str = option(f"{ALL}, or one of: {', '.join(PAPERS)}", metavar="NAME")
    routing: InputFile | None = option("recorded routing trace (.npz with counts and iteration)", None)
    spot: InputFile | None = option("trace of spot instances (.csv: milliseconds,add|remove,node)", None)
    plots: OutputFolder | None = option("folder for a picture of each (.svg)", None)


def run(options: Options) -> int:
    """Print the tables; 0 on success."""
    if options.figure not in PAPERS and options.figure != ALL:
        raise ConfigurationError(
            f"figure={shown(options.figure)} is not a reproduction: use {ALL} or one of {list(PAPERS)}"
        )
    if options.plots is not None:
        require()
        options.plots.mkdir(parents=True, exist_ok=True)
    sources = Sources(routing=options.routing, spot=options.spot)
    sources.check()
    left_out = []
    for name in PAPERS if options.figure == ALL else [options.figure]:
        try:
            table = PAPERS[name](sources)
        except MissingTrace:
            if options.figure != ALL:
                raise
            left_out.append(name)
            continue
        print(f"== {name}\n{table.text()}\n", flush=True)
        if options.plots is not None and table.chart is not None:
            path = options.plots / f"{name}.svg"
            path.write_text(svg(table.chart()))
    if left_out:
        print(f"left out for want of a recorded trace (--routing, --spot): {', '.join(left_out)}")
    return 0
