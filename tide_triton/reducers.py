"""What a reduce-scatter is to those who use it, whichever way its gradients go.

reducer = ReduceScatter(...) or SwitchReduceScatter(...) or HierarchicalReduceScatter(...)
reducing = reducer.start(through, outputs, reduction, what)
reducing.offer(index, gradient)             for each, as it is there
reducing.finish(traffic)                    outputs hold the shards
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tide_triton.layouts import LandingLayout
from tide_triton.traffic import Traffic
from tide_triton.transports import Mark, Transport
from tide_triton.windows import Ring, Slot


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


@dataclass(eq=False)
class Kept:
    """Gradients that are still being read, until `mark`: alive as long as somebody holds this.

    nbytes: theirs. Added up once, since every gradient that comes asks for it.
    """

    gradients: list[torch.Tensor]
    mark: Mark | None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(gradient.nbytes for gradient in self.gradients)


class Underway(abc.ABC):
    """A reduction under way.

    outputs: by tensor of the group, in the order in which gradients travel, which is the same on every rank.
    what: the group's name, for errors.
    """

    def __init__(
        self, transport: Transport, outputs: Mapping[int, torch.Tensor], reduction: Reduction, what: str
    ) -> None:
        self.outputs = outputs
        self.reduction = reduction
        #: Gradients that were offered and are not on their way whole.
        self.waiting: dict[int, torch.Tensor] = {}
        #: Tensors that are on their way whole.
        self.sent: set[int] = set()
        #: What is worth knowing of this reduction, for `Traffic.remarks`.
        self.remark: str | None = None
        self._transport = transport
        self._what = f"reduce-scatter of {what}"
        self._done: Mark | None = None

    @property
    @abc.abstractmethod
    def wire_nbytes(self) -> int:
        """Bytes that this rank sends to others."""

    @abc.abstractmethod
    def offer(self, index: int, gradient: torch.Tensor) -> Kept | None:
        """The gradient of tensor `index` (contiguous) is there, in the caller's order: send what can go.

        Returns the gradients that are now on their way whole, None where none is; without one, they live as long as
        this object or until `finish`.
        """

    def follow(self) -> None:
        """Whatever the caller does next comes after all that was sent so far."""
        self._transport.after(self._done)

    def finish(self, traffic: Traffic) -> None:
        """Once every gradient was offered: gradients may be freed, and outputs used, in the caller's order.

        Raises RuntimeError where gradients are missing.
        """
        missing = sorted(set(self.outputs) - set(self.waiting) - self.sent)
        if missing:
            raise RuntimeError(f"{self._what}: the gradients of tensors {missing} of the group were never offered")
        self.follow()
        traffic.wire_bytes += self.wire_nbytes
        traffic.zero_copy += 1
        if self.remark is not None:
            traffic.remarks[self.remark] += 1


class AtOnce(Underway):
    """A reduction that goes once its last gradient is there."""

    def offer(self, index: int, gradient: torch.Tensor) -> Kept | None:
        self.waiting[index] = gradient
        if len(self.waiting) < len(self.outputs):
            return None
        gradients = {index: self.waiting[index] for index in self.outputs}
        self._done = self._go(gradients)
        self.waiting.clear()
        self.sent.update(gradients)
        return Kept(list(gradients.values()), self._done)

    @abc.abstractmethod
    def _go(self, gradients: Mapping[int, torch.Tensor]) -> Mark | None:
        """Send and sum `gradients`, which are in the outputs' order; after the mark they are free and outputs there."""


class Reducer(abc.ABC):
    """The reduce-scatter of one group on one rank, for gradients of one dtype.

    padded_numels: elements of this rank's shard of each tensor, with padding.
    """

    landing: LandingLayout
    padded_numels: list[int]

    @abc.abstractmethod
    def start(
        self, through: Slot | Ring, outputs: Mapping[int, torch.Tensor], reduction: Reduction, what: str
    ) -> Underway:
        """Begin a reduction of the tensors that `outputs` names, in its order: their gradients come by `offer`."""

    def __call__(
        self,
        through: Slot | Ring,
        gradients: Sequence[tuple[int, torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        reduction: Reduction,
        what: str,
        traffic: Traffic,
    ) -> None:
        """Reduce `gradients` over the ranks, and write this rank's shards to `outputs`.

        through: what gradients go through; the reducer's class says what it takes.
        gradients: (index of the tensor in the group, unsharded gradient), contiguous and of the landing's dtypes; the
        same indices in the same order on every rank.
        outputs: one per gradient, contiguous, at least the shard's elements; what is beyond them (padding) becomes 0.
        what: the group's name, for errors.

        Gradients may be freed, and outputs used, once the caller's order is past this.
        """
        into = {index: output for (index, _), output in zip(gradients, outputs, strict=True)}
        reducing = self.start(through, into, reduction, what)
        for index, gradient in gradients:
            reducing.offer(index, gradient)
        reducing.finish(traffic)
