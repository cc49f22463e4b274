"""Multicast on the host transport's emulated switch, between real processes, and on GPU windows without a GPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPools
from tests.transports.jobs import opened
from tide_triton.copy_engine import Batch, CopyEngine
from tide_triton.kernels import Multicast
from tide_triton.layouts import Copy
from tide_triton.transports import READY, WRITTEN, select
from tide_triton.transports.device import DeviceTransport, DeviceWindow, SymmetricMemory
from tide_triton.transports.host import HostTransport
from tide_triton.transports.rendezvous import Rendezvous


def switched() -> HostTransport:
    return HostTransport(Rendezvous(dist.group.WORLD, 20.0), 20.0, emulate_switch=True)


def multicast_to_everyone(rank: int, world: int) -> tuple[list[int], list[list[float]]]:
    """Every rank multicasts its number: one byte from its own window, and one from elsewhere. Then what all hold."""
    transport = switched()
    window = transport.allocate(64 + 16, "0", "a window")
    window.memory.fill_(255)
    window.memory[rank] = rank
    apart = torch.tensor([99, rank], dtype=torch.uint8)
    for peer in range(world):
        transport.signal(window, peer, READY, 1)
    for peer in range(world):
        transport.wait(window, peer, READY, 1, "test")
    moves = [(window.memory, Copy(rank, rank, 1, 1, 1, 1)), (apart, Copy(1, 32 + rank, 1, 1, 1, 1))]
    transport.put(transport.prepare_multicast(window, moves))
    window.memory[64:66].view(torch.bfloat16)[0] = rank + 1
    for peer in range(world):
        transport.signal(window, peer, WRITTEN, 1)
    for peer in range(world):
        transport.wait(window, peer, WRITTEN, 1, "test")
    held = transport.everywhere(window, 64, 1)
    assert not isinstance(held, Multicast)
    seen = window.memory[:64].tolist(), [one.tolist() for one in held]
    for peer in range(world):
        transport.signal(window, peer, WRITTEN, 2)
    for peer in range(world):
        transport.wait(window, peer, WRITTEN, 2, "test")
    transport.close()
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_a_multicast_reaches_every_window_the_own_too_and_touches_nothing_else(ranks: RankPools, world: int) -> None:
    free = [255] * (32 - world)
    whole = [*range(world), *free, *range(world), *free]
    assert ranks(world).run(multicast_to_everyone) == [(whole, [[rank + 1.0] for rank in range(world)])] * world


def refuse(rank: int, world: int) -> list[str]:
    refused = []
    source = torch.zeros(64, dtype=torch.uint8)
    for transport, copy in (
        (opened(), Copy(0, 0, 1, 4, 4, 4)),
        (switched(), Copy(0, 0, 2, 4, 8, 8)),
        (switched(), Copy(0, 60, 1, 5, 5, 5)),
    ):
        window = transport.allocate(64, "0", "a window")
        for call in (
            lambda: transport.prepare_multicast(window, [(source, copy)]),  # noqa: B023
            lambda: transport.everywhere(window, 48, 9),  # noqa: B023
        ):
            try:
                call()
            except (RuntimeError, ValueError, IndexError) as error:
                refused.append(f"{type(error).__name__}: {error}")
        transport.close()
    return refused


def test_what_cannot_be_multicast_is_refused(ranks: RankPools) -> None:
    for refused in ranks(2).run(refuse):
        assert [text.split(":")[0] for text in refused] == [
            "RuntimeError",
            "RuntimeError",
            "ValueError",
            "IndexError",
            "IndexError",
            "IndexError",
        ]
        assert "'host' does not multicast" in refused[0]
        assert "several rows" in refused[2]


def make(rank: int, world: int, name: str, multicast: bool) -> tuple[bool, str, list[str]]:
    import warnings

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        meeting = Rendezvous(dist.group.WORLD, 20.0)
        device = torch.device("cpu")
        transport, why = select.make(name, device, dist.group.WORLD, meeting, 20.0, multicast=multicast)
    multicasts = transport.multicasts
    transport.close()
    return multicasts, why, [str(one.message) for one in warned if "tide_triton" in str(one.message)]


def test_multicast_is_had_only_from_an_emulated_switch_and_its_lack_is_said(ranks: RankPools) -> None:
    assert ranks(2).run(make, "auto", False) == [(False, "tensors are on the CPU", [])] * 2
    assert (
        ranks(2).run(make, "host_switch", True)
        == [(True, "asked for, with an emulated switch, with multicast", [])] * 2
    )
    for multicasts, why, warned in ranks(2).run(make, "host", True):
        assert not multicasts
        assert why == "tensors are on the CPU, no multicast: the transport 'host' does not multicast"
        assert len(warned) == 1
        assert "the transport 'host' does not multicast" in warned[0]


def make_differently(rank: int, world: int) -> tuple[bool, str]:
    return make(rank, world, "host_switch" if rank == 0 else "host", True)[:2]


def test_one_rank_without_a_switch_is_enough_to_do_without(ranks: RankPools) -> None:
    first, second = ranks(2).run(make_differently)
    for (multicasts, why), chosen in ((first, "an emulated switch"), (second, "on the CPU")):
        assert not multicasts
        assert why.endswith(f"{chosen}, no multicast: the transport 'host' does not multicast")


# --- GPU windows, as addresses ---


class OnPaper(DeviceTransport):
    """A GPU transport without GPUs, whose windows are addresses."""

    name = "nccl"

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 2

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        raise NotImplementedError

    def window(self, multicast: int | None) -> DeviceWindow:
        own = torch.zeros(4096, dtype=torch.uint8)
        memory = SymmetricMemory(own, (own.data_ptr(), 1 << 40), None, multicast)
        return DeviceWindow(1024, 0, memory, self.word_nbytes, lambda: None)


def test_a_gpu_multicasts_by_engine_alone_to_where_all_windows_are_mapped() -> None:
    transport, source = OnPaper(), torch.zeros(64, dtype=torch.uint8)
    window = transport.window(1 << 41)
    with pytest.raises(RuntimeError, match="does not multicast"):
        transport.prepare_multicast(window, [])
    transport.multicasts = True
    base = (1 << 41) + window.header
    put = transport.prepare_multicast(window, [(source, Copy(8, 128, 1, 32, 32, 32))])
    assert put == Batch([base + 128], [source.data_ptr() + 8], [32], (), (0,), engine_only=True)
    assert put.moved([16]) == Batch([base + 128], [source.data_ptr() + 24], [32], (), (0,), engine_only=True)
    assert transport.everywhere(window, 32, 5) == Multicast(base + 32, 5)
    for wrong in (lambda: transport.everywhere(window, 1016, 5), lambda: transport.everywhere(window, -16, 5)):
        with pytest.raises(IndexError):
            wrong()
    with pytest.raises(IndexError):
        transport.prepare_multicast(window, [(source, Copy(0, 1020, 1, 32, 32, 32))])
    with pytest.raises(ValueError, match="several rows"):
        transport.prepare_multicast(window, [(source, Copy(0, 0, 2, 4, 8, 8))])


def engine(calls: list[str]) -> CopyEngine:
    """A copy engine that only says what it is called for."""

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name) or (0,)

    made = CopyEngine.__new__(CopyEngine)
    made._runtime, made._attributes, made._device_to_device = Runtime(), [], 3
    return made


def test_one_copy_by_engine_alone_is_a_batch_and_is_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    engine(calls).copy(Batch([1], [2], [3], (), (0,)), 1)
    engine(calls).copy(Batch([1], [2], [3], (), (0,), engine_only=True), 1)
    assert calls == ["cudaMemcpyAsync", "cudaMemcpyBatchAsync"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="captured"):
        engine(calls).copy(Batch([1], [2], [3], (), (0,), engine_only=True), 1)


class Told:
    """What a library would answer: a window, or a handle, with or without a multicast address."""

    def __init__(self, address: int | None) -> None:
        self.address, self.asked, self.closed = address, 0, 0
        self.handle = self.buffer_ptrs = (1, 2)
        self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = 512, 1024

    def get_peer_device_pointer(self, peer: int, offset: int) -> int:
        return 1000 + peer

    def get_lsa_multimem_device_pointer(self) -> int | None:
        self.asked += 1
        return self.address

    @property
    def multicast_ptr(self) -> int:
        self.asked += 1
        return self.address or 0

    def close(self) -> None:
        self.closed += 1


def nccl(told: Told) -> Any:
    from types import SimpleNamespace

    from tide_triton.transports.nccl import NcclTransport

    made = NcclTransport.__new__(NcclTransport)
    made.world_size, made.device, made.global_ranks = 2, torch.device("cpu"), [0, 1]
    empty = SimpleNamespace(empty=torch.empty)
    made._nccl = SimpleNamespace(torch=empty, WindowFlag=SimpleNamespace(COLL_SYMMETRIC=1))
    supported = SimpleNamespace(multimem_support=told.address is not None)
    made._communicator = SimpleNamespace(register_window=lambda own, flag: told, properties=supported)
    return made


def symm(told: Told, monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch.distributed._symmetric_memory as symmetric_memory

    from tide_triton.transports.symm import SymmTransport

    made = SymmTransport.__new__(SymmTransport)
    made.world_size, made.device, made._group = 2, torch.device("cpu"), None
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda own, group: told)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: None)
    return made


@pytest.mark.parametrize("library", ["nccl", "symm"])
def test_a_library_is_asked_for_a_multicast_address_only_where_the_user_has_asked(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(1 << 30)
    transport = nccl(told) if library == "nccl" else symm(told, monkeypatch)
    assert transport._symmetric(64).multicast is None
    assert told.asked == 0
    transport.multicasts = True
    assert transport._symmetric(64).multicast == 1 << 30
    told.address = None
    with pytest.raises(RuntimeError, match="multicast_nbytes=None and switch_sums=False"):
        transport._symmetric(64)


def test_nccl_says_why_it_does_not_multicast() -> None:
    assert nccl(Told(None)).why_no_multicast() == "NCCL reports no multicast"
    assert nccl(Told(1)).why_no_multicast() is None
