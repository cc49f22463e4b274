"""The steps of a reduction over several nodes, prepared once: puts and sums that follow gradients and outputs.

Rings stay where they are. Whatever else a step reads or writes is `Memory`, which is allocated anew for every
reduction, mostly where it was before; where it was not, puts and sums are moved to where it is. Puts that a transport
cannot reuse, and sums that are no kernels, are prepared anew every time.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch

from tide_triton.hierarchical_plan import Part, Plan
from tide_triton.kernels import prepare_accumulate
from tide_triton.kernels.launch import Prepared
from tide_triton.kernels.movable import STEP, Movable
from tide_triton.layouts import Copy, FinalSum, LocalPut, LocalSum, RailPut, Region, Step
from tide_triton.reducers import Reduction
from tide_triton.transports import Lane, Put, Transport
from tide_triton.views import DTYPES, as_bytes, region_view
from tide_triton.windows import Slot

LANES: Final[Mapping[type[Step], Lane]] = {LocalPut: "reduce", LocalSum: "sum", RailPut: "rail", FinalSum: "final"}


@dataclass(frozen=True, slots=True)
class Memory:
    """What a reduction reads and writes beside its rings: contiguous tensors of one device.

    gradients, outputs: by tensor, in the same order, as for `HierarchicalReduceScatter`.
    accumulator: where the own chunk is added up, (chunk_numel,) of the dtype that it is added in; empty with one node.
    """

    gradients: Mapping[int, torch.Tensor]
    outputs: Mapping[int, torch.Tensor]
    accumulator: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *self.gradients.values(), *self.outputs.values(), self.accumulator

    def key(self) -> Hashable:
        """All that prepared steps take from it but for how far it can be moved."""
        return tuple(self.outputs), tuple((x.dtype, x.numel(), x.data_ptr() % STEP) for x in self.tensors)


@dataclass(slots=True)
class SourcedPut:
    """sources: of each copy from a gradient, the tensor; none where the put starts from the rings."""

    put: Put
    sources: tuple[int, ...]


#: A step's put, or its sums in order.
Work = SourcedPut | tuple[Prepared, ...]


class Program:
    """The steps of `plan` through the rings in `slot`, for `memory` and, where reusable, for any of the same key.

    works: by turn and step. padding: sets to 0 what outputs hold of which this rank's shard has nothing; in lane final.
    is_reusable: whether it holds addresses only, keeps no tensor alive, and can be moved.
    """

    def __init__(self, plan: Plan, slot: Slot, memory: Memory, reduction: Reduction, ctas: int | None) -> None:
        steps = _Preparation(plan, slot, memory, reduction, ctas)
        self.works = [[steps.prepare(first, step) for step in turn] for first, turn in plan.turns]
        self.padding = steps.padding()
        self._transport = slot.transport
        self._puts = [work for works in self.works for work in works if isinstance(work, SourcedPut)]
        self._addresses = _addresses(memory)
        self._movable: dict[Lane, Movable] = {}
        self.is_reusable = (
            all(work.put.is_reusable for work in self._puts)
            and all(one.is_reusable for sums in steps.sums.values() for one in sums)
            and _are_disjoint(memory.tensors)
        )
        if self.is_reusable:
            # Tables are uploaded in the lane whose launches read them.
            for lane, sums in steps.sums.items():
                with _in(slot.transport, lane):
                    self._movable[lane] = Movable(sums, memory.tensors)

    def move(self, memory: Memory) -> None:
        """Gradients, outputs and accumulator are now those of `memory`, of the same key."""
        addresses = _addresses(memory)
        if addresses == self._addresses:
            return
        by = {index: new - old for index, new, old in zip(memory.gradients, addresses, self._addresses, strict=False)}
        for work in self._puts:
            if any(steps := [by[index] for index in work.sources]):
                work.put = work.put.moved(steps)
        for lane, movable in self._movable.items():
            with _in(self._transport, lane):
                moved = movable.move(addresses)
            assert moved, "the key holds alignments"
        self._addresses = addresses


class _Preparation:
    """Prepares steps, and forgets what they are prepared for."""

    def __init__(self, plan: Plan, slot: Slot, memory: Memory, reduction: Reduction, ctas: int | None) -> None:
        self._plan = plan
        self._hierarchy = plan.hierarchy
        self._slot = slot
        self._gradients = {index: as_bytes(gradient) for index, gradient in memory.gradients.items()}
        self._outputs = {index: output.view(-1) for index, output in memory.outputs.items()}
        self._accumulator = memory.accumulator
        self._reduction = reduction
        self._ctas = ctas
        self._dtype, self._partial = DTYPES[self._hierarchy.dtype], DTYPES[self._hierarchy.partial_dtype]
        #: What has been prepared, by the lane that it runs in.
        self.sums: dict[Lane, list[Prepared]] = {"sum": [], "final": []}

    def prepare(self, first: int, step: Step) -> Work:
        """`step` of a turn whose chunks count from `first`."""
        chunk = first + step.chunk
        if isinstance(step, LocalPut):
            return self._slices(chunk, step.owner, step.peer, self._hierarchy.contributions.at(step.slot))
        if isinstance(step, RailPut):
            return self._put_partial(chunk, step)
        if isinstance(step, LocalSum):
            return (self._sum_node(chunk, step),)
        return self._add_partial(chunk, step)

    def padding(self) -> Prepared | None:
        """Zeros for outputs of whose tensors this rank has no element; others take theirs with the last part."""
        there = {part.index for parts in self._plan.own for part in parts}
        empty = [output for index, output in self._outputs.items() if index not in there and output.numel()]
        if not empty:
            return None
        return self._accumulate("final", [[self._accumulator[:0]] for _ in empty], empty, rounded=True)

    # --- puts ---

    def _slices(self, chunk: int, owner: int, peer: int, at: int) -> SourcedPut:
        """The own slices of `owner`'s chunk go to `peer`'s window, from byte `at` on."""
        slices = self._plan.slices[owner][chunk]
        moves = [(self._gradients[index], replace(copy, dst_offset=copy.dst_offset + at)) for index, copy in slices]
        put = self._slot.transport.prepare(self._slot.window, peer, moves)
        return SourcedPut(put, tuple(index for index, _ in slices))

    def _put_partial(self, chunk: int, step: RailPut) -> SourcedPut:
        at, window = self._hierarchy.partials.at(step.slot), self._slot.window
        if step.outbox is None:
            return self._slices(chunk, step.owner, step.owner, at)
        nbytes = self._scaled(sum(copy.nbytes for _, copy in self._plan.slices[step.owner][chunk]))
        copy = Copy(self._hierarchy.outbox.at(step.outbox), at, 1, nbytes, nbytes, nbytes)
        return SourcedPut(self._slot.transport.prepare(window, step.owner, [(window.memory, copy)]), ())

    # --- sums ---

    def _sum_node(self, chunk: int, step: LocalSum) -> Prepared:
        """The node's slices of a chunk, in GPU order, into a slot of partials' dtype, or the shard itself."""
        contributions, outputs = [], []
        into = self._hierarchy.partials if step.into == "partials" else self._hierarchy.outbox
        places = self._plan.own[chunk] if step.into == "shard" else ()
        for number, (index, copy) in enumerate(self._plan.slices[step.owner][chunk]):
            contributions.append(
                [
                    region_view(self._gradients[index], copy.src, self._dtype)
                    if slot is None
                    else self._view(self._hierarchy.contributions.at(slot) + copy.dst_offset, copy.nbytes, self._dtype)
                    for slot in step.contributions
                ]
            )
            if step.slot is None:
                outputs.append(self._output(places[number]))
            else:
                start, nbytes = self._scaled(copy.dst_offset), self._scaled(copy.nbytes)
                outputs.append(self._view(into.at(step.slot) + start, nbytes, self._partial))
        divisor = self._reduction.divisor if step.into == "shard" else 1.0
        return self._accumulate("sum", contributions, outputs, divisor=divisor)

    def _add_partial(self, chunk: int, step: FinalSum) -> tuple[Prepared, ...]:
        """A node's partial of the own chunk into the accumulator; the last one with it into the shard."""
        node, parts = self._hierarchy.topology.node(step.source), self._plan.own[chunk]
        in_place = self._hierarchy.is_in_place
        if in_place:
            came = [self._came_in_place(step, index, copy) for index, copy in self._plan.slices[self._plan.rank][chunk]]
        else:
            assert step.slot is not None
            at, size = self._hierarchy.partials.at(step.slot), self._partial.itemsize
            came = [self._view(at + part.in_chunk * size, part.numel * size, self._partial) for part in parts]
        sums = [self._accumulator[part.in_chunk : part.in_chunk + part.numel] for part in parts]
        if node < self._hierarchy.topology.nodes - 1:
            return (self._accumulate("final", [[x] for x in came], sums, add=node > 0, rounded=not in_place),)
        outputs, divisor = [self._output(part) for part in parts], self._reduction.divisor
        if self._adds_to_accumulator:
            both = [[total, x] for total, x in zip(sums, came, strict=True)]
            return (self._accumulate("final", both, outputs, divisor=divisor, rounded=not in_place),)
        return (
            self._accumulate("final", [[x] for x in came], sums, add=True, rounded=not in_place),
            self._accumulate("final", [[x] for x in sums], outputs, divisor=divisor, rounded=True),
        )

    @property
    def _adds_to_accumulator(self) -> bool:
        """Whether a kernel may take the accumulator as a contribution: it is not rounded, and added in its dtype."""
        wide = self._accumulator.dtype
        if self._hierarchy.is_in_place:
            return self._reduction.premultiply == 1.0 and self._reduction.wire_dtype in (None, wide)
        return self._partial != torch.float64 or wide == torch.float64

    def _came_in_place(self, step: FinalSum, index: int, copy: Copy) -> torch.Tensor:
        """A node's only gradient: the own one where it lies, others where they landed."""
        if step.slot is None:
            return region_view(self._gradients[index], copy.src, self._dtype)
        return self._view(self._hierarchy.partials.at(step.slot) + copy.dst_offset, copy.nbytes, self._dtype)

    def _accumulate(
        self,
        lane: Lane,
        contributions: Sequence[Sequence[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
        add: bool = False,
        rounded: bool = False,
    ) -> Prepared:
        """rounded: whether contributions are what the reduction makes of gradients already."""
        with _in(self._slot.transport, lane):
            add_up = prepare_accumulate(
                contributions,
                outputs,
                wire_dtype=None if rounded else self._reduction.wire_dtype,
                premultiply=1.0 if rounded else self._reduction.premultiply,
                divisor=divisor,
                add=add,
                ctas=self._ctas,
            )
        self.sums[lane].append(add_up)
        return add_up

    # --- views ---

    def _view(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        return region_view(self._slot.window.memory, Region(offset, 1, nbytes, nbytes), dtype)

    def _scaled(self, nbytes: int) -> int:
        """Bytes of as many elements of a partial as of gradients take `nbytes`."""
        return nbytes // self._dtype.itemsize * self._partial.itemsize

    def _output(self, part: Part) -> torch.Tensor:
        """What `part` fills; the last part of a tensor takes the padding along."""
        output = self._outputs[part.index]
        return output[part.in_shard : output.numel() if part.is_last else part.in_shard + part.numel]


def empty_accumulator(plan: Plan, transport: Transport, wide: torch.dtype) -> torch.Tensor:
    """`Memory.accumulator` for `plan`, in the order of the lane that uses it: the next one may take its place."""
    numel = plan.hierarchy.chunk_numel if plan.hierarchy.topology.nodes > 1 else 0
    with _in(transport, "final"):
        return torch.empty(numel, dtype=wide, device=transport.device)


def _in(transport: Transport, lane: Lane) -> ExitStack:
    """Torch's own work inside goes in `lane`'s order."""
    with ExitStack() as stack:
        stack.enter_context(transport.lane(lane, joined=False))
        stack.enter_context(transport.here())
        return stack.pop_all()


def _addresses(memory: Memory) -> list[int]:
    return [tensor.data_ptr() for tensor in memory.tensors]


def _are_disjoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an address says which of `tensors` it lies in."""
    stretches = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    return all(stop <= start for (_, stop), (start, _) in pairwise(stretches))
