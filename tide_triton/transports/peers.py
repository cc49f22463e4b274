"""Who of the peers still lives, and who has given up.

Every rank owns one small segment, mapped by all, with the things that the others must be able to read at any time:

    word 0           1 + the rank of this process once it has given up, else 0
    word 1           how many windows it has announced
    word 2           how many windows it has mapped from everyone
    word 3           1 + the rank it is waiting for, 0 while it is not
    words 8..        the last windows announced: file descriptor (-1: no memory for it), bytes, digest
    then             why it gave up, as text; and last, what it is waiting in
"""

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tide_triton.errors import AbortedError, MismatchError, PeerLostError, WaitTimeoutError
from tide_triton.transports import shared_memory
from tide_triton.transports.rendezvous import Rendezvous

_ABORTED, _ANNOUNCED, _MAPPED, _WAITING, _TABLE = 0, 1, 2, 3, 8
#: Announcements kept. Ranks finish one window before the next, so two would do.
_KEPT = 8
_TEXT = (_TABLE + 3 * _KEPT) * 8
_NBYTES = 4096
_WHAT = _NBYTES - 512
#: Seconds between looks at whether peers are alive: rare enough to cost nothing, often enough to fail fast.
_CHECK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Announcement:
    """A window as its owner announced it; `fd` is -1 where it had no memory for it."""

    fd: int
    nbytes: int
    digest: int


