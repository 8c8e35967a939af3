"""User errors: the exceptions that count as such, their one-line messages and the exit codes of commands."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterable

from moe_lightning.errors import ConfigurationError, UserError

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
            return one_line(link)
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


_SIMILAR = 0.78
"""Ratio of difflib from which on a name may be a misspelling of another: below, a guess is worse than none."""
_SAME_WORD = 0.6
"""The same of each word between underscores: moe_layers is no misspelling of num_layers."""
_COMMON = {"enabled", "kind", "mode", "name", "path", "type"}
"""Names that say nothing without their section."""
_SHORT = 4  # letters, of names that are only compared within their section


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None where none is near.

    Names are dotted. Last parts are compared with those of the same section, spelled alike; where none of exactly that
    section is near, the only name that ends in the same last part is meant, but not for a section that does not exist.
    """
    names = sorted(known)
    section, _, last = name.lower().rpartition(".")
    same = [candidate for candidate in names if candidate.lower().rpartition(".")[2] == last]

    def similarity(candidate: str) -> tuple[float, float]:
        folder, _, ending = candidate.lower().rpartition(".")
        beside = _ratio(section, folder)
        is_open = not section and len(last) > _SHORT
        return (_likeness(last, ending) if is_open or beside >= _SIMILAR else 0.0, beside)

    best = max(names, key=similarity, default=None)
    is_beside = best is not None and section != "" and similarity(best) >= (_SIMILAR, 1.0)
    is_section = section == "" or any(f".{section}." in f".{candidate.lower()}" for candidate in names)
    if len(same) == 1 and is_section and last not in _COMMON and not is_beside:
        return same[0]
    return best if best is not None and similarity(best)[0] >= _SIMILAR else None


def _likeness(word: str, other: str) -> float:
    """Ratio of two names, 0 where they are different words."""
    short, long = sorted((word, other), key=len)
    if len(short) >= _SHORT and long.startswith(f"{short}_"):
        return max(_ratio(word, other), _SIMILAR)
    words, others = word.split("_"), other.split("_")
    if len(words) != len(others):
        return float("".join(words) == "".join(others))
    is_same = all(_ratio(one, two) >= _SAME_WORD for one, two in zip(words, others, strict=True))
    return _ratio(word, other) if is_same else 0.0


def _ratio(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def suggestion(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", or nothing where no known name is near."""
    best = nearest(name, known)
    return f" (did you mean '{best}'?)" if best else ""
