"""Every option of the elastic launcher for scripts and of the rendezvous host."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from moe_lightning.elastic import rendezvous_host, run
from moe_lightning.elastic.membership import ElasticSettings
from tests.sweep.cases import Case
from tests.sweep.files import common, unwritable
from tests.sweep.values import TEXTS

_SCRIPT = "script.py"
_ADDRESSES = (
    ":", "a:b", "127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536", "203.0.113.1:0", "no.such.host.invalid:0",
    "[::1", "[::1]:99999", "1:2:3:4", "/tmp/socket",
)  # fmt: skip
_TEXTS_ARE_NAMES = {"--node", "notice_file"}
_OTHER_SECRETS = {"noise.secret", "flipped.secret"}
"""Files that hold a secret, as any bytes are one; that it is another's only the rendezvous host could say."""
_SECRETS = {"missing.secret", *_OTHER_SECRETS}
"""Files that the rendezvous host makes, or takes as they are."""


def launching(folder: Path) -> Iterator[Case]:
    """Values in every option and setting, scripts and secret files of every wrong kind."""
    Path(_SCRIPT).write_text("pass\n")
    for option in ("--ranks", "--num-nodes", "--rdzv-endpoint", "--node", "--max-restarts", "--set"):
        for label, text in TEXTS.items():
            sensible = option in _TEXTS_ARE_NAMES or (option == "--max-restarts" and label in ("0", "1e14"))
            yield _launch([f"{option}={text}", _SCRIPT], option, sensible)
    for setting in dataclasses.fields(ElasticSettings):
        for label, text in TEXTS.items():
            sensible = _fits(setting, label)
            yield _launch([f"--set={setting.name}={text}", _SCRIPT], setting.name, sensible)
    for path in unwritable(folder):
        yield _launch([f"--log-dir={path}", _SCRIPT], str(path)[:40], path == folder or "no_such" in str(path))
    together = ["--num-nodes=2", "--rdzv-endpoint=127.0.0.1:1", "--set=rendezvous_timeout_s=1"]
    yield _launch([*together, _SCRIPT], "secret")
    for path in common(folder, ".secret", b"0" * 32):
        subject = "127.0.0.1:1" if path.name in _OTHER_SECRETS else path.name[:40]
        yield _launch([*together, f"--secret-file={path}", _SCRIPT], subject)
    for path in common(folder, ".py", b"pass\n"):
        if not os.path.isfile(path):  # what is wrong in a script is told by its traceback
            yield _launch([str(path)], path.name[:40])
    for arguments in ([], ["--no-such-option", _SCRIPT], ["--ranks"]):
        yield _launch(arguments, "script" if not arguments else arguments[0])


def hosting(folder: Path) -> Iterator[Case]:
    """Addresses and secret files of every wrong kind."""
    for text in (*TEXTS.values(), *_ADDRESSES):
        yield _host(["--bind", text] if not text.startswith("-") else [f"--bind={text}"], "bind")
    for path in [*common(folder, ".secret", b"0" * 32), *unwritable(folder)]:
        sensible = path.name in _SECRETS or path.parent.name in ("missing_folder", "no_such_folder")
        yield _host(["--bind=127.0.0.1:0", f"--secret-file={path}"], path.name[:40], sensible)
    for arguments in (["stray"], ["--no-such-option"], ["--bind"]):
        yield _host(arguments, arguments[0])


def _launch(arguments: list[str], subject: str, sensible: bool = False) -> Case:
    return Case(
        label=f"elastic.run {' '.join(word[:80] for word in arguments)}",
        run=partial(run.main, arguments),
        subjects=(subject, subject.lstrip("-").replace("-", "_")),
        sensible=sensible,
    )


def _host(arguments: list[str], subject: str, sensible: bool = False) -> Case:
    return Case(
        label=f"rendezvous_host {' '.join(word[:80] for word in arguments)}",
        run=partial(_hosted, arguments),
        subjects=(subject, arguments[-1].rpartition("=")[2][:40] or "bind", "HOST:PORT"),
        sensible=sensible,
    )


def _hosted(arguments: list[str]) -> int:
    """The host's command; where it listens, it is ended a second later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    rendezvous_host.signal.sigtimedwait = lambda *_: signal.SIGTERM  # type: ignore[assignment]
    return rendezvous_host.main(arguments)


def _fits(setting: dataclasses.Field[object], label: str) -> bool:
    kind = type(setting.default)
    if setting.name in _TEXTS_ARE_NAMES or setting.name == "notice_url":
        return setting.name in _TEXTS_ARE_NAMES and label != "empty"
    return kind is float and label == "1.5"
