"""A transport whose ranks live in one thread, and where nothing happens before a test lets it.

On GPUs a host runs ahead of its streams, streams run beside each other, and ranks beside ranks. Here every rank has a
host and streams, each a queue of operations, and the test picks whose next operation happens; only the order within a
queue, marks and counters hold it back. So every interleaving that streams allow can be had, as slow as one likes:

    rank 0  host      | next call of the script | ...
            compute   | read slot 1 | poison slot 1 | ...
            gather    | signal READY 3 | after cast | wait for rank 1's READY 3 | put | put | signal WRITTEN 3 | ...
    rank 1  host      | ...

With `in_order`, a rank has one stream and its host waits until that is done, as on the host transport.

Each window keeps a ledger: which turn its owner is in, and which accesses of the owner (casts, reads, sums, puts from
it and into it) are still to come. A write that happens before all accesses of earlier turns is a `ScheduleError`, as
are counters that do not grow and ranks that wait for each other forever.
"""

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest import mock

import torch

from tide_triton import all_gather, reduce_scatter, switch_reduce
from tide_triton.layouts import Copy
from tide_triton.transports import READY, Mark, Put, Window
from tide_triton.transports.base import COUNTERS, Lane, require_one_row
from tide_triton.views import as_bytes

#: What memory is filled with once nobody may read it: NaN in every float dtype.
POISON = 0xFF


class ScheduleError(AssertionError):
    """Something happened that no schedule may allow."""


@dataclass(slots=True)
class Operation:
    label: str
    run: Callable[[], object]
    is_ready: Callable[[], bool] = lambda: True


class Stream:
    """Operations of one rank that happen one after the other."""

    _handles = itertools.count(1)

    def __init__(self, name: str, transport: "SimulatedTransport") -> None:
        self.name = name
        self.transport = transport
        self.handle = next(Stream._handles)
        self.queue: deque[Operation] = deque()
        self.issued = 0
        self.done = 0

    def push(self, operation: Operation) -> None:
        self.queue.append(operation)
        self.issued += 1

    @property
    def is_runnable(self) -> bool:
        return bool(self.queue) and self.queue[0].is_ready()

    def advance(self) -> None:
        """Let the next operation happen."""
        self.queue[0].run()
        self.queue.popleft()
        self.done += 1

    def __str__(self) -> str:
        return f"rank {self.transport.rank}, {self.name}"


#: By handle, which is all that kernels are told.
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Point:
    """A mark: everything that `stream` was given up to now."""

    stream: Stream
    count: int

    def is_reached(self) -> bool:
        return self.stream.done >= self.count


