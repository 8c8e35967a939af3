"""User errors: the exceptions that count as such, their one-line messages and the exit codes of commands."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterable

from moe_lightning.errors import ConfigurationError, UnreadableCheckpointError, UserError

EXIT_MISTAKE = 2
EXIT_CRASH = 1
EXIT_INTERRUPTED = 130


ALARMS = logging.getLogger("moe_lightning.alarms")
"""Logger of events that somebody should see at once, such as a hang. The terminal has them anyway; a webhook adds a
handler.
"""
ALARMS.propagate = False
ALARMS.addHandler(logging.NullHandler())

_LONGEST_WORD = 250  # characters: of a path; what is longer was no value


def missing_for_logger(logger: str, package: str) -> ConfigurationError:
    """Return the error for a logger whose package is not installed; the extra has the choice's name."""
    return ConfigurationError(
        f"logger={logger} needs the package '{package}': run pip install 'moe-lightning[{logger}]', or choose "
        "logger=default or logger=csv"
    )


def printable(text: str) -> str:
    """A text with escapes in the place of characters that are not shown: some control a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def one_line(message: object) -> str:
    """A message of any shape as one printable line; paragraphs after the first are advice on other libraries' options
    and go."""
    words = str(message).strip().split("\n\n")[0].split()
    return printable(" ".join(word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in words))


def sentence_of(error: BaseException) -> str | None:
    """The sentence for a mistake of the user, a path that cannot be used, memory that does not suffice, and what is
    found wrong in a run; None for a defect of ours.

    What went wrong in cleaning up after a mistake does not hide it.
    """
    mistakes: list[type[BaseException]] = [UserError]
    # Lightning is slow to import: where nobody did, no error of it can have come up.
    theirs = sys.modules.get("lightning.fabric.utilities.exceptions")
    if theirs is not None:
        mistakes.append(theirs.MisconfigurationException)
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        if isinstance(link, tuple(mistakes)):
            cure = "; restore it from a copy, or name another checkpoint"
            return one_line(link) + (cure if isinstance(link, UnreadableCheckpointError) else "")
        chain.append(link)
        link = link.__cause__ or link.__context__
    return sentence_of_memory(error) or _sentence_of_path(error)


def sentence_of_memory(error: BaseException) -> str | None:
    """The sentence for an allocation that failed, of Python, NumPy or torch; None for any other error."""
    is_of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: " in str(error)
    if not isinstance(error, MemoryError) and not (is_of_torch and isinstance(error, RuntimeError)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    where = f"in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    why = ", ".join(part for part in (one_line(error)[:100], where) if part)
    return (
        f"this needs more memory than there is ({why}): lower the sizes that were given (model, context, samples of a "
        "micro-batch, ranks of this machine), or raise the limit of the process"
    )


def report(program: str, error: BaseException) -> int:
    """Print an error once, as a sentence or with its traceback; the command's exit code.

    Args:
        error: its own, or one of a launcher whose ranks failed (with the `failure` of the first).
    """
    failure = getattr(error, "failure", None)
    sentence = sentence_of(error) if failure is None else failure.message if failure.kind == "mistake" else None
    if sentence is not None:
        print(f"{program}: error: {sentence}", file=sys.stderr)
        return EXIT_MISTAKE
    if failure is None:
        traceback.print_exception(error)
        return EXIT_CRASH
    if failure.details:
        print(failure.details, file=sys.stderr)
    print(f"{program}: crash: {failure.message}", file=sys.stderr)
    return EXIT_CRASH


def stop_printing() -> int:
    """Drop what is still to be printed, because what reads the output has seen enough; the command's exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CRASH


_OF_A_PATH = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR}
_OF_A_PATH |= {errno.EDQUOT, errno.EPERM, errno.EROFS}


def _sentence_of_path(error: BaseException) -> str | None:
    """The sentence for a path of the user that cannot be read or written; None for any other error."""
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_A_PATH:
        return f"{one_line(error.filename)} cannot be read or written ({error.strerror}): give another path"
    return None


_SIMILAR = 0.8
"""Ratio of difflib from which on a word may be a misspelling of another: below, a guess is worse than none."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None where none is near.

    Names are dotted. Meant is one of the same section with a similar last part, or one with the same last part whose
    section is similar; the section may be missing where only one name ends so.
    """
    section, _, last = name.lower().rpartition(".")
    beside, ending_alike = dict[str, str](), dict[str, str]()
    for candidate in known:
        folder, _, ending = candidate.lower().rpartition(".")
        if folder == section:
            beside[ending] = candidate
        if ending == last:
            ending_alike[folder] = candidate
    if close := difflib.get_close_matches(last, beside, n=1, cutoff=_SIMILAR):
        return beside[close[0]]
    if not section and len(ending_alike) == 1:
        return next(iter(ending_alike.values()))
    close = difflib.get_close_matches(section, ending_alike, n=1, cutoff=_SIMILAR)
    return ending_alike[close[0]] if close else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", or nothing where no known name is near."""
    best = nearest(name, known)
    return f" (did you mean '{best}'?)" if best else ""
