"""TIDE-RS: every gradient's slices go straight to the ranks that own them, and are summed there.

    gradient (bf16, where autograd left it) --put--> a place with the owner --sum by rank--> fp32 shard

The owner reads its own slice from its gradient, so a byte moves once and is added once. Contributions are added in rank
order whatever order they came in, so the result is the same bit for bit on every transport and by either way:

| through  | where slices land                    | pieces                             | gradients may come        |
|----------|--------------------------------------|------------------------------------|---------------------------|
| a ring   | in a chunk, which the next but few   | as large as a chunk; one turn each | one by one, as autograd   |
|          | pieces use again                     |                                    | produces them             |
| a slot   | side by side in a vacated slot       | parts of one turn, the last small  | all at once               |

Where the transport overlaps, the sum of a piece runs while later pieces travel.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tide_triton.kernels import prepare_accumulate
from tide_triton.kernels.launch import Prepared
from tide_triton.kernels.movable import Movable
from tide_triton.layouts import Copy, LandingLayout, Region, shard
from tide_triton.layouts.pieces import reduce_pieces
from tide_triton.layouts.ranges import Range, owned, source_region
from tide_triton.layouts.ring import RingLayout
from tide_triton.layouts.transfers import between
from tide_triton.reducers import Kept, Reducer, Reduction, Underway
from tide_triton.transports import Put
from tide_triton.views import DTYPES, as_bytes, region_view
from tide_triton.windows import PARTS, Ring, Slot, Turn

#: (source, owner) -> where a range's bytes of `source` start with their owner.
_Place = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What travels together.

    copies: by owner, what this rank puts into its place: the tensor's index, from its gradient, to the place.
    contributions: by range, every rank's bytes: in the place that they came to, the own ones in the gradient.
    """

    ranges: tuple[Range, ...]
    copies: tuple[tuple[tuple[int, Copy], ...], ...]
    contributions: tuple[tuple[Region, ...], ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the gradients of some tensors travel: in which pieces, and after how many of them each tensor is done."""

    pieces: tuple[_Piece, ...]
    last: dict[int, int]
    wire_nbytes: int


@dataclass(slots=True)
class _PutPlan:
    """Puts by piece and peer, and where the gradients lay that they start from."""

    addresses: dict[int, int]
    puts: list[list[Put]]


class ReduceScatter(Reducer):
    """The reduce-scatter of one group on rank `rank` of a node, for gradients of one dtype.

    Gradients go through a vacant slot, at least `landing.nbytes` large, or through a ring.

    ctas: CTAs of each sum but the last at most, None for as many as there are blocks.
    """

    def __init__(self, landing: LandingLayout, rank: int, *, ctas: int | None = None) -> None:
        self.landing = landing
        self.rank = rank
        self.world_size = landing.spec.world_size
        self.padded_numels = [shard(tensor, self.world_size, rank).padded_numel for tensor in landing.tensors]
        self._ctas = ctas
        self._dtypes = [DTYPES[tensor.dtype] for tensor in landing.tensors]
        #: What was prepared, to be moved to where gradients and outputs lie the next time.
        self._put_plans: dict[Hashable, _PutPlan] = {}
        self._sum_plans: dict[Hashable, Movable] = {}
        self._captured: list[list[Prepared]] = []
        self._cuts: dict[Hashable, _Cut] = {}

    def start(
        self, through: Slot | Ring, outputs: Mapping[int, torch.Tensor], reduction: Reduction, what: str
    ) -> "Reducing":
        return Reducing(self, through, outputs, reduction, what)

    # --- what travels ---

    def cut(self, through: Slot | Ring, indices: tuple[int, ...]) -> _Cut:
        """How the gradients of tensors `indices` travel."""
        chunk = through.chunk_nbytes if isinstance(through, Ring) else None
        key = (indices, chunk, through.transport.piece_nbytes)
        if key not in self._cuts:
            pieces = self._through_slot(indices, key[2]) if chunk is None else self._through_ring(indices, chunk)
            last = {part.index: number for number, piece in enumerate(pieces) for part in piece.ranges}
            sent = (copy for piece in pieces for moves in piece.copies for _, copy in moves)
            self._cuts[key] = _Cut(pieces, last, sum(copy.nbytes for copy in sent))
        return self._cuts[key]

    def _through_slot(self, indices: tuple[int, ...], smallest: int | None) -> tuple[_Piece, ...]:
        landing = self.landing

        def place(part: Range, source: int, owner: int) -> int:
            start, _ = owned(landing.tensors[part.index], self.world_size, part, owner)
            itemsize = landing.tensors[part.index].itemsize
            return landing.segment(part.index, source, owner).offset + start * itemsize

        return tuple(
            self._piece(ranges, [partial(place, part) for part in ranges])
            for ranges in reduce_pieces(landing, indices, smallest, PARTS - 1)
        )

    def _through_ring(self, indices: tuple[int, ...], chunk_nbytes: int) -> tuple[_Piece, ...]:
        ring = RingLayout(self.landing, chunk_nbytes)

        def place(offset: int, source: int, owner: int) -> int:
            return ring.place(source, owner) + offset

        return tuple(
            self._piece(piece.ranges, [partial(place, offset) for offset in piece.offsets])
            for piece in ring.pieces(indices)
        )

    def _piece(self, ranges: Sequence[Range], places: Sequence[_Place]) -> _Piece:
        """places: by range, where a source's bytes start with their owner."""

        def region(part: Range, place: _Place, source: int, owner: int) -> Region:
            start, stop = owned(self.landing.tensors[part.index], self.world_size, part, owner)
            nbytes = (stop - start) * self.landing.tensors[part.index].itemsize
            return Region(place(source, owner), 1, nbytes, nbytes).merged()

        def source(part: Range, owner: int) -> Region:
            return source_region(self.landing.tensors[part.index], self.world_size, part, owner)

        copies = tuple(
            tuple(
                (part.index, copy)
                for part, place in zip(ranges, places, strict=True)
                if owner != self.rank
                and (copy := between(source(part, owner), region(part, place, self.rank, owner))) is not None
            )
            for owner in range(self.world_size)
        )
        contributions = tuple(
            tuple(
                source(part, self.rank) if rank == self.rank else region(part, place, rank, self.rank)
                for rank in range(self.world_size)
            )
            for part, place in zip(ranges, places, strict=True)
        )
        return _Piece(tuple(ranges), copies, contributions)

    # --- what is prepared ---

    def puts(
        self, slots: Sequence[Slot], cut: _Cut, first: int, gradients: Mapping[int, torch.Tensor]
    ) -> list[list[Put]]:
        """What goes to each peer in the pieces from `first` on, one for each of `slots`."""
        pieces = cut.pieces[first : first + len(slots)]
        key = (id(cut), first, len(slots), slots[0])
        addresses = {index: gradient.data_ptr() for index, gradient in gradients.items()}
        plan = self._put_plans.get(key)
        if plan is None:
            puts = [
                [
                    slot.transport.prepare(slot.window, peer, [(gradients[i], copy) for i, copy in piece.copies[peer]])
                    for peer in slot.peers
                ]
                for slot, piece in zip(slots, pieces, strict=True)
            ]
            if not all(put.is_reusable for to_peers in puts for put in to_peers):
                return puts
            plan = self._put_plans[key] = _PutPlan(addresses, puts)
        elif addresses != plan.addresses:
            by = {index: address - plan.addresses[index] for index, address in addresses.items()}
            for to_peers, slot, piece in zip(plan.puts, slots, pieces, strict=True):
                for number, peer in enumerate(slot.peers):
                    to_peers[number] = to_peers[number].moved([by[index] for index, _ in piece.copies[peer]])
            plan.addresses = addresses
        return plan.puts

    def sums(
        self,
        slots: Sequence[Slot],
        cut: _Cut,
        first: int,
        gradients: Mapping[int, torch.Tensor],
        outputs: Mapping[int, torch.Tensor],
        reduction: Reduction,
    ) -> list[Prepared]:
        """The sums of the pieces from `first` on, one for each of `slots`."""
        into = {index: outputs[index] for index in gradients}
        tensors = (*gradients.values(), *into.values())
        layout = tuple((output.dtype, output.numel()) for output in into.values())
        key = (id(cut), first, len(slots), slots[0], reduction, layout)
        captured = slots[0].transport.capture is not None
        # What a graph has captured must stay as it is, for as long as the graph is replayed.
        plan = None if captured else self._sum_plans.get(key)
        with slots[0].transport.here():
            if plan is not None and plan.move([tensor.data_ptr() for tensor in tensors]):
                return plan.prepared
            pieces = cut.pieces[first : first + len(slots)]
            sums = [
                prepare_accumulate(
                    [
                        self._contributions(slot, regions, gradients[part.index], part.index)
                        for part, regions in zip(piece.ranges, piece.contributions, strict=True)
                    ],
                    [self._output(part, into[part.index]) for part in piece.ranges],
                    wire_dtype=reduction.wire_dtype,
                    premultiply=reduction.premultiply,
                    divisor=reduction.divisor,
                    # Nothing is left to overlap with the last sum, which somebody waits for.
                    ctas=self._ctas if number < len(cut.pieces) else None,
                )
                for number, (slot, piece) in enumerate(zip(slots, pieces, strict=True), start=first + 1)
            ]
            if captured:
                self._captured.append(sums)
            elif all(one.is_reusable for one in sums):
                self._sum_plans[key] = Movable(sums, tensors)
        return sums

    def _output(self, part: Range, output: torch.Tensor) -> torch.Tensor:
        """What `part` fills of `output`; the last range of a tensor takes the padding along."""
        start, stop = owned(self.landing.tensors[part.index], self.world_size, part, self.rank)
        return output[start : output.numel() if part.stop == self.padded_numels[part.index] else stop]

    def _contributions(
        self, slot: Slot, regions: Sequence[Region], gradient: torch.Tensor, index: int
    ) -> list[torch.Tensor]:
        """Every rank's slice, in rank order: the own one in place, the others where they landed."""
        own = as_bytes(gradient)
        return [
            region_view(own if source == self.rank else slot.window.memory, region, self._dtypes[index])
            for source, region in enumerate(regions)
        ]


class Reducing(Underway):
    """A reduction under way within a node.

    What is offered travels in the order in which the outputs were given, which is the same on every rank: a piece goes
    once all its gradients are there, so ranks whose autograd produces gradients in different orders still agree.
    """

    def __init__(
        self,
        reducer: ReduceScatter,
        through: Slot | Ring,
        outputs: Mapping[int, torch.Tensor],
        reduction: Reduction,
        what: str,
    ) -> None:
        super().__init__(through.transport, outputs, reduction, what)
        self._reducer = reducer
        self._through = through
        self._cut = reducer.cut(through, tuple(outputs))
        self._missing = [{part.index for part in piece.ranges} for piece in self._cut.pieces]
        self._next = 0
        self._turn: Turn | None = None

    @property
    def wire_nbytes(self) -> int:
        return self._cut.wire_nbytes

    def offer(self, index: int, gradient: torch.Tensor) -> Kept | None:
        self.waiting[index] = gradient
        if index not in self._cut.last:
            # A tensor without elements has no part in any piece.
            del self.waiting[index]
            self.sent.add(index)
        for missing in self._missing[self._next :]:
            missing.discard(index)
        upto = self._next
        while upto < len(self._missing) and not self._missing[upto]:
            upto += 1
        # Parts of one turn go together; a ring's pieces need not.
        if upto == self._next or (isinstance(self._through, Slot) and upto < len(self._missing)):
            return None
        return self._send(upto)

    def _send(self, upto: int) -> Kept:
        """Send and sum the pieces up to `upto`."""
        transport, first = self._transport, self._next
        used = {part.index for piece in self._cut.pieces[first:upto] for part in piece.ranges}
        gradients = {index: self.waiting[index] for index in self.waiting if index in used}
        through, count = self._through, upto - first
        slots = through.take(count) if isinstance(through, Ring) else [through] * count
        parts = 1 if isinstance(through, Ring) else count
        with transport.lane("reduce"):
            puts = self._reducer.puts(slots, self._cut, first, gradients)
            # Joined here, so that sums come after the gradients they read and the memory they write.
            with transport.lane("sum"):
                sums = self._reducer.sums(slots, self._cut, first, gradients, self.outputs, self.reduction)
            for number, (slot, to_peers, add_up) in enumerate(zip(slots, puts, sums, strict=True)):
                part = number % parts + 1
                if part == 1:
                    self._turn = slot.open(self._what, parts)
                    for peer in self._turn.peers:
                        self._turn.await_credit(peer)
                turn = self._turn
                assert turn is not None
                for peer, put in zip(turn.peers, to_peers, strict=True):
                    transport.put(put)
                    turn.publish(peer, part)
                with transport.lane("sum", joined=False):
                    turn.await_part(part)
                    add_up(transport.stream)
                    if part == turn.parts:
                        turn.is_complete = True
                        slot.vacate()
            sent = transport.mark()
            with transport.lane("sum", joined=False):
                # Gradients have been read once they are sent and added.
                transport.after(sent)
                self._done = transport.mark()
        self._next = upto
        whole = [index for index in gradients if self._cut.last[index] < upto]
        self.sent.update(whole)
        return Kept([self.waiting.pop(index) for index in whole], self._done)
