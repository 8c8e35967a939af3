"""Tests that may be run again: those that meet a known race in code that is not ours. All other failures count."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

LOST_WAKE_UP = "gloo now and then loses the wake-up of a process whose peer was killed or stopped amid a collective"
_RERUNS = 2


def rerun_known_races(items: Iterable[pytest.Item]) -> None:
    """Let pytest-rerunfailures repeat what is marked `known_race(reason)`, up to twice. The summary says RERUN.

    With `sign=REGEX` only a failure whose message matches is repeated.
    """
    for item in items:
        race = item.get_closest_marker("known_race")
        if race is None:
            continue
        if not (len(race.args) == 1 and isinstance(race.args[0], str) and race.args[0].strip()):
            raise pytest.UsageError(f"{item.nodeid}: known_race needs the reason, one text")
        if item.config.pluginmanager.hasplugin("rerunfailures"):
            sign = race.kwargs.get("sign")
            only = {} if sign is None else {"only_rerun": [sign]}
            item.add_marker(pytest.mark.flaky(reruns=_RERUNS, **only))
