"""TIDE-RS: every gradient's slices go straight to the ranks that own them, and are summed there.

    gradient (bf16, where autograd left it) --put--> its segment of the owner's landing --sum by rank--> fp32 shard

The owner reads its own slice from its gradient, so a byte moves once and is added once. Contributions are added in rank
order whatever order they came in, so the result is the same bit for bit on every transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_triton.kernels import TableCache, accumulate
from tide_triton.layouts import LandingLayout, scatter_copies, shard
from tide_triton.traffic import Traffic
from tide_triton.views import DTYPES, region_view
from tide_triton.windows import Slot


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
    """The reduce-scatter of one group on rank `rank`, for gradients of one dtype."""

    def __init__(self, landing: LandingLayout, rank: int) -> None:
        self.landing = landing
        self.rank = rank
        self.world_size = landing.spec.world_size
        self._tables = TableCache()
        self._copies = [scatter_copies(landing, rank, owner) for owner in range(self.world_size)]
        self._shards = [shard(tensor, self.world_size, rank) for tensor in landing.tensors]

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
        turn = slot.open(f"reduce-scatter of {what}")
        for peer in turn.peers:
            turn.await_credit(peer)
            for index, gradient in gradients:
                copy = self._copies[peer][index]
                if copy is not None:
                    turn.put(peer, gradient, (copy,))
                    traffic.wire_bytes += copy.nbytes
            turn.publish(peer)
        turn.await_data()
        accumulate(
            [self._contributions(slot, index, gradient) for index, gradient in gradients],
            outputs,
            wire_dtype=reduction.wire_dtype,
            premultiply=reduction.premultiply,
            divisor=reduction.divisor,
            tables=self._tables,
        )
        traffic.zero_copy += 1

    def _contributions(self, slot: Slot, index: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's slice of tensor `index`, in rank order: the own one in place, the others where they landed."""
        dtype = DTYPES[self.landing.tensors[index].dtype]
        memory = gradient.detach().reshape(-1).view(torch.uint8)
        return [
            region_view(memory, self._shards[index].region, dtype)
            if source == self.rank
            else region_view(slot.window.memory, self.landing.segment(index, source, self.rank), dtype)
            for source in range(self.world_size)
        ]
