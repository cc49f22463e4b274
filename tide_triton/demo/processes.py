"""Ranks as processes of this machine: started together, heard while they work, and ended together.

    def work(rank: int, ranks: int, tell: Tell, text: str) -> int: ...        # importable, at module level

    results = run_ranks(4, work, "text", hear=print)       # what each returned, in rank order

Whatever happens, a failing rank, Ctrl-C or SIGTERM, no process is left when `run_ranks` is.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from tide_triton import parent

#: How a rank says something to the process that started it.
Tell = Callable[[object], None]

#: Seconds in which other ranks may still say why they failed, once one has: the cause may come second.
_GRACE_S = 1.0
#: Seconds that a process may take to end by itself.
_END_S = 5.0


class RankFailedError(RuntimeError):
    """A rank failed first.

    trace: its traceback, empty where its process died.
    """

    def __init__(self, rank: int, reason: str, trace: str) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank
        self.trace = trace


@dataclass(frozen=True, slots=True)
class _Said:
    what: object


@dataclass(frozen=True, slots=True)
class _Returned:
    result: object


@dataclass(frozen=True, slots=True)
class _Failed:
    """at: on the monotonic clock, which all processes of a machine share."""

    at: float
    reason: str
    trace: str
    is_death: bool = False


def run_ranks(ranks: int, work: Callable[..., Any], *args: object, hear: Callable[[int, Any], None]) -> list[Any]:
    """Call `work(rank, ranks, tell, *args)` in `ranks` processes, and return what each returned.

    hear: called in this process with (rank, what it told).

    Raises RankFailedError, for the rank that failed first, as soon as one fails.
    """
    context = multiprocessing.get_context("spawn")
    crew: dict[Connection, tuple[int, BaseProcess]] = {}
    done = False
    with _sigterm_exits():
        try:
            with _deaf_children():
                for rank in range(ranks):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_serve, args=(rank, ranks, theirs, work, args), daemon=True)
                    process.start()
                    theirs.close()
                    crew[ours] = (rank, process)
            results = _collect(crew, hear)
            done = True
            return results
        finally:
            _end(crew, at_once=not done)


def _collect(crew: dict[Connection, tuple[int, BaseProcess]], hear: Callable[[int, Any], None]) -> list[Any]:
    working = dict(crew)
    results: dict[int, object] = {}
    failures: list[tuple[int, _Failed]] = []
    deadline: float | None = None
    while working:
        ready = wait(list(working), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank, process = working[connection]
            message = _receive(connection, process)
            if isinstance(message, _Said):
                hear(rank, message.what)
                continue
            del working[connection]
            if isinstance(message, _Failed):
                failures.append((rank, message))
            else:
                results[rank] = message.result
        if failures and deadline is None:
            deadline = time.monotonic() + _GRACE_S
    if failures:
        # A killed process leaves the others with broken connections, which they may report before it is missed.
        rank, first = min(failures, key=lambda entry: (not entry[1].is_death, entry[1].at))
        raise RankFailedError(rank, first.reason, first.trace)
    return [results[rank] for rank in range(len(crew))]


def _receive(connection: Connection, process: BaseProcess) -> _Said | _Returned | _Failed:
    try:
        message = connection.recv()
    except (EOFError, OSError):
        process.join(_END_S)
        code = process.exitcode
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        # Aborting is what libraries do when a peer is lost: a death of its own, but hardly the first.
        return _Failed(time.monotonic(), f"its process died ({name})", "", is_death=code != -signal.SIGABRT)
    assert isinstance(message, (_Said, _Returned, _Failed))
    return message


def _end(crew: dict[Connection, tuple[int, BaseProcess]], *, at_once: bool) -> None:
    """See every process off: those that are done end by themselves, all others `at_once`."""
    for connection, (_, process) in crew.items():
        connection.close()
        if at_once:
            process.terminate()
    for _, process in crew.values():
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _serve(rank: int, ranks: int, connection: Connection, work: Callable[..., Any], args: tuple[object, ...]) -> None:
    """What a rank's process runs."""
    parent.follow()
    try:
        result = work(rank, ranks, lambda what: connection.send(_Said(what)), *args)
        connection.send(_Returned(result))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        # Nobody listens any more where the parent has been killed.
        with contextlib.suppress(OSError):
            connection.send(_Failed(time.monotonic(), reason, traceback.format_exc()))
        # Not through the interpreter's end, where a broken process group may wait for its peers.
        os._exit(1)


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started now ignore Ctrl-C, which reaches the whole foreground: their parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that this process cleans up before it ends."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
