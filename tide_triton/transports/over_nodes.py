"""What transports share that reach the ranks of other nodes by a library's puts, and those of their own by copy engine.

Ranks are node-major, as in `layouts.topology`; nodes may be logical, several of them on one machine. For a put to
another node, what it reads decides the way:

    contiguous, and where the library can read it       one put
    rows that stay rows, where the library can read it  a put a row
    anything else                                       copied into the staging, and put from there, filling by filling

Libraries read only symmetric memory over a network, and gradients lie elsewhere. The staging is a window of
`STAGING_NBYTES` bytes, the only one of its transport, whatever the groups; all lanes use it, one after the other.

Counters and waits are those of `DeviceTransport`: a counter of another node's rank is raised by the library, after
everything put on the same stream, and waited for in this rank's memory by its stream. They have 64 bits, which never
wrap around: some are raised by large groups only, and with 32 bits half a million turns of small ones would let the
next wait for one of them pass.
"""

import abc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from tide_triton.copy_engine import AddressedCopy, Batch, batch
from tide_triton.errors import SpecError
from tide_triton.layouts import Copy, Topology
from tide_triton.transports.base import Put, Window, no_multicast
from tide_triton.transports.device import DeviceTransport, DeviceWindow

#: Bytes of the staging: as large as a chunk that leaves a node by default.
STAGING_NBYTES: Final = 32 << 20
#: Staged bytes lie as their destination does to this alignment, so that copies and puts can be wide.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` contiguous bytes at `address` of this rank, for byte `at` of a peer's window, counters included."""

    address: int
    at: int
    nbytes: int


#: What to copy into the staging, and what to put from there. The batch's `order` numbers the copies of the whole put.
Filling = tuple[Batch, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class RemotePut:
    """Pieces to put from where they are, then fillings of the staging. Holds addresses only.

    moves: what it was prepared from: the address that a copy's `src_offset` counts from, and the copy.
    owners: of each piece, its number among them.
    """

    transport: "OverNodes"
    window: DeviceWindow
    peer: int
    moves: tuple[tuple[int, Copy], ...]
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]
    fillings: tuple[Filling, ...]
    is_reusable: bool = True

    def moved(self, by: Sequence[int]) -> "RemotePut":
        moves = tuple((address + step, copy) for (address, copy), step in zip(self.moves, by, strict=True))
        if not all(self.transport.reads(self.peer, *moves[owner]) for owner in self.owners):
            # What was put from where it was must go through the staging now.
            return self.transport.remote_put(self.window, self.peer, moves)
        pieces = tuple(
            replace(piece, address=piece.address + by[owner])
            for piece, owner in zip(self.pieces, self.owners, strict=True)
        )
        filled = tuple((filling.moved(by), staged) for filling, staged in self.fillings)
        return replace(self, moves=moves, pieces=pieces, fillings=filled)


