"""Processes of one machine: windows in POSIX shared memory, puts as memory copies, counters as 64-bit words.

The embedded default, and the executor of every schedule in the tests. Each window is one segment a rank:

    | READY from rank 0 .. W-1 | WRITTEN from rank 0 .. W-1 | pad to 256 | nbytes of data |

Counters are written by one rank and read by one, so no word is ever updated by two.

A switch can be emulated, for schedules that need one: a multicast is then a copy into every rank's window, one after
the other, and what is summed is every rank's window as it is mapped here.
"""

import mmap
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tide_triton.errors import PeerError, SharedMemoryError
from tide_triton.kernels.multimem import Source
from tide_triton.layouts import Copy
from tide_triton.layouts.slots import align
from tide_triton.transports import shared_memory
from tide_triton.transports.base import (
    COUNTERS,
    Lane,
    Mark,
    Put,
    Window,
    no_multicast,
    require_inside,
    require_one_row,
    require_switch,
)
from tide_triton.transports.peers import Announcement, Peers, signed
from tide_triton.transports.rendezvous import Rendezvous
from tide_triton.views import as_bytes


class HostWindow:
    """A window in shared memory. Built by `HostTransport.allocate`."""

    def __init__(self, nbytes: int, rank: int, maps: Sequence[mmap.mmap]) -> None:
        self.nbytes = nbytes
        self._world_size = len(maps)
        self._header = header_nbytes(len(maps))
        self._own: mmap.mmap | None = maps[rank]
        words = len(maps) * COUNTERS
        self.counters = [memoryview(m)[: words * 8].cast("q") for m in maps]
        self.bytes = [_tensor(m, self._header, nbytes, torch.uint8) for m in maps]
        self.memory = self.bytes[rank]

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._own is None:
            raise RuntimeError("the window is closed")
        require_inside(self.nbytes, offset, numel, dtype)
        return _tensor(self._own, self._header + offset, numel, dtype)

    def word(self, of: int, counter: int) -> int:
        """The index of rank `of`'s `counter` among a rank's counters."""
        if not (0 <= counter < COUNTERS and 0 <= of < self._world_size):
            raise IndexError(f"counter {counter} of rank {of} is not one of {COUNTERS} x {self._world_size}")
        return counter * self._world_size + of

    def close(self) -> None:
        # The kernel unmaps each segment when the last tensor over it goes; parameters may outlive the window.
        for words in self.counters:
            words.release()
        self.counters, self.bytes, self._own = [], [], None
        self.memory = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class HostPut:
    """Views to copy, as (destination, source)."""

    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    is_reusable: bool = False

    def moved(self, by: Sequence[int]) -> Put:
        raise NotImplementedError("views are made anew for every put")


