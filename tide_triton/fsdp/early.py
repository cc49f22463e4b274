"""Reductions that begin before FSDP2 asks for them: gradients leave when autograd produces them.

FSDP2 reduces a group once its backward is over. By then most of its gradients have been there for long, and have taken
memory. So it is noted in which order autograd produces a group's gradients, and what FSDP2 then asks of the reduction.
Once two backwards went alike, the ranks agree on the order, and from then on each gradient goes at once:

    autograd     dW3 ------ dW2 ------ dW1 ------ FSDP2's post-backward
    ring            dW3 -> owner  dW2 -> owner  dW1 -> owner
    memory       dW3 is dropped before dW1 is made   (compute waits for its sum, which is long over)

Groups within which others lie are left out: their gradients come mixed with the others', and a ring needs one order on
all ranks. FSDP2 finds a placeholder in `.grad` and the sums in the output it asks for. Whatever differs from what was
noted (other parameters with gradients, a second gradient of one) is reduced when FSDP2 asks, as without this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide_triton.fsdp.internals import FSDPParamGroup, TrainingState
from tide_triton.reducers import Kept, Reducer, Reduction, Underway
from tide_triton.traffic import Traffic
from tide_triton.transports import Transport
from tide_triton.windows import Ring, Slot


@dataclass(frozen=True)
class Habit:
    """How a group's reduction went, in the expectation that the next will go alike.

    order: in which autograd produced gradients. collected: in which FSDP2 hands them over, with all of which `output`
    elements are filled. settings: FSDP2's own, from which the reduction follows. stream: FSDP2's, on which outputs are
    allocated (None on the CPU).
    """

    order: tuple[int, ...]
    collected: tuple[int, ...]
    reduction: Reduction
    settings: tuple[object, ...]
    gradient_dtype: torch.dtype
    output_numel: int
    output_dtype: torch.dtype
    stream: Any


def settings_of(group: FSDPParamGroup) -> tuple[object, ...]:
    """What FSDP2 derives its reduction from; some of it not on torch 2.11."""
    names = ("gradient_divide_factor", "force_sum_reduction_for_comms", "_reduce_dtype", "_orig_dtype", "mesh_info")
    return tuple(getattr(group, name, None) for name in names)


class EarlyReduction:
    """The reduction of one group in one backward, from its first gradient on."""

    def __init__(
        self, reducer: Reducer, ring: Ring | Slot, habit: Habit, device: torch.device, transport: Transport, what: str
    ) -> None:
        self.habit = habit
        self.output = _allocate(habit, device, transport)
        self._parts = split_output(self.output, habit.collected, reducer)
        self._reducing: Underway = reducer.start(
            ring, {index: self._parts[index] for index in habit.order}, habit.reduction, what
        )
        self._offered: set[int] = set()

    def wants(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether this gradient of parameter `index` can go now."""
        return (
            type(gradient) is torch.Tensor
            and gradient.layout == torch.strided
            and gradient.dtype == self.habit.gradient_dtype
            and index in self._parts
            and index not in self._offered
        )

    def offer(self, index: int, gradient: torch.Tensor) -> Kept | None:
        """Send the gradient of parameter `index` (contiguous), as `Reducing.offer`."""
        self._offered.add(index)
        return self._reducing.offer(index, gradient)

    def has(self, index: int) -> bool:
        """Whether a gradient of parameter `index` was offered."""
        return index in self._offered

    def is_as_expected(self, collected: Sequence[int]) -> bool:
        """Whether FSDP2 hands over the gradients that it did before."""
        return tuple(collected) == self.habit.collected

    def finish(self, traffic: Traffic) -> None:
        """Everything was offered: let the caller's order follow, after which `output` holds the shards."""
        self._reducing.finish(traffic)

    def salvage(self) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Where other gradients came than expected: shards that are reduced, in the caller's order, and gradients that
        are not whole on their way."""
        self._reducing.follow()
        return {index: self._parts[index] for index in self._reducing.sent}, dict(self._reducing.waiting)


def _allocate(habit: Habit, device: torch.device, transport: Transport) -> torch.Tensor:
    """The flat output as FSDP2 would allocate it, before the sums in their order."""
    if habit.stream is None:
        return torch.empty(habit.output_numel, dtype=habit.output_dtype, device=device)
    with torch.cuda.stream(habit.stream):
        output = torch.empty(habit.output_numel, dtype=habit.output_dtype, device=device)
        allocated = transport.mark()
    with transport.lane("sum", joined=False):
        transport.after(allocated)
    return output


def split_output(output: torch.Tensor, collected: Sequence[int], reducer: Reducer) -> dict[int, torch.Tensor]:
    """FSDP2's flat output as the padded shards of the tensors `collected`, which lie there one after the other."""
    parts, at = {}, 0
    for index in collected:
        parts[index] = output[at : at + reducer.padded_numels[index]]
        at += reducer.padded_numels[index]
    return parts


def may_begin(group: FSDPParamGroup, habit: Habit) -> bool:
    """Whether FSDP2 will reduce this group after this backward as it did before: the same on every rank."""
    return (
        group._training_state == TrainingState.PRE_BACKWARD
        and bool(group.reduce_grads)
        and settings_of(group) == habit.settings
        and all(getattr(param, "unsharded_accumulated_grad", None) is None for param in group.fsdp_params)
    )
