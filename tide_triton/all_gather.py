"""TIDE-AG: each rank's shard goes straight to its final place in every rank's slot.

    shard (fp32) --cast--> its place in the own slot (bf16) --put--> the same place of every other rank's slot

Nothing is copied in or out: the cast writes the place that the parameter is read from, and the puts start there. Where
the transport overlaps, pieces of the group travel while later ones are still cast.
"""

from collections.abc import Sequence

import torch

from tide_triton.kernels import prepare_place
from tide_triton.kernels.launch import Prepared
from tide_triton.layouts import Copy, SlotLayout
from tide_triton.layouts.pieces import gather_pieces
from tide_triton.layouts.transfers import between, merge
from tide_triton.programs import Programs
from tide_triton.traffic import Traffic
from tide_triton.transports import Put
from tide_triton.views import DTYPES, region_view
from tide_triton.windows import Slot, Turn


class AllGather:
    """The all-gather of one group on rank `rank`: what moves, whatever slot it moves through.

    smallest_piece: bytes of the first piece, for a transport on which casts and puts overlap; None for one piece.
    """

    def __init__(self, layout: SlotLayout, rank: int, *, smallest_piece: int | None = None) -> None:
        self.layout = layout
        self.rank = rank
        self._pieces = gather_pieces(layout, smallest_piece)
        #: What this rank puts to each peer, from its own slot, by piece.
        self.copies = tuple(self._copies_of(piece) for piece in self._pieces)
        self._wire_nbytes = sum(copy.nbytes for copies in self.copies for copy in copies)
        self._regions = [layout.region(index, rank) for index in range(len(layout.places))]
        self._dtypes = [DTYPES[place.tensor.dtype] for place in layout.places]
        self._casts: Programs[list[Prepared]] = Programs()
        self._puts: Programs[list[list[Put]]] = Programs()

    def _copies_of(self, piece: Sequence[int]) -> tuple[Copy, ...]:
        regions = [self.layout.region(index, self.rank) for index in piece]
        return merge(copy for region in regions if (copy := between(region, region)) is not None)

    def start(self, slot: Slot, shards: Sequence[torch.Tensor], what: str, traffic: Traffic) -> "Gathering":
        """Open a turn of `slot`, cast `shards` into it and put them to every peer.

        shards: one per tensor of the group, contiguous, of any float dtype (other dtypes: the tensor's own); elements
        beyond the rank's shard (FSDP2's padding) are ignored.
        what: the group's name, for errors.
        """
        transport = slot.transport
        mark = None
        with transport.lane("gather"):
            turn = slot.open(f"all-gather of {what}")
            with transport.lane("cast"):
                key = (slot, *(shard.data_ptr() for shard in shards), *(shard.dtype for shard in shards))
                casts = self._casts.get(key, lambda: self._prepare(slot, shards), _are_reusable)
            puts = self._puts.get(slot, lambda: self._prepare_puts(slot), _are_all_reusable)
            for number, (cast, to_peers) in enumerate(zip(casts, puts, strict=True)):
                # Not after the puts before it: casts run ahead of the link.
                with transport.lane("cast", joined=False):
                    cast(transport.stream)
                    mark = transport.mark()
                if number == 0:
                    for peer in turn.peers:
                        turn.await_credit(peer)
                transport.after(mark)
                for put in to_peers:
                    transport.put(put)
            for peer in turn.peers:
                turn.publish(peer)
        # The shards have been read when the caller goes on: an optimizer may change them.
        transport.after(mark)
        traffic.wire_bytes += self._wire_nbytes * len(turn.peers)
        traffic.zero_copy += 1
        return Gathering(turn)

    def _prepare(self, slot: Slot, shards: Sequence[torch.Tensor]) -> list[Prepared]:
        """The casts of `shards` into `slot`, by piece."""
        with slot.transport.here():
            return [self._prepare_piece(slot, shards, piece) for piece in self._pieces]

    def _prepare_piece(self, slot: Slot, shards: Sequence[torch.Tensor], piece: Sequence[int]) -> Prepared:
        sources, places = [], []
        for index in piece:
            region, dtype = self._regions[index], self._dtypes[index]
            sources.append(shards[index].detach().reshape(-1)[: region.nbytes // dtype.itemsize])
            places.append(region_view(slot.window.memory, region, dtype))
        return prepare_place(sources, places)

    def _prepare_puts(self, slot: Slot) -> list[list[Put]]:
        """What goes to each peer from `slot`, by piece."""
        memory = slot.window.memory
        return [
            [slot.transport.prepare(slot.window, peer, [(memory, copy) for copy in copies]) for peer in slot.peers]
            for copies in self.copies
        ]

    def views(self, slot: Slot) -> list[torch.Tensor]:
        """The group's unsharded tensors as they lie in `slot`."""
        return [
            slot.window.memory[p.offset : p.offset + p.nbytes].view(DTYPES[p.tensor.dtype]).view(p.tensor.shape)
            for p in self.layout.places
        ]


class Gathering:
    """An all-gather under way."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def wait(self) -> None:
        """Until the unsharded tensors are there, for whatever the caller does next."""
        transport = self._turn.slot.transport
        with transport.lane("gather"):
            self._turn.await_data()
            arrived = transport.mark()
        transport.after(arrived)


def _are_reusable(programs: Sequence[Prepared]) -> bool:
    return all(program.is_reusable for program in programs)


def _are_all_reusable(puts: Sequence[Sequence[Put]]) -> bool:
    return all(put.is_reusable for to_peers in puts for put in to_peers)
