"""Values that read name=value reach Hydra as text; everything else reaches it as it was typed."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from moe_lightning.cli.composition import with_quotes


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("chaos.kill=rank=1,step=30", "rank=1,step=30"),
        ("chaos.kill=rank=1,step=30; rank=0,step=60,place=backward", "rank=1,step=30; rank=0,step=60,place=backward"),
        ("+a.b=x=1", "x=1"),
        ('chaos.kill="rank=1,step=30"', "rank=1,step=30"),
        ("data.source=~/books", "~/books"),
        ("data.source=~", "~"),
    ],
)
def test_named_values_are_text(typed: str, value: str) -> None:
    assert OverridesParser.create().parse_override(with_quotes(typed)).value() == value


@pytest.mark.parametrize(
    "typed",
    ["seed=1", "seed=1,2", "a={b:1}", "a='x=1'", "a=[b,c]", "a=choice(b,c)", "~a", "recipes=chaos", "a.b=c/d=e", "a="],
)
def test_other_values_stay(typed: str) -> None:
    assert with_quotes(typed) == typed
