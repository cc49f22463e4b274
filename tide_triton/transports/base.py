"""The protocol between collectives and transports.

A *window* is memory of the same size on every rank, into which the others may put. It carries counters of each peer,
held in the memory of the rank that waits for them, and these only grow:

    READY         the peer's window is vacant for turn n: you may put into it (a credit)
    WRITTEN       the peer has put everything it had for turn n into yours
    ACKNOWLEDGED  so many of your puts have landed there         } where puts are paced one by one: over several nodes
    VACATED       so many credits for single places of its window }

`put`, `signal` and `wait` keep their order: on a GPU the order of the current stream, on the host that of the calls.
Lanes let them run beside the caller: on a GPU a lane is a stream of the transport's own, on the host there is but one
order, and lanes and marks cost nothing.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal, Protocol

import torch

from tide_triton.kernels.multimem import Source
from tide_triton.layouts import Copy

READY: Final = 0
WRITTEN: Final = 1
#: The same for turns in a captured graph, replayed with the values they were captured with: whoever has waited for one
#: clears it, before it does what the peer waits for before it raises it again.
CAPTURED_READY: Final = 2
CAPTURED_WRITTEN: Final = 3
ACKNOWLEDGED: Final = 4
VACATED: Final = 5
#: How many kinds of counter a window has.
COUNTERS: Final = 6

#: What runs beside the caller, each in an order of its own.
Lane = Literal[
    "gather",
    "cast",
    "reduce",
    "sum",
    "rail",
    "second_rail",
    "signals",
    "receipts",
    "local_receipts",
    "unpack",
    "final",
]


class Mark(Protocol):
    """A point in a lane's or the caller's order, after which another may go on."""


class Put(Protocol):
    """Copies that a transport has prepared, to be made any number of times while their memory stays where it is."""

    @property
    def is_reusable(self) -> bool:
        """Whether it holds addresses only, and keeps no tensor alive."""
        ...

    def moved(self, by: Sequence[int]) -> "Put":
        """The same copies from sources that lie `by` bytes further on, given per copy; only where reusable."""
        ...


class Window(Protocol):
    """Memory of `nbytes` bytes on this rank, with a twin on every other."""

    @property
    def nbytes(self) -> int: ...

    @property
    def memory(self) -> torch.Tensor:
        """This rank's bytes: uint8, shape (nbytes,)."""
        ...

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """This rank's bytes from `offset` on as a 1-D tensor, in a storage of its own of exactly that size."""
        ...

    def close(self) -> None:
        """Give the memory back, once no tensor refers to it. Idempotent."""
        ...


