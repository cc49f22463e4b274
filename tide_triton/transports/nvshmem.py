"""Windows in NVSHMEM's symmetric heap, puts and signals between nodes by NVSHMEM's operations on streams.

The own node is reached by copy engine, at the pointers that NVSHMEM gives. For ranks of other nodes, by pointer, on the
lane's stream:

|          | peer's memory is mapped here (one machine or NVLink domain)    | it is not (InfiniBand and the like)  |
|----------|----------------------------------------------------------------|--------------------------------------|
| data     | putmem_on_stream: a copy by copy engine, on that stream        | putmem_nbi_on_stream, one a piece,   |
|          |                                                                | then quiet_on_stream                 |
| counters | signal_op_on_stream, SET: a 64-bit stream write to the peer    | the same: an atomic of the network   |
| SMs      | none                                                           | a kernel of one block for each call  |

Waits are on a counter in this rank's window, by its stream, as everywhere.

**Why a counter never overtakes data.** Mapped, both are work of one stream. `putmem_nbi` would not be: it moves the
copy to a stream of NVSHMEM's own, one for all lanes, behind which only `quiet` gets, for all of them at once; so the
blocking variant, which blocks the stream only, is the better one. Over a network `quiet` holds the stream until
everything put is there. (`putmem_signal` orders its signal after its own data alone, and `fence` has no variant on
streams.)

What is read over a network must lie in the heap, so gradients go through the staging (`over_nodes`) there; mapped
peers are put to from anywhere.

Signals are 64-bit words, and a stream can wait for 32: counters lie 8 bytes apart, little-endian, and the upper half
stays zero. (NVSHMEM's own wait is a kernel, on GPUs that cannot flush writes of others.)

NVSHMEM serves one set of ranks per process at a time, and one thread at a time: see `nvshmem_runtime`.
"""

from collections.abc import Sequence

import torch

from tide_triton.errors import TideError
from tide_triton.transports import nvshmem_runtime
from tide_triton.transports.device import DeviceWindow, Raw, SymmetricMemory
from tide_triton.transports.nvshmem_runtime import Runtime
from tide_triton.transports.over_nodes import OverNodes, Piece
from tide_triton.transports.rendezvous import Rendezvous


class NvshmemTransport(OverNodes):
    """GPUs of `nodes` logical nodes, with windows in NVSHMEM's heap.

    heap_nbytes: as for `nvshmem_runtime.enter`.

    Raises TideError, on every rank, where NVSHMEM cannot be had between these ranks.
    """

    name = "nvshmem"

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        device: torch.device,
        nodes: int = 1,
        heap_nbytes: int | None = None,
    ) -> None:
        self._span(nodes, rendezvous.world_size)
        self._meeting = rendezvous
        self._runtime: Runtime | None = None
        #: Ranks whose memory is mapped here, this one among them.
        self._mapped: frozenset[int] = frozenset()
        super().__init__(rendezvous, timeout_s, device)
        try:
            self._runtime = nvshmem_runtime.enter(rendezvous, device, heap_nbytes)
            self._bindings = self._runtime.bindings
            self._open_staging()
        except BaseException:
            self.close()
            raise

    def _taken(self, nbytes: int) -> int:
        return nbytes + nvshmem_runtime.GRANULARITY

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        assert self._runtime is not None
        address, block = self._runtime.allocate(nbytes, self._meeting)
        own = torch.as_tensor(Raw(address, nbytes, block), device=self.device)
        pointers = [self._bindings.ptr(address, peer) for peer in range(self.world_size)]
        self._mapped = frozenset(peer for peer, pointer in enumerate(pointers) if pointer)
        unreachable = [peer for peer in range(self.world_size) if not (self._is_remote(peer) or peer in self._mapped)]
        if unreachable:
            raise TideError(
                f"NVSHMEM gives no pointer to the memory of ranks {[self.global_ranks[peer] for peer in unreachable]}, "
                f"which are of this node; pass the number of nodes that the ranks are on (nodes=)"
            )
        # What is never used need not be there: nothing of another node is reached by its address.
        addresses = [0 if self._is_remote(peer) else pointer for peer, pointer in enumerate(pointers)]
        addresses[self.rank] = address
        return SymmetricMemory(own, tuple(addresses), block)

    def _reads(self, peer: int, address: int, nbytes: int) -> bool:
        return peer in self._mapped or self._place(address, nbytes) is not None

    def _put_pieces(self, window: DeviceWindow, peer: int, pieces: Sequence[Piece], stream: int) -> None:
        base, is_mapped = window.addresses[self.rank], peer in self._mapped
        put = self._bindings.putmem_on_stream if is_mapped else self._bindings.putmem_nbi_on_stream
        for piece in pieces:
            put(base + piece.at, piece.address, piece.nbytes, peer, stream)
        if not is_mapped:
            self._bindings.quiet_on_stream(stream)

    def _raise_remote(self, window: DeviceWindow, peer: int, at: int, value: int) -> None:
        address = window.addresses[self.rank] + at
        kind = self._bindings.Signal_op.SIGNAL_SET
        self._bindings.signal_op_on_stream(address, value, kind, peer, self._current().cuda_stream)

    def close(self) -> None:
        super().close()
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.leave(self._meeting, is_well=not self.gave_up)
