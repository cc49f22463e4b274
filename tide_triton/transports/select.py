"""Which transport a group of ranks uses."""

from typing import Final, Literal, get_args

import torch

from tide_triton.transports.base import Transport
from tide_triton.transports.host import HostTransport
from tide_triton.transports.rendezvous import Rendezvous

TransportName = Literal["auto", "host"]
NAMES: Final[tuple[str, ...]] = get_args(TransportName)


def check(transport: str, device: torch.device) -> None:
    """Raise ValueError, with the way out, unless `transport` can move tensors of `device`."""
    if transport not in NAMES:
        raise ValueError(f"transport must be one of {', '.join(map(repr, NAMES))}, got {transport!r}")
    if device.type != "cpu":
        raise ValueError(
            f"transport={transport!r} has nothing for tensors on {device}: this version moves CPU tensors; keep the "
            f"stock collectives there"
        )


def make(transport: str, device: torch.device, meeting: Rendezvous, timeout_s: float) -> Transport:
    """The transport between the ranks of `meeting` for tensors of `device`."""
    check(transport, device)
    return HostTransport(meeting, timeout_s)