class Transport(Protocol):
    """Moves bytes between the ranks of one group."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, nbytes: int, digest: str, what: str) -> Window:
        """A new window of `nbytes` bytes. Every rank calls this in the same order.

        digest: up to 16 hex digits that stand for what the window will hold, compared between ranks.
        what: names the window in errors.

        Raises MismatchError where ranks differ in size or digest, SharedMemoryError on every rank where one of them
        has no memory for it, PeerError where one does not answer.
        """
        ...

    def prepare(self, window: Window, peer: int, moves: Sequence[tuple[torch.Tensor, Copy]]) -> Put:
        """Copies into `peer`'s window, each from its own source (contiguous, any dtype; offsets in bytes).

        Raises IndexError where a copy leaves its source or the window.
        """
        ...

    @property
    def multicasts(self) -> bool:
        """Whether a switch between the ranks takes part: one put reaches every window, and sums are made on the way.

        The same on every rank, and only where it was asked for when the transport was made.
        """
        ...

    def prepare_multicast(self, window: Window, moves: Sequence[tuple[torch.Tensor, Copy]]) -> Put:
        """Copies to the same place of every rank's window at once, this rank's own included.

        Only where the transport `multicasts`; otherwise as `prepare`. A source may be that very place of the own
        window, which is then written with what it holds. Copies are of one row: what copies rows need not be an engine,
        and only an engine may write to a multicast address. Not to be put while a CUDA graph is captured.

        Raises IndexError where a copy leaves its source or the window, ValueError for one of several rows.
        """
        ...

    def everywhere(self, window: Window, offset: int, numel: int) -> Source:
        """What every rank's window holds from byte `offset` (a multiple of 16) on, `numel` bf16 elements, to be summed.

        Only where the transport `multicasts`: a multicast range, or every rank's bytes where the switch is emulated.
        Raises IndexError where they leave the window.
        """
        ...

    def put(self, put: Put) -> None:
        """Make what was prepared happen."""
        ...

    def signal(self, window: Window, peer: int, counter: int, value: int) -> None:
        """Raise `peer`'s `counter` of this rank to `value`, after everything put to it before."""
        ...

    def put_and_signal(self, put: Put, window: Window, peer: int, counter: int, value: int) -> None:
        """`put`, which is for `peer`, and then `signal`: at once where a library can."""
        ...

    def wait(self, window: Window, peer: int, counter: int, value: int, what: str) -> None:
        """Until this rank's `counter` of `peer` is at least `value`.

        what: the group and phase, for errors. Raises PeerError when the peer has died, given up or been too slow.
        """
        ...

    def clear(self, window: Window, peer: int, counter: int) -> None:
        """Set this rank's `counter` of `peer` back to 0, for turns in a captured graph."""
        ...

    @property
    def capture(self) -> int | None:
        """Which CUDA graph is being captured in the order that is current, None while none is."""
        ...

    @property
    def piece_nbytes(self) -> int | None:
        """Bytes of the smallest piece in which collectives should go, None for all at once."""
        ...

    @property
    def rails(self) -> tuple[Lane, ...]:
        """Lanes in which puts to another node best go beside each other: "rail", and others where it gains by them."""
        ...

    def lane(self, name: Lane, *, joined: bool = True) -> AbstractContextManager[None]:
        """Run what is inside in `name`'s order.

        joined: after everything the caller has done so far too; else only after what the lane itself has done.
        """
        ...

    @property
    def stream(self) -> int | None:
        """The handle of the stream that is current, for kernels; None where there are no streams."""
        ...

    def here(self) -> AbstractContextManager[None]:
        """Let torch itself allocate and work in the order that is current; at once where a graph is being captured."""
        ...

    def mark(self) -> Mark | None:
        """Everything done so far, in the order that is current."""
        ...

    def after(self, mark: Mark | None) -> None:
        """Go on, in the order that is current, only after `mark`."""
        ...

    @property
    def gave_up(self) -> bool:
        """Whether a PeerError has made this transport unusable."""
        ...

    def abort(self, reason: str) -> None:
        """Tell every peer that this rank gives up, so that they raise instead of waiting."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


def no_multicast(name: str) -> str:
    """Why a transport called `name` does not multicast, where it never does."""
    return f"the transport '{name}' does not multicast"


def require_switch(transport: Transport) -> None:
    """Raise RuntimeError where `transport` does not multicast."""
    if not transport.multicasts:
        raise RuntimeError(f"{no_multicast(transport.name)}: see Transport.multicasts")


def require_inside(nbytes: int, offset: int, numel: int, dtype: torch.dtype) -> None:
    """Raise IndexError where `numel` elements at byte `offset` leave a window of `nbytes` bytes."""
    if offset < 0 or offset + numel * dtype.itemsize > nbytes:
        raise IndexError(f"{numel} x {dtype} at byte {offset} lie outside a window of {nbytes} bytes")


def require_one_row(moves: Sequence[tuple[torch.Tensor, Copy]]) -> None:
    """Raise ValueError where a copy, meant for every window at once, has several rows."""
    for _, copy in moves:
        if copy.rows > 1:
            raise ValueError(f"{copy} has several rows; put it to each rank")
