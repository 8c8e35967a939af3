"""`moe-data`: tokens of text as a memory map.

    moe-data tokenize SOURCE... --tokenizer T --out DIR   make it; a command that was killed goes on where it stopped

SOURCE is what data.source takes: a file, a folder or a glob of text, JSONL or Parquet. This module parses and prints.
"""

from __future__ import annotations

import argparse
import errno
import glob
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from moe_lightning import user_errors
from moe_lightning.arguments import Parser, nonempty, output_folder, value
from moe_lightning.config import NonNegativeInt
from moe_lightning.cores import usable_cores
from moe_lightning.errors import ConfigurationError
from moe_lightning.files import check_local

_Workers = Annotated[int, Interval(ge=1, le=1024)]
_Fraction = Annotated[float, Interval(gt=0, lt=1)]
_PLAIN_S = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT, None)  # None: numpy has written less than an array


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason
        return int(stop.code or 0)
    try:
        tokenize(arguments)
    except KeyboardInterrupt:  # the pool of workers has to be closed before this process ends
        print("moe-data: ended by SIGINT; the same command goes on where it stopped", file=sys.stderr)
        return user_errors.EXIT_INTERRUPTED
    except Exception as error:
        return user_errors.report("moe-data", error)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of a command line."""
    parser = Parser(prog="moe-data", description="Make tokens of text.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    made = commands.add_parser("tokenize", help="make a folder of tokens, or finish one that was begun")
    made.add_argument(
        "source", nargs="+", type=nonempty, metavar="SOURCE", help="file, folder or glob of text, JSONL or Parquet"
    )
    made.add_argument(
        "--tokenizer", required=True, help="bytes, bpe:SIZE, the path of a tokenizer.json, or ORG/NAME on the Hub"
    )
    made.add_argument("--out", type=output_folder, required=True, metavar="DIR", help="the folder to make")
    made.add_argument(
        "--workers", type=value(_Workers), default=usable_cores(), metavar="N",
        help="processes; the tokens do not depend on their number (default: the cores that this process may use)",
    )  # fmt: skip
    made.add_argument(
        "--text-field", default="text", metavar="NAME", help="key or column of the text (default: %(default)s)"
    )
    made.add_argument(
        "--end-of-document", type=value(NonNegativeInt), metavar="ID", help="token to append to every document"
    )
    made.add_argument(
        "--val-fraction", type=value(_Fraction), default=0.05, metavar="X",
        help="end of the text that bpe:SIZE is not trained on (default: %(default)s, as data.val_fraction)",
    )  # fmt: skip
    return parser


def tokenize(arguments: argparse.Namespace) -> None:
    """Make a folder of tokens.

    Raises:
        ConfigurationError: see `write_token_folder`, or the disk is full.
    """
    from moe_lightning.data.documents import has_records, source_files
    from moe_lightning.data.token_folder import Recipe, is_token_folder, write_token_folder

    for source in arguments.source:
        check_local("SOURCE", source)
        if is_token_folder(source):
            raise ConfigurationError(f"{source} holds tokens already; train on it with data.source={source}")
        if _is_among(source, arguments.out):
            raise ConfigurationError(
                f"--out {arguments.out} lies in {source}, whose files it would then be among; give a folder beside it"
            )
    files = source_files(arguments.source)
    recipe = Recipe(
        tokenizer=_tokenizer(arguments),
        text_field=arguments.text_field if has_records(files) else "",
        end_of_document=arguments.end_of_document,
    )
    if is_token_folder(arguments.out):
        print(f"moe-data: {arguments.out} was begun before: what is finished is kept", file=sys.stderr)
    with _progress(sum(file.size_bytes for file in files)) as advance:
        try:
            made = write_token_folder(arguments.out, files, recipe, workers=arguments.workers, advance=advance)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise ConfigurationError(
                f"{arguments.out} cannot be written ({error.strerror or error}); free space, and run the same command "
                "again; what is finished is kept."
            ) from error
    header = made.header
    print(
        f"{made.path}: {header.num_tokens:,} tokens ({header.dtype}) in {header.num_documents:,} documents of "
        f"{header.num_files:,} files; train on it with data.source={made.path}"
    )


def _is_among(source: str, folder: Path) -> bool:
    """True if files that are made in a folder would be among those of a folder or a glob."""
    if not glob.has_magic(source) or os.path.isdir(source):
        return folder.resolve().is_relative_to(Path(source).expanduser().resolve())
    pattern, made = Path(source).expanduser().absolute(), folder.absolute()
    for path in (made / "tokens.json", made / "portions" / "000000.json"):
        if fnmatch(str(path), str(pattern)) if "**" in pattern.parts else path.match(str(pattern)):
            return True
    return False


@contextmanager
def _progress(size_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, elsewhere a line every few seconds; yields the function to call with bytes and tokens
    as they are done.
    """
    from tqdm import tqdm

    done_bytes, done_tokens, next_s = 0, 0, time.monotonic() + _PLAIN_S
    with tqdm(total=size_bytes, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, disable=None) as bar:

        def advance(nbytes: int, tokens: int) -> None:
            nonlocal done_bytes, done_tokens, next_s
            done_bytes, done_tokens = done_bytes + nbytes, done_tokens + tokens
            text = f"{done_tokens / 1e6:,.1f}M tokens"
            bar.set_postfix_str(text, refresh=False)
            bar.update(nbytes)
            if bar.disable and time.monotonic() >= next_s:  # no terminal
                next_s = time.monotonic() + _PLAIN_S
                print(f"{done_bytes / 1e6:,.1f}/{size_bytes / 1e6:,.1f} MB  {text}", file=sys.stderr, flush=True)

        yield advance


def _tokenizer(arguments: argparse.Namespace) -> str | None:
    """The content of the tokenizer.json; one that is trained is kept in the cache, where a second try finds it."""
    from moe_lightning.data.corpus import DataSource, trained_tokenizer
    from moe_lightning.data.tokenizer import check_tokenizer, is_trained, tokenizer_content

    spec = arguments.tokenizer
    check_local("--tokenizer", spec)
    check_tokenizer(spec)
    if not is_trained(spec):
        return tokenizer_content(spec)
    sources = [DataSource(path=source, text_field=arguments.text_field) for source in arguments.source]
    return trained_tokenizer(sources, spec, val_fraction=arguments.val_fraction, are_joined=True)


if __name__ == "__main__":
    sys.exit(main())
