"""What TIDE is compared with, as FSDP2 of torch 2.11 to 2.14 runs it for a group: `stock`, `symm` and `limit`.

gather, stock    foreach cast | copy-in | NCCL all-gather | split_with_sizes_copy
gather, symm     foreach cast | copy-in | NCCL all-gather on copy engines, in place in a window | split_with_sizes_copy
reduce, stock    chunk_cat (bf16 -> fp32) | NCCL reduce-scatter, AVG
reduce, symm     chunk_cat into a window | NCCL's symmetric reduce-scatter, SUM (it has no AVG) | division
limit            a peer copy of the bytes that must leave this rank
"""

import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Registers torch.ops.fsdp.*
import torch.distributed.fsdp

from bench.ranks import Here
from tide_triton.layouts import GroupSpec, shard

#: The collectives over flat tensors, by the names that torch 2.13 gave them where it has those.
all_gather_flat: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


Baseline = TypeVar("Baseline")


def padded_numels(spec: GroupSpec) -> list[int]:
    """Elements of one rank's padded shard of each tensor."""
    return [shard(tensor, spec.world_size, 0).padded_numel for tensor in spec.tensors]


def wire_nbytes(spec: GroupSpec, rank: int) -> int:
    """Bytes of `rank`'s shards in the group's dtypes: what it must send to each other rank."""
    return sum(shard(tensor, spec.world_size, rank).nbytes for tensor in spec.tensors)


class ZeroCta:
    """A process group whose NCCL may use no SMs where it need not, and windows registered with it.

    Windows come from NCCL 2.31 or newer through nccl4py; `why_not` says why there are none, None where there are.
    """

    def __init__(self, here: Here) -> None:
        self.why_not: str | None = None
        self._here = here
        self._windows: list[Any] = []
        self.nbytes = 0
        if not here.is_cuda:
            self.why_not = "needs NCCL"
            self.group = dist.group.WORLD
            return
        from tide_triton.transports import nccl as transport

        assert dist.group.WORLD is not None
        self.why_not = transport.why_not(dist.group.WORLD, here.device)
        options: Any = dist.ProcessGroupNCCL.Options()
        before = os.environ.get("NCCL_CTA_POLICY")
        try:
            options.config.cta_policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", 2)
        except (AttributeError, TypeError) as error:
            # A torch that cannot say it: NCCL reads the variable when it makes the communicator, just below.
            warnings.warn(f"no cta_policy in this torch ({error}); using NCCL_CTA_POLICY", stacklevel=2)
            os.environ["NCCL_CTA_POLICY"] = "2"
        self.group = dist.new_group(backend="nccl", pg_options=options)
        dist.all_reduce(torch.zeros(1, device=here.device), group=self.group)
        here.synchronize()
        if before is None:
            os.environ.pop("NCCL_CTA_POLICY", None)
        if self.why_not is None:
            import nccl.core as nccl

            self._nccl: Any = nccl
            backend: Any = self.group._get_backend(here.device)
            self._communicator = nccl.Communicator(backend._comm_ptr())

    def window(self, nbytes: int) -> torch.Tensor:
        """A new window of `nbytes` bytes, uint8; every rank calls this with the same size."""
        if self.why_not is not None:
            raise RuntimeError(f"no windows: {self.why_not}")
        memory: torch.Tensor = self._nccl.torch.empty(nbytes, dtype=torch.uint8, device=self._here.device)
        window = self._communicator.register_window(memory, self._nccl.WindowFlag.COLL_SYMMETRIC)
        if not window.handle:
            raise RuntimeError(f"NCCL registered no window of {nbytes} bytes")
        self._windows.append((window, memory))
        self.nbytes += nbytes
        return memory

    def close(self) -> None:
        """Give the windows back; their memory must not be in use."""
        self._here.synchronize()
        while self._windows:
            window, memory = self._windows.pop()
            window.close()
            del memory
        self.nbytes = 0


def windowed(zero: ZeroCta, make: Callable[[], Baseline]) -> tuple[Baseline | None, str | None]:
    """What `make` gives, or None and why there is no `symm` here: a baseline less must not cost the others."""
    if zero.why_not is not None:
        return None, zero.why_not
    try:
        return make(), None
    except Exception as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}"[:300]


