"""What FSDP2 calls: its two comm interfaces, for one bound group."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tide_triton.fsdp.binding import GroupBinding
from tide_triton.fsdp.tickets import GatherTicket, ReduceTicket


class TideAllGather(AllGather):  # type: ignore[misc]
    """FSDP2's all-gather comm: a ticket and puts, or the stock collective where the call cannot be zero-copy."""

    def __init__(self, binding: GroupBinding) -> None:
        self.binding = binding
        self._stock = DefaultAllGather()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        reason = self.binding.gather_fallback()
        if reason is None:
            return GatherTicket(size, dtype, device, self.binding.finish_gather)
        # Stock copies out into the parameters' memory, which is the slot.
        self.binding.take_slot(may_defer=False)
        self.binding.overwrite()
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if isinstance(output_tensor, GatherTicket):
            self.binding.start_gather()
            return None
        reason = self.binding.gather_fallback() or "asked for a buffer that is no ticket"
        self.binding.fall_back(
            self.binding.gather,
            reason,
            wire_bytes=input_tensor.nbytes * (group.size() - 1),
            layout_copy_bytes=input_tensor.nbytes + output_tensor.nbytes,
        )
        work: dist.Work | None = self._stock(output_tensor, input_tensor, group, async_op)
        return work


class TideReduceScatter(ReduceScatter):  # type: ignore[misc]
    """FSDP2's reduce-scatter comm: likewise."""

    def __init__(self, binding: GroupBinding) -> None:
        self.binding = binding
        self._stock = DefaultReduceScatter()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        reduction = self.binding.reduction
        if reduction.allocates_input():
            if reduction.fallback(dtype) is None:
                return ReduceTicket(size, dtype, device, reduction)
        elif (expected := reduction.expected_output(math.prod(size), dtype)) is not None:
            return expected
        # The output must be fresh: `sharded_param.grad` will be a view of it.
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        binding = self.binding
        if isinstance(input_tensor, ReduceTicket):
            # FSDP2 keeps its input until the compute stream is past the reduction: so long the gradients must live.
            input_tensor.keep = binding.reduction.reduce(output_tensor, input_tensor.dtype, op)
            return None
        binding.fall_back(
            binding.reduce,
            binding.reduction.fallback(input_tensor.dtype) or "asked for a buffer that is no ticket",
            wire_bytes=input_tensor.nbytes // group.size() * (group.size() - 1),
            layout_copy_bytes=input_tensor.nbytes,
        )
        work: dist.Work | None = self._stock(output_tensor, input_tensor, group, op, async_op)
        return work
