"""TIDE-RS: every gradient's slices go straight to the ranks that own them, and are summed there.

    gradient (bf16, where autograd left it) --put--> its segment of the owner's landing --sum by rank--> fp32 shard

The owner reads its own slice from its gradient, so a byte moves once and is added once. Contributions are added in rank
order whatever order they came in, so the result is the same bit for bit on every transport. Where the transport
overlaps, the sum of a piece runs while later pieces travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_triton.kernels import TableCache, accumulate
from tide_triton.layouts import Copy, LandingLayout, scatter_copies, shard
from tide_triton.layouts.pieces import Range, clip, reduce_pieces
from tide_triton.traffic import Traffic
from tide_triton.views import DTYPES, region_view
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


class ReduceScatter:
    """The reduce-scatter of one group on rank `rank`, for gradients of one dtype.

    ctas: CTAs of the sum at most, None for as many as there are blocks.
    """

    def __init__(self, landing: LandingLayout, rank: int, *, ctas: int | None = None) -> None:
        self.landing = landing
        self.rank = rank
        self.world_size = landing.spec.world_size
        self._ctas = ctas
        self._tables = TableCache()
        self._copies = [scatter_copies(landing, rank, owner) for owner in range(self.world_size)]
        self._shards = [shard(tensor, self.world_size, rank) for tensor in landing.tensors]
        self._pieces: dict[tuple[tuple[int, ...], int | None], tuple[tuple[Range, ...], ...]] = {}

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
        pieces = self._pieces_of(tuple(index for index, _ in gradients), transport.piece_nbytes)
        by_index = dict(gradients)
        into = {index: output for (index, _), output in zip(gradients, outputs, strict=True)}
        with transport.lane("reduce"):
            turn = slot.open(f"reduce-scatter of {what}", len(pieces))
            for peer in turn.peers:
                turn.await_credit(peer)
            for part, piece in enumerate(pieces, start=1):
                for peer in turn.peers:
                    moves = [
                        (by_index[span.index], copy) for span in piece if (copy := self._copy(peer, span)) is not None
                    ]
                    turn.put(peer, moves)
                    turn.publish(peer, part)
                    traffic.wire_bytes += sum(copy.nbytes for _, copy in moves)
            sent = transport.mark()
        with transport.lane("sum"):
            for part, piece in enumerate(pieces, start=1):
                turn.await_part(part)
                accumulate(
                    [self._contributions(slot, span, by_index[span.index]) for span in piece],
                    [into[span.index][span.start : self._stop(span, into[span.index])] for span in piece],
                    wire_dtype=reduction.wire_dtype,
                    premultiply=reduction.premultiply,
                    divisor=reduction.divisor,
                    tables=self._tables,
                    ctas=self._ctas,
                )
            turn.is_complete = True
            slot.vacate()
            summed = transport.mark()
        # Gradients may be freed, and outputs used, once the caller is past both.
        transport.after(sent)
        transport.after(summed)
        traffic.zero_copy += 1

    def _pieces_of(self, indices: tuple[int, ...], nbytes: int | None) -> tuple[tuple[Range, ...], ...]:
        key = (indices, nbytes)
        if key not in self._pieces:
            pieces = reduce_pieces(self.landing, indices, nbytes)
            while len(pieces) >= PARTS and nbytes is not None:
                nbytes *= 2
                pieces = reduce_pieces(self.landing, indices, nbytes)
            self._pieces[key] = pieces
        return self._pieces[key]

    def _copy(self, owner: int, span: Range) -> Copy | None:
        """What of `span` this rank puts to its owner."""
        return clip(self._copies[owner][span.index], span, self.landing.tensors[span.index].itemsize)

    def _stop(self, span: Range, output: torch.Tensor) -> int:
        """The last span of a tensor takes its output's padding along."""
        return output.numel() if span.stop == self._shards[span.index].padded_numel else span.stop

    def _contributions(self, slot: Slot, span: Range, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's slice of `span`, in rank order: the own one in place, the others where they landed."""
        dtype = DTYPES[self.landing.tensors[span.index].dtype]
        memory = gradient.detach().reshape(-1).view(torch.uint8)
        views = [
            region_view(memory, self._shards[span.index].region, dtype)
            if source == self.rank
            else region_view(slot.window.memory, self.landing.segment(span.index, source, self.rank), dtype)
            for source in range(self.world_size)
        ]
        if span.start == 0 and span.stop >= self._shards[span.index].numel:
            return views
        return [view[span.start : span.stop] for view in views]
