"""How bytes and signals reach another rank's memory.

base.py         the protocol that every transport speaks: windows, puts, signals, waits
rendezvous.py   ranks of a process group exchange small messages through its store, under a time limit
host.py         processes of one machine, windows in POSIX shared memory
shared_memory.py, peers.py    what host.py stands on: anonymous segments, and who is still alive
device.py       GPUs of one machine, by copy engine; nccl.py and symm.py say where windows come from
over_nodes.py   GPUs of several nodes; nccl_rma.py and nvshmem.py (on nvshmem_runtime.py) say how to put between nodes
select.py       which of them a group of ranks uses
"""

from tide_triton.transports.base import (
    ACKNOWLEDGED,
    CAPTURED_READY,
    CAPTURED_WRITTEN,
    READY,
    VACATED,
    WRITTEN,
    Lane,
    Mark,
    Put,
    Transport,
    Window,
)

__all__ = [
    "ACKNOWLEDGED",
    "CAPTURED_READY",
    "CAPTURED_WRITTEN",
    "READY",
    "VACATED",
    "WRITTEN",
    "Lane",
    "Mark",
    "Put",
    "Transport",
    "Window",
]
