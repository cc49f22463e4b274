"""One reduction over several nodes, step by step: what `hierarchical_reduce` does when all gradients are there.

    lane      steps                                                  signals when done
    reduce    LocalPut: own slices to the GPU that sums them         WRITTEN
    sum       LocalSum: the node's slices, in GPU order              VACATED to those who may put the next slices
    rail      RailPut: the node's partial to the shard's owner       WRITTEN
    final     FinalSum: partials, in node order                      ACKNOWLEDGED, then VACATED to who puts the next one

A transport without lanes does one step after the other. Large groups take several turns, each of as many chunks as a
turn can count.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

import torch

from tide_triton.kernels import prepare_accumulate
from tide_triton.layouts import (
    ITEMSIZES,
    Copy,
    FinalSum,
    GroupSpec,
    Hierarchy,
    LandingLayout,
    LocalPut,
    LocalSum,
    RailPut,
    Region,
    SpecError,
    Step,
    cut_slices,
    shard,
)
from tide_triton.layouts.pacing import Parts
from tide_triton.paced import PacedTurn
from tide_triton.reducers import Reduction
from tide_triton.transports import Lane, Mark
from tide_triton.views import DTYPES, as_bytes, region_view
from tide_triton.windows import PARTS, Slot

_LANES: Final[Mapping[type[Step], Lane]] = {LocalPut: "reduce", LocalSum: "sum", RailPut: "rail", FinalSum: "final"}


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a chunk of the own shard: of which tensor, from where in its shard and in the chunk, how many."""

    index: int
    in_shard: int
    in_chunk: int
    numel: int


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
        _own_parts(slices[rank], itemsize),
        tuple(sorted(neighbours)),
        sent[RailPut] // itemsize * ITEMSIZES[hierarchy.partial_dtype],
        sent[LocalPut],
    )


def _turns(hierarchy: Hierarchy, rank: int, numels: Sequence[int]) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """By turn, its first chunk and the steps; numels: elements of each rank's shard."""
    most = (PARTS - 1) // hierarchy.topology.nodes
    if not most:
        raise SpecError(f"nodes must be at most {PARTS - 1}, got {hierarchy.topology.nodes}")
    size, turns = hierarchy.chunk_numel, []
    for first in range(0, hierarchy.chunks(max(numels)), most):
        part = [min(max(numel - first * size, 0), most * size) for numel in numels]
        turns.append((first, hierarchy.steps(rank, part)))
    return tuple(turns)


