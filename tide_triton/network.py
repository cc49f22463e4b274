"""What the collectives of one block move between GPUs and between nodes, from shapes alone.

Figures are of one GPU, as if all shards were as large as the largest, and of one gather or reduction of the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tide_triton.layouts import (
    GroupSpec,
    Hierarchy,
    Load,
    Pacing,
    SlotLayout,
    Topology,
    gather_load,
    pack,
    reduce_load,
    shard,
)
from tide_triton.layouts.pacing import gather_pacing, pacing_for

#: The dtype of parameters and gradients on the wire.
_WIRE = "bfloat16"


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The loads of both collectives, and the chunks in which they go (bytes, and how many at once).

    gather_pacing, reduce_pacing: chunks of each. partials: dtype of what crosses nodes in a reduction.
    """

    gather_pacing: Pacing
    reduce_pacing: Pacing
    partials: str
    all_gather: Load
    reduce_scatter: Load


def plan_network(
    block: GroupSpec,
    topology: Topology,
    chunk_nbytes: int,
    depth: int,
    wire: str | None = None,
    groups: Sequence[GroupSpec] = (),
) -> NetworkPlan:
    """The loads of `block` over `topology`.

    groups: all that share the rings with it, if there are others.
    chunk_nbytes, depth: `ring_chunk_nbytes` and `ring_depth` of attach. wire: its `wire_dtype`, by name.
    """
    shards = [shard(tensor, block.world_size, 0) for tensor in block.tensors]
    block_nbytes = sum(own.nbytes for own in shards)
    in_gather = gather_pacing(topology, block_nbytes, chunk_nbytes, depth)
    in_reduction = pacing_for(topology, groups or [block], chunk_nbytes, depth)
    hierarchy = Hierarchy(topology, in_reduction, _WIRE, wire)
    return NetworkPlan(
        in_gather,
        in_reduction,
        hierarchy.partial_dtype,
        gather_load(topology, block_nbytes, in_gather, pack(SlotLayout(block), topology).areas_nbytes),
        reduce_load(hierarchy, sum(own.numel for own in shards)),
    )