class StockGather:
    """FSDP2's all-gather of fp32 shards into bf16 parameters.

    zero: communicate in a window of this group instead of in the allocator's memory.
    """

    def __init__(self, here: Here, spec: GroupSpec, zero: ZeroCta | None = None) -> None:
        self._here, self._world = here, spec.world_size
        self._numels = padded_numels(spec)
        total = sum(self._numels) * self._world
        self._output = None if zero is None else zero.window(total * 2).view(torch.bfloat16)
        self._group = dist.group.WORLD if zero is None else zero.group
        self._total = total
        self._flat = [torch.empty(n * self._world, dtype=torch.bfloat16, device=here.device) for n in self._numels]
        self._shapes = [tensor.shape for tensor in spec.tensors]

    def __call__(self, shards: Sequence[torch.Tensor]) -> None:
        """shards: fp32, 1-D, padded, one per tensor."""
        device = self._here.device
        flat = torch.empty(sum(self._numels), dtype=torch.bfloat16, device=device)
        splits = list(torch.split(flat, self._numels))
        torch._foreach_copy_(splits, list(shards))
        output = self._output
        if output is None:
            output = torch.empty(self._total, dtype=torch.bfloat16, device=device)
        own, output = torch.ops.fsdp.all_gather_copy_in(splits, output, self._numels, flat.numel(), self._here.rank)
        all_gather_flat(output, own, group=self._group)
        out = [tensor.view(self._world, -1) for tensor in self._flat]
        torch.ops.fsdp.split_with_sizes_copy(output.view(self._world, -1), self._numels, dim=1, out=out)

    def views(self) -> list[torch.Tensor]:
        """The unsharded tensors."""
        return [
            flat[: torch.Size(shape).numel()].view(shape) for flat, shape in zip(self._flat, self._shapes, strict=True)
        ]


class StockReduce:
    """FSDP2's reduce-scatter of bf16 gradients into averaged fp32 shards.

    zero: communicate in windows of this group instead of in the allocator's memory.
    wire_dtype: dtype in which gradients are communicated and added.
    """

    def __init__(
        self, here: Here, spec: GroupSpec, zero: ZeroCta | None = None, *, wire_dtype: torch.dtype = torch.float32
    ) -> None:
        self._here, self._world, self._dtype = here, spec.world_size, wire_dtype
        self._numels = padded_numels(spec)
        self._own = sum(self._numels)
        self._group = dist.group.WORLD if zero is None else zero.group
        self._input = self._result = None
        if zero is not None:
            size = wire_dtype.itemsize
            self._input = zero.window(self._own * self._world * size).view(wire_dtype)
            self._result = zero.window(self._own * size).view(wire_dtype)
        # Neither gloo nor NCCL's symmetric kernels average.
        self._divides = zero is not None or not here.is_cuda

    def __call__(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's padded shards, 1-D, fresh unless they lie in a window."""
        flat = self._input
        if flat is None:
            flat = torch.empty(self._own * self._world, dtype=self._dtype, device=self._here.device)
        torch.ops.fsdp.chunk_cat(list(gradients), dim=0, num_chunks=self._world, out=flat.view(self._world, -1))
        return self.communicate(flat)

    def communicate(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """NCCL's part: `flat` is the copied-in (W x own) buffer, 1-D."""
        output = self._result
        if output is None:
            output = torch.empty(self._own, dtype=self._dtype, device=self._here.device)
        op = dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        reduce_scatter_flat(output, flat, op=op, group=self._group)
        if self._divides:
            output.div_(self._world)
        return list(torch.split(output, self._numels))

    def copied_in(self) -> torch.Tensor:
        """A buffer for `communicate`, filled with noise."""
        numel = self._own * self._world
        return torch.randn(numel, dtype=torch.float32, device=self._here.device).to(self._dtype)


class PeerCopy:
    """The limit: `nbytes` bytes of this rank to each other GPU, by copy engine; a copy in memory without GPUs."""

    def __init__(self, here: Here, nbytes: int) -> None:
        source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=here.device)
        others = [(here.rank + step) % here.world_size for step in range(1, here.world_size)]
        devices = [torch.device("cuda", other) if here.is_cuda else here.device for other in others]
        self._source = source
        self._targets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices]

    def __call__(self) -> None:
        for target in self._targets:
            target.copy_(self._source, non_blocking=True)
