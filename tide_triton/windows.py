"""Slots: symmetric windows that groups take in turns.

Every use of a slot, for a gather or for incoming gradients, is one *turn*, numbered from 1. The ranks use a slot in the
same order, so that a turn has the same number everywhere. In turn n:

    owner                               peer
    my slot is vacant   READY = n  -->  waits for READY >= n   (the credit)
                                        puts
    waits               <-- WRITTEN = n
    uses what came

A rank raises READY for turn n only after its last use of turn n - 1, so nobody is ever overwritten. A turn may come in
parts: WRITTEN counts n * PARTS + the parts that are there.

Turns in a captured graph cannot be counted, since each replay is one more. They have words of their own, which hold no
turn and which the waiting side clears: READY is 1 and WRITTEN the parts that are there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tide_triton.layouts import flat
from tide_triton.layouts.pacing import COUNTED
from tide_triton.transports import CAPTURED_READY, CAPTURED_WRITTEN, READY, WRITTEN, Mark, Put, Transport, Window

#: One more than the parts that a turn can have.
PARTS = COUNTED + 1


@dataclass(eq=False)
class Slot:
    """One window of a transport, and how far its turns have come.

    label: what it is called in reports, e.g. "slot 2".
    content: whose gathered tensors lie here whole, None for nobody's.
    """

    transport: Transport
    window: Window
    label: str
    turn: int = field(default=0, init=False)
    peers: tuple[int, ...] = field(init=False)
    content: object = field(default=None, init=False)
    _vacant: Mark | None = field(default=None, init=False)
    _readers: list[Mark | None] = field(default_factory=list, init=False)
    _latest: "Turn | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.peers = flat(self.transport.world_size, self.transport.rank)

    def settle(self) -> None:
        """Until nothing of the latest turn is still on its way into this rank's slot.

        Waits in the order that is current, once for each turn: whoever opens the next one must follow that order.
        """
        latest = self._latest
        # What a graph gathers is waited for in that graph.
        if latest is not None and not latest.is_complete and latest.capture == self.transport.capture:
            with self.transport.lane("gather"):
                latest.await_data()
                arrived = self.transport.mark()
            self.transport.after(arrived)

    def vacate(self) -> Mark | None:
        """The latest turn's use of this slot ends here, in the order that is current. Returns the mark of it."""
        self._vacant = self.transport.mark()
        return self._vacant

    def await_vacant(self) -> None:
        """Until nobody reads this slot any more, for a use that is no turn."""
        self.transport.after(self._vacant)
        for mark in self._readers:
            self.transport.after(mark)

    def read_until(self, mark: Mark | None) -> None:
        """Others than the turn's user read this slot until `mark`, whenever it is vacated."""
        self._readers.append(mark)

    def open(
        self, what: str, parts: int = 1, sources: Mapping[int, int] | None = None, *, marks_vacancy: bool = False
    ) -> "Turn":
        """Start the next turn: tell every peer that this rank's slot is vacant.

        what: the group and collective, for errors.
        parts: in how many parts the peers will put, 1 to `PARTS - 1`.
        sources: who will put, and in how many parts each; None for all peers, in `parts` parts. Only they are told.
        marks_vacancy: whether the turn is to know when this rank may write into the slot, where telling takes its time.
        """
        if not 1 <= parts < PARTS:
            raise ValueError(f"parts must be 1 to {PARTS - 1}, got {parts}")
        # A gather that was issued and never waited for may still be coming in.
        self.settle()
        self.content = None
        self.await_vacant()
        self._readers.clear()
        vacant = self.transport.mark() if marks_vacancy else None
        capture = self.transport.capture
        if capture is None:
            self.turn += 1
        counter, value = (READY, self.turn) if capture is None else (CAPTURED_READY, 1)
        for peer in self.peers if sources is None else sources:
            self.transport.signal(self.window, peer, counter, value)
        self._latest = Turn(self, self.turn, what, parts, capture, sources, vacant)
        return self._latest

    def close(self) -> None:
        self._latest = None
        self.window.close()