class Peers:
    """The control segments of the ranks of one group.

    Raises OSError with an explanation where the ranks are not processes of one machine and PID namespace.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        self.global_ranks = rendezvous.global_ranks
        self.timeout_s = timeout_s
        own_fd = shared_memory.create(_NBYTES, "the control segment")
        own = shared_memory.map_own(own_fd, _NBYTES)
        self._segments: list[mmap.mmap] = []
        self._pidfds: list[int] = []
        try:
            messages = rendezvous.exchange(f"{_machine()} {os.getpid()} {own_fd}", "meeting the peers")
            failure = ""
            try:
                self._map(messages, own)
            except OSError as error:
                failure = f"rank {self.global_ranks[self.rank]}: {error}"
            failures = [text for text in rendezvous.exchange(failure, "meeting the peers") if text]
            if failures:
                self.close()
                raise OSError(
                    "the host transport needs all ranks on one machine, in one PID namespace and of one user: "
                    f"{failures}"
                )
        finally:
            os.close(own_fd)
        self._words = [memoryview(segment).cast("q") for segment in self._segments]

    def _map(self, messages: list[str], own: mmap.mmap) -> None:
        for peer, message in enumerate(messages):
            machine, pid, fd = message.split()
            if machine != _machine():
                raise OSError(f"rank {self.global_ranks[peer]} runs on another machine")
            self._segments.append(own if peer == self.rank else shared_memory.map_of(int(pid), int(fd), _NBYTES))
            self._pidfds.append(os.pidfd_open(int(pid)))
        self.pids = [int(message.split()[1]) for message in messages]

    def announce(self, serial: int, announcement: Announcement) -> None:
        words, at = self._words[self.rank], _TABLE + 3 * (serial % _KEPT)
        words[at], words[at + 1], words[at + 2] = announcement.fd, announcement.nbytes, announcement.digest
        words[_ANNOUNCED] = serial + 1

    def announcement(self, peer: int, serial: int, what: str) -> Announcement:
        """What `peer` announced as window `serial`, once it has."""
        words, at = self._words[peer], _TABLE + 3 * (serial % _KEPT)
        self.wait(lambda: words[_ANNOUNCED] > serial, peer, what)
        return Announcement(words[at], words[at + 1], words[at + 2])

    def require_same(self, others: Sequence[Announcement], nbytes: int, digest: str, what: str) -> None:
        """Raise MismatchError unless all ranks announced a window of `nbytes` bytes for the layout `digest`."""
        for peer, announced in enumerate(others):
            if announced.nbytes != nbytes or announced.digest != signed(digest):
                raise MismatchError(
                    f"ranks disagree on {what}: rank {self.global_ranks[self.rank]} wants {nbytes} bytes (layout "
                    f"{digest}), rank {self.global_ranks[peer]} {announced.nbytes} bytes; parameters must have the "
                    f"same shapes and dtypes on every rank"
                )

    def mapped(self, serial: int, what: str) -> None:
        """Say that this rank has mapped window `serial` of every peer, and wait until all have."""
        self._words[self.rank][_MAPPED] = serial + 1
        for peer in range(self.world_size):
            words = self._words[peer]
            self.wait(lambda words=words: words[_MAPPED] > serial, peer, what)  # type: ignore[misc]

    def wait(self, done: Callable[[], bool], peer: int, what: str) -> None:
        """Until `done()`. Raises, on every rank, where `peer` is too slow or any rank has died or given up."""
        if done():
            return
        own = self._words[self.rank]
        text = what.encode()[: _NBYTES - _WHAT]
        self._segments[self.rank][_WHAT:_NBYTES] = text.ljust(_NBYTES - _WHAT, b"\0")
        own[_WAITING] = peer + 1
        try:
            self._wait(done, peer, what)
        finally:
            own[_WAITING] = 0

    def _wait(self, done: Callable[[], bool], peer: int, what: str) -> None:
        started = checked = time.monotonic()
        pause, spins = 0.0, 0
        while not done():
            # Yield first: with more ranks than cores the peer may need this one. Then sleep, longer and longer.
            time.sleep(pause)
            spins += 1
            if spins > 100:
                pause = min(0.001, pause + 0.00002)
            now = time.monotonic()
            if now - checked > _CHECK_EVERY_S:
                checked = now
                self._check(done, peer, what)
                if now - started > self.timeout_s:
                    message = (
                        f"rank {self.global_ranks[self.rank]} waited {self.timeout_s:g} s in {what} for rank "
                        f"{self.global_ranks[peer]} (pid {self.pids[peer]}){self._whom_it_waits_for(peer)}"
                    )
                    self.abort(message)
                    raise WaitTimeoutError(message + "; find out what it is doing, or raise timeout_s")

    def _check(self, done: Callable[[], bool], peer: int, what: str) -> None:
        for other, words in enumerate(self._words):
            if other != self.rank and words[_ABORTED]:
                text = self._reason(other)
                self.abort(text)
                own, its = self.global_ranks[self.rank], self.global_ranks[other]
                raise AbortedError(f"rank {own}, in {what}, stops with rank {its}: {text}")
        # Only the awaited rank: another may have finished its work and left. Where one died, those who wait for it
        # give up, and with them everyone else.
        if self._has_ended(peer) and not done():
            message = (
                f"rank {self.global_ranks[peer]} (pid {self.pids[peer]}) died while rank "
                f"{self.global_ranks[self.rank]} waited for it in {what}"
            )
            self.abort(message)
            raise PeerLostError(message)

    def _whom_it_waits_for(self, peer: int) -> str:
        """Who keeps `peer` waiting in turn: the last of the chain is the one to look at."""
        chain, seen = "", {self.rank}
        while peer not in seen and (waits_for := self._words[peer][_WAITING]):
            seen.add(peer)
            own, its = self.global_ranks[peer], self.global_ranks[waits_for - 1]
            chain += f", while rank {own} waits for rank {its} in {self._text(peer, _WHAT, _NBYTES)}"
            peer = waits_for - 1
        return chain

    def _has_ended(self, peer: int) -> bool:
        if peer == self.rank:
            return False
        poll = select.poll()
        poll.register(self._pidfds[peer], select.POLLIN)
        return bool(poll.poll(0))

    def abort(self, reason: str) -> None:
        """Give up, and let the others know why. The first reason stands."""
        if self._words[self.rank][_ABORTED] > 0:
            return
        text = reason.encode()[: _WHAT - _TEXT]
        self._segments[self.rank][_TEXT : _TEXT + len(text)] = text
        self._words[self.rank][_ABORTED] = self.rank + 1

    def why_aborted(self) -> str:
        """The reason of the first other rank that has given up, "" while none has."""
        for other, words in enumerate(self._words):
            if other != self.rank and words[_ABORTED]:
                return self._reason(other)
        return ""

    def _reason(self, other: int) -> str:
        return self._text(other, _TEXT, _WHAT)

    def _text(self, other: int, start: int, stop: int) -> str:
        return bytes(self._segments[other][start:stop]).rstrip(b"\0").decode(errors="replace")

    @property
    def aborted(self) -> bool:
        return self._words[self.rank][_ABORTED] > 0

    def close(self) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        for words in getattr(self, "_words", ()):
            words.release()
        self._words = []
        for segment in self._segments:
            segment.close()
        self._segments.clear()


def signed(digest: str) -> int:
    """64 bits given as hex, as the signed word in which they travel."""
    value = int(digest, 16)
    return value - (1 << 64) if value >= 1 << 63 else value


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
