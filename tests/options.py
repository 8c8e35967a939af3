"""Options of a command, as its command line gives them."""

from __future__ import annotations

import argparse
from typing import TypeVar

from moe_lightning.arguments import add_options, read_options

T = TypeVar("T")


def options_of(options: type[T], *arguments: str) -> T:
    """What a benchmark gets of these arguments."""
    parser = argparse.ArgumentParser()
    add_options(parser, options)
    return read_options(options, parser.parse_args(arguments))
