"""Turns over several nodes: what the steps of `layouts.queues` and `layouts.hierarchy` wait for, as words of a window.

| a step of turn n waits for    | and the other rank raises            | once                              |
|-------------------------------|--------------------------------------|-----------------------------------|
| nothing, before its first put | READY to n                           | its window is vacant              |
| "landed", count               | WRITTEN to n * PARTS + count         | so many of its puts are there     |
| "acknowledged", count         | ACKNOWLEDGED to n * PARTS + count    | so many puts have landed with it  |
| "vacated", count              | VACATED to n * PARTS + count         | it has given so many credits      |

What a rank waits for of itself is a mark, since nothing but its own lanes can be behind.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from tide_triton.layouts import Wait
from tide_triton.transports import ACKNOWLEDGED, VACATED, WRITTEN, Lane, Mark, Put, Transport
from tide_triton.windows import PARTS, Slot

_WORDS: Final[Mapping[str, int]] = {"landed": WRITTEN, "acknowledged": ACKNOWLEDGED, "vacated": VACATED}
_PHASES: Final[Mapping[str, str]] = {"landed": "data", "acknowledged": "acknowledgement", "vacated": "credit"}


def refuse_capture(transport: Transport, what: str) -> None:
    """Raise RuntimeError, for group and collective `what`, where a graph is being captured."""
    if transport.capture is not None:
        raise RuntimeError(
            f"{what} goes over several nodes and cannot be captured in a CUDA graph; capture it on one node (nodes="
            f"None), or capture the modules' computation only"
        )


class PacedTurn:
    """The next turn of `slot`, whose puts, acknowledgements and credits are counted one by one.

    what: the group and collective, for errors.
    sources: how often each rank puts into this rank's slot; only these are told that it is vacant.
    marks_vacancy: as for `Slot.open`.

    Raises RuntimeError where a graph is being captured.
    """

    def __init__(self, slot: Slot, what: str, sources: Mapping[int, int], *, marks_vacancy: bool = False) -> None:
        refuse_capture(slot.transport, what)
        self._transport = slot.transport
        self._window = slot.window
        self.turn = slot.open(what, sources=sources, marks_vacancy=marks_vacancy)
        #: By lane and word: up to where it has waited, which need not be waited for again.
        self._reached: dict[tuple[Lane, str, int], int] = defaultdict(int)
        #: By word of this rank: what its own waits are behind.
        self._marks: dict[str, list[Mark | None]] = defaultdict(list)
        self._given: dict[int, int] = defaultdict(int)

    def greet(self, lane: Lane, peer: int) -> None:
        """Until `peer`'s slot is vacant, in `lane`."""
        if not self._reached[lane, "ready", peer]:
            self._reached[lane, "ready", peer] = 1
            self.turn.await_credit(peer)

    def wait(self, lane: Lane, wait: Wait) -> None:
        """Until what `wait` says, in `lane`, which is the current one."""
        if wait.rank == self._transport.rank:
            self._transport.after(self._marks[wait.counter][wait.count - 1])
        elif self._reached[lane, wait.counter, wait.rank] < wait.count:
            self._reached[lane, wait.counter, wait.rank] = wait.count
            value, what = self.turn.number * PARTS + wait.count, f"{self.turn.what}: {_PHASES[wait.counter]}"
            self._transport.wait(self._window, wait.rank, _WORDS[wait.counter], value, what)

    def count(self, counter: str) -> None:
        """One more of what this rank itself waits for by `counter` is done."""
        self._marks[counter].append(self._transport.mark())

    def publish(self, peer: int, count: int, last: Put | None = None) -> None:
        """Tell `peer` that `count` puts to it are there. last: what is put just before, if not yet."""
        self.turn.publish(peer, count, last)

    def acknowledge(self, peer: int, count: int) -> None:
        """Tell `peer` that `count` of its puts are here."""
        self._transport.signal(self._window, peer, ACKNOWLEDGED, self.turn.number * PARTS + count)

    def vacate(self, rank: int) -> None:
        """Give `rank` one more credit, which may be this rank itself."""
        if rank == self._transport.rank:
            self.count("vacated")
            return
        self._given[rank] += 1
        self._transport.signal(self._window, rank, VACATED, self.turn.number * PARTS + self._given[rank])
