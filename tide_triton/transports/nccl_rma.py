"""NCCL's one-sided transfers between nodes: `put_signal` into windows, on a communicator of the transport's own.

The own node is reached as by `nccl`. For ranks of other nodes:

    data      put_signal from where it lies in a window, or from the staging (`over_nodes`)
    counters  the value is written to a word of the staging by the stream, and those eight bytes are put like data
    waits     on the word in this rank's window, by its stream, as everywhere: no NCCL signal is ever waited for

**Why a counter never overtakes data.** NCCL executes operations to one peer in one context in order, "both data
delivery and signal updates on the remote peer follow the program order" (user guide, one-sided communication), so the
word lands after whatever the same lane has put before. Within a machine it is also what happens: each put is a copy
enqueued on the lane's stream; over a network the stream goes on only once the network has confirmed a put. Each lane
has a context or a communicator of its own, so that this order is the lane's. (Contexts other than 0: NCCL >= 2.31.)

**Why not `wait_signal`.** It counts signals, and a counter here is a value that several puts or none have raised; the
watchdog cannot let go a stream that waits for NCCL's own word; and NCCL lets all operations of one communicator follow
each other, across streams, so a wait in one lane would hold up every put of the others.

That last also binds puts: one that stands behind a credit holds up later puts of other lanes. Since all of it is in the
order of the program, in which the host transport runs everything, nothing waits for itself; it costs overlap only. For
the same reason the communicators are not torch's: its collectives would be in that order too. There are three of them,
each with all windows: one for each rail's lane, one for whatever other lanes put and raise.

**Why two rails.** Between two puts of one lane the link is idle for 8 us, and for 20 to 30 while a kernel writes much:
for a stream write, and the eight bytes of a signal. Another lane's put goes on meanwhile.

Every put ends in a signal of NCCL's, since there is no put without one. They are counted up and never read.

The communicators are made for the first transport of a process group and kept as long as that, since destroying one
needs all ranks at once. No SM takes part.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, get_args

import torch
import torch.distributed as dist

from tide_triton.errors import TideError
from tide_triton.transports.base import Lane, Put, Window
from tide_triton.transports.device import DeviceWindow, SymmetricMemory
from tide_triton.transports.nccl import NcclTransport, Registered
from tide_triton.transports.over_nodes import OverNodes, Piece, RemotePut
from tide_triton.transports.rendezvous import Rendezvous

#: One context a lane, and one for whatever runs in none.
CONTEXTS: Final = 1 + len(get_args(Lane))
#: Bytes from one context's word to the next: no two in a line of any cache.
_WORD_PITCH = 128
#: Puts in one group, which must fit into the queues of NCCL's proxies together.
_GROUP = 16

#: Lanes with a communicator of their own, which is that of their place; all others share one more.
_RAILS: Final[tuple[Lane, ...]] = ("rail", "second_rail")

_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Any, ...]]" = weakref.WeakKeyDictionary()


class NcclRmaTransport(OverNodes, NcclTransport):
    """GPUs of `nodes` logical nodes, with windows registered with NCCL.

    Raises TideError where NCCL cannot put to other nodes.
    """

    name = "nccl_rma"
    reserved_nbytes = CONTEXTS * _WORD_PITCH
    rails = _RAILS

    def __init__(
        self, group: dist.ProcessGroup, rendezvous: Rendezvous, timeout_s: float, device: torch.device, nodes: int = 1
    ) -> None:
        self._span(nodes, rendezvous.world_size)
        #: By the address of this rank's memory, its windows' handles in each communicator.
        self._handles: dict[int, tuple[Any, ...]] = {}
        #: All but the first.
        self._others: tuple[Any, ...] = ()
        super().__init__(group, rendezvous, timeout_s, device)
        try:
            self._open_staging()
        except BaseException:
            self.close()
            raise

    def _communicate(self, group: dist.ProcessGroup, rendezvous: Rendezvous) -> Any:
        if self._topology.nodes == 1:
            return super()._communicate(group, rendezvous)
        known = rendezvous.exchange("yes" if group in _communicators else "", "looking for communicators")
        if not all(known):
            # A context takes memory of its own, and what only one lane uses needs but one.
            contexts = (*(1 for _ in _RAILS), CONTEXTS)
            _communicators[group] = tuple(self._new_communicator(rendezvous, count) for count in contexts)
        # Handles of windows pile up in the objects, so each transport has its own.
        first, *others = (self._nccl.Communicator(made.ptr) for made in _communicators[group])
        self._others = tuple(others)
        return first

    def _new_communicator(self, rendezvous: Rendezvous, contexts: int) -> Any:
        nccl = self._nccl
        identity = bytes(nccl.get_unique_id()).hex() if self.rank == 0 else ""
        identity = rendezvous.exchange(identity, "making a communicator")[0]
        config = nccl.NCCLConfig(num_rma_ctx=contexts)
        with torch.cuda.device(self.device):
            unique_id = nccl.UniqueId.from_bytes(bytes.fromhex(identity))
            communicator = nccl.Communicator.init(self.world_size, self.rank, unique_id, config)
        able = rendezvous.exchange("yes" if communicator.host_rma_support else "", "making a communicator")
        if not all(able):
            raise TideError(
                f"NCCL cannot put to other ranks' windows (host_rma_support is off on ranks "
                f"{[self.global_ranks[rank] for rank, is_able in enumerate(able) if not is_able]}); it needs NVLink "
                f"within, and InfiniBand or GDRCopy between machines; pass transport='nccl' on one machine"
            )
        return communicator

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        memory = super()._symmetric(nbytes)
        if not self._others:
            return memory
        last = memory.keep
        assert isinstance(last, Registered)
        handles = [last.window]
        for communicator in self._others:
            # Given back in the order opposite to that in which they were made.
            last = Registered(self._register(communicator, memory.own), last)
            handles.append(last.window)
        self._handles = {address: known for address, known in self._handles.items() if known[0].is_valid}
        self._handles[memory.addresses[self.rank]] = tuple(handles)
        return replace(memory, keep=last)

    def _address(self, window: Any, peer: int) -> int:
        # What is never used need not be there: nothing of another node is reached by its address.
        return 0 if self._is_remote(peer) else super()._address(window, peer)

    def _reads(self, peer: int, address: int, nbytes: int) -> bool:
        return self._place(address, nbytes) is not None

    def _put_pieces(self, window: DeviceWindow, peer: int, pieces: Sequence[Piece], stream: int) -> None:
        in_rails = (self._active is not None and self._active is self._streams.get(lane) for lane in _RAILS)
        which = next((number for number, is_in in enumerate(in_rails) if is_in), len(_RAILS))
        communicator = (self._communicator, *self._others)[which]
        handle = self._handles[window.addresses[self.rank]][which]
        context = 0 if which < len(_RAILS) else self._context()
        for first in range(0, len(pieces), _GROUP):
            some = pieces[first : first + _GROUP]
            with self._nccl.group() if len(some) > 1 else nullcontext():
                for piece in some:
                    communicator.put_signal(self._bytes(piece), peer, handle, piece.at, context=context, stream=stream)

    def put_and_signal(self, put: Put, window: Window, peer: int, counter: int, value: int) -> None:
        if not isinstance(put, RemotePut) or put.fillings:
            super().put_and_signal(put, window, peer, counter, value)
            return
        assert put.window is window
        # The word is written before the data go, and both are put in one call: the data are told of 3 us sooner.
        self._put_with_word(put.window, peer, put.pieces, self._counter_at(put.window, counter), self._cyclic(value))

    def _raise_remote(self, window: DeviceWindow, peer: int, at: int, value: int) -> None:
        self._put_with_word(window, peer, (), at, value)

    def _put_with_word(self, window: DeviceWindow, peer: int, pieces: Sequence[Piece], at: int, value: int) -> None:
        assert self._staging is not None
        stream, context = self._current(), self._context()
        word = self._staging.memory.data_ptr() + context * _WORD_PITCH
        with self._word_of(context, stream):
            self._write(word, value, stream)
            self._put_pieces(window, peer, [*pieces, Piece(word, at, self.word_nbytes)], stream.cuda_stream)

    @contextmanager
    def _word_of(self, context: int, stream: torch.cuda.Stream) -> Iterator[None]:
        """Lanes are in order with themselves; whatever runs in none may be on any stream."""
        if context:
            yield
            return
        with self._turn(stream):
            yield

    def _context(self) -> int:
        """The context of the lane we are in, 0 outside of any."""
        return next((n for n, stream in enumerate(self._streams.values(), 1) if stream is self._active), 0)

    def _bytes(self, piece: Piece) -> torch.Tensor:
        place = self._place(piece.address, piece.nbytes)
        assert place is not None
        window, start = place
        return window.memory[start : start + piece.nbytes]
