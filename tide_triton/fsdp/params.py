"""FSDP2's parameter and parameter group, as they are while attached.

`attach` gives each object of a zero-copy group one of these classes in place of its own, and `detach` its own back: no
function of torch is replaced, and other models are not touched. What changes:

    the all-gather's inputs     the shards themselves, not a cast copy: the cast goes straight into the slot
    all-gather outputs          lie in the slot; they are neither allocated nor freed
    copy-out                    has no parameters to copy
    gradients                   reach the reduce-scatter with the index of their parameter, early where they can
"""

from typing import TYPE_CHECKING, Any

import torch

from tide_triton.fsdp.internals import FSDPParam, FSDPParamGroup, ShardedState
from tide_triton.fsdp.tickets import GatherTicket, GradTicket

if TYPE_CHECKING:
    from tide_triton.fsdp.binding import GroupBinding


class SlotParam(FSDPParam):  # type: ignore[misc]
    """A parameter whose unsharded form lies in a slot."""

    _tide_binding: "GroupBinding"
    _tide_index: int
    param_dtype: torch.dtype | None
    #: The dtype FSDP2 would have cast to before the all-gather; None for the parameter's own.
    _tide_cast: torch.dtype | None

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        super().init_dtype_attrs(mp_policy)
        # With no param_dtype, FSDP2 hands over the shard as it is instead of a cast copy.
        self._tide_cast, self.param_dtype = self.param_dtype, None

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        if self.sharded_state == ShardedState.SHARDED:
            return [self._sharded_param_data]
        inputs: list[torch.Tensor] = super().all_gather_inputs
        return inputs if self._tide_cast is None else [tensor.to(self._tide_cast) for tensor in inputs]

    def init_unsharded_param(self) -> None:
        super().init_unsharded_param()
        self._tide_binding.listen(self._tide_index)

    def alloc_all_gather_outputs(self) -> None:
        """The slot is there already."""

    def free_unsharded_param(self) -> None:
        """The slot goes to the next group instead."""

    @property
    def unsharded_grad_data(self) -> torch.Tensor:
        return self._tide_collect(super().unsharded_grad_data)

    @property
    def unsharded_accumulated_grad_data(self) -> torch.Tensor:
        return self._tide_collect(super().unsharded_accumulated_grad_data)

    @property
    def unsharded_zero_grad_data(self) -> torch.Tensor:
        return self._tide_collect(super().unsharded_zero_grad_data)

    def _tide_collect(self, gradient: torch.Tensor) -> torch.Tensor:
        """Note the gradient with its parameter's index, on its way to the reduce-scatter."""
        self._tide_binding.reduction.gradients.append((self._tide_index, gradient))
        # FSDP2 reorders gradients of parameters sharded on another dim than 0: a ticket lets it believe so.
        return gradient if self.fsdp_placement.dim == 0 else GradTicket(gradient)


class SlotParamGroup(FSDPParamGroup):  # type: ignore[misc]
    """A parameter group whose parameters are `SlotParam`s."""

    _tide_binding: "GroupBinding"
    _all_gather_result: Any

    def _init_mp_dtypes(self) -> None:
        super()._init_mp_dtypes()
        self._tide_binding.dtypes_changed()

    def unshard(self, async_op: bool = False) -> None:
        self._tide_binding.require_comms()
        super().unshard(async_op)
        result = self._all_gather_result
        if result is not None and isinstance(result.all_gather_output, GatherTicket):
            # Copy-out walks these lists. Without entries it has nothing to allocate, split or reorder.
            self._all_gather_result = result._replace(
                param_all_gather_input_dtypes=[], param_all_gather_input_numels=[], all_gather_input_split_sizes=[]
            )

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._tide_binding.reduction.abandon()
        return super().pre_forward(*args, **kwargs)

    def _to_sharded(self) -> None:
        if not self.is_sharded:
            super()._to_sharded()
            self._tide_binding.vacate()

    def _to_sharded_post_forward(self) -> None:
        if not self.is_sharded_post_forward:
            super()._to_sharded_post_forward()
            self._tide_binding.vacate()

    def post_backward(self, *unused: Any) -> None:
        binding = self._tide_binding
        binding.require_comms()
        binding.reduction.begin()
        try:
            super().post_backward(*unused)
        finally:
            binding.reduction.end()
            binding.used()
