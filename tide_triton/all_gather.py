"""TIDE-AG: each rank's shard goes straight to its final place in every rank's slot.

    shard (fp32) --cast--> its place in the own slot (bf16) --put--> the same place of every other rank's slot

Nothing is copied in or out: the cast writes the place that the parameter is read from, and the puts start there. Where
the transport overlaps, pieces of the group travel while later ones are still cast.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from tide_triton.kernels import TableCache, place
from tide_triton.layouts import Copy, SlotLayout, gather_copies
from tide_triton.layouts.pieces import SMALL, gather_pieces
from tide_triton.layouts.transfers import between, merge
from tide_triton.traffic import Traffic
from tide_triton.transports import Mark
from tide_triton.views import DTYPES, region_view
from tide_triton.windows import Slot, Turn


class AllGather:
    """The all-gather of one group on rank `rank`: what moves, whatever slot it moves through.

    overlap: whether to go in pieces, for a transport on which casts and puts overlap.
    """

    def __init__(self, layout: SlotLayout, rank: int, *, overlap: bool = False) -> None:
        self.layout = layout
        self.rank = rank
        self._pieces = gather_pieces(layout, SMALL if overlap else None)
        self._tables = TableCache()

    @cached_property
    def copies(self) -> tuple[tuple[Copy, ...], ...]:
        """What this rank puts to each peer, from its own slot, by piece."""
        if len(self._pieces) == 1:
            return (gather_copies(self.layout, self.rank),)
        by_piece = []
        for piece in self._pieces:
            regions = [self.layout.region(index, self.rank) for index in piece]
            by_piece.append(merge(copy for region in regions if (copy := between(region, region)) is not None))
        return tuple(by_piece)

    def start(self, slot: Slot, shards: Sequence[torch.Tensor], what: str, traffic: Traffic) -> "Gathering":
        """Open a turn of `slot`, cast `shards` into it and put them to every peer.

        shards: one per tensor of the group, contiguous, of any float dtype (other dtypes: the tensor's own); elements
        beyond the rank's shard (FSDP2's padding) are ignored.
        what: the group's name, for errors.
        """
        transport = slot.transport
        marks: list[Mark | None] = []
        with transport.lane("gather"):
            turn = slot.open(f"all-gather of {what}")
            with transport.lane("cast"):
                for piece in self._pieces:
                    self._cast(slot, shards, piece)
                    marks.append(transport.mark())
            for peer in turn.peers:
                turn.await_credit(peer)
            for mark, copies in zip(marks, self.copies, strict=True):
                transport.after(mark)
                moves = [(slot.window.memory, copy) for copy in copies]
                for peer in turn.peers:
                    turn.put(peer, moves)
                    traffic.wire_bytes += sum(copy.nbytes for copy in copies)
            for peer in turn.peers:
                turn.publish(peer)
        # The shards have been read when the caller goes on: an optimizer may change them.
        transport.after(marks[-1] if marks else None)
        traffic.zero_copy += 1
        return Gathering(turn)

    def _cast(self, slot: Slot, shards: Sequence[torch.Tensor], piece: Sequence[int]) -> None:
        sources, places = [], []
        for index in piece:
            region = self.layout.region(index, self.rank)
            dtype = DTYPES[self.layout.places[index].tensor.dtype]
            sources.append(shards[index].detach().reshape(-1)[: region.nbytes // dtype.itemsize])
            places.append(region_view(slot.window.memory, region, dtype))
        place(sources, places, tables=self._tables)

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
