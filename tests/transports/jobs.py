"""What the ranks do in the tests of transports: importable functions of (rank, world_size, ...)."""

import os
import time

import torch
import torch.distributed as dist

from tide_triton.layouts import Copy
from tide_triton.transports import READY, WRITTEN, shared_memory
from tide_triton.transports.base import COUNTERS
from tide_triton.transports.host import HostTransport, header_nbytes
from tide_triton.transports.rendezvous import Rendezvous
from tide_triton.transports.shared_memory import DIRECTORY


def opened(timeout_s: float = 20.0, group: dist.ProcessGroup | None = None) -> HostTransport:
    return HostTransport(Rendezvous(group or dist.group.WORLD, timeout_s), timeout_s)


def put_to_everyone(rank: int, world: int) -> list[int]:
    """Every rank puts its number into its own byte of every other's window."""
    transport = opened()
    window = transport.allocate(world + 1, "0", "a window")
    window.memory.fill_(255)
    window.memory[rank] = rank
    for peer in range(world):
        transport.signal(window, peer, READY, 1)
    for peer in range(world):
        if peer != rank:
            transport.wait(window, peer, READY, 1, "test")
            transport.put(transport.prepare(window, peer, [(window.memory, Copy(rank, rank, 1, 1, 1, 1))]))
        transport.signal(window, peer, WRITTEN, 1)
    for peer in range(world):
        transport.wait(window, peer, WRITTEN, 1, "test")
    seen = window.memory.tolist()
    window.close()
    transport.close()
    return seen


def put_rows(rank: int, world: int) -> list[list[int]]:
    """Rank 0 puts a column block of its matrix into rank 1's, row by row."""
    transport = opened()
    window = transport.allocate(24, "0", "a window")
    window.memory.fill_(9)
    source = torch.arange(24, dtype=torch.uint8)
    transport.signal(window, 0, READY, 1)
    if rank == 0:
        transport.wait(window, 1, READY, 1, "test")
        transport.put(transport.prepare(window, 1, [(source, Copy(2, 1, 4, 3, 6, 6))]))
        transport.signal(window, 1, WRITTEN, 1)
    else:
        transport.wait(window, 0, WRITTEN, 1, "test")
    rows: list[list[int]] = window.memory.view(4, 6).tolist()
    transport.close()
    return rows


def leave_the_window(rank: int, world: int) -> list[str]:
    """Puts and counters past the end are refused, and the last valid ones leave their neighbours alone."""
    transport = opened()
    window = transport.allocate(64, "0", "a window")
    window.memory.fill_(7)
    refused = []
    for copy in (Copy(0, 60, 1, 5, 5, 5), Copy(0, 0, 3, 30, 30, 30), Copy(60, 0, 1, 5, 5, 5)):
        try:
            transport.prepare(window, 1 - rank, [(torch.zeros(64, dtype=torch.uint8), copy)])
        except IndexError as error:
            refused.append(str(error))
    for counter, peer in ((COUNTERS, 0), (-1, 0), (1, world)):
        try:
            window.word(peer, counter)
        except IndexError as error:
            refused.append(str(error))
    transport.signal(window, 1 - rank, WRITTEN, 2**62)
    transport.wait(window, 1 - rank, WRITTEN, 2**62, "test")
    assert window.memory.tolist() == [7] * 64
    assert header_nbytes(world) >= COUNTERS * world * 8
    transport.close()
    return refused


def wait_forever(rank: int, world: int, timeout_s: float) -> float:
    """Rank 0 waits for a credit that rank 1 never gives; rank 2, a little later, waits for rank 0."""
    transport = opened(timeout_s)
    window = transport.allocate(8, "0", "a window")
    started = time.monotonic()
    if rank == 2:
        # Or both give up in the same moment, and neither hears what the other was waiting for.
        time.sleep(0.4 * timeout_s)
    if rank != 1:
        transport.wait(window, 1 if rank == 0 else 0, READY, 1, "all-gather of 'blocks.3': credit")
    time.sleep(timeout_s + 1)
    return time.monotonic() - started


def go_different_ways(rank: int, world: int) -> None:
    """Each rank waits for the other, in another collective."""
    transport = opened(1.0)
    window = transport.allocate(8, "0", "a window")
    time.sleep(0.5 * rank)
    transport.wait(window, 1 - rank, READY, 1, f"all-gather of 'blocks.{rank}': credit")


def wait_for_a_peer_that_is_killed(rank: int, world: int, timeout_s: float) -> None:
    transport = opened(timeout_s)
    window = transport.allocate(1 << 20, "0", "a window")
    if rank == world - 1:
        time.sleep(timeout_s * 2)
    transport.wait(window, (rank + 1) % world, READY, 1, "reduce-scatter of 'head': data")


def disagree(rank: int, world: int, what: str) -> None:
    transport = opened()
    size = 64 + (rank if what == "size" else 0)
    transport.allocate(size, f"{rank if what == 'digest' else 1:x}", "a slot of group 'blocks.0'")


def ask_for_too_much(rank: int, world: int, only: int | None) -> str:
    """Ask for more than /dev/shm has, on every rank or on one; afterwards everything still works."""
    transport = opened()
    if only == rank or only is None:
        nbytes = 1 << 50
        original = shared_memory.create
        if only is not None:
            # The others ask for the same, and have it.
            shared_memory.create = lambda n, what: original(1 << 50 if n > 4096 else n, what)
            nbytes = 1 << 16
        try:
            transport.allocate(nbytes, "1", "a slot of group 'blocks.0'")
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shared_memory.create = original
    else:
        try:
            transport.allocate(1 << 16, "1", "a slot of group 'blocks.0'")
        except OSError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def repeat_windows(rank: int, world: int, times: int) -> tuple[int, int, list[str]]:
    """Open and close transports and windows; what is left of descriptors, mappings and names."""

    def held() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            mapped = sum(DIRECTORY in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mapped

    put_to_everyone(rank, world)
    before = held()
    for _ in range(times):
        put_to_everyone(rank, world)
    after = held()
    return after[0] - before[0], after[1] - before[1], os.listdir(DIRECTORY)


def meet_in_a_subgroup_then_all(rank: int, world: int) -> list[list[int]]:
    """[0, 1] first, then everyone: ranks outside the first group must not be waited for."""
    pair = dist.new_group([0, 1])
    seen = []
    if rank < 2:
        transport = opened(group=pair)
        seen.append(transport.global_ranks)
        transport.close()
    transport = opened()
    seen.append(transport.global_ranks)
    transport.close()
    return seen


def come_late(rank: int, world: int, timeout_s: float) -> None:
    if rank == 1:
        time.sleep(timeout_s + 1.5)
    else:
        opened(timeout_s)


def still_works(rank: int, world: int) -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)
