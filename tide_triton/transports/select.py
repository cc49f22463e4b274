"""Which transport a group of ranks uses."""

import warnings
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist

from tide_triton.transports.base import Transport
from tide_triton.transports.device import DeviceTransport
from tide_triton.transports.host import HostTransport
from tide_triton.transports.rendezvous import Rendezvous

TransportName = Literal["auto", "host", "host_switch", "nccl", "symm", "nccl_rma", "nvshmem"]
NAMES: Final[tuple[str, ...]] = get_args(TransportName)


def check(transport: str, device: torch.device) -> None:
    """Raise ValueError, with the way out, unless `transport` can move tensors of `device`."""
    if transport not in NAMES:
        raise ValueError(f"transport must be one of {', '.join(map(repr, NAMES))}, got {transport!r}")
    on_gpus = ("auto", "nccl", "symm", "nccl_rma", "nvshmem")
    fitting = {"cpu": ("auto", "host", "host_switch"), "cuda": on_gpus}.get(device.type)
    if fitting is None:
        raise ValueError(f"there is no transport for tensors on {device}; keep the stock collectives there")
    if transport not in fitting:
        raise ValueError(
            f"transport={transport!r} cannot move tensors on {device}; pass one of {', '.join(map(repr, fitting))}"
        )


def make(
    transport: str,
    device: torch.device,
    group: dist.ProcessGroup,
    meeting: Rendezvous,
    timeout_s: float,
    nodes: int = 1,
    *,
    multicast: bool = False,
) -> tuple[Transport, str]:
    """The transport between the ranks of `group` for tensors of `device`, and why it was picked.

    multicast: whether to multicast where every rank can, which is why for the second result too; where one cannot, a
    warning says so. Without it no library is asked for multicast.

    nodes: on how many nodes the ranks are, equally many on each, in rank order: "nccl_rma" and "nvshmem" put to those
    of other nodes as over a network, also where they could reach their memory.

    Raises what the transport raises where it cannot be had, on every rank.
    """
    check(transport, device)
    made, why = _make(transport, device, group, meeting, timeout_s, nodes)
    if not multicast:
        return made, why
    try:
        return made, f"{why}, {_agree_on_multicast(made, meeting)}"
    except BaseException:
        made.close()
        raise


def _agree_on_multicast(made: HostTransport | DeviceTransport, meeting: Rendezvous) -> str:
    """Let `made` multicast if every rank's can; whether it does, and why not."""
    reasons = _reasons(meeting, made.why_no_multicast())
    made.multicasts = not reasons
    if not reasons:
        return "with multicast"
    warnings.warn(f"tide_triton: no multicast, peer copies and sums by kernels instead: {reasons[0]}", stacklevel=4)
    return f"no multicast: {reasons[0]}"


def _make(
    transport: str, device: torch.device, group: dist.ProcessGroup, meeting: Rendezvous, timeout_s: float, nodes: int
) -> tuple[HostTransport | DeviceTransport, str]:
    if device.type == "cpu":
        switch = transport == "host_switch"
        why = "asked for, with an emulated switch" if switch else "tensors are on the CPU"
        return HostTransport(meeting, timeout_s, emulate_switch=switch), why
    from tide_triton.transports import nccl, nccl_rma, nvshmem, nvshmem_runtime, symm

    if transport == "symm":
        return symm.SymmTransport(group, meeting, timeout_s, device), "asked for"
    if transport == "nvshmem":
        reasons = _reasons(meeting, nvshmem_runtime.why_not())
        if reasons:
            raise ValueError(f"transport='nvshmem' cannot be had: {reasons[0]}; pass transport='nccl_rma' or 'auto'")
        return nvshmem.NvshmemTransport(meeting, timeout_s, device, nodes), "asked for"
    # One rank without NCCL's windows is enough to do without.
    reasons = _reasons(meeting, nccl.why_not(group, device))
    if transport == "nccl_rma" and not reasons:
        return nccl_rma.NcclRmaTransport(group, meeting, timeout_s, device, nodes), "asked for"
    if not reasons:
        why = "asked for" if transport == "nccl" else "NCCL has windows"
        return nccl.NcclTransport(group, meeting, timeout_s, device), why
    if transport in ("nccl", "nccl_rma"):
        raise ValueError(f"transport={transport!r} cannot be had: {reasons[0]}; pass transport='symm' or 'auto'")
    return symm.SymmTransport(group, meeting, timeout_s, device), f"not nccl: {reasons[0]}"


def _reasons(meeting: Rendezvous, reason: str | None) -> list[str]:
    """Every rank's reason why not."""
    return [text for text in meeting.exchange(reason or "", "choosing a transport") if text]
