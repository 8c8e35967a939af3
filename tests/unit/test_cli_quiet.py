"""Warnings of ours are sentences; those of others keep their place in the code."""

from __future__ import annotations

import warnings

import pytest

from moe_lightning.cli import training


def test_our_warnings_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        training.quiet_libraries()
        ours = warnings.formatwarning("K is raised", UserWarning, str(training.PACKAGE / "callbacks" / "x.py"), 3)
        theirs = warnings.formatwarning("old", UserWarning, "/usr/lib/x.py", 3)
    assert ours == "moe-train: K is raised\n"
    assert theirs == "/usr/lib/x.py:3: old\n"
