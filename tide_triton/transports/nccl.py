"""Symmetric windows of NCCL, on torch's own communicator, through nccl4py."""

from typing import Any

import torch
import torch.distributed as dist

from tide_triton.errors import TideError
from tide_triton.transports.device import DeviceTransport, SymmetricMemory
from tide_triton.transports.rendezvous import Rendezvous

#: The first NCCL whose windows give host code a pointer to every peer's memory, with more than one signal.
MINIMUM = (2, 31)


def why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why NCCL windows cannot be used between the ranks of `group`, None where they can, as far as is known here."""
    try:
        import nccl.core as nccl
    except ImportError as error:
        return f"nccl4py is not installed ({error})"
    library = nccl.get_version().libnccl
    if library is None:
        return "no NCCL library is loaded"
    if (library.version.major, library.version.minor) < MINIMUM:
        return f"the NCCL that is loaded is {library.version}, windows need {MINIMUM[0]}.{MINIMUM[1]} or newer"
    if "nccl" not in dist.get_backend(group):
        return f"the process group's backend is {dist.get_backend(group)}"
    return None


class NcclTransport(DeviceTransport):
    """GPUs of one machine whose windows are registered with NCCL."""

    name = "nccl"

    def __init__(
        self, group: dist.ProcessGroup, rendezvous: Rendezvous, timeout_s: float, device: torch.device
    ) -> None:
        super().__init__(rendezvous, timeout_s, device)
        import nccl.core as nccl

        self._nccl: Any = nccl
        self._communicator = self._communicate(group, rendezvous)

    def _communicate(self, group: dist.ProcessGroup, rendezvous: Rendezvous) -> Any:
        """The communicator in which windows are registered: torch's own."""
        # torch makes one at the first collective, and a window must not be the first.
        dist.barrier(group=group, device_ids=[self.device.index])
        backend: Any = group._get_backend(self.device)
        return self._nccl.Communicator(backend._comm_ptr())

    def why_no_multicast(self) -> str | None:
        # Also where NCCL_NVLS_ENABLE=0 has switched it off.
        return None if self._communicator.properties.multimem_support else "NCCL reports no multicast"

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        own = self._nccl.torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        window = self._register(self._communicator, own)
        addresses = tuple(self._address(window, peer) for peer in range(self.world_size))
        # A window keeps nothing alive, and must be closed before its memory goes.
        registered = Registered(window, own)
        # NCCL makes a multicast object when it is first asked for its address, and not before.
        multicast = self._multicast_of(window.get_lsa_multimem_device_pointer, nbytes)
        return SymmetricMemory(own, addresses, registered, multicast)

    def _register(self, communicator: Any, own: torch.Tensor) -> Any:
        """A window of `communicator` over `own`; every rank calls this at once."""
        window = communicator.register_window(own, self._nccl.WindowFlag.COLL_SYMMETRIC)
        if not window.handle:
            raise TideError(
                f"NCCL registered no window of {own.numel()} bytes on {self.device}: windows are not supported"
            )
        return window

    def _address(self, window: Any, peer: int) -> int:
        """Where `peer`'s twin of `window` is mapped here."""
        address = window.get_peer_device_pointer(peer, 0)
        if not address:
            raise TideError(
                f"NCCL gives no pointer to rank {self.global_ranks[peer]}'s window: it is not on this machine"
            )
        return int(address)


class Registered:
    """A window and what it needs, given back in that order: its memory, or another window over that."""

    def __init__(self, window: Any, own: object) -> None:
        self.window, self._own = window, own

    def __del__(self) -> None:
        self.window.close()
