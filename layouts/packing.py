"""What crosses nodes packed: many short runs of bytes as one, since a put over a network costs time whatever its size.

Blocks cross a rail tensor by tensor, from the place in one slot to the same place in another. Where a shard lies there
in runs of few bytes, a put of each would cost more than its bytes do. Such tensors have one area a node behind the
slot's places, in which a block of the rail lies without gaps:

    | w0 | w1 | w2 | w3 |  node 0: r0 of w1, w3 |  node 1: r1 of w1, w3 | ...        (one GPU a node)

    sender     shards --cast--> own area
    rail       own area --put--> same area of other nodes, and on from there
    everyone   areas --copies--> places of its own slot, and of its node's other GPUs

A copy engine takes as long for a local copy of few bytes as for a strided one, so an area holds shards of the same size
side by side: where their places are as far from each other, they are the rows of one copy.

What is packed follows from layout and topology alone: shards of several short runs each (of a later dim than the
first), whatever their areas take, which is one part in `gpus_per_node` of their places; and of those of one short run
the shortest, in areas of at most one part in `SHARE` of the slot, or `FREE_NBYTES`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tide_triton.layouts.shards import Region
from tide_triton.layouts.slots import SlotLayout, align
from tide_triton.layouts.spec import SpecError
from tide_triton.layouts.topology import Topology
from tide_triton.layouts.transfers import Copy, between, in_rows

#: Runs of fewer bytes are packed: about what a fast network carries in the time that a put takes beside its bytes.
RUN_NBYTES: Final = 512 << 10
#: The areas of shards of one run take one part in so many of the slot at most.
SHARE: Final = 8
#: Or so many bytes, in slots so small that it does not matter.
FREE_NBYTES: Final = 4 << 20


@dataclass(frozen=True)
class Packing:
    """The tensors `indices` of `layout`, in the order of the areas, cross the nodes of `topology` packed."""

    layout: SlotLayout
    topology: Topology
    indices: tuple[int, ...]

    @cached_property
    def area_nbytes(self) -> int:
        """Bytes of one node's area: rank 0's shards are the largest."""
        return align(sum(self.layout.region(index, 0).nbytes for index in self.indices), self.layout.alignment)

    @property
    def areas_nbytes(self) -> int:
        """Bytes of the areas of all nodes."""
        return self.topology.nodes * self.area_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot with its areas."""
        return self.layout.nbytes + self.areas_nbytes

    def area(self, block: int) -> Region:
        """Where rank `block`'s packed shards lie, on every rank of its rail."""
        nbytes = sum(self.layout.region(index, block).nbytes for index in self.indices)
        return Region(self.layout.nbytes + self.topology.node(block) * self.area_nbytes, 1, nbytes, nbytes).merged()

    def across(self, block: int) -> tuple[Copy, ...]:
        """What goes over the rail: the area of `block`, as one copy, or none."""
        area = self.area(block)
        copy = between(area, area)
        return () if copy is None else (copy,)

    def unpacks(self, block: int) -> tuple[Copy, ...]:
        """From the area of `block` to the places of its shards, byte after byte of the area."""
        packed = self.packed(block).items()
        return in_rows(between(region, self.layout.region(index, block)) for index, region in packed)

    def packed(self, block: int) -> dict[int, Region]:
        """By tensor, where `block`'s shard of it lies in its area."""
        start, regions = self.area(block).offset, {}
        for index in self.indices:
            nbytes = self.layout.region(index, block).nbytes
            regions[index] = Region(start, 1, nbytes, nbytes).merged()
            start += nbytes
        return regions


def pack(layout: SlotLayout, topology: Topology, run_nbytes: int | None = None) -> Packing:
    """What of a group that is laid out so crosses the nodes of `topology` packed. Nothing where it would save no put.

    run_nbytes: tensors whose shards lie in runs of fewer bytes may be packed; None for `RUN_NBYTES`.

    Raises SpecError where the topology has other ranks than the layout.
    """
    if topology.world_size != layout.spec.world_size:
        raise SpecError(
            f"topology has {topology.nodes} nodes x {topology.gpus_per_node} GPUs, but the layout is for "
            f"{layout.spec.world_size} ranks"
        )
    places = [layout.region(index, 0) for index in range(len(layout.places))]
    limit = (RUN_NBYTES if run_nbytes is None else run_nbytes) if topology.nodes > 1 else 0
    short = [index for index, place in enumerate(places) if 0 < place.width < limit]
    # A put each row would take longer than anything else: they are packed whatever that takes.
    chosen = [index for index in short if places[index].rows > 1]
    most, nbytes = max(layout.nbytes // SHARE, FREE_NBYTES), 0
    for index in sorted(set(short) - set(chosen), key=lambda index: (places[index].width, index)):
        if topology.nodes * align(nbytes + places[index].nbytes, layout.alignment) <= most:
            chosen.append(index)
            nbytes += places[index].nbytes
    if sum(places[index].rows for index in chosen) <= 1:
        return Packing(layout, topology, ())
    # Wide elements first, so that all are aligned without gaps; then side by side what is of one size.
    tensors = layout.spec.tensors
    order = sorted(chosen, key=lambda index: (-tensors[index].itemsize, places[index].width, index))
    return Packing(layout, topology, tuple(order))
