"""Waits of a GPU stream have no time limit of their own: a thread watches them instead.

Each mark that a lane leaves is kept with what the lane waited for last. Where the oldest one is not reached in time, or
another rank has given up, the watchdog tells every rank, lets the streams go on (with data that nobody may use), and
the next call of the transport raises.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Watched:
    """An event, and the wait that it stands behind."""

    event: torch.cuda.Event
    what: str
    peer: int
    since: float


class Watchdog:
    """Watches the events given to `watch`.

    aborted: the reason another rank gave for giving up, "" while none has.
    overdue: called once, from the watching thread, with the wait that took too long or with the other rank's reason.
    relaxed: within it, this thread's CUDA calls leave graphs that others capture alone.
    """

    #: Seconds between looks.
    EVERY_S = 0.1

    def __init__(
        self,
        timeout_s: float,
        aborted: Callable[[], str],
        overdue: Callable[[Watched | None, str], None],
        relaxed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._timeout_s = timeout_s
        self._aborted = aborted
        self._overdue = overdue
        self._relaxed = relaxed
        self._watched: deque[Watched] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, event: torch.cuda.Event, what: str, peer: int) -> None:
        """Expect `event` to be reached within the time limit from now."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tide_watchdog", daemon=True)
            self._thread.start()
        self._watched.append(Watched(event, what, peer, time.monotonic()))

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        self._watched.clear()

    def _run(self) -> None:
        # Looking at events must not spoil a graph that another thread captures.
        with self._relaxed():
            self._watch_until_stopped()

    def _watch_until_stopped(self) -> None:
        while not self._stop.wait(self.EVERY_S):
            while self._watched and self._watched[0].event.query():  # type: ignore[no-untyped-call]
                self._watched.popleft()
            oldest = self._watched[0] if self._watched else None
            if oldest is None:
                continue
            reason = self._aborted()
            if reason:
                self._overdue(None, reason)
                return
            if time.monotonic() - oldest.since > self._timeout_s:
                self._overdue(oldest, "")
                return