@dataclass
class Turn:
    """One use of a slot, by every rank of its transport.

    capture: the CUDA graph that it is captured in, None for one that happens now.
    sources: as for `Slot.open`.
    vacant: from where on this rank may write into the slot, where it was asked to be marked.
    """

    slot: Slot
    number: int
    what: str
    parts: int = 1
    capture: int | None = None
    sources: Mapping[int, int] | None = None
    vacant: Mark | None = None
    is_complete: bool = field(default=False, init=False)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, in the order in which this one sends to them."""
        return self.slot.peers

    def await_credit(self, peer: int) -> None:
        """Until `peer`'s slot is vacant."""
        transport, window, what = self.slot.transport, self.slot.window, f"{self.what}: credit"
        if self.capture is None:
            transport.wait(window, peer, READY, self.number, what)
        else:
            transport.wait(window, peer, CAPTURED_READY, 1, what)
            transport.clear(window, peer, CAPTURED_READY)

    def publish(self, peer: int, part: int = 1, last: Put | None = None) -> None:
        """Tell `peer` that the first `part` parts for it are there. last: what is put just before, if not yet."""
        transport, window = self.slot.transport, self.slot.window
        counter, value = CAPTURED_WRITTEN, part
        if self.capture is None:
            counter, value = WRITTEN, self.number * PARTS + part
        if last is None:
            transport.signal(window, peer, counter, value)
        else:
            transport.put_and_signal(last, window, peer, counter, value)

    def await_part(self, part: int) -> None:
        """Until the first `part` parts from every peer are there."""
        for peer in self.peers:
            self.await_from(peer, part)

    def await_data(self) -> None:
        """Until everything for this rank is there. Waits once, however often it is called."""
        if self.is_complete:
            return
        sources = dict.fromkeys(self.peers, self.parts) if self.sources is None else self.sources
        for peer, parts in sources.items():
            self.await_from(peer, parts)
        self.is_complete = True

    def await_from(self, peer: int, part: int) -> None:
        """Until the first `part` parts from `peer` are there."""
        transport, window, what = self.slot.transport, self.slot.window, f"{self.what}: data"
        if self.capture is None:
            transport.wait(window, peer, WRITTEN, self.number * PARTS + part, what)
            return
        transport.wait(window, peer, CAPTURED_WRITTEN, part, what)
        if part == self.parts:
            transport.clear(window, peer, CAPTURED_WRITTEN)


@dataclass(eq=False)
class Ring:
    """Chunks that pieces of reductions take in turns: each use of a chunk is a turn of its own.

    Bytes in flight are bounded by the ring, whatever the group and the world, and a piece waits only for the piece
    that had its chunk before.
    """

    chunks: tuple[Slot, ...]
    _next: int = field(default=0, init=False)

    @property
    def transport(self) -> Transport:
        return self.chunks[0].transport

    @property
    def chunk_nbytes(self) -> int:
        return self.chunks[0].window.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks on this rank."""
        return sum(chunk.window.nbytes for chunk in self.chunks)

    def take(self, count: int) -> list[Slot]:
        """The chunks of the next `count` pieces, in order. Every rank takes them in the same order."""
        taken = [self.chunks[(self._next + number) % len(self.chunks)] for number in range(count)]
        self._next = (self._next + count) % len(self.chunks)
        return taken


class SlotPool:
    """The slots of one transport. Every rank adds the same slots in the same order."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.slots: list[Slot] = []
        self._added = 0
        self._ring: Ring | None = None

    def add(self, nbytes: int, digest: str, what: str) -> Slot:
        """A new slot of `nbytes` bytes. Raises what `Transport.allocate` raises."""
        slot = Slot(self.transport, self.transport.allocate(nbytes, digest, what), f"slot {self._added}")
        self._added += 1
        self.slots.append(slot)
        return slot

    def ring(self, chunk_nbytes: int, depth: int, digest: str) -> "Ring":
        """The ring of this transport, made when it is first asked for. Raises what `Transport.allocate` raises."""
        if self._ring is None:
            chunks = [self.add(chunk_nbytes, digest, f"chunk {number} of the ring") for number in range(depth)]
            for number, chunk in enumerate(chunks):
                chunk.label = f"chunk {number}"
            self._ring = Ring(tuple(chunks))
        return self._ring

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the ring on this rank, 0 where there is none yet."""
        return 0 if self._ring is None else self._ring.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all windows on this rank."""
        return sum(slot.window.nbytes for slot in self.slots)

    def close(self) -> None:
        """Give every window back, and the transport. Idempotent."""
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        self._ring = None
        self.transport.close()
