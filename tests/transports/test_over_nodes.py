"""Puts and counters of other nodes' ranks, with libraries and copy engine played on the memory of this process."""

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.simulated_transport import SimulatedTransport
from tests.test_many_nodes_streams import TOPOLOGIES, _Script, on_streams
from tide_triton.copy_engine import Batch
from tide_triton.layouts import Copy, SpecError, Topology
from tide_triton.transports import READY, WRITTEN, Mark, over_nodes
from tide_triton.transports.base import COUNTERS
from tide_triton.transports.device import DeviceWindow, SymmetricMemory
from tide_triton.transports.nccl_rma import NcclRmaTransport
from tide_triton.transports.nvshmem import NvshmemTransport
from tide_triton.transports.over_nodes import OverNodes, fillings

WORLD, NODES = 4, 2
#: So small that most puts need several fillings.
STAGING = 64


class Engine:
    """Copies and writes that happen at once."""

    def copy(self, batch: Batch, stream: int) -> None:
        for to, source, nbytes in zip(batch.destinations, batch.sources, batch.sizes, strict=True):
            ctypes.memmove(to, source, nbytes)
        for to, to_pitch, source, pitch, width, rows in batch.strided:
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, source + row * pitch, width)

    def write(self, address: int, value: int, stream: int, nbytes: int = 4) -> None:
        ctypes.memmove(address, value.to_bytes(nbytes, "little"), nbytes)


class Nccl:
    """What NcclRmaTransport asks of nccl4py; a window's handle is its memory of every rank."""

    def __init__(self) -> None:
        self.grouped: list[int] = []
        self.contexts: set[int] = set()
        self.sources: list[int] = []
        self._open = 0

    @contextmanager
    def group(self) -> Iterator[None]:
        self._open = 0
        yield
        self.grouped.append(self._open)

    def put_signal(
        self, local: torch.Tensor, peer: int, window: list[torch.Tensor], at: int, *, context: int, stream: int
    ) -> None:
        assert local.dtype == torch.uint8
        assert local.is_contiguous()
        self._open += 1
        self.contexts.add(context)
        self.sources.append(local.data_ptr())
        window[peer][at : at + local.numel()] = local


class Nvshmem:
    """What NvshmemTransport asks of nvshmem4py: symmetric addresses, as an offset from this rank's memory."""

    Signal_op = SimpleNamespace(SIGNAL_SET=9)

    def __init__(self, memories: list[torch.Tensor], rank: int) -> None:
        self._memories, self._rank = memories, rank
        self.calls: list[str] = []

    def _at(self, address: int, peer: int) -> int:
        offset = address - self._memories[self._rank].data_ptr()
        assert 0 <= offset < self._memories[peer].numel()
        return self._memories[peer].data_ptr() + offset

    def putmem_on_stream(self, to: int, source: int, nbytes: int, peer: int, stream: int) -> None:
        self.calls.append("put")
        ctypes.memmove(self._at(to, peer), source, nbytes)

    def putmem_nbi_on_stream(self, to: int, source: int, nbytes: int, peer: int, stream: int) -> None:
        self.calls.append("put_nbi")
        ctypes.memmove(self._at(to, peer), source, nbytes)

    def quiet_on_stream(self, stream: int) -> None:
        self.calls.append("quiet")

    def signal_op_on_stream(self, address: int, value: int, kind: int, peer: int, stream: int) -> None:
        assert kind == 9
        assert address % 8 == 0
        self.calls.append("signal")
        ctypes.memmove(self._at(address, peer), value.to_bytes(8, "little"), 8)


def _nothing() -> None:
    """What windows wait for before they close."""


