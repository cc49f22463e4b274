"""TIDE-RS: every gradient's slices go straight to the ranks that own them, and are summed there.

    gradient (bf16, where autograd left it) --put--> its segment of the owner's landing --sum by rank--> fp32 shard

The owner reads its own slice from its gradient, so a byte moves once and is added once. Contributions are added in rank
order whatever order they came in, so the result is the same bit for bit on every transport. Where the transport
overlaps, the sum of a piece runs while later pieces travel.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tide_triton.kernels import prepare_accumulate
from tide_triton.kernels.launch import Prepared
from tide_triton.kernels.movable import Movable
from tide_triton.layouts import Copy, LandingLayout, scatter_copies, shard
from tide_triton.layouts.pieces import Range, clip, reduce_pieces
from tide_triton.traffic import Traffic
from tide_triton.transports import Put
from tide_triton.views import DTYPES, as_bytes, region_view
from tide_triton.windows import PARTS, Slot


@dataclass(frozen=True, slots=True)
class Reduction:
    """What happens to the sum, in FSDP2's terms.

    wire_dtype: contributions are rounded to it before they are added; None leaves them as they are.
    premultiply: each contribution is multiplied by it, in the wire dtype, before the sum (PREMUL_SUM, pre-division).
    divisor: the sum is divided by it (AVG: the world size).
    """

    wire_dtype: torch.dtype | None = None
    premultiply: float = 1.0
    divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """How some tensors' gradients travel: pieces, and of each piece what goes to each owner."""

    indices: tuple[int, ...]
    pieces: tuple[tuple[Range, ...], ...]
    copies: tuple[tuple[tuple[tuple[int, Copy], ...], ...], ...]
    wire_nbytes: int


@dataclass(slots=True)
class _PutPlan:
    """Puts by piece and peer, and where the gradients lay that they start from."""

    addresses: dict[int, int]
    puts: list[list[Put]]


