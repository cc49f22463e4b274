"""Weight gradients that are written where they travel from: into the place that the weight itself has in the slot.

In the backward of a linear layer the weight is needed once, for the gradient of the input. After that its place in the
slot is free until the group is gathered again, and the gradient of the weight has just its shape and dtype:

    dX = dY W          reads W from the slot
    dW = dY^T X        is written over W, and sent from there as early reductions are

So no memory is ever allocated for it. This holds only where nothing else reads the weight until it is gathered again;
where that is not certain, the gradient is allocated and handed to autograd as ever:

    not yet early        the first two backwards of the group, `no_sync`, gradients left over from `no_sync`
    not resharded        `reshard_after_backward` is off: the weight is used again without being gathered
    used more than once  forwards are counted, so that no second use is still to come
    used elsewhere       the first two backwards show whether the layer's gradient is all of the weight's
    tied                 another module has the same parameter

What reads the weight elsewhere and has no gradient for it (through `detach()`) is not seen: where that is read again in
backward, autograd raises "modified by an inplace operation". Attach without `grads_in_slots` then.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from tide_triton.fsdp.group_reduce import GroupReduce

_KEY = "_tide_weight"


class SlotWeight:
    """The weight of one linear layer: which parameter of which group it is, and how often it was used."""

    def __init__(self, reduction: "GroupReduce", index: int) -> None:
        self._reduction = reduction
        self._index = index

    def count(self) -> None:
        """A forward uses the weight. Recomputation within a backward is no other use."""
        if torch._C._current_graph_task_id() == -1:
            self._reduction.uses[self._index] += 1

    def claim(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The place for the gradient, None where it is not certain that the weight is needed no more."""
        return self._reduction.claim(self._index, dtype)

    def expect(self, gradient: torch.Tensor) -> None:
        """The layer hands `gradient` to autograd: is it all of the weight's?"""
        self._reduction.expect(self._index, gradient)

    def deliver(self, gradient: torch.Tensor) -> None:
        """The gradient is in the claimed place."""
        self._reduction.deliver(self._index, gradient)

    def __deepcopy__(self, _: Any) -> "SlotWeight":
        return self


class SlotLinear(nn.Linear):
    """What `attach` makes of an `nn.Linear` with `grads_in_slots`; `detach` makes it an `nn.Linear` again."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        known: SlotWeight | None = self.__dict__.get(_KEY)
        weight = self.weight
        if (
            known is None
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(input.device.type)
            or type(input) is not torch.Tensor
            or type(weight) is not nn.Parameter
            or not (torch.is_grad_enabled() and weight.requires_grad)
            or input.dtype != weight.dtype
        ):
            if known is not None and torch.is_grad_enabled():
                # Used in a way that is not followed: no gradient may be written over the weight.
                known.count()
                known.count()
            return super().forward(input)
        known.count()
        output: torch.Tensor = _Linear.apply(input, weight, self.bias, known)  # type: ignore[no-untyped-call]
        return output


class _Linear(torch.autograd.Function):
    """`functional.linear` whose backward writes the gradient of the weight into the slot where it can."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, known: SlotWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        # Not saved, for then a retained graph would be refused its second backward, before which it is gathered again.
        ctx.weight, ctx.known = weight, known
        return functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        (grad,), weight = gradients, ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])
        columns = input.reshape(-1, input.shape[-1])
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_input = rows.mm(weight).view(input.shape) if needs_input else None
        grad_bias = rows.sum(0) if needs_bias else None
        grad_weight = None
        wanted = _is_wanted(ctx.next_functions[1][0]) if needs_weight else False
        if wanted is not False:
            place = ctx.known.claim(rows.dtype) if wanted and not torch.is_grad_enabled() else None
            if place is None:
                grad_weight = rows.t().mm(columns)
                ctx.known.expect(grad_weight)
            else:
                torch.mm(rows.t(), columns, out=place)
                # Whoever else saved the weight for this backward is told so by autograd.
                torch.autograd.graph.increment_version(weight)
                ctx.known.deliver(place)
        return grad_input, grad_weight, grad_bias, None


def _is_wanted(accumulate: Any) -> bool | None:
    """Whether this backward adds to the weight's `.grad` (`grad(inputs=...)` need not); None where it is returned."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:
        return None


def convert(module: nn.Module, reduction: "GroupReduce", index: int) -> bool:
    """Make `module`, whose weight is parameter `index`, a SlotLinear. False where it is not exactly an nn.Linear."""
    if type(module) is not nn.Linear:
        return False
    module.__class__ = SlotLinear
    module.__dict__[_KEY] = SlotWeight(reduction, index)
    return True


def restore(module: nn.Module) -> None:
    """Make a SlotLinear an nn.Linear again."""
    if type(module) is SlotLinear:
        module.__dict__.pop(_KEY, None)
        plain: nn.Module = module
        plain.__class__ = nn.Linear
