"""Notices of preemption of this process: SIGTERM, a file that appears, or a URL that answers.

After a notice the worker transfers its state and leaves at the next step boundary; the notice itself ends nothing.
"""

from __future__ import annotations

import logging
import signal
import threading
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from types import FrameType

from moe_lightning.elastic.membership import ElasticSettings

EXIT_PREEMPTED = 76
"""Exit code of a worker that left on notice after transferring its state; it is not restarted."""

EXIT_STOPPED = 77
"""Exit code of a worker that stopped because all ranks agreed to, on a signal to one of them; it is not restarted."""

_URL_TIMEOUT_S = 2.0
_LONGEST = 200
# Google's metadata server wants this header and says FALSE as long as nothing happens; the others do not mind it.
_HEADERS = {"Metadata-Flavor": "Google"}
_NO = {"", "FALSE", "NONE"}
# AWS answers 401 to whoever has no session token (IMDSv2), and gives one for a PUT to the same server.
_TOKEN_PATH, _TOKEN_LIFE = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
_TOKEN = "X-aws-ec2-metadata-token"
_FAILURES = (OSError, HTTPException, ValueError)  # of the server, the network, or the address
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

logger = logging.getLogger(__name__)


class PreemptionWatch:
    """Watch for notices until `close`.

    Args:
        settings: the sources to watch, and the interval. SIGTERM needs the main thread.
    """

    def __init__(self, settings: ElasticSettings) -> None:
        self._settings = settings
        self._notice: str | None = None
        self._token: dict[str, str] = {}
        self._has_answered = self._has_warned = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._former = signal.getsignal(signal.SIGTERM)
        self.listen()
        if settings.notice_file is not None or settings.notice_url is not None:
            self._thread = threading.Thread(target=self._poll, name="preemption-notice", daemon=True)
            self._thread.start()

    def listen(self) -> None:
        """Install the SIGTERM handler if the settings ask for it; call it again after another handler replaced it."""
        if self._settings.notice_on_sigterm:
            signal.signal(signal.SIGTERM, self._receive)

    @property
    def notice(self) -> str | None:
        """First notice, as a sentence; None without one."""
        return self._notice

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._settings.notice_on_sigterm:
            signal.signal(signal.SIGTERM, self._former)
        if self._thread is not None:
            self._thread.join(timeout=2 * _URL_TIMEOUT_S)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._record("SIGTERM asks this process to leave")

    def _record(self, notice: str) -> None:
        if self._notice is None:
            self._notice = notice

    def _poll(self) -> None:
        while self._notice is None and not self._closed.is_set():
            for notice in (self._file(), self._url()):
                if notice is not None:
                    self._record(notice)
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
        try:
            answer = self._read(self._settings.notice_url)
        except _FAILURES as error:
            self._report(self._settings.notice_url, error)
            return None
        self._has_answered = True
        return f"{self._settings.notice_url} answers: {answer}" if answer.upper() not in _NO else None

    def _read(self, url: str) -> str:
        """Return the text at an address, with a new session token where the server asks for one."""
        try:
            return _answer(url, _HEADERS | self._token)
        except urllib.error.HTTPError as refused:
            if refused.code != HTTPStatus.UNAUTHORIZED:
                raise
            self._token = {}  # there was none, or it has expired
            try:
                token = _answer(urllib.parse.urljoin(url, _TOKEN_PATH), _TOKEN_LIFE, method="PUT")
            except _FAILURES:
                raise refused from None
        self._token = {_TOKEN: token}
        return _answer(url, _HEADERS | self._token)

    def _report(self, url: str, error: Exception) -> None:
        """Warn once of a server that refuses, or has never answered; 404 means that nothing is planned."""
        code = error.code if isinstance(error, urllib.error.HTTPError) else None
        self._has_answered |= code == HTTPStatus.NOT_FOUND
        if self._has_warned or (self._has_answered and code not in _REFUSALS):
            logger.debug("%s: %s", url, error)
            return
        self._has_warned = True
        logger.warning(
            "notice_url=%s %s answer (%s), so this machine would be taken away without notice: enable its "
            "metadata service, on AWS with a hop limit of 2 where this runs in a container, or set notice_file",
            url,
            "does not" if code is None else "refuses to",
            error,
        )


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return the beginning of the text at an address of the machine itself, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    with opener.open(request, timeout=_URL_TIMEOUT_S) as answer:
        text: str = answer.read(_LONGEST).decode(errors="replace").strip()
    return text
