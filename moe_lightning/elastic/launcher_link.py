"""A launcher's side of the control plane: it tells deaths, and hears which of its workers are in the world."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from moe_lightning.elastic.address import Address
from moe_lightning.elastic.clock import OwnClock
from moe_lightning.elastic.link import ControlLink
from moe_lightning.elastic.secret import read_secret
from moe_lightning.elastic.settings import ElasticSettings
from moe_lightning.elastic.wire import Message
from moe_lightning.errors import ConfigurationError

_STEP_S = 0.1
_GOODBYE_S = 1.0
_MOST_DEATHS = 1000

logger = logging.getLogger(__name__)


class LauncherLink:
    """Connected from its construction to `close`; what is said while there is no connection is said on the next one.

    Args:
        address: of the rendezvous host.
        secret_file: of the run.
        settings: how long to wait for it.

    Raises:
        ConfigurationError: it does not answer within `rendezvous_timeout_s`, turns this launcher away, or the secret
            cannot be read.
    """

    def __init__(self, address: Address, secret_file: Path, settings: ElasticSettings) -> None:
        self._address, self._settings = address, settings
        self._clock = OwnClock()
        self._lock = threading.Lock()
        self._deaths: list[Message] = []
        self._heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._known = threading.Event()
        self._closed = threading.Event()
        self._link = ControlLink(
            address,
            read_secret(secret_file),
            introduce=self._introduce,
            handle=self._heard.put,
            silence_s=settings.silence_timeout_s,
        )
        self._thread = threading.Thread(target=self._run, name="elastic-launcher-link", daemon=True)
        self._thread.start()
        try:
            self._wait()
        except ConfigurationError:
            self.close()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether the rendezvous host answers."""
        return self._link.is_connected

    @property
    def trouble(self) -> str:
        """Why it does not, as the end of a sentence."""
        return self._link.trouble

    def tell_death(self, token: str, how: str) -> None:
        """A worker's process has ended.

        Args:
            token: the worker's.
            how: the end of a sentence that says how.
        """
        message = {"t": "died", "token": token, "how": how}
        with self._lock:
            self._deaths = [*self._deaths[-_MOST_DEATHS:], message]
            self._link.send(message)

    def read(self) -> list[Message]:
        """What has come since the last call."""
        messages = []
        while True:
            try:
                messages.append(self._heard.get_nowait())
            except queue.Empty:
                return messages

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._link.wake()
        self._thread.join(timeout=_GOODBYE_S)

    def _wait(self) -> None:
        while not self._known.wait(_STEP_S):
            limit = self._settings.rendezvous_timeout_s
            if self._link.is_refused:
                raise ConfigurationError(
                    f"the rendezvous host at {self._address} turns this machine away: {self._link.trouble}"
                )
            if self._clock.now > limit:
                raise ConfigurationError(
                    f"nothing answers at {self._address} for {limit:g} s ({self._link.trouble}): start "
                    f"`python -m moe_lightning.elastic.rendezvous_host --bind {self._address}` and give its address"
                )

    def _introduce(self, say: Callable[[Message], None]) -> None:
        with self._lock:
            say({"t": "launcher"})
            for message in self._deaths:
                self._link.send(message)
        self._known.set()

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closed.is_set():
            try:
                self._link.step(self._clock.tick(), _STEP_S)
                now = self._clock.tick()
                if now >= next_beat:
                    next_beat = now + self._settings.beat_s
                    self._link.send({"t": "beat", "progress": 0})
            except Exception:  # the workers are worth more than the word about them
                logger.exception("the launcher's connection could not be served")
        self._link.close()
