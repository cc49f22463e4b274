"""What the ranks do in the tests of attach, train and detach again and again: the same job on GPUs and on the host."""

import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import tide_triton
from tests.fsdp.models import MIXED, VOCABULARY, Model
from tests.gpu.jobs import device_of
from tide_triton.all_gather import AllGather, CastShards, Gathering
from tide_triton.fsdp.binding import GroupBinding
from tide_triton.fsdp.domain import Domain
from tide_triton.fsdp.group_reduce import GradientHook, GroupReduce
from tide_triton.fsdp.params import SlotParam, SlotParamGroup
from tide_triton.fsdp.slot_linear import SlotLinear, SlotWeight
from tide_triton.reduce_scatter import ReduceScatter, Reducing
from tide_triton.reducers import Kept
from tide_triton.transports.device import DeviceTransport, DeviceWindow
from tide_triton.transports.host import HostTransport, HostWindow
from tide_triton.windows import Ring, Slot, SlotPool, Turn

#: Of these none may be left once a model is detached.
OURS = (
    *(SlotParam, SlotParamGroup, SlotLinear, SlotWeight, GroupBinding, GroupReduce, GradientHook, Domain),
    *(AllGather, CastShards, Gathering, ReduceScatter, Reducing, Kept),
    *(SlotPool, Slot, Ring, Turn, HostTransport, HostWindow, DeviceTransport, DeviceWindow),
)

#: Options of attach, which cycles take in turn. Chunks are so small that every group takes several.
OPTIONS: tuple[dict[str, Any], ...] = tuple(
    {
        "reuse": reuse,
        "slot_reuse": slot_reuse,
        "early_reduce": early,
        "keep_cast": keep,
        "grads_in_slots": in_slots,
        "ring_depth": depth,
        "ring_chunk_nbytes": 2048,
    }
    for reuse, slot_reuse, early, keep, in_slots, depth in (
        (True, True, False, False, False, 2),
        (True, False, False, False, False, 1),
        (False, False, True, False, False, 2),
        (True, False, True, True, True, 1),
        (False, True, False, True, False, 2),
    )
)


@dataclass(frozen=True)
class Case:
    """How often, and how.

    cycles: of attach, `steps` steps and detach. look_every: cycles between looks at what is held. model_lives: cycles
    until the model itself is dropped for a new one.
    """

    transport: str
    cycles: int
    steps: int
    look_every: int
    model_lives: int = 10


@dataclass(frozen=True)
class Held:
    """What this process holds after `cycle` cycles, with its garbage collected.

    segments: mappings of shared memory. ours: objects of this project that live, by class. rss: bytes resident, in all.
    device: bytes of the device's memory in use by anybody; allocated: bytes that torch has handed out of it; pinned:
    bytes of pinned host memory that torch has. All three are 0 without a GPU.
    """

    cycle: int
    descriptors: int
    segments: int
    python_threads: int
    threads: int
    tensors: int
    ours: dict[str, int]
    rss: int
    device: int = 0
    allocated: int = 0
    pinned: int = 0


@dataclass
class Found:
    """What one rank saw: what it held at each look, and what reports said of all cycles together."""

    held: list[Held] = field(default_factory=list)
    cycles: int = 0
    early: int = 0
    in_slot: int = 0
    reused: int = 0
    fallbacks: int = 0


#: What may not grow at all.
COUNTS = ("descriptors", "segments", "python_threads", "threads", "tensors", "allocated")
#: What may grow by so many bytes. A cycle has several windows of at least 2 MiB of a GPU, so that one lost every few
#: cycles is far more; allocators keep pinned blocks, of which timing decides how many are in use at once.
BYTES = {"device": 8 << 20, "pinned": 1 << 20}


def grown(held: Sequence[Held], *, warm: int, rss: int | None = None) -> list[str]:
    """What grew after the first `warm` cycles, in words; empty where nothing did.

    rss: by how many bytes the resident memory may grow in the second half, None for as many as it likes.
    """
    words = [f"after {h.cycle} cycles there are still {h.ours}" for h in held if h.ours]
    first, *later = [h for h in held if h.cycle >= warm]
    for name in (*COUNTS, *BYTES):
        sizes = [getattr(h, name) for h in (first, *later)]
        if max(sizes) > sizes[0] + BYTES.get(name, 0):
            words.append(f"{name} grew: {dict(zip([h.cycle for h in (first, *later)], sizes, strict=True))}")
    middle = next(h for h in held if 2 * h.cycle >= held[-1].cycle)
    if rss is not None and held[-1].rss > middle.rss + rss:
        words.append(f"rss grew from {middle.rss} bytes after {middle.cycle} cycles to {held[-1].rss}")
    return words


def cycle(rank: int, world: int, case: Case) -> Found:
    """Attach, train and detach, again and again."""
    device = device_of(rank)
    mesh = init_device_mesh(device.type, (world,))
    found = Found()
    while found.cycles < case.cycles:
        if found.cycles % case.look_every == 0:
            found.held.append(_held(found.cycles, device))
        if found.cycles % case.model_lives == 0:
            model = _sharded(mesh, device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=True)
        options = OPTIONS[found.cycles % len(OPTIONS)]
        tide_triton.attach(model, transport=case.transport, timeout_s=30, **options)  # type: ignore[arg-type]
        for step in range(case.steps):
            seed = 1000 * found.cycles + 10 * step + rank
            _step(model, optimizer, torch.Generator(device).manual_seed(seed))
        report = tide_triton.report(model, quiet=True)
        found.early += report.reduce.early
        found.in_slot += report.reduce.in_slot
        found.reused += report.gather.reused
        found.fallbacks += report.gather.fallback + report.reduce.fallback
        tide_triton.detach(model)
        found.cycles += 1
    found.held.append(_held(found.cycles, device))
    return found


def _sharded(mesh: DeviceMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model = Model(blocks=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 4), generator=generator, device=generator.device)
    nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _held(cycle: int, device: torch.device) -> Held:
    # Ranks collect at other times, and what one holds may keep something of another's alive.
    gc.collect()
    dist.barrier()
    device_bytes = allocated = pinned = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # What the device holds counts the other rank's too, where both share it.
        dist.barrier()
        free, total = torch.cuda.mem_get_info(device)
        dist.barrier()
        device_bytes, allocated = total - free, torch.cuda.memory_allocated(device)
        pinned = _pinned()
    objects = Counter(map(type, gc.get_objects()))
    with open("/proc/self/maps") as maps:
        segments = sum("/dev/shm" in line or "/memfd:" in line for line in maps)
    with open("/proc/self/statm") as statm:
        rss = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(
        cycle,
        len(os.listdir("/proc/self/fd")),
        segments,
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        sum(count for kind, count in objects.items() if issubclass(kind, torch.Tensor)),
        {kind.__name__: count for kind, count in objects.items() if issubclass(kind, OURS)},
        rss,
        device_bytes,
        allocated,
        pinned,
    )


def _pinned() -> int:
    """Bytes of pinned memory that torch's host allocator has, in use or cached."""
    statistics = torch.cuda.host_memory_stats()
    # Renamed from torch 2.11 on.
    return int(statistics.get("reserved_bytes.current", statistics["allocated_bytes.current"]))
