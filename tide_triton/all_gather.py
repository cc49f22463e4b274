"""TIDE-AG: each rank's shard goes straight to its final place in every rank's slot.

    shard (fp32) --cast--> its place in the own slot (bf16) --put--> the same place of every other rank's slot

Nothing is copied in or out: the cast writes the place that the parameter is read from, and the puts start there.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from tide_triton.kernels import TableCache, place
from tide_triton.layouts import Copy, SlotLayout, gather_copies
from tide_triton.traffic import Traffic
from tide_triton.views import DTYPES, region_view
from tide_triton.windows import Slot, Turn


class AllGather:
    """The all-gather of one group on rank `rank`: what moves, whatever slot it moves through."""

    def __init__(self, layout: SlotLayout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._tables = TableCache()

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """What this rank puts to each peer, from its own slot."""
        return gather_copies(self.layout, self.rank)

    def start(self, slot: Slot, shards: Sequence[torch.Tensor], what: str, traffic: Traffic) -> Turn:
        """Open a turn of `slot`, cast `shards` into it and put them to every peer.

        shards: one per tensor of the group, contiguous, of any float dtype (other dtypes: the tensor's own); elements
        beyond the rank's shard (FSDP2's padding) are ignored.
        what: the group's name, for errors.
        Returns the turn, whose `await_data` ends the gather.
        """
        turn = slot.open(f"all-gather of {what}")
        sources, places = [], []
        for index, (shard, where) in enumerate(zip(shards, self.layout.places, strict=True)):
            region = self.layout.region(index, self.rank)
            dtype = DTYPES[where.tensor.dtype]
            sources.append(shard.detach().reshape(-1)[: region.nbytes // dtype.itemsize])
            places.append(region_view(slot.window.memory, region, dtype))
        place(sources, places, tables=self._tables)
        for peer in turn.peers:
            turn.await_credit(peer)
            turn.put(peer, slot.window.memory, self.copies)
            turn.publish(peer)
            traffic.wire_bytes += sum(copy.nbytes for copy in self.copies)
        traffic.zero_copy += 1
        return turn

    def views(self, slot: Slot) -> list[torch.Tensor]:
        """The group's unsharded tensors as they lie in `slot`."""
        return [
            slot.window.memory[p.offset : p.offset + p.nbytes].view(DTYPES[p.tensor.dtype]).view(p.tensor.shape)
            for p in self.layout.places
        ]
