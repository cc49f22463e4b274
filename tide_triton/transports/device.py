"""What the GPU transports of one machine share: everything but where symmetric memory comes from.

Each window is symmetric memory, laid out as on the host. Counters have 32 bits, which wrap around: within a machine
every one is raised in every turn, or every few. (Between nodes it may be one turn in a million: `over_nodes`.) Puts are
peer copies by copy engine, signals are stream writes to the peer, waits are stream waits on this rank's memory: no SM
takes part.

    lane      stream of                                                      waits for
    gather    credits, puts and signals of all-gathers                       cast, tensor by tensor
    cast      the cast of shards into the own slot
    reduce    credits, puts and signals of reduce-scatters                   the gradients
    sum       the sums of what has landed                                    WRITTEN, piece by piece
    rail      over several nodes: puts to other nodes                        what they wait for (`paced`)
    second_rail    the same beside it, where a library's puts leave gaps       likewise
    signals   WRITTEN of what an all-gather has put to other nodes           the rail, chunk by chunk
    receipts  acknowledgements of what an all-gather's rail has brought      WRITTEN, chunk by chunk
    local_receipts   and of what has come from the own node                  WRITTEN, chunk by chunk
    unpack    copies of what has come packed from other nodes to its places  WRITTEN, block by block
    final     the sums of what other nodes have put                          WRITTEN, chunk by chunk
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tide_triton.copy_engine import Batch, CopyEngine, batch
from tide_triton.errors import PeerError, SharedMemoryError, TideError
from tide_triton.kernels.multimem import Multicast, Source
from tide_triton.layouts import Copy
from tide_triton.layouts.slots import align
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
from tide_triton.transports.watchdog import Watchdog, Watched


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """Memory of this rank and where every rank's twin of it is mapped here.

    own: uint8, (nbytes,). addresses: of each rank's memory, in rank order. keep: whatever must live as long.
    multicast: where all twins are mapped at once, None where they are not or nobody has asked.
    """

    own: torch.Tensor
    addresses: tuple[int, ...]
    keep: Any
    multicast: int | None = None


class DeviceWindow:
    """A window in symmetric memory. Built by `DeviceTransport.allocate`."""

    def __init__(
        self, nbytes: int, rank: int, memory: SymmetricMemory, word_nbytes: int, drain: Callable[[], None]
    ) -> None:
        self.nbytes = nbytes
        self.header = header_nbytes(len(memory.addresses), word_nbytes)
        self.addresses = memory.addresses
        self.multicast = memory.multicast
        self.memory = memory.own[self.header : self.header + nbytes]
        #: The highest value that any counter of this window was told to wait for.
        self.latest = 0
        self._rank = rank
        self._word_nbytes = word_nbytes
        self._drain = drain
        self._keep: SymmetricMemory | None = memory

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._keep is None:
            raise RuntimeError("the window is closed")
        require_inside(self.nbytes, offset, numel, dtype)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.memory.device)
        raw = Raw(self.addresses[self._rank] + self.header + offset, numel * dtype.itemsize, self._keep)
        return torch.as_tensor(raw, device=self.memory.device).view(dtype)

    def word(self, at: int, of: int, counter: int) -> int:
        """The address of rank `of`'s `counter` in rank `at`'s window."""
        world = len(self.addresses)
        if not (0 <= counter < COUNTERS and 0 <= of < world):
            raise IndexError(f"counter {counter} of rank {of} is not one of {COUNTERS} x {world}")
        return self.addresses[at] + (counter * world + of) * self._word_nbytes

    def check(self, moves: Sequence[tuple[torch.Tensor, Copy]]) -> None:
        """Raise IndexError where a copy leaves its source or this window."""
        for source, copy in moves:
            if copy.dst.end > self.nbytes or copy.src.end > source.nbytes:
                raise IndexError(f"{copy} leaves its source of {source.nbytes} or its window of {self.nbytes} bytes")

    def multicast_data(self) -> int:
        """The address of the first byte after the counters in every rank's window at once."""
        assert self.multicast is not None
        return self.multicast + self.header

    @property
    def is_open(self) -> bool:
        return self._keep is not None

    def close(self) -> None:
        if self._keep is not None:
            # Kernels and copies that were enqueued may still use this memory, and nothing else keeps it for them.
            self._drain()
        self._keep = None
        self.memory = self.memory[:0].clone()


