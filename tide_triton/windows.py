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
"""

from dataclasses import dataclass, field

from tide_triton.layouts import flat
from tide_triton.transports import READY, WRITTEN, Mark, Transport, Window

#: One more than the parts that a turn can have.
PARTS = 1 << 12


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
    _latest: "Turn | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.peers = flat(self.transport.world_size, self.transport.rank)

    def settle(self) -> None:
        """Until nothing of the latest turn is still on its way into this rank's slot."""
        if self._latest is not None and not self._latest.is_complete:
            with self.transport.lane("gather"):
                self._latest.await_data()
                arrived = self.transport.mark()
            self.transport.after(arrived)

    def vacate(self) -> None:
        """The latest turn's use of this slot ends here, in the order that is current."""
        self._vacant = self.transport.mark()

    def open(self, what: str, parts: int = 1) -> "Turn":
        """Start the next turn: tell every peer that this rank's slot is vacant.

        what: the group and collective, for errors.
        parts: in how many parts the peers will put, 1 to `PARTS - 1`.
        """
        if not 1 <= parts < PARTS:
            raise ValueError(f"parts must be 1 to {PARTS - 1}, got {parts}")
        # A gather that was issued and never waited for may still be coming in.
        self.settle()
        self.content = None
        self.transport.after(self._vacant)
        self.turn += 1
        for peer in self.peers:
            self.transport.signal(self.window, peer, READY, self.turn)
        self._latest = Turn(self, self.turn, what, parts)
        return self._latest

    def close(self) -> None:
        self._latest = None
        self.window.close()


@dataclass
class Turn:
    """One use of a slot, by every rank of its transport."""

    slot: Slot
    number: int
    what: str
    parts: int = 1
    is_complete: bool = field(default=False, init=False)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, in the order in which this one sends to them."""
        return self.slot.peers

    def await_credit(self, peer: int) -> None:
        """Until `peer`'s slot is vacant."""
        self.slot.transport.wait(self.slot.window, peer, READY, self.number, f"{self.what}: credit")

    def publish(self, peer: int, part: int = 1) -> None:
        """Tell `peer` that the first `part` parts for it are there."""
        self.slot.transport.signal(self.slot.window, peer, WRITTEN, self.number * PARTS + part)

    def await_part(self, part: int) -> None:
        """Until the first `part` parts from every peer are there."""
        for peer in self.peers:
            self.slot.transport.wait(self.slot.window, peer, WRITTEN, self.number * PARTS + part, f"{self.what}: data")

    def await_data(self) -> None:
        """Until everything for this rank is there. Waits once, however often it is called."""
        if not self.is_complete:
            self.await_part(self.parts)
            self.is_complete = True


class SlotPool:
    """The slots of one transport. Every rank adds the same slots in the same order."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.slots: list[Slot] = []
        self._added = 0
        self._landing: Slot | None = None

    def add(self, nbytes: int, digest: str, what: str) -> Slot:
        """A new slot of `nbytes` bytes. Raises what `Transport.allocate` raises."""
        slot = Slot(self.transport, self.transport.allocate(nbytes, digest, what), f"slot {self._added}")
        self._added += 1
        self.slots.append(slot)
        return slot

    def landing(self, nbytes: int, digest: str) -> Slot:
        """A slot in which no group's parameters live, for gradients that cannot land in their group's own.

        Grows to the largest landing asked for, and stays.
        """
        if self._landing is None or self._landing.window.nbytes < nbytes:
            # The new one first: making it waits until nothing is on its way into the old one, or being read from it.
            outgrown, self._landing = self._landing, self.add(nbytes, digest, "the landing of gradients")
            self._landing.label = "landing"
            if outgrown is not None:
                self.slots.remove(outgrown)
                outgrown.close()
        return self._landing

    @property
    def nbytes(self) -> int:
        """Bytes of all windows on this rank."""
        return sum(slot.window.nbytes for slot in self.slots)

    def close(self) -> None:
        """Give every window back, and the transport. Idempotent."""
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        self._landing = None
        self.transport.close()
