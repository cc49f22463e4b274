"""What the many-node collectives cost a rank, in figures, without making their schedules.

|                 | all-gather                            | reduce-scatter                                       |
|-----------------|---------------------------------------|------------------------------------------------------|
| rounds          | ceil(log2 nodes)                      | chunks * nodes + nodes - 1; chunks for a single node |
| over the rail   | (nodes - 1) blocks                    | (nodes - 1) shards, in the partials' dtype           |
| to a local peer | nodes blocks                          | nodes shards, in the gradients' dtype                |
| buffers         | areas of what is packed, in the slot  | three rings of chunks, whatever the nodes            |

Figures are upper bounds for every rank: where shards are uneven, all are taken to be as large as rank 0's, which are
the largest.
"""

from dataclasses import dataclass

from tide_triton.layouts.hierarchy import Hierarchy
from tide_triton.layouts.pacing import Pacing
from tide_triton.layouts.rails import rounds
from tide_triton.layouts.spec import ITEMSIZES
from tide_triton.layouts.topology import Topology


@dataclass(frozen=True, slots=True)
class Load:
    """What one collective costs a rank at most.

    rail_peers, link_peers: how many ranks it puts to over its rail, and inside its node.
    rail_nbytes, link_nbytes: bytes it puts over its rail, and to each peer inside its node.
    rail_in_flight_nbytes, link_in_flight_nbytes: bytes of those that are under way at once.
    buffer_nbytes: memory beside unsharded parameters, gradients and shards.
    """

    rounds: int
    rail_peers: int
    link_peers: int
    rail_nbytes: int
    link_nbytes: int
    rail_in_flight_nbytes: int
    link_in_flight_nbytes: int
    buffer_nbytes: int


def gather_load(topology: Topology, block_nbytes: int, pacing: Pacing, areas_nbytes: int = 0) -> Load:
    """The all-gather of blocks of `block_nbytes` bytes, the largest where they differ.

    areas_nbytes: of what crosses nodes packed (`packing`).
    """
    nodes, gpus = topology.nodes, topology.gpus_per_node
    number = rounds(nodes)
    rail = (nodes - 1) * block_nbytes
    link = nodes * block_nbytes if gpus > 1 else 0
    window = pacing.depth * min(pacing.chunk_nbytes, block_nbytes)
    return Load(
        rounds=number if block_nbytes else 0,
        rail_peers=number,
        link_peers=gpus - 1,
        rail_nbytes=rail,
        link_nbytes=link,
        rail_in_flight_nbytes=min(window, rail),
        link_in_flight_nbytes=min(window, link),
        buffer_nbytes=areas_nbytes,
    )


def reduce_load(hierarchy: Hierarchy, numel: int) -> Load:
    """The reduce-scatter into shards of `numel` elements, the largest where they differ."""
    nodes, gpus = hierarchy.topology.nodes, hierarchy.topology.gpus_per_node
    partial, gradient = ITEMSIZES[hierarchy.partial_dtype], ITEMSIZES[hierarchy.dtype]
    chunks = hierarchy.chunks(numel)
    rail = (nodes - 1) * numel * partial
    link = nodes * numel * gradient if gpus > 1 else 0
    window = hierarchy.pacing.depth * min(hierarchy.chunk_numel, numel)
    return Load(
        rounds=chunks * nodes + nodes - 1 if chunks else 0,
        rail_peers=nodes - 1,
        link_peers=gpus - 1,
        rail_nbytes=rail,
        link_nbytes=link,
        rail_in_flight_nbytes=min(window * partial, rail),
        link_in_flight_nbytes=min(window * gradient, link),
        buffer_nbytes=hierarchy.nbytes,
    )
