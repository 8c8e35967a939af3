"""One HTML page that needs nothing else: escaped text, tables, SVG pictures that follow light and dark."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1f24; --soft: #5b6470; --line: #d9dde3; --card: #f5f7fa;
  --accent: #3b6fb6; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181d; --ink: #e6e9ee; --soft: #9aa4b2; --line: #333a44;
  --card: #1e232a; --accent: #7fb0f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 0.25rem; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 0.5rem; padding-bottom: 0.25rem; border-bottom: 1px solid var(--line); font-size: 1.25rem; }
p { margin: 0.5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; margin: 0.75rem 0; }
.soft, figcaption { color: var(--soft); }
.missing { padding: 0.6rem 0.9rem; border-left: 3px solid var(--accent); background: var(--card); }
dl.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 0.75rem; margin: 1rem 0; }
dl.cards div { padding: 0.6rem 0.8rem; border-radius: 0.5rem; background: var(--card); }
dl.cards dt { color: var(--soft); font-size: 0.85rem; }
dl.cards dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figcaption { font-size: 0.9rem; }
.wide { overflow-x: auto; }
figure.picture { display: inline-block; width: 49%; min-width: min(100%, 27rem); vertical-align: top; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { fill: var(--ink); }
figure svg .paper path { fill: none !important; }
table { width: max-content; min-width: 100%; border-collapse: collapse; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td { max-width: 22rem; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
pre { overflow-x: auto; padding: 0.8rem; border-radius: 0.5rem; background: var(--card); font-size: 0.8rem; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 40rem) { figure.picture { width: 100%; }
  table { width: 100%; } td, th { padding: 0.3rem; overflow-wrap: anywhere; white-space: normal; } }
@media print { details > * { display: block; } nav { display: none; } }
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        name: of its anchor, letters only.
        parts: HTML, of the functions below.
    """

    name: str
    title: str
    parts: Sequence[str]


def escaped(text: object) -> str:
    """Text for elements and attributes: markup and control characters in it are harmless."""
    return html.escape(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text)))


def paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"


def missing(text: str) -> str:
    """What a section says that has nothing to show: what to turn on."""
    return f'<p class="missing">{escaped(text)}</p>'


def figure(picture: str, title: str, caption: str, more: str = "") -> str:
    """An SVG picture, named for those who cannot see it, with what is said of it and what belongs to it."""
    named = f'<svg role="img" aria-label="{escaped(title)}" {picture.strip().removeprefix("<svg ")}'
    return f'<figure class="picture">{named}<figcaption>{escaped(caption)}</figcaption>{more}</figure>'


def cards(numbers: Sequence[tuple[str, str]]) -> str:
    """Numbers at a glance: what, and how much with its unit."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in numbers)
    return f'<dl class="cards">{items}</dl>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> str:
    """Rows under a head; on a phone its cells break."""
    heads = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return f'<figure><div class="wide"><table>{body}</table></div><figcaption>{escaped(caption)}</figcaption></figure>'


def folded(summary: str, part: str) -> str:
    """A part that is shown when its heading is opened."""
    return f"<details><summary>{escaped(summary)}</summary>{part}</details>"


def listing(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>"


def page(title: str, subtitle: str, head: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole document; it is well-formed XML too, and nothing in it may run or be fetched."""
    links = "".join(f'<a href="#{section.name}">{escaped(section.title)}</a>' for section in sections)
    body = "\n".join(
        f'<section id="{section.name}"><h2>{escaped(section.title)}</h2>\n' + "\n".join(section.parts) + "\n</section>"
        for section in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"/>
<link rel="icon" href="data:,"/>
<title>{escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{escaped(title)}</h1><p class="soft">{escaped(subtitle)}</p></header>
<nav aria-label="Sections">{links}</nav>
<main>
{"".join(head)}
{body}
</main>
</body>
</html>
"""
