"""How many bytes stock FSDP2 holds to communicate.

Counted are, on one rank:

    flat buffers            outputs of all-gathers and inputs of reduce-scatters, from allocation until they are freed
    unsharded parameters    the storages that all-gathers are copied out into

Not counted are the outputs of reduce-scatters: they live on as gradients, with TIDE as well. TIDE's windows hold the
unsharded parameters and what takes the place of the flat buffers, so the two sums compare.

They are summed at every collective call, which is right after the allocation for it, and when the most is held. What
lives only between two calls is missed: a peak found here is never too high.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.multiprocessing.reductions import StorageWeakRef

from tide_triton.fsdp.internals import FSDPParam, groups_of


class BufferMeter:
    """Watches the collectives below `model`, whichever they are, from now on."""

    def __init__(self, model: nn.Module) -> None:
        self.peak_nbytes = 0
        self._flat: list[tuple[StorageWeakRef, int]] = []
        self._params: list[FSDPParam] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in groups_of(module):
                    self._params += group.fsdp_params
                    group._all_gather_comm = _WatchedAllGather(group._all_gather_comm, self)
                    group._reduce_scatter_comm = _WatchedReduceScatter(group._reduce_scatter_comm, self)

    def holds(self, flat: torch.Tensor) -> None:
        """Take note of a flat buffer, and sum up what is held now."""
        storage = flat.untyped_storage()
        self._flat = [held for held in self._flat if not held[0].expired()]  # type: ignore[no-untyped-call]
        self._flat.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
        unsharded = sum(o.untyped_storage().nbytes() for p in self._params for o in p.all_gather_outputs)
        self.peak_nbytes = max(self.peak_nbytes, sum(nbytes for _, nbytes in self._flat) + unsharded)


class _WatchedAllGather(AllGather):  # type: ignore[misc]
    """`inner`, watched by `meter`."""

    def __init__(self, inner: AllGather, meter: BufferMeter) -> None:
        self._inner, self._meter = inner, meter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._meter.holds(output_tensor)
        work: dist.Work | None = self._inner(output_tensor, input_tensor, group, async_op)
        return work


class _WatchedReduceScatter(ReduceScatter):  # type: ignore[misc]
    """Likewise."""

    def __init__(self, inner: ReduceScatter, meter: BufferMeter) -> None:
        self._inner, self._meter = inner, meter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._meter.holds(input_tensor)
        work: dist.Work | None = self._inner(output_tensor, input_tensor, group, op, async_op)
        return work