class Case:
    """Rank 0 of two nodes of two ranks, with a window of `nbytes` bytes on each rank."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind = kind
        word = 8
        header = -(-WORLD * COUNTERS * word // 256) * 256
        self.header = header
        self.memories = [torch.zeros(header + nbytes, dtype=torch.uint8) for _ in range(WORLD)]
        transport: Any = (NcclRmaTransport if kind == "nccl_rma" else NvshmemTransport).__new__(
            NcclRmaTransport if kind == "nccl_rma" else NvshmemTransport
        )
        transport.rank, transport.world_size = 0, WORLD
        transport._span(NODES, WORLD)
        transport._engine = Engine()
        transport._streams, transport._active = {}, None
        transport._current = lambda: SimpleNamespace(cuda_stream=7)
        transport._turn = lambda stream: nullcontext()
        addresses = tuple(m.data_ptr() if rank < 2 else 0 for rank, m in enumerate(self.memories))
        own = SymmetricMemory(self.memories[0], addresses, None)
        self.window = DeviceWindow(nbytes, 0, own, word, _nothing)
        staging = torch.zeros(header + transport.reserved_nbytes + STAGING, dtype=torch.uint8)
        transport._staging = DeviceWindow(
            staging.numel() - header, 0, SymmetricMemory(staging, (staging.data_ptr(), 0, 0, 0), None), word, _nothing
        )
        transport._windows = [transport._staging, self.window]
        self.library: Any
        if kind == "nccl_rma":
            self.library = Nccl()
            transport._nccl = self.library
            self.of_rails = Nccl(), Nccl()
            transport._communicator, *others = *self.of_rails, self.library
            transport._others = tuple(others)
            transport._handles = {self.memories[0].data_ptr(): (self.memories,) * 3}
        else:
            self.library = transport._bindings = Nvshmem(self.memories, 0)
            transport._mapped = frozenset(range(4 if kind == "nvshmem" else 2))
        self.transport: OverNodes = transport


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_nodes, "STAGING_NBYTES", STAGING)


KINDS = ["nccl_rma", "nvshmem", "nvshmem over a network"]


def _random_copy(draw: random.Random, source_nbytes: int, start: int) -> Copy:
    rows, width = draw.choice([(1, draw.randint(1, 150)), (draw.randint(2, 9), draw.randint(1, 20))])
    src_pitch, dst_pitch = width + draw.choice([0, 0, 3]), width + draw.choice([0, 5])
    if rows == 1:
        src_pitch = dst_pitch = width
    extent = (rows - 1) * src_pitch + width
    return Copy(draw.randint(0, source_nbytes - extent), start, rows, width, src_pitch, dst_pitch)


def _naive(copy: Copy, source: torch.Tensor, into: torch.Tensor) -> None:
    for row in range(copy.rows):
        at, to = copy.src_offset + row * copy.src_pitch, copy.dst_offset + row * copy.dst_pitch
        into[to : to + copy.width] = source[at : at + copy.width]


@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peer", [1, 2, 3])
def test_puts_from_anywhere_arrive_and_touch_nothing_else(kind: str, peer: int) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        case = Case(kind, 4096)
        case.window.memory[:1024] = torch.randint(0, 255, (1024,), dtype=torch.uint8)
        wanted = [memory.clone() for memory in case.memories]
        moves, start = [], 1024
        for _ in range(draw.randint(1, 8)):
            outside = torch.randint(0, 255, (600,), dtype=torch.uint8)
            source = draw.choice([outside, case.window.memory[:1024]])
            copy = _random_copy(draw, source.numel(), start)
            start = copy.dst.end + draw.choice([0, 0, 7])
            moves.append((source, copy))
            _naive(copy, source, wanted[peer][case.header :])
        put = case.transport.prepare(case.window, peer, moves)
        case.transport.put(put)
        for rank, memory in enumerate(case.memories):
            assert torch.equal(memory, wanted[rank]), f"seed {seed}, rank {rank}"
        assert put.is_reusable
        if kind == "nccl_rma":
            assert max(case.library.grouped, default=0) <= 16


@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peer", [1, 2, 3])
def test_puts_follow_sources_that_move_wherever_they_move_to(kind: str, peer: int) -> None:
    """Into a window and out of it as well: what can be read where it is changes."""
    for seed in range(30):
        draw = random.Random(seed)
        case = Case(kind, 4096)
        copies, start = [], 1024
        for _ in range(draw.randint(1, 8)):
            copies.append(_random_copy(draw, 512, start))
            start = copies[-1].dst.end + draw.choice([0, 0, 7])

        def sources(draw: random.Random = draw, case: Case = case, count: int = len(copies)) -> list[torch.Tensor]:
            """Somewhere in the window, or outside of it."""
            places = [draw.choice([None, 0, 512]) for _ in range(count)]
            return [
                torch.empty(512, dtype=torch.uint8) if at is None else case.window.memory[at : at + 512]
                for at in places
            ]

        before = sources()
        put = case.transport.prepare(case.window, peer, list(zip(before, copies, strict=True)))
        for _ in range(3):
            after = sources()
            for source in after:
                source.copy_(torch.randint(0, 255, (512,), dtype=torch.uint8))
            wanted = [memory.clone() for memory in case.memories]
            for source, copy in zip(after, copies, strict=True):
                _naive(copy, source, wanted[peer][case.header :])
            put = put.moved([new.data_ptr() - old.data_ptr() for new, old in zip(after, before, strict=True)])
            case.transport.put(put)
            for rank, memory in enumerate(case.memories):
                assert torch.equal(memory, wanted[rank]), f"seed {seed}, rank {rank}"
            before = after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peer", [1, 2, 3])
def test_a_counter_of_any_rank_is_raised_where_that_rank_waits_for_it(kind: str, peer: int) -> None:
    case = Case(kind, 256)
    for counter, value in ((READY, 1), (WRITTEN, 0xFFFFFFFF), (WRITTEN, (1 << 32) + 5), (WRITTEN, (1 << 64) + 5)):
        before = [memory.clone() for memory in case.memories]
        case.transport.signal(case.window, peer, counter, value)
        pitch = case.transport.word_nbytes
        word = (counter * WORLD + 0) * pitch
        before[peer][word : word + 8] = torch.tensor(list((value % (1 << 64)).to_bytes(8, "little")))
        for rank, memory in enumerate(case.memories):
            assert torch.equal(memory, before[rank])


def test_lanes_that_raise_counters_stage_them_in_words_of_their_own_and_what_runs_in_none_takes_turns() -> None:
    case = Case("nccl_rma", 256)
    transport: Any = case.transport
    turns = []

    @contextmanager
    def turn(stream: Any) -> Iterator[None]:
        turns.append(stream)
        yield

    transport._turn = turn
    transport._streams = {"rail": object(), "receipts": object(), "signals": object()}
    libraries = (*case.of_rails, case.library)
    for stream in (None, *transport._streams.values()):
        transport._active = stream
        transport.signal(case.window, 2, READY, 1)
    words = sorted(address for library in libraries for address in library.sources)
    assert len(words) == 4
    assert all(following - word >= 128 for word, following in pairwise(words))
    assert len(turns) == 1


@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["in a window", "elsewhere"])
def test_a_put_and_the_signal_after_it_are_as_one_after_the_other(kind: str, where: str) -> None:
    copies = [Copy(3, 7, 1, 20, 20, 20), Copy(30, 100, 3, 5, 9, 11)]
    results, calls = [], []
    for at_once in (False, True):
        case = Case(kind, 256)
        case.window.memory.copy_(torch.arange(256, dtype=torch.uint8))
        source = case.window.memory if where == "in a window" else torch.arange(100, dtype=torch.uint8)
        put = case.transport.prepare(case.window, 2, [(source, copy) for copy in copies])
        if at_once:
            case.transport.put_and_signal(put, case.window, 2, WRITTEN, (1 << 32) + 9)
        else:
            case.transport.put(put)
            case.transport.signal(case.window, 2, WRITTEN, (1 << 32) + 9)
        results.append([memory.clone() for memory in case.memories])
        calls.append(case.library.grouped if kind == "nccl_rma" else 0)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    if kind == "nccl_rma" and where == "in a window":
        assert calls == [[4], [5]]


@pytest.mark.usefixtures("small_staging")
def test_over_a_network_every_filling_is_there_before_the_next_and_the_signal() -> None:
    case = Case("nvshmem over a network", 1024)
    source = torch.arange(200, dtype=torch.uint8)
    put = case.transport.prepare(case.window, 2, [(source, Copy(0, 0, 1, 200, 200, 200))])
    case.transport.put(put)
    case.transport.signal(case.window, 2, WRITTEN, 1)
    assert case.library.calls == ["put_nbi", "quiet"] * 4 + ["signal"]
    assert torch.equal(case.memories[2][case.header : case.header + 200], source)


def test_what_lies_in_a_window_goes_from_there() -> None:
    case = Case("nccl_rma", 1024)
    put: Any = case.transport.prepare(case.window, 2, [(case.window.memory, Copy(8, 512, 1, 64, 64, 64))])
    assert [(piece.at - case.header, piece.nbytes) for piece in put.pieces] == [(512, 64)]
    assert put.fillings == ()


def test_neighbours_in_the_staging_go_as_one_piece() -> None:
    copies = [(256, 1000, Copy(0, 0, 1, 10, 10, 10)), (256, 9000, Copy(0, 10, 3, 4, 8, 4))]
    ((batch, pieces),) = fillings(copies, 4096, 1 << 20)
    assert [(piece.address, piece.at, piece.nbytes) for piece in pieces] == [(4096, 256, 22)]
    assert len(batch.sizes) + len(batch.strided) == 2


def test_each_rail_has_a_communicator_and_every_other_lane_a_context_of_one_more() -> None:
    case = Case("nccl_rma", 256)
    transport: Any = case.transport
    transport._streams = {"rail": object(), "receipts": object(), "second_rail": object()}
    seen = []
    for stream in (None, *transport._streams.values()):
        transport._active = stream
        communicators = (*case.of_rails, case.library)
        for communicator in communicators:
            communicator.contexts.clear()
        transport.signal(case.window, 2, READY, 1)
        seen.append(tuple(communicator.contexts.copy() for communicator in communicators))
    assert seen == [(set(), set(), {0}), ({0}, set(), set()), (set(), set(), {2}), (set(), {0}, set())]


def test_puts_that_leave_their_source_or_window_are_refused() -> None:
    case = Case("nccl_rma", 256)
    for copy in (Copy(0, 200, 1, 57, 57, 57), Copy(0, 0, 1, 101, 101, 101)):
        with pytest.raises(IndexError, match="leaves its source of 100 or its window of 256 bytes"):
            case.transport.prepare(case.window, 2, [(torch.zeros(100, dtype=torch.uint8), copy)])


@pytest.mark.parametrize("nodes", [0, 3, 5])
def test_nodes_that_do_not_divide_the_ranks_are_refused(nodes: int) -> None:
    transport: Any = NvshmemTransport.__new__(NvshmemTransport)
    with pytest.raises(SpecError, match=f"nodes={nodes} does not divide 4 ranks"):
        transport._span(nodes, 4)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_puts_to_other_nodes_that_follow_each_other_across_lanes_never_wait_for_themselves(topology: Topology) -> None:
    """As NCCL has it: whatever one communicator was given comes after all that it was given before."""
    latest: dict[int, Mark | None] = {}

    def in_turn(name: str) -> Any:
        at_once = getattr(SimulatedTransport, name)

        def call(self: SimulatedTransport, *arguments: Any) -> None:
            peer = arguments[0].peer if name == "put" else arguments[1]
            if topology.node(peer) == topology.node(self.rank):
                at_once(self, *arguments)
                return
            self.after(latest.get(self.rank))
            at_once(self, *arguments)
            latest[self.rank] = self.mark()

        return mock.patch.object(SimulatedTransport, name, call)

    with on_streams(), in_turn("put"), in_turn("signal"):
        for seed in range(4):
            latest.clear()
            assert not _Script(topology, seed, in_order=False).wrong
