"""Windows in torch's symmetric memory, for images whose NCCL is older than its host-visible windows."""

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

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(own, group=self._group)
        return SymmetricMemory(own, tuple(handle.buffer_ptrs), (own, handle))