@dataclass(eq=False)
class SimulatedWindow:
    """Rank `rank`'s memory of window `serial`, its counters and its ledger.

    counters: of each kind, one per peer.
    opened: the latest turn that the owner's host has begun. written: the latest turn in which anything was written.
    to_come: by turn, how many accesses of the owner have been issued and not happened.
    """

    serial: int
    rank: int
    nbytes: int
    memory: torch.Tensor
    counters: list[list[int]]
    opened: int = 0
    written: int = 0
    to_come: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Nothing to give back."""

    def write(self, turn: int, what: str) -> None:
        """Check that what happens now, in turn `turn`, overwrites nothing."""
        if self.opened < turn:
            raise ScheduleError(f"{what} comes in turn {turn} into {self}, whose owner is in turn {self.opened}")
        if earlier := sorted(t for t, count in self.to_come.items() if count and t < turn):
            raise ScheduleError(
                f"{what} comes in turn {turn} into {self}, which its owner still uses in turns {earlier}"
            )
        if turn < self.written:
            raise ScheduleError(f"{what} of turn {turn} comes late into {self}, written in turn {self.written}")
        self.written = turn

    def read(self, turn: int, what: str) -> None:
        """Check that what another rank reads now, of turn `turn`, has not been overwritten."""
        if turn < self.written:
            raise ScheduleError(f"{what} of turn {turn} comes late to {self}, written in turn {self.written}")

    def __str__(self) -> str:
        return f"window {self.serial} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class SimulatedPut:
    """Copies to `peer`, or with `to_all` to every rank at once, from addresses, as a GPU transport keeps them."""

    window: SimulatedWindow
    peer: int
    moves: tuple[tuple[int, Copy], ...]
    is_reusable: bool = True
    to_all: bool = False

    def moved(self, by: Sequence[int]) -> "SimulatedPut":
        moves = tuple((address + step, copy) for (address, copy), step in zip(self.moves, by, strict=True))
        return replace(self, moves=moves)


class Cluster:
    """`world_size` ranks, their windows and their streams.

    piece_nbytes, rails, multicasts: as in `Transport`; the switch is emulated.
    """

    def __init__(
        self,
        world_size: int,
        *,
        in_order: bool = False,
        piece_nbytes: int | None = None,
        rails: tuple[Lane, ...] = ("rail",),
        multicasts: bool = False,
    ) -> None:
        self.world_size = world_size
        self.multicasts = multicasts
        self.in_order = in_order
        self.piece_nbytes = piece_nbytes
        self.rails = rails
        self.windows: list[list[SimulatedWindow]] = []
        self.streams: list[Stream] = []
        #: Memory that may be put from: uint8, by the address where it starts.
        self.sources: dict[int, torch.Tensor] = {}
        #: What went wrong; nothing may go on after it.
        self.failure: BaseException | None = None
        self.transports = [SimulatedTransport(self, rank) for rank in range(world_size)]

    def stream(self, name: str, transport: "SimulatedTransport") -> Stream:
        stream = Stream(name, transport)
        _streams[stream.handle] = stream
        self.streams.append(stream)
        return stream

    def may_put_from(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self.sources[tensor.data_ptr()] = as_bytes(tensor)

    def source(self, address: int, copy: Copy) -> torch.Tensor:
        """Where `copy` reads, (rows, width), for a source that starts at `address`."""
        for start, memory in self.sources.items():
            if start <= address and address + copy.src.end <= start + memory.numel():
                offset = address - start + copy.src_offset + memory.storage_offset()
                return torch.as_strided(memory, (copy.rows, copy.width), (copy.src_pitch, 1), offset)
        raise ScheduleError(f"{copy} reads memory that nobody owns")

    def window_of(self, tensor: torch.Tensor) -> SimulatedWindow | None:
        """The window that `tensor` lies in."""
        if tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        windows = (window for twins in self.windows for window in twins)
        return next((w for w in windows if w.address <= address < w.address + w.nbytes), None)

    # --- what happens next ---

    def call(self, function: Callable[["SimulatedTransport"], object], label: str) -> None:
        """Let every rank's host call `function` with its transport, each when it comes to it."""
        for transport in self.transports:
            transport.host.push(Operation(label, lambda t=transport: function(t), transport.host_is_free))  # type: ignore[misc]

    def rush(self, stream: Stream, count: int) -> None:
        """Let up to `count` operations of `stream` happen, and nothing else."""
        for _ in range(count):
            if not stream.is_runnable:
                return
            self._advance(stream)

    def mix(self, draw: Random, count: int | None = None) -> None:
        """Let `count` operations happen, None for all: always one of the stream that goes first of those that can.

        Which goes first is drawn now and then: some streams are far ahead of others, as few races show otherwise.
        """
        done = 0
        order: list[Stream] = []
        while count is None or done < count:
            if len(order) != len(self.streams) or draw.random() < 0.05:
                order = draw.sample(self.streams, len(self.streams))
            stream = next((stream for stream in order if stream.is_runnable), None)
            if stream is None:
                break
            self._advance(stream)
            done += 1
        if count is None and (stuck := [f"{s}: {s.queue[0].label}" for s in self.streams if s.queue]):
            self._fail(ScheduleError("nothing can happen any more:\n    " + "\n    ".join(stuck)))

    def _advance(self, stream: Stream) -> None:
        try:
            stream.advance()
        except BaseException as error:
            self._fail(error, stream)

    def _fail(self, error: BaseException, stream: Stream | None = None) -> None:
        self.failure = error
        if stream is not None:
            error.add_note(f"{stream}: {stream.queue[0].label}")
        raise error


