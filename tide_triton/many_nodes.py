"""What collectives over several nodes are made of, for those who make them."""

from collections.abc import Sequence

import torch

from tide_triton.hierarchical_reduce import HierarchicalReduceScatter
from tide_triton.layouts import GroupSpec, LandingLayout, Pacing, SlotLayout, Topology, block_sizes, pack
from tide_triton.layouts.pacing import gather_pacing, pacing_for, rings_nbytes
from tide_triton.rail_gather import RailAllGather
from tide_triton.windows import Slot, SlotPool


class ManyNodes:
    """The ranks of one transport as the nodes of `topology`, and the rings that their reductions share.

    chunk_nbytes, depth: rings hold `depth` chunks of each kind and take `depth` * `chunk_nbytes` bytes at most;
    all-gathers go in chunks of `layouts.pacing.gather_pacing`, `depth` at once.
    wire: as for `HierarchicalReduceScatter`.
    """

    def __init__(self, topology: Topology, chunk_nbytes: int, depth: int, wire: torch.dtype | None) -> None:
        self.topology = topology
        self.wire = wire
        self._nbytes, self._depth = chunk_nbytes, depth
        self._rings: tuple[Slot, Pacing] | None = None

    def slot_nbytes(self, layout: SlotLayout) -> int:
        """Bytes of a slot for a group that is laid out so."""
        return pack(layout, self.topology).slot_nbytes

    def gatherer(self, layout: SlotLayout, rank: int, smallest_piece: int | None = None) -> RailAllGather:
        """The all-gather of one group on rank `rank`. smallest_piece: as for `AllGather`, the same on all ranks."""
        pacing = gather_pacing(self.topology, max(block_sizes(layout)), self._nbytes, self._depth)
        return RailAllGather(layout, rank, self.topology, pacing, smallest_piece=smallest_piece)

    def reducer(self, landing: LandingLayout, rank: int, ctas: int | None = None) -> HierarchicalReduceScatter:
        """The reduce-scatter of one group on rank `rank`, through `rings`, which must be there."""
        assert self._rings is not None
        return HierarchicalReduceScatter(landing, rank, self.topology, self._rings[1], self.wire, ctas)

    def rings(self, pool: SlotPool, specs: Sequence[GroupSpec]) -> Slot:
        """The window of `pool` in which all reductions have their rings, made when it is first asked for.

        specs: all groups that will be reduced; chunks are no larger than the largest of them needs.

        Raises what `Transport.allocate` raises.
        """
        if self._rings is None:
            pacing = pacing_for(self.topology, specs, self._nbytes, self._depth)
            slot = pool.add(rings_nbytes(self.topology, pacing), specs[0].digest, "the rings over several nodes")
            slot.label = "rings"
            self._rings = slot, pacing
        return self._rings[0]

    @property
    def rings_nbytes(self) -> int:
        """Bytes of the rings on this rank, 0 where there are none yet."""
        return 0 if self._rings is None else self._rings[0].window.nbytes
