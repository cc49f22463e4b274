"""NVSHMEM in this process: initialised for one set of ranks at a time, whatever number of transports use it.

    enter    the first transport initialises it, by a unique id over the store of the process group (no MPI)
    leave    the last one finalises it, where every rank does so within seconds and holds none of its memory any more

Initialising, allocating, freeing and finalising are collective in NVSHMEM and wait for the other ranks without a time
limit, holding Python's lock. So ranks agree through the store before each of them. What cannot be agreed on is put off:

* memory is freed before the next allocation, by those ranks' windows that every rank has let go of by then;
* where a rank does not leave, has failed, or holds tensors in a window, NVSHMEM stays as it is, and the next transport
  between the same ranks goes on with it. A transport between other ranks is refused meanwhile.

NVSHMEM ends the process (`exit`) where CUDA fails within it.
"""

import ctypes
import gc
import os
from typing import Any, Final

import torch

from tide_triton.errors import SharedMemoryError, TideError
from tide_triton.transports.rendezvous import Rendezvous

#: The first NVSHMEM that this was run with.
MINIMUM = (3, 4)
#: Bytes by which the heap grows, where it grows (NVSHMEM_CUMEM_GRANULARITY).
GRANULARITY: Final = 512 << 20
#: Seconds that the last transport to leave waits for other ranks before it leaves NVSHMEM as it is.
PATIENCE_S: Final = 5.0

_UNIQUE_ID_NBYTES = 128

_runtime: "Runtime | None" = None


def load() -> Any:
    """The bindings, with the library loaded. Raises ImportError or RuntimeError where either is missing."""
    import nvshmem.bindings.nvshmem as bindings
    from cuda.pathfinder import load_nvidia_dynamic_lib

    load_nvidia_dynamic_lib("nvshmem_host")
    return bindings


def why_not() -> str | None:
    """Why NVSHMEM cannot be used here, None where it can, as far as is known before it is initialised."""
    try:
        bindings = load()
        parts = [ctypes.c_int() for _ in range(3)]
        bindings.vendor_get_version_info(*(ctypes.addressof(part) for part in parts))
    except (ImportError, RuntimeError) as error:
        return f"nvshmem4py or the NVSHMEM library is missing ({error})"
    major, minor, patch = (part.value for part in parts)
    if (major, minor) < MINIMUM:
        return f"the NVSHMEM that is loaded is {major}.{minor}.{patch}, {MINIMUM[0]}.{MINIMUM[1]} or newer is needed"
    return None


def enter(meeting: Rendezvous, device: torch.device, heap_nbytes: int | None) -> "Runtime":
    """NVSHMEM between the ranks of `meeting`; every rank calls this, and calls `leave` of what it gets.

    heap_nbytes: bytes of the heap where NVSHMEM cannot let it grow; None for NVSHMEM's own default. Only the first
    transport's counts.

    Raises TideError, on every rank, where NVSHMEM is in use between other ranks or cannot be initialised.
    """
    global _runtime
    ranks = tuple(meeting.global_ranks)
    state = "" if _runtime is None else f"{list(_runtime.ranks)} {_runtime.unique_id}"
    states = meeting.exchange(state, "opening NVSHMEM")
    if _runtime is not None and set(states) == {state} and _runtime.ranks == ranks:
        _runtime.users += 1
        return _runtime
    for rank, text in zip(ranks, states, strict=True):
        if text:
            raise TideError(
                f"NVSHMEM is initialised once per process, and on rank {rank} it is so for ranks "
                f"{text.partition(']')[0]}]: it cannot also serve ranks {list(ranks)}. Detach what uses it there first "
                f"(and drop the tensors that it gathered), or pass transport='nccl_rma'"
            )
    _runtime = _initialise(meeting, device, heap_nbytes)
    return _runtime


def _initialise(meeting: Rendezvous, device: torch.device, heap_nbytes: int | None) -> "Runtime":
    bindings = load()
    # NVSHMEM reads these when it makes a unique id, and again when it is initialised.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    if heap_nbytes is not None:
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_nbytes)
    unique_id = bindings.uniqueid()
    text = ""
    if meeting.rank == 0:
        try:
            bindings.get_uniqueid(unique_id.ptr)
            text = ctypes.string_at(unique_id.ptr, _UNIQUE_ID_NBYTES).hex()
        except Exception as error:
            text = f"!{error}"
    text = meeting.exchange(text, "exchanging NVSHMEM's unique id")[0]
    failure = text[1:] if text.startswith("!") else ""
    if not failure:
        ctypes.memmove(unique_id.ptr, bytes.fromhex(text), _UNIQUE_ID_NBYTES)
        try:
            attributes = bindings.InitAttr()
            bindings.set_attr_uniqueid_args(meeting.rank, meeting.world_size, unique_id.ptr, attributes.ptr)
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
            status = bindings.init_status()
            if status < bindings.Init_status.STATUS_IS_INITIALIZED:
                failure = f"its status is {status}"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    failures = meeting.exchange(failure, "initialising NVSHMEM")
    for rank, said in zip(meeting.global_ranks, failures, strict=True):
        if said:
            raise TideError(f"NVSHMEM cannot be initialised on rank {rank}: {said}; NVSHMEM_DEBUG=INFO says more")
    return Runtime(bindings, text, tuple(meeting.global_ranks), device)


class Runtime:
    """NVSHMEM, initialised for `ranks`. Built by `enter`."""

    def __init__(self, bindings: Any, unique_id: str, ranks: tuple[int, ...], device: torch.device) -> None:
        self.bindings = bindings
        self.unique_id = unique_id
        self.ranks = ranks
        self.users = 1
        self._device = device
        #: Addresses by the number of the allocation, which is the same on every rank.
        self._addresses: dict[int, int] = {}
        self._released: set[int] = set()
        self._next = 0

    def allocate(self, nbytes: int, meeting: Rendezvous) -> tuple[int, "Block"]:
        """The address of `nbytes` new bytes of the heap, and what keeps them; every rank calls this alike.

        Raises SharedMemoryError, on every rank, where the heap has no room for them and cannot grow.
        """
        mine = " ".join(str(number) for number in sorted(self._released))
        everyones = [set(map(int, text.split())) for text in meeting.exchange(mine, "freeing windows")]
        with torch.cuda.device(self._device):
            for number in sorted(set.intersection(*everyones)):
                self.bindings.free(self._addresses.pop(number))
                self._released.discard(number)
            address = self.bindings.malloc(nbytes)
        if not address:
            raise SharedMemoryError(
                f"NVSHMEM's heap has no room for {nbytes} bytes; let NvshmemTransport have a larger one (heap_nbytes)"
            )
        number, self._next = self._next, self._next + 1
        self._addresses[number] = address
        return address, Block(self, number)

    def release(self, number: int) -> None:
        self._released.add(number)

    def leave(self, meeting: Rendezvous, *, is_well: bool) -> None:
        """One transport less uses it. Finalises NVSHMEM after the last, where every rank agrees."""
        global _runtime
        self.users -= 1
        if self.users:
            return
        if is_well and set(self._addresses) - self._released:
            gc.collect()
        if meeting.unanimous(is_well and not set(self._addresses) - self._released, PATIENCE_S):
            with torch.cuda.device(self._device):
                self.bindings.hostlib_finalize()
            _runtime = None


class Block:
    """One allocation, freed at the next opportunity after the last tensor over it has gone."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime, self._number = runtime, number

    def __del__(self) -> None:
        self._runtime.release(self._number)