class SimulatedTransport:
    """Rank `rank` of `cluster`."""

    name = "simulated"
    gave_up = False
    capture: int | None = None

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.world_size = cluster.world_size
        self.device = torch.device("cpu")
        self.piece_nbytes = cluster.piece_nbytes
        self.rails = cluster.rails
        self.multicasts = cluster.multicasts
        self.host = cluster.stream("host", self)
        self._streams: dict[str, Stream] = {}
        self._current = self._stream("compute")
        self._allocated = 0

    def _stream(self, name: str) -> Stream:
        name = "stream" if self.cluster.in_order else name
        if name not in self._streams:
            self._streams[name] = self.cluster.stream(name, self)
        return self._streams[name]

    def host_is_free(self) -> bool:
        return not self.cluster.in_order or not any(stream.queue for stream in self._streams.values())

    # --- what tests do beside the protocol ---

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Be a caller whose own stream is `name`: what torch's current stream is on a GPU."""
        outer, self._current = self._current, self._stream(name)
        try:
            yield
        finally:
            self._current = outer

    def enqueue(
        self,
        label: str,
        run: Callable[[], object],
        *,
        reads: Sequence[SimulatedWindow] = (),
        writes: Sequence[SimulatedWindow] = (),
    ) -> None:
        """Let `run` happen in the order that is current.

        reads, writes: own windows that it uses in their current turns.
        """
        uses = [(window, window.opened) for window in (*reads, *writes)]
        for window, turn in uses:
            window.to_come[turn] += 1

        def happen() -> None:
            for window, turn in uses[len(reads) :]:
                window.write(turn, f"'{label}' of rank {self.rank}")
            run()
            for window, turn in uses:
                window.to_come[turn] -= 1

        self._current.push(Operation(label, happen))

    # --- the protocol ---

    def allocate(self, nbytes: int, digest: str, what: str) -> SimulatedWindow:
        serial, self._allocated = self._allocated, self._allocated + 1
        if serial == len(self.cluster.windows):
            twins = [
                SimulatedWindow(
                    serial,
                    rank,
                    nbytes,
                    torch.full((nbytes,), POISON, dtype=torch.uint8),
                    [[0] * self.world_size for _ in range(COUNTERS)],
                )
                for rank in range(self.world_size)
            ]
            self.cluster.windows.append(twins)
            for window in twins:
                self.cluster.may_put_from(window.memory)
        window = self.cluster.windows[serial][self.rank]
        assert window.nbytes == nbytes
        return window

    def prepare(self, window: Window, peer: int, moves: Sequence[tuple[torch.Tensor, Copy]]) -> SimulatedPut:
        assert isinstance(window, SimulatedWindow)
        for source, copy in moves:
            if copy.dst.end > window.nbytes or copy.src.end > source.nbytes:
                raise IndexError(f"{copy} leaves its source of {source.nbytes} or its window of {window.nbytes} bytes")
        return SimulatedPut(window, peer, tuple((source.data_ptr(), copy) for source, copy in moves))

    def prepare_multicast(self, window: Window, moves: Sequence[tuple[torch.Tensor, Copy]]) -> SimulatedPut:
        assert self.multicasts
        require_one_row(moves)
        return replace(self.prepare(window, self.rank, moves), to_all=True)

    def everywhere(self, window: Window, offset: int, numel: int) -> list[torch.Tensor]:
        assert self.multicasts
        assert isinstance(window, SimulatedWindow)
        return [twin.tensor(offset, numel, torch.bfloat16) for twin in self.cluster.windows[window.serial]]

    def put(self, put: Put) -> None:
        assert isinstance(put, SimulatedPut)
        own, twins = put.window, self.cluster.windows[put.window.serial]
        twins = twins if put.to_all else [twins[put.peer]]
        turn = own.opened
        for address, copy in put.moves:
            source = self.cluster.source(address, copy)

            def happen(copy: Copy = copy, source: torch.Tensor = source) -> None:
                for twin in twins:
                    if twin is not own:
                        twin.write(turn, f"a put of rank {self.rank}")
                    to = torch.as_strided(twin.memory, (copy.rows, copy.width), (copy.dst_pitch, 1), copy.dst_offset)
                    to.copy_(source)

            # Where it starts in an own slot, that is in use until then.
            starts_in = self.cluster.window_of(source)
            reads = [] if starts_in is None else [starts_in]
            writes = [own] if own in twins else []
            label = f"put to {'all' if put.to_all else f'rank {put.peer}'}, turn {turn} of window {own.serial}"
            self.enqueue(label, happen, reads=reads, writes=writes)

    def signal(self, window: Window, peer: int, counter: int, value: int) -> None:
        assert isinstance(window, SimulatedWindow)
        if counter == READY:
            window.opened = value
        theirs = self.cluster.windows[window.serial][peer]

        def happen() -> None:
            before = theirs.counters[counter][self.rank]
            if value <= before:
                raise ScheduleError(f"counter {counter} of rank {self.rank} in {theirs} goes from {before} to {value}")
            theirs.counters[counter][self.rank] = value

        self._current.push(Operation(f"signal {counter} = {value} of window {window.serial} to rank {peer}", happen))

    def put_and_signal(self, put: Put, window: Window, peer: int, counter: int, value: int) -> None:
        self.put(put)
        self.signal(window, peer, counter, value)

    def wait(self, window: Window, peer: int, counter: int, value: int, what: str) -> None:
        assert isinstance(window, SimulatedWindow)
        words = window.counters[counter]
        label = f"{what} of rank {peer}: counter {counter} of window {window.serial} >= {value}"
        self._current.push(Operation(label, lambda: None, lambda: words[peer] >= value))

    def clear(self, window: Window, peer: int, counter: int) -> None:
        raise ScheduleError("nothing is captured here")

    @contextmanager
    def lane(self, name: Lane, *, joined: bool = True) -> Iterator[None]:
        joint = self.mark() if joined else None
        with self.calling(name):
            self.after(joint)
            yield

    @property
    def stream(self) -> int | None:
        return self._current.handle

    @contextmanager
    def here(self) -> Iterator[None]:
        at_work.append(self)
        try:
            yield
        finally:
            at_work.pop()

    def mark(self) -> Mark | None:
        # In order, marks cost nothing and say nothing, as on the host.
        return None if self.cluster.in_order else Point(self._current, self._current.issued)

    def after(self, mark: Mark | None) -> None:
        if mark is not None:
            assert isinstance(mark, Point)
            self._current.push(Operation(f"after {mark.count} of {mark.stream}", lambda: None, mark.is_reached))

    def abort(self, reason: str) -> None:
        raise ScheduleError(f"rank {self.rank} gives up: {reason}")

    def close(self) -> None:
        """Nothing to give back."""