def _own_parts(chunks: Sequence[Parts], itemsize: int) -> tuple[tuple[Part, ...], ...]:
    done: dict[int, int] = {}
    result = []
    for chunk in chunks:
        parts = []
        for index, copy in chunk:
            start, numel = done.get(index, 0), copy.nbytes // itemsize
            parts.append(Part(index, start, copy.dst_offset // itemsize, numel))
            done[index] = start + numel
        result.append(tuple(parts))
    return tuple(result)


class Execution:
    """The steps of `plan`, from `gradients` to `outputs` through the rings in `slot`.

    gradients, outputs: by tensor, as for `HierarchicalReduceScatter`. wide: what is summed in.
    """

    def __init__(
        self,
        plan: Plan,
        slot: Slot,
        gradients: Mapping[int, torch.Tensor],
        outputs: Mapping[int, torch.Tensor],
        reduction: Reduction,
        wide: torch.dtype,
        ctas: int | None,
    ) -> None:
        self.plan = plan
        self.hierarchy = plan.hierarchy
        self.slot = slot
        self.transport = slot.transport
        self.gradients = {index: as_bytes(gradient) for index, gradient in gradients.items()}
        self.outputs = outputs
        self.reduction = reduction
        self.ctas = ctas
        self.dtype, self.partial = DTYPES[self.hierarchy.dtype], DTYPES[self.hierarchy.partial_dtype]
        with self._in("final"), self.transport.here():
            #: Where the own chunk is added up, node by node.
            self.accumulator = torch.empty(self.hierarchy.chunk_numel, dtype=wide, device=self.transport.device)

    def run(self, what: str) -> Mark | None:
        """Take every step. Returns the mark after which gradients are free and outputs are there."""
        transport, done = self.transport, None
        others = [lane for lane in _LANES.values() if lane != "reduce"]
        with transport.lane("reduce"):
            with self._in("sum"):
                # Outputs may be ready in the order of sums.
                ready = transport.mark()
            transport.after(ready)
            for first, steps in self.plan.turns:
                # Neighbours are told that the window is vacant; each step waits for what it needs of them.
                paced = PacedTurn(self.slot, what, dict.fromkeys(self.plan.neighbours, 0))
                paced.turn.is_complete = True
                for lane in others:
                    with transport.lane(lane):
                        pass
                for step in steps:
                    self._take(paced, first, step)
                for lane in others:
                    with self._in(lane):
                        done = transport.mark()
                    transport.after(done)
                done = self.slot.vacate()
            if paddings := self._paddings():
                self._accumulate([[self.accumulator[:0]] for _ in paddings], paddings, rounded=True)
                done = transport.mark()
        return done

    def _in(self, lane: Lane) -> AbstractContextManager[None]:
        return self.transport.lane(lane, joined=False)

    def _take(self, paced: PacedTurn, first: int, step: Step) -> None:
        lane = _LANES[type(step)]
        with self._in(lane):
            for wait in step.waits_for:
                paced.wait(lane, wait)
            if isinstance(step, LocalPut):
                paced.greet(lane, step.peer)
                self._put_slices(first + step.chunk, step.owner, step.peer, self.hierarchy.contributions.at(step.slot))
                paced.publish(step.peer, step.number)
            elif isinstance(step, RailPut):
                paced.greet(lane, step.owner)
                self._put_partial(first + step.chunk, step)
                paced.publish(step.owner, step.number)
            elif isinstance(step, LocalSum):
                self._sum_node(first + step.chunk, step)
                paced.count("summed")
                if step.into == "partials":
                    paced.count("landed")
            else:
                if step.source != self.plan.rank:
                    paced.acknowledge(step.source, step.chunk + 1)
                self._add_partial(first + step.chunk, step)
            if isinstance(step, (LocalSum, FinalSum)):
                for rank in step.vacates:
                    paced.vacate(rank)

    # --- puts ---

    def _put_slices(self, chunk: int, owner: int, peer: int, at: int) -> None:
        """The own slices of `owner`'s chunk go to `peer`'s window, from byte `at` on."""
        moves = [
            (self.gradients[index], replace(copy, dst_offset=copy.dst_offset + at))
            for index, copy in self.plan.slices[owner][chunk]
        ]
        self.transport.put(self.transport.prepare(self.slot.window, peer, moves))

    def _put_partial(self, chunk: int, step: RailPut) -> None:
        at = self.hierarchy.partials.at(step.slot)
        if step.outbox is None:
            self._put_slices(chunk, step.owner, step.owner, at)
            return
        nbytes = self._scaled(sum(copy.nbytes for _, copy in self.plan.slices[step.owner][chunk]))
        copy = Copy(self.hierarchy.outbox.at(step.outbox), at, 1, nbytes, nbytes, nbytes)
        self.transport.put(self.transport.prepare(self.slot.window, step.owner, [(self.slot.window.memory, copy)]))

    # --- sums ---

    def _sum_node(self, chunk: int, step: LocalSum) -> None:
        """The node's slices of a chunk, in GPU order, into a slot of partials' dtype, or the shard itself."""
        contributions, outputs = [], []
        into = self.hierarchy.partials if step.into == "partials" else self.hierarchy.outbox
        places = self.plan.own[chunk] if step.into == "shard" else ()
        for number, (index, copy) in enumerate(self.plan.slices[step.owner][chunk]):
            contributions.append(
                [
                    region_view(self.gradients[index], copy.src, self.dtype)
                    if slot is None
                    else self._view(self.hierarchy.contributions.at(slot) + copy.dst_offset, copy.nbytes, self.dtype)
                    for slot in step.contributions
                ]
            )
            if step.slot is None:
                outputs.append(self._output(places[number]))
            else:
                start, nbytes = self._scaled(copy.dst_offset), self._scaled(copy.nbytes)
                outputs.append(self._view(into.at(step.slot) + start, nbytes, self.partial))
        self._accumulate(contributions, outputs, divisor=self.reduction.divisor if step.into == "shard" else 1.0)

    def _add_partial(self, chunk: int, step: FinalSum) -> None:
        """A node's partial of the own chunk into the accumulator; after the last, that into the shard."""
        node, parts = self.hierarchy.topology.node(step.source), self.plan.own[chunk]
        if self.hierarchy.is_in_place:
            came = [[self._came_in_place(step, index, copy)] for index, copy in self.plan.slices[self.plan.rank][chunk]]
        else:
            assert step.slot is not None
            at, size = self.hierarchy.partials.at(step.slot), self.partial.itemsize
            came = [[self._view(at + part.in_chunk * size, part.numel * size, self.partial)] for part in parts]
        sums = [self.accumulator[part.in_chunk : part.in_chunk + part.numel] for part in parts]
        self._accumulate(came, sums, add=node > 0, rounded=not self.hierarchy.is_in_place)
        if node == self.hierarchy.topology.nodes - 1:
            outputs = [self._output(part) for part in parts]
            self._accumulate([[x] for x in sums], outputs, divisor=self.reduction.divisor, rounded=True)

    def _came_in_place(self, step: FinalSum, index: int, copy: Copy) -> torch.Tensor:
        """A node's only gradient: the own one where it lies, others where they landed."""
        if step.slot is None:
            return region_view(self.gradients[index], copy.src, self.dtype)
        return self._view(self.hierarchy.partials.at(step.slot) + copy.dst_offset, copy.nbytes, self.dtype)

    def _accumulate(
        self,
        contributions: Sequence[Sequence[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
        add: bool = False,
        rounded: bool = False,
    ) -> None:
        """rounded: whether contributions are what the reduction makes of gradients already."""
        with self.transport.here():
            add_up = prepare_accumulate(
                contributions,
                outputs,
                wire_dtype=None if rounded else self.reduction.wire_dtype,
                premultiply=1.0 if rounded else self.reduction.premultiply,
                divisor=divisor,
                add=add,
                ctas=self.ctas,
            )
        add_up(self.transport.stream)

    # --- views ---

    def _view(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return region_view(self.slot.window.memory, Region(offset, 1, nbytes, nbytes), dtype)

    def _scaled(self, nbytes: int) -> int:
        """Bytes of as many elements of a partial as of gradients take `nbytes`."""
        return nbytes // self.dtype.itemsize * self.partial.itemsize

    def _output(self, part: Part) -> torch.Tensor:
        return self.outputs[part.index].view(-1)[part.in_shard : part.in_shard + part.numel]

    def _paddings(self) -> list[torch.Tensor]:
        """What outputs hold beyond the shard, which becomes 0."""
        ends = dict.fromkeys(self.outputs, 0)
        for parts in self.plan.own:
            for part in parts:
                ends[part.index] = part.in_shard + part.numel
        return [self.outputs[index].view(-1)[end:] for index, end in ends.items() if end < self.outputs[index].numel()]
