"""What a reduce-scatter is to those who use it, whichever way its gradients go."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from tide_triton.layouts import LandingLayout
from tide_triton.reduce_scatter import Kept, Reduction
from tide_triton.traffic import Traffic
from tide_triton.windows import Ring, Slot


class Underway(Protocol):
    """A reduction under way: `reduce_scatter.Reducing` says what each of these does."""

    #: Gradients that were offered and are not on their way whole, and tensors that are.
    waiting: dict[int, torch.Tensor]
    sent: set[int]

    def offer(self, index: int, gradient: torch.Tensor) -> Kept | None: ...

    def follow(self) -> None: ...

    def finish(self, traffic: Traffic) -> None: ...


class Reducer(Protocol):
    """The reduce-scatter of one group on one rank, for gradients of one dtype: see `reduce_scatter.ReduceScatter`."""

    landing: LandingLayout
    #: Elements of this rank's shard of each tensor, with padding.
    padded_numels: list[int]

    def start(
        self, through: Slot | Ring, outputs: Mapping[int, torch.Tensor], reduction: Reduction, what: str
    ) -> Underway: ...

    def __call__(
        self,
        through: Slot | Ring,
        gradients: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        reduction: Reduction,
        what: str,
        traffic: Traffic,
    ) -> None: ...