#: Those in whose order torch itself works now, the innermost last.
at_work: list[SimulatedTransport] = []


class _OnStream:
    """A kernel that was prepared, to happen on the stream that it is started on. `run` is the real one."""

    is_reusable = False

    def __init__(
        self,
        run: Callable[[], object],
        label: str,
        reads: Sequence[Any],
        writes: Sequence[Any],
        everywhere: Sequence[Any] = (),
    ) -> None:
        """everywhere: what is read of windows, other ranks' as well as the own."""
        self._run, self._label = run, label
        self._reads, self._writes = reads, writes
        self._everywhere = everywhere

    def __call__(self, stream: int | None = None) -> None:
        assert stream is not None
        on = _streams[stream]
        cluster = on.transport.cluster
        windows = [
            list(dict.fromkeys(w for tensor in tensors if (w := cluster.window_of(tensor)) is not None))
            for tensors in (self._reads, self._writes)
        ]
        landed = [tensor for tensor in self._reads if cluster.window_of(tensor) is not None] + [*self._everywhere]
        twins = list(dict.fromkeys(w for tensor in self._everywhere if (w := cluster.window_of(tensor)) is not None))
        # All ranks number turns alike, and a host that is behind has not opened this one.
        turns = [(twin, cluster.windows[twin.serial][on.transport.rank].opened) for twin in twins]
        for twin, turn in turns:
            twin.to_come[turn] += 1

        def happen() -> None:
            for twin, turn in turns:
                twin.read(turn, f"'{self._label}' of rank {on.transport.rank}")
            self._run()
            # Nobody needs them any more.
            for tensor in landed:
                tensor.fill_(torch.nan)
            for twin, turn in turns:
                twin.to_come[turn] -= 1

        with on.transport.calling(on.name):
            on.transport.enqueue(self._label, happen, reads=windows[0], writes=windows[1])


@contextmanager
def kernels_on_streams() -> Iterator[None]:
    """Let the collectives' kernels happen in the order of their stream, as on a GPU. What they do is the real thing."""
    place, accumulate = all_gather.prepare_place, reduce_scatter.prepare_accumulate
    multimem = switch_reduce.prepare_multimem

    def prepare_place(sources: Any, places: Any) -> _OnStream:
        return _OnStream(place(sources, places), "cast", (), places)

    def prepare_accumulate(contributions: Any, outputs: Any, **options: Any) -> _OnStream:
        reads = [tensor for ranks in contributions for tensor in ranks]
        return _OnStream(accumulate(contributions, outputs, **options), "sum", reads, ())

    def prepare_multimem(sources: Any, outputs: Any, **options: Any) -> _OnStream:
        everywhere = [tensor for ranks in sources for tensor in ranks]
        return _OnStream(multimem(sources, outputs, **options), "switch sum", (), (), everywhere)

    with (
        mock.patch.object(switch_reduce, "prepare_multimem", prepare_multimem),
        mock.patch.object(all_gather, "prepare_place", prepare_place),
        mock.patch.object(reduce_scatter, "prepare_accumulate", prepare_accumulate),
    ):
        yield
