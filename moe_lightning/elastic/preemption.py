"""Notices that this process will be taken away: SIGTERM, a file that appears, or an address that answers.

A notice asks to hand over and leave at the next step boundary; it does not end anything by itself.
"""

from __future__ import annotations

import logging
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType

from moe_lightning.elastic.settings import ElasticSettings

EXIT_PREEMPTED = 76
"""With this code a worker ends that has handed over and left on notice; nobody is started in its place."""

_URL_TIMEOUT_S = 2.0
_LONGEST = 200
# Google's metadata server wants this header and says FALSE as long as nothing happens; the others do not mind it.
_HEADERS = {"Metadata-Flavor": "Google"}
_NO = {"", "FALSE", "NONE"}

logger = logging.getLogger(__name__)


class PreemptionWatch:
    """Looks out for notices from its construction to `close`.

    Args:
        settings: which of the three to look at, and how often. SIGTERM needs the main thread.
    """

    def __init__(self, settings: ElasticSettings) -> None:
        self._settings = settings
        self._notice: str | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._former = signal.getsignal(signal.SIGTERM)
        self.listen()
        if settings.notice_file is not None or settings.notice_url is not None:
            self._thread = threading.Thread(target=self._poll, name="preemption-notice", daemon=True)
            self._thread.start()

    def listen(self) -> None:
        """Receive SIGTERM, where the settings say so; again after somebody else has taken it."""
        if self._settings.notice_on_sigterm:
            signal.signal(signal.SIGTERM, self._receive)

    @property
    def notice(self) -> str | None:
        """The first notice, as a sentence; None as long as there is none."""
        return self._notice

    def close(self) -> None:
        """Look no longer."""
        self._closed.set()
        if self._settings.notice_on_sigterm:
            signal.signal(signal.SIGTERM, self._former)
        if self._thread is not None:
            self._thread.join(timeout=2 * _URL_TIMEOUT_S)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._take("SIGTERM asks this process to leave")

    def _take(self, notice: str) -> None:
        if self._notice is None:
            self._notice = notice

    def _poll(self) -> None:
        while self._notice is None and not self._closed.is_set():
            for said in (self._file(), self._url()):
                if said is not None:
                    self._take(said)
            self._closed.wait(self._settings.notice_poll_s)

    def _file(self) -> str | None:
        if self._settings.notice_file is None:
            return None
        try:
            with Path(self._settings.notice_file).open(errors="replace") as file:
                line = file.readline(_LONGEST).strip()
        except OSError:
            return None
        return f"{self._settings.notice_file} appeared: {line}" if line else f"{self._settings.notice_file} appeared"

    def _url(self) -> str | None:
        if self._settings.notice_url is None:
            return None
        request = urllib.request.Request(self._settings.notice_url, headers=_HEADERS)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the machine's own address
        try:
            with opener.open(request, timeout=_URL_TIMEOUT_S) as answer:
                said = answer.read(_LONGEST).decode(errors="replace").strip()
        except (urllib.error.URLError, OSError, ValueError) as error:
            logger.debug("%s: %s", self._settings.notice_url, error)  # 404: nothing is planned
            return None
        return f"{self._settings.notice_url} answers: {said}" if said.upper() not in _NO else None