class OverNodes(DeviceTransport):
    """GPUs of logical nodes. A subclass calls `_span` first in its constructor, and `_open_staging` last."""

    word_nbytes = 8
    #: Bytes at the start of the staging that are the subclass's own.
    reserved_nbytes = 0

    def _span(self, nodes: int, world_size: int) -> None:
        if nodes < 1 or world_size % nodes:
            raise SpecError(f"nodes={nodes} does not divide {world_size} ranks")
        self._topology = Topology(nodes, world_size // nodes)
        self._staging: DeviceWindow | None = None
        self._turn_event: torch.cuda.Event | None = None
        self._turn_stream: torch.cuda.Stream | None = None

    def _open_staging(self) -> None:
        if self._topology.nodes > 1:
            self._staging = self.allocate(self.reserved_nbytes + STAGING_NBYTES, "0", "the staging of puts")

    @abc.abstractmethod
    def _reads(self, peer: int, address: int, nbytes: int) -> bool:
        """Whether the library can put these bytes of this rank to `peer` from where they are."""

    @abc.abstractmethod
    def _put_pieces(self, window: DeviceWindow, peer: int, pieces: Sequence[Piece], stream: int) -> None:
        """Put all of them; what follows on `stream` may overwrite them, and what it puts and raises comes after."""

    @abc.abstractmethod
    def _raise_remote(self, window: DeviceWindow, peer: int, at: int, value: int) -> None:
        """Set the counter at byte `at` of `peer`'s window, after everything put on the current stream."""

    def why_no_multicast(self) -> str | None:
        # Also where the own node's library could: a switch reaches no other node.
        return no_multicast(self.name)

    def prepare(self, window: Window, peer: int, moves: Sequence[tuple[torch.Tensor, Copy]]) -> Put:
        if not self._is_remote(peer):
            return super().prepare(window, peer, moves)
        assert isinstance(window, DeviceWindow)
        window.check(moves)
        return self.remote_put(window, peer, tuple((source.data_ptr(), copy) for source, copy in moves))

    def remote_put(self, window: DeviceWindow, peer: int, moves: tuple[tuple[int, Copy], ...]) -> RemotePut:
        """moves: as for `RemotePut`."""
        assert self._staging is not None
        pieces: list[Piece] = []
        owners: list[int] = []
        indirect: dict[int, AddressedCopy] = {}
        for number, (address, copy) in enumerate(moves):
            where_it_is = direct(window.header, address, copy)
            if where_it_is is not None and self.reads(peer, address, copy):
                pieces += where_it_is
                owners += [number] * len(where_it_is)
            else:
                indirect[number] = (window.header, address, copy)
        area = self._staging.memory.data_ptr() + self.reserved_nbytes
        filled = fillings(list(indirect.values()), area, STAGING_NBYTES, list(indirect))
        return RemotePut(self, window, peer, moves, tuple(pieces), tuple(owners), filled)

    def reads(self, peer: int, address: int, copy: Copy) -> bool:
        """Whether the library can put to `peer` all that `copy` reads, from `address` on, from where it is."""
        return self._reads(peer, address + copy.src_offset, _extent(copy))

    def put(self, put: Put) -> None:
        if not isinstance(put, RemotePut):
            super().put(put)
            return
        stream = self._current()
        if put.pieces:
            self._put_pieces(put.window, put.peer, put.pieces, stream.cuda_stream)
        for filling, pieces in put.fillings:
            with self._turn(stream):
                self._engine.copy(filling, stream.cuda_stream)
                self._put_pieces(put.window, put.peer, pieces, stream.cuda_stream)

    def _raise(self, window: DeviceWindow, peer: int, counter: int, value: int) -> None:
        if not self._is_remote(peer):
            super()._raise(window, peer, counter, value)
            return
        self._raise_remote(window, peer, self._counter_at(window, counter), value)

    def _counter_at(self, window: DeviceWindow, counter: int) -> int:
        """The byte of every rank's window at which it has this rank's `counter`."""
        return window.word(self.rank, self.rank, counter) - window.addresses[self.rank]

    def close(self) -> None:
        super().close()
        if self._staging is not None:
            self._staging.close()

    def _is_remote(self, peer: int) -> bool:
        return self._topology.node(peer) != self._topology.node(self.rank)

    def _place(self, address: int, nbytes: int) -> tuple[DeviceWindow, int] | None:
        """The window of this rank in whose data these bytes lie, and from where on."""
        for window in self._windows:
            if not window.is_open:
                continue
            # A library may have mapped the memory a second time, for windows.
            for start in (window.memory.data_ptr(), window.addresses[self.rank] + window.header):
                if start <= address and address + nbytes <= start + window.nbytes:
                    return window, address - start
        return None

    @contextmanager
    def _turn(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """What is enqueued within uses the staging, after whatever else has used it."""
        if self._turn_event is None:
            self._turn_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif self._turn_stream is not stream:
            stream.wait_event(self._turn_event)
        try:
            yield
        finally:
            self._turn_event.record(stream)
            self._turn_stream = stream


def direct(at: int, address: int, copy: Copy) -> list[Piece] | None:
    """`copy` as pieces that are read where they are; None where fewer are needed once its rows lie side by side.

    at: the byte of the peer's window that `dst_offset` counts from. address: likewise for `src_offset`.
    """
    source, destination = address + copy.src_offset, at + copy.dst_offset
    if copy.rows == 1 or copy.src_pitch == copy.dst_pitch == copy.width:
        return [Piece(source, destination, copy.nbytes)]
    if copy.dst_pitch == copy.width:
        return None
    rows = range(copy.rows)
    return [Piece(source + row * copy.src_pitch, destination + row * copy.dst_pitch, copy.width) for row in rows]


def fillings(
    copies: Sequence[AddressedCopy], area: int, nbytes: int, numbers: Sequence[int] | None = None
) -> tuple[Filling, ...]:
    """`copies` by way of `nbytes` bytes at `area`. Rows come to lie side by side there, and neighbours go as one piece.

    copies: as (the byte of the peer's window that `dst_offset` counts from, the address that `src_offset` does, copy).
    numbers: by which the batches' `order` names them; None for their places.
    """
    done: list[Filling] = []
    into: list[AddressedCopy] = []
    owners: list[int] = []
    out: list[Piece] = []
    filled = 0

    def filling() -> Filling:
        made = batch(into)
        return replace(made, order=tuple(owners[number] for number in made.order)), tuple(out)

    for number, (at, address, copy) in zip(range(len(copies)) if numbers is None else numbers, copies, strict=True):
        for part in _cut(copy, nbytes - _ALIGNMENT):
            to = at + part.dst_offset
            start = filled + (to - area - filled) % _ALIGNMENT
            if start + part.nbytes > nbytes:
                done.append(filling())
                into, owners, out = [], [], []
                start = (to - area) % _ALIGNMENT
            width, pitch = part.width, part.src_pitch
            # Rows that lie side by side are copied as one.
            row = _flat(part.src_offset, start, part.nbytes)
            into.append(
                (area, address, row if pitch == width else Copy(part.src_offset, start, part.rows, width, pitch, width))
            )
            owners.append(number)
            staged = Copy(start, part.dst_offset, part.rows, width, width, part.dst_pitch)
            for piece in direct(at, area, staged) or ():
                _append(out, piece)
            filled = start + part.nbytes
    if into:
        done.append(filling())
    return tuple(done)


def _append(pieces: list[Piece], piece: Piece) -> None:
    if pieces:
        last = pieces[-1]
        if last.address + last.nbytes == piece.address and last.at + last.nbytes == piece.at:
            pieces[-1] = Piece(last.address, last.at, last.nbytes + piece.nbytes)
            return
    pieces.append(piece)


def _cut(copy: Copy, most: int) -> Iterator[Copy]:
    """`copy` in parts of at most `most` bytes: some of its rows each, or bytes of one row."""
    if copy.width <= most and copy.rows > 1:
        rows = most // copy.width
        for row in range(0, copy.rows, rows):
            yield Copy(
                copy.src_offset + row * copy.src_pitch,
                copy.dst_offset + row * copy.dst_pitch,
                min(rows, copy.rows - row),
                copy.width,
                copy.src_pitch,
                copy.dst_pitch,
            )
        return
    for row in range(copy.rows):
        for start in range(0, copy.width, most):
            yield _flat(
                copy.src_offset + row * copy.src_pitch + start,
                copy.dst_offset + row * copy.dst_pitch + start,
                min(most, copy.width - start),
            )


def _flat(src_offset: int, dst_offset: int, nbytes: int) -> Copy:
    return Copy(src_offset, dst_offset, 1, nbytes, nbytes, nbytes)


def _extent(copy: Copy) -> int:
    """Bytes from the first that `copy` reads to the last."""
    return copy.src.end - copy.src_offset