class Raw:
    """Device memory that torch may look at without owning it; `keep` lives as long as the tensor over it."""

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event, and the graph under capture in which it was recorded, if any."""

    event: torch.cuda.Event
    capture: int | None


class DeviceTransport(abc.ABC):
    """A transport between GPUs of one machine, over symmetric memory that the subclass allocates.

    timeout_s: seconds that any wait may take.
    """

    name: str
    #: Small enough that a cast before it or a sum after it hardly shows, large enough to be worth its overhead.
    piece_nbytes: int | None = 16 << 20
    rails: tuple[Lane, ...] = ("rail",)
    #: Bytes of a counter.
    word_nbytes = 4
    #: Set by who makes it, before the first window, where every rank has no reason why not: symmetric memory is then
    #: asked for its multicast address.
    multicasts = False

    def __init__(self, rendezvous: Rendezvous, timeout_s: float, device: torch.device) -> None:
        self.device = device
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        self.global_ranks = rendezvous.global_ranks
        self._timeout_s = timeout_s
        self._engine = CopyEngine()
        self._peers = Peers(rendezvous, timeout_s)
        self._watchdog = Watchdog(timeout_s, self._peers.why_aborted, self._give_up, self._engine.relaxed)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._active: torch.cuda.Stream | None = None
        self._callers: dict[int, torch.cuda.Stream] = {}
        self._windows: list[DeviceWindow] = []
        self._serial = 0
        self._failure: str | None = None
        self._waiting = ("", self.rank)

    @abc.abstractmethod
    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        """`nbytes` bytes of symmetric memory; every rank calls this with the same size."""

    def why_no_multicast(self) -> str | None:
        """Why this rank's GPU cannot multicast to the others, None where it can; asks, and changes nothing."""
        return no_multicast(self.name)

    def _multicast_of(self, ask: Callable[[], int | None], nbytes: int) -> int | None:
        """The multicast address that `ask` gives; where this transport does not multicast, nobody is asked."""
        if not self.multicasts:
            return None
        address = ask()
        if not address:
            raise TideError(
                f"the transport '{self.name}' reports multicast and is given no multicast address for {nbytes} bytes "
                f"on {self.device}; pass multicast_nbytes=None and switch_sums=False"
            )
        return address

    def _taken(self, nbytes: int) -> int:
        """Bytes of device memory that `_symmetric(nbytes)` takes at most."""
        return nbytes

    def allocate(self, nbytes: int, digest: str, what: str) -> DeviceWindow:
        self._check_usable()
        serial, self._serial = self._serial, self._serial + 1
        header = header_nbytes(self.world_size, self.word_nbytes)
        total = header + nbytes
        taken = self._taken(total)
        # Whether there is room is settled first: inside the allocation, one rank's failure would hang the others.
        torch.cuda.synchronize(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < taken:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
        self._peers.announce(serial, Announcement(0 if free >= taken else -1, nbytes, signed(digest)))
        others = [self._peers.announcement(peer, serial, f"allocating {what}") for peer in range(self.world_size)]
        self._peers.mapped(serial, f"allocating {what}")
        self._peers.require_same(others, nbytes, digest, what)
        for peer, a in enumerate(others):
            if a.fd < 0:
                raise SharedMemoryError(
                    f"rank {self.global_ranks[peer]} has no device memory for {what}: {taken} bytes wanted"
                    + (f", {free} bytes free; hold less at once (fewer slots)" if peer == self.rank else "")
                )
        memory = self._symmetric(total)
        memory.own[:header].zero_()
        torch.cuda.synchronize(self.device)
        serial, self._serial = self._serial, self._serial + 1
        self._peers.announce(serial, Announcement(0, nbytes, 0))
        # Nobody may signal before everyone's counters are zero.
        self._peers.mapped(serial, f"allocating {what}")
        window = DeviceWindow(nbytes, self.rank, memory, self.word_nbytes, self._drain)
        self._windows = [*(known for known in self._windows if known.is_open), window]
        return window

    def prepare(self, window: Window, peer: int, moves: Sequence[tuple[torch.Tensor, Copy]]) -> Put:
        own = _own(window)
        own.check(moves)
        destination = own.addresses[peer] + own.header
        return batch([(destination, source.data_ptr(), copy) for source, copy in moves])

    def prepare_multicast(self, window: Window, moves: Sequence[tuple[torch.Tensor, Copy]]) -> Put:
        require_switch(self)
        require_one_row(moves)
        own = _own(window)
        own.check(moves)
        copies = [(own.multicast_data(), source.data_ptr(), copy) for source, copy in moves]
        # A kernel that copies, as CUDA may start for a copy of its own, must not touch a multicast address.
        return replace(batch(copies), engine_only=True)

    def everywhere(self, window: Window, offset: int, numel: int) -> Source:
        require_switch(self)
        own = _own(window)
        require_inside(own.nbytes, offset, numel, torch.bfloat16)
        return Multicast(own.multicast_data() + offset, numel)

    def put(self, put: Put) -> None:
        assert isinstance(put, Batch)
        self._engine.copy(put, self._current().cuda_stream)

    def signal(self, window: Window, peer: int, counter: int, value: int) -> None:
        self._raise(_own(window), peer, counter, self._cyclic(value))

    def put_and_signal(self, put: Put, window: Window, peer: int, counter: int, value: int) -> None:
        self.put(put)
        self.signal(window, peer, counter, value)

    def _raise(self, window: DeviceWindow, peer: int, counter: int, value: int) -> None:
        """Set `peer`'s `counter` of this rank to `value`, in the order that is current."""
        self._write(window.word(peer, self.rank, counter), value, self._current())

    def _write(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        """Set the counter at `address`."""
        self._engine.write(address, value, stream.cuda_stream, self.word_nbytes)

    def _cyclic(self, value: int) -> int:
        """`value` as a counter holds it."""
        return value % (1 << 8 * self.word_nbytes)

    def wait(self, window: Window, peer: int, counter: int, value: int, what: str) -> None:
        self._check_usable()
        own = _own(window)
        own.latest = max(own.latest, value)
        self._waiting = (what, peer)
        word = own.word(self.rank, peer, counter)
        self._engine.wait(word, self._cyclic(value), self._current().cuda_stream, self.word_nbytes)

    def clear(self, window: Window, peer: int, counter: int) -> None:
        self._write(_own(window).word(self.rank, peer, counter), 0, self._current())

    @property
    def capture(self) -> int | None:
        # Torch's current stream is the caller's also within lanes, which are captured with it.
        if not torch.cuda.is_current_stream_capturing():
            return None
        return self._engine.capture(torch.cuda.current_stream(self.device).cuda_stream)

    @contextmanager
    def lane(self, name: Lane, *, joined: bool = True) -> Iterator[None]:
        stream = self._streams.get(name)
        if stream is None:
            # Ahead of compute, whose kernels are many and long.
            stream = self._streams[name] = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        outer = self._current()
        if joined:
            stream.wait_stream(outer)
        before, self._active = self._active, stream
        try:
            # Torch's own current stream stays as it is: setting it takes longer than enqueueing a copy.
            yield
        finally:
            self._active = before

    @property
    def stream(self) -> int | None:
        handle: int = self._current().cuda_stream
        return handle

    def here(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._current()) if self.capture is None else self._at_once()

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Work that a graph under capture must find done: on a stream that is not captured, and waited for."""
        with self._engine.relaxed():
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()

    def mark(self) -> Mark | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._current())
        capture = self.capture
        if capture is None:
            self._watchdog.watch(event, *self._waiting)
        return _Mark(event, capture)

    def after(self, mark: Mark | None) -> None:
        if mark is None:
            return
        assert isinstance(mark, _Mark)
        # A mark outside of this capture is passed already: captures begin, and replays end, with everything done.
        if mark.capture == self.capture:
            self._current().wait_event(mark.event)

    @property
    def gave_up(self) -> bool:
        return self._failure is not None

    def abort(self, reason: str) -> None:
        self._peers.abort(reason)

    def close(self) -> None:
        self._watchdog.stop()
        self._drain()
        self._windows.clear()
        self._streams.clear()
        self._peers.close()

    def _drain(self) -> None:
        """Until nothing of this rank is under way, unless what is may never end."""
        if self._failure is None:
            torch.cuda.synchronize(self.device)

    def _current(self) -> torch.cuda.Stream:
        """The stream of the lane we are in, or the caller's."""
        if self._active is not None:
            return self._active
        # The handle costs next to nothing to ask for, torch's object ten microseconds: there are few, so keep them.
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        caller = self._callers.get(handle)
        if caller is None:
            caller = self._callers[handle] = torch.cuda.current_stream(self.device)
        return caller

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise PeerError(f"{self._failure}; detach, and attach again once every rank is well")

    def _give_up(self, wait: Watched | None, reason: str) -> None:
        """On the watchdog's thread: let every rank know, and the streams go on."""
        if wait is not None:
            reason = (
                f"rank {self.global_ranks[self.rank]} waited {self._timeout_s:g} s in {wait.what} for rank "
                f"{self.global_ranks[wait.peer]} (pid {self._peers.pids[wait.peer]})"
            )
        self._failure = reason
        self._peers.abort(reason)
        with torch.cuda.device(self.device):
            release = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for window in [known for known in self._windows if known.is_open]:
                for counter in range(COUNTERS):
                    for peer in range(self.world_size):
                        value = self._cyclic(window.latest + (1 << 30))
                        self._write(window.word(self.rank, peer, counter), value, release)


def _own(window: Window) -> DeviceWindow:
    if not isinstance(window, DeviceWindow):
        raise TypeError(f"a {type(window).__name__} is not a window of a GPU transport")
    return window


def header_nbytes(world_size: int, word_nbytes: int = DeviceTransport.word_nbytes) -> int:
    """Bytes of a window's counters, in front of its data."""
    return align(world_size * COUNTERS * word_nbytes)