class ReduceScatter:
    """The reduce-scatter of one group on rank `rank`, for gradients of one dtype.

    ctas: CTAs of the sum at most, None for as many as there are blocks.
    """

    def __init__(self, landing: LandingLayout, rank: int, *, ctas: int | None = None) -> None:
        self.landing = landing
        self.rank = rank
        self.world_size = landing.spec.world_size
        self._ctas = ctas
        self._copies = [scatter_copies(landing, rank, owner) for owner in range(self.world_size)]
        self._shards = [shard(tensor, self.world_size, rank) for tensor in landing.tensors]
        self._dtypes = [DTYPES[tensor.dtype] for tensor in landing.tensors]
        #: Where each rank's slice of each tensor lies: in the own gradient, or where it lands.
        self._regions = [
            [
                own.region if source == rank else landing.segment(index, source, rank)
                for source in range(self.world_size)
            ]
            for index, own in enumerate(self._shards)
        ]
        #: What was prepared, to be moved to where gradients and outputs lie the next time.
        self._put_plans: dict[Hashable, _PutPlan] = {}
        self._sum_plans: dict[Hashable, Movable] = {}
        self._cuts: dict[tuple[tuple[int, ...], int | None], _Cut] = {}

    def __call__(
        self,
        slot: Slot,
        gradients: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        reduction: Reduction,
        what: str,
        traffic: Traffic,
    ) -> None:
        """Reduce `gradients` over the ranks, and write this rank's shards to `outputs`.

        slot: vacant, at least `landing.nbytes` large.
        gradients: (index of the tensor in the group, unsharded gradient), contiguous and of the landing's dtypes; the
        same indices in the same order on every rank.
        outputs: one per gradient, contiguous, at least the shard's elements; what is beyond them (padding) becomes 0.
        what: the group's name, for errors.
        """
        transport = slot.transport
        cut = self._cut(tuple(index for index, _ in gradients), transport.piece_nbytes)
        by_index = dict(gradients)
        with transport.lane("reduce"):
            turn = slot.open(f"reduce-scatter of {what}", len(cut.pieces))
            for peer in turn.peers:
                turn.await_credit(peer)
            for part, to_peers in enumerate(self._puts(slot, cut, by_index), start=1):
                for peer, put in zip(turn.peers, to_peers, strict=True):
                    transport.put(put)
                    turn.publish(peer, part)
            sent = transport.mark()
        with transport.lane("sum"):
            for part, add_up in enumerate(self._sums(slot, cut, by_index, outputs, reduction), start=1):
                turn.await_part(part)
                add_up(transport.stream)
            turn.is_complete = True
            slot.vacate()
            summed = transport.mark()
        # Gradients may be freed, and outputs used, once the caller is past both.
        transport.after(sent)
        transport.after(summed)
        traffic.wire_bytes += cut.wire_nbytes
        traffic.zero_copy += 1

    def _cut(self, indices: tuple[int, ...], smallest: int | None) -> "_Cut":
        """How the gradients of tensors `indices` travel."""
        key = (indices, smallest)
        if key not in self._cuts:
            pieces = reduce_pieces(self.landing, indices, smallest, PARTS - 1)
            copies = tuple(
                tuple(
                    tuple((span.index, copy) for span in piece if (copy := self._copy(owner, span)) is not None)
                    for owner in range(self.world_size)
                )
                for piece in pieces
            )
            self._cuts[key] = _Cut(
                indices,
                pieces,
                copies,
                sum(
                    copy.nbytes
                    for by_owner in copies
                    for owner, moves in enumerate(by_owner)
                    if owner != self.rank
                    for _, copy in moves
                ),
            )
        return self._cuts[key]

    def _copy(self, owner: int, span: Range) -> Copy | None:
        """What of `span` this rank puts to its owner."""
        return clip(self._copies[owner][span.index], span, self.landing.tensors[span.index].itemsize)

    def _puts(self, slot: Slot, cut: "_Cut", gradients: Mapping[int, torch.Tensor]) -> list[list[Put]]:
        """What goes to each peer, by piece."""
        key = (slot, id(cut))
        addresses = {index: gradient.data_ptr() for index, gradient in gradients.items()}
        plan = self._put_plans.get(key)
        if plan is None:
            puts = _prepare_puts(slot, cut, gradients)
            if not all(put.is_reusable for to_peers in puts for put in to_peers):
                return puts
            plan = self._put_plans[key] = _PutPlan(addresses, puts)
        elif addresses != plan.addresses:
            by = {index: address - plan.addresses[index] for index, address in addresses.items()}
            for to_peers, by_owner in zip(plan.puts, cut.copies, strict=True):
                for number, peer in enumerate(slot.peers):
                    to_peers[number] = to_peers[number].moved([by[index] for index, _ in by_owner[peer]])
            plan.addresses = addresses
        return plan.puts

    def _sums(
        self,
        slot: Slot,
        cut: "_Cut",
        gradients: Mapping[int, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> list[Prepared]:
        """The sums, by piece."""
        tensors = (*gradients.values(), *outputs)
        key = (slot, id(cut), reduction, outputs[0].dtype, *(output.numel() for output in outputs))
        plan = self._sum_plans.get(key)
        with slot.transport.here():
            if plan is not None and plan.move([tensor.data_ptr() for tensor in tensors]):
                return plan.prepared
            sums = self._prepare_sums(slot, cut, gradients, outputs, reduction)
            if all(one.is_reusable for one in sums):
                self._sum_plans[key] = Movable(sums, tensors)
        return sums

    def _prepare_sums(
        self,
        slot: Slot,
        cut: "_Cut",
        gradients: Mapping[int, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> list[Prepared]:
        into = dict(zip(gradients, outputs, strict=True))
        return [
            prepare_accumulate(
                [self._contributions(slot, span, gradients[span.index]) for span in piece],
                [into[span.index][span.start : self._stop(span, into[span.index])] for span in piece],
                wire_dtype=reduction.wire_dtype,
                premultiply=reduction.premultiply,
                divisor=reduction.divisor,
                ctas=self._ctas,
            )
            for piece in cut.pieces
        ]

    def _stop(self, span: Range, output: torch.Tensor) -> int:
        """The last span of a tensor takes its output's padding along."""
        return output.numel() if span.stop == self._shards[span.index].padded_numel else span.stop

    def _contributions(self, slot: Slot, span: Range, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's slice of `span`, in rank order: the own one in place, the others where they landed."""
        dtype, own = self._dtypes[span.index], as_bytes(gradient)
        views = [
            region_view(own if source == self.rank else slot.window.memory, region, dtype)
            for source, region in enumerate(self._regions[span.index])
        ]
        if span.start == 0 and span.stop >= self._shards[span.index].numel:
            return views
        return [view[span.start : span.stop] for view in views]


def _prepare_puts(slot: Slot, cut: _Cut, gradients: Mapping[int, torch.Tensor]) -> list[list[Put]]:
    """What goes to each peer, by piece."""
    return [
        [
            slot.transport.prepare(slot.window, peer, [(gradients[index], copy) for index, copy in by_owner[peer]])
            for peer in slot.peers
        ]
        for by_owner in cut.copies
    ]
