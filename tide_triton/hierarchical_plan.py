"""How the gradients of some tensors travel over several nodes: chunks, slices and steps, all but where memory lies.

Large groups take several turns, each of as many chunks as a turn can count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tide_triton.layouts import (
    ITEMSIZES,
    GroupSpec,
    Hierarchy,
    LandingLayout,
    LocalPut,
    RailPut,
    Step,
    cut_slices,
    shard,
)
from tide_triton.layouts.pacing import Parts, chunks_of_each


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a chunk of the own shard: of which tensor, from where in its shard and in the chunk, how many.

    is_last: whether the tensor's shard ends with them.
    """

    index: int
    in_shard: int
    in_chunk: int
    numel: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The reduction of some tensors on rank `rank`.

    turns: by turn, its first chunk and the steps, which count chunks from there.
    slices: by owner and chunk, a rank's slices as copies out of its gradients, each with the tensor's index.
    own: by chunk, the parts of the own shard.
    neighbours: the ranks that put into this rank's window.
    rail_nbytes, local_nbytes: bytes that this rank puts over its rail, and inside its node.
    """

    hierarchy: Hierarchy
    rank: int
    turns: tuple[tuple[int, tuple[Step, ...]], ...]
    slices: Mapping[int, tuple[Parts, ...]]
    own: tuple[tuple[Part, ...], ...]
    neighbours: tuple[int, ...]
    rail_nbytes: int
    local_nbytes: int


def plan(hierarchy: Hierarchy, landing: LandingLayout, indices: Sequence[int], rank: int) -> Plan:
    """The reduction of tensors `indices` of a group, in that order, on rank `rank`.

    landing: the group's. Raises SpecError where there are more nodes than a turn can count.
    """
    topology, world = hierarchy.topology, range(hierarchy.topology.world_size)
    spec = GroupSpec(len(world), tuple(landing.spec.tensors[index] for index in indices))
    landing = LandingLayout(spec, landing.dtype, landing.alignment)
    numels = [sum(shard(tensor, len(world), owner).numel for tensor in landing.tensors) for owner in world]
    own = {index: shard(tensor, len(world), rank).numel for index, tensor in zip(indices, landing.tensors, strict=True)}
    itemsize = ITEMSIZES[hierarchy.dtype]
    slices = {
        owner: tuple(
            tuple((indices[number], copy) for number, copy in parts)
            for parts in cut_slices(landing, owner, hierarchy.chunk_numel * itemsize)
        )
        for owner in world
    }
    turns = _turns(hierarchy, rank, numels)
    sent = {LocalPut: 0, RailPut: 0}
    for first, steps in turns:
        for step in steps:
            if isinstance(step, (LocalPut, RailPut)):
                sent[type(step)] += sum(copy.nbytes for _, copy in slices[step.owner][first + step.chunk])
    neighbours = {*topology.local_ranks(topology.node(rank)), *topology.rail(topology.gpu(rank))} - {rank}
    return Plan(
        hierarchy,
        rank,
        turns,
        slices,
        _own_parts(slices[rank], itemsize, own),
        tuple(sorted(neighbours)),
        sent[RailPut] // itemsize * ITEMSIZES[hierarchy.partial_dtype],
        sent[LocalPut],
    )


def _turns(hierarchy: Hierarchy, rank: int, numels: Sequence[int]) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """By turn, its first chunk and the steps; numels: elements of each rank's shard."""
    most = chunks_of_each(hierarchy.topology.nodes)
    size, turns = hierarchy.chunk_numel, []
    for first in range(0, hierarchy.chunks(max(numels)), most):
        part = [min(max(numel - first * size, 0), most * size) for numel in numels]
        turns.append((first, hierarchy.steps(rank, part)))
    return tuple(turns)


def _own_parts(chunks: Sequence[Parts], itemsize: int, numels: Mapping[int, int]) -> tuple[tuple[Part, ...], ...]:
    """numels: elements of each tensor's own shard."""
    done: dict[int, int] = {}
    result = []
    for chunk in chunks:
        parts = []
        for index, copy in chunk:
            start, numel = done.get(index, 0), copy.nbytes // itemsize
            done[index] = start + numel
            parts.append(Part(index, start, copy.dst_offset // itemsize, numel, done[index] == numels[index]))
        result.append(tuple(parts))
    return tuple(result)