class HostTransport:
    """The host transport between the ranks of `rendezvous`, which must be processes of one machine.

    timeout_s: seconds that any wait may take.
    emulate_switch: whether to multicast, through an emulated switch.

    Raises PeerError where a rank does not come, OSError where the ranks do not share a machine.
    """

    #: Nothing overlaps here, so nothing is gained by pieces.
    piece_nbytes: int | None = None
    rails: tuple[Lane, ...] = ("rail",)

    def __init__(self, rendezvous: Rendezvous, timeout_s: float, *, emulate_switch: bool = False) -> None:
        self.device = torch.device("cpu")
        self.name = "host_switch" if emulate_switch else "host"
        self.multicasts = emulate_switch
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        self.global_ranks = rendezvous.global_ranks
        self._peers = Peers(rendezvous, timeout_s)
        self._serial = 0
        # A lock's acquire and release order memory on every architecture; x86 alone would not need it.
        self._fence = threading.Lock()

    def why_no_multicast(self) -> str | None:
        return None if self.multicasts else no_multicast(self.name)

    def allocate(self, nbytes: int, digest: str, what: str) -> HostWindow:
        self._check_usable()
        serial, self._serial = self._serial, self._serial + 1
        total = header_nbytes(self.world_size) + nbytes
        shortage: SharedMemoryError | None = None
        fd = -1
        try:
            fd = shared_memory.create(total, what)
        except SharedMemoryError as error:
            shortage = error
        own = None if fd < 0 else shared_memory.map_own(fd, total)
        try:
            # Digests travel as signed words.
            self._peers.announce(serial, Announcement(fd, nbytes, signed(digest)))
            others = [self._peers.announcement(peer, serial, f"allocating {what}") for peer in range(self.world_size)]
            maps = []
            if all(a.nbytes == nbytes and a.digest == signed(digest) and a.fd >= 0 for a in others):
                for peer, a in enumerate(others):
                    mapped = own if peer == self.rank else shared_memory.map_of(self._peers.pids[peer], a.fd, total)
                    assert mapped is not None
                    maps.append(mapped)
            # Nobody may give its descriptor back, or reuse the announcement, before everyone has looked.
            self._peers.mapped(serial, f"allocating {what}")
        finally:
            if fd >= 0:
                shared_memory.release(fd)
        self._peers.require_same(others, nbytes, digest, what)
        if shortage is not None:
            raise shortage
        for peer, a in enumerate(others):
            if a.fd < 0:
                raise SharedMemoryError(
                    f"rank {self.global_ranks[peer]} has no shared memory left: {shared_memory.shortage(total, what)}"
                )
        return HostWindow(nbytes, self.rank, maps)

    def prepare(self, window: Window, peer: int, moves: Sequence[tuple[torch.Tensor, Copy]]) -> "HostPut":
        dst = _own(window).bytes[peer]
        pairs = []
        for source, copy in moves:
            src = as_bytes(source)
            if copy.dst.end > window.nbytes or copy.src.end > src.numel():
                raise IndexError(f"{copy} leaves its source of {src.numel()} or its window of {window.nbytes} bytes")
            shape = (copy.rows, copy.width)
            to = torch.as_strided(dst, shape, (copy.dst_pitch, 1), copy.dst_offset)
            pairs.append(
                (to, torch.as_strided(src, shape, (copy.src_pitch, 1), src.storage_offset() + copy.src_offset))
            )
        return HostPut(pairs)

    def prepare_multicast(self, window: Window, moves: Sequence[tuple[torch.Tensor, Copy]]) -> "HostPut":
        require_switch(self)
        require_one_row(moves)
        return HostPut([pair for rank in range(self.world_size) for pair in self.prepare(window, rank, moves).pairs])

    def everywhere(self, window: Window, offset: int, numel: int) -> Source:
        require_switch(self)
        own = _own(window)
        require_inside(own.nbytes, offset, numel, torch.bfloat16)
        return [memory[offset : offset + numel * torch.bfloat16.itemsize].view(torch.bfloat16) for memory in own.bytes]

    def put(self, put: Put) -> None:
        assert isinstance(put, HostPut)
        for to, source in put.pairs:
            to.copy_(source)

    def signal(self, window: Window, peer: int, counter: int, value: int) -> None:
        own = _own(window)
        with self._fence:
            own.counters[peer][own.word(self.rank, counter)] = value

    def put_and_signal(self, put: Put, window: Window, peer: int, counter: int, value: int) -> None:
        self.put(put)
        self.signal(window, peer, counter, value)

    def clear(self, window: Window, peer: int, counter: int) -> None:
        raise RuntimeError("the host transport takes part in no CUDA graph")

    @property
    def capture(self) -> int | None:
        return None

    def wait(self, window: Window, peer: int, counter: int, value: int, what: str) -> None:
        self._check_usable()
        own = _own(window)
        words, word = own.counters[self.rank], own.word(peer, counter)
        self._peers.wait(lambda: words[word] >= value, peer, what)
        with self._fence:
            pass

    def lane(self, name: Lane, *, joined: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def stream(self) -> int | None:
        return None

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Mark | None:
        return None

    def after(self, mark: Mark | None) -> None:
        """Calls return when their work is done."""

    @property
    def gave_up(self) -> bool:
        return self._peers.aborted

    def abort(self, reason: str) -> None:
        self._peers.abort(reason)

    def close(self) -> None:
        self._peers.close()

    def _check_usable(self) -> None:
        if self._peers.aborted:
            raise PeerError("this transport gave up earlier; detach, and attach again once every rank is well")


def _own(window: Window) -> HostWindow:
    if not isinstance(window, HostWindow):
        raise TypeError(f"a {type(window).__name__} is not a window of the host transport")
    return window


def header_nbytes(world_size: int) -> int:
    """Bytes of a window's counters, in front of its data."""
    return align(world_size * COUNTERS * 8)


def _tensor(memory: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
