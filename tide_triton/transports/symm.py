"""Windows in torch's symmetric memory, for images whose NCCL is older than its host-visible windows."""

import sys
from typing import Any

import torch
import torch.distributed as dist

from tide_triton.transports.device import DeviceTransport, SymmetricMemory
from tide_triton.transports.rendezvous import Rendezvous


class SymmTransport(DeviceTransport):
    """GPUs of one machine that map each other's memory, over `torch.distributed._symmetric_memory`."""

    name = "symm"

    def __init__(
        self, group: dist.ProcessGroup, rendezvous: Rendezvous, timeout_s: float, device: torch.device
    ) -> None:
        super().__init__(rendezvous, timeout_s, device)
        self._group = group

    def why_no_multicast(self) -> str | None:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        # Also where TORCH_SYMM_MEM_DISABLE_MULTICAST=1 has switched it off.
        supported = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, self.device.index)
        return None if supported else "torch's symmetric memory reports no multicast"

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(own, group=self._group)
        multicast = self._multicast_of(lambda: int(handle.multicast_ptr), nbytes)
        return SymmetricMemory(own, tuple(handle.buffer_ptrs), Rendezvoused(own, handle), multicast)


class Rendezvoused:
    """Symmetric memory and torch's handle of it, given back together.

    Of every rendezvous torch keeps two arrays of pointers for good, 512 bytes each in its allocator. Nothing reads
    them here, so they go with the memory, for the versions of torch that are known not to free them.
    """

    def __init__(self, own: torch.Tensor, handle: Any) -> None:
        self._keep = own, handle
        self._arrays = (int(handle.buffer_ptrs_dev), int(handle.signal_pad_ptrs_dev)) if keeps_arrays() else ()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for address in self._arrays:
                torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def keeps_arrays(version: str = torch.__version__) -> bool:
    """Whether this torch never frees what it allocates for a rendezvous beside the memory itself."""
    return version.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
