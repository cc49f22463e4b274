"""Collectives over several nodes where streams run beside each other, as on GPUs: whatever happens when.

Ranks, streams and what happens when are those of `tests.simulated_transport`. Both collectives follow each other for
some turns of the same slots, and are held to the stated sums bit by bit; slots are poisoned once they have been read.
"""

import ctypes
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.simulated_transport import POISON, Cluster, SimulatedTransport, _OnStream, at_work, kernels_on_streams
from tests.test_collectives import part, random_spec, whole
from tests.test_many_nodes import sum_over_nodes
from tide_triton import hierarchical_program, hierarchical_reduce, rail_gather
from tide_triton.all_gather import Gathering
from tide_triton.hierarchical_plan import Plan
from tide_triton.hierarchical_program import Memory, Program, empty_accumulator
from tide_triton.hierarchical_reduce import HierarchicalReduceScatter
from tide_triton.kernels import accumulate
from tide_triton.kernels.launch import Prepared
from tide_triton.kernels.movable import Movable
from tide_triton.kernels.tables import Launch, make_launch
from tide_triton.layouts import Copy, GroupSpec, LandingLayout, Pacing, SlotLayout, TensorSpec, Topology, Wait
from tide_triton.layouts.pacing import rings_nbytes
from tide_triton.paced import PacedTurn
from tide_triton.rail_gather import RailAllGather
from tide_triton.reducers import Reduction
from tide_triton.traffic import Traffic
from tide_triton.transports import Lane, Mark
from tide_triton.views import DTYPES, dtype_name
from tide_triton.windows import Slot, SlotPool, Turn

TOPOLOGIES = [Topology(2, 2), Topology(3, 2), Topology(2, 3), Topology(4, 1), Topology(3, 1)]
TURNS = 3


def _at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The memory at `address`, seen as `like` (meta) is."""
    span = like.untyped_storage().nbytes()
    if not like.numel():
        return torch.empty(0, dtype=like.dtype)
    memory = torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=torch.uint8)
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def _sum_by_address(cluster: Cluster, contributions: Any, outputs: Any, **options: Any) -> Prepared:
    """A sum that knows its tensors only by a table, which it reads when it happens: as a kernel does."""
    tensors = [*(tensor for ranks in contributions for tensor in ranks), *outputs]
    rows, counts = [[tensor.data_ptr()] for tensor in tensors], [(0, 0)] * len(tensors)
    launch = make_launch([], rows, counts, torch.device("cpu"), {}, 1, address_columns=(0,))
    likes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    count, ranks = len(outputs), len(contributions[0])
    landed = [tensor for tensor in tensors[:-count] if cluster.window_of(tensor) is not None]

    def run(launches: Sequence[Launch], stream: int | None) -> None:
        (launch,) = launches

        def happen() -> None:
            places = launch.table[list(launch.addresses)].tolist()
            views = [_at(address, like) for address, like in zip(places, likes, strict=True)]
            given, into = views[:-count], views[-count:]
            accumulate([given[i : i + ranks] for i in range(0, len(given), ranks)], into, **options)

        _OnStream(happen, "sum", landed, ())(stream)

    return Prepared(run, [launch], is_reusable=True)


class _Allocator:
    """Accumulators as a GPU's allocator gives them: the next may lie where the last is, in the order of one stream."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._given = 0

    def __call__(self, plan: Plan, transport: Any, wide: torch.dtype) -> torch.Tensor:
        key = (transport, plan.hierarchy.chunk_numel, wide)
        if key not in self._kept:
            self._kept[key] = [torch.full((plan.hierarchy.chunk_numel,), torch.nan, dtype=wide) for _ in range(2)]
        self._given += 1
        return self._kept[key][self._given // 3 % 2]


@contextmanager
def on_streams() -> Iterator[None]:
    """`kernels_on_streams`, with the sums of this reduce-scatter, which can be moved, and uploads of their tables."""

    def prepare_accumulate(contributions: Any, outputs: Any, **options: Any) -> Prepared:
        options.pop("ctas")
        return _sum_by_address(at_work[-1].cluster, contributions, outputs, **options)

    def upload(self: Movable) -> None:
        table = torch.from_numpy(self._host.copy())
        at_work[-1].enqueue("upload", lambda: self._device.copy_(table))

    with (
        kernels_on_streams(),
        mock.patch.object(hierarchical_program, "prepare_accumulate", prepare_accumulate),
        mock.patch.object(hierarchical_reduce, "empty_accumulator", _Allocator()),
        mock.patch.object(Movable, "_upload", upload),
    ):
        yield


@dataclass
class _Rank:
    slot: Slot
    rings: Slot
    gather: RailAllGather
    reducer: HierarchicalReduceScatter
    #: What a GPU's allocator would keep.
    alive: list[torch.Tensor] = field(default_factory=list)


class _Script:
    """Some turns of both collectives of a random group, on every rank. wrong: what did not come out as it should."""

    def __init__(self, topology: Topology, seed: int, in_order: bool) -> None:
        draw = Random(seed)
        self.topology, self.world = topology, topology.world_size
        self.spec = random_spec(self.world, seed)
        self.dtype = draw.choice([torch.bfloat16, torch.float32])
        self.wire = draw.choice([None, torch.bfloat16])
        self.pacing = Pacing(32, draw.randint(1, 3))
        # The gather's chunks may be larger, so that several pieces of the own part go into one.
        self.gather_pacing = Pacing(draw.choice([32, 96, 480]), self.pacing.depth)
        self.smallest_piece = draw.choice([None, 1, 24])
        self.run_nbytes = draw.choice([0, 8, 1 << 10])
        #: Turns before which something else is gathered into the same slot, for which nobody waits.
        self.dropped = {number for number in range(TURNS) if draw.random() < 0.4}
        rails: list[tuple[Lane, ...]] = [("rail",), ("rail", "second_rail")]
        self.cluster = Cluster(self.world, in_order=in_order, rails=draw.choice(rails))
        self.ranks: dict[int, _Rank] = {}
        self.wrong: list[str] = []
        #: Of the memory of gradients and outputs.
        self.memories: list[weakref.ref[np.ndarray[Any, Any]]] = []
        self.gradients = [
            [
                [self._watched(whole(t, 999 * r + 50 * n + i, self.dtype)) for i, t in enumerate(self.spec.tensors)]
                for n in range(TURNS)
            ]
            for r in range(self.world)
        ]
        for gradient in (g for of_rank in self.gradients for turn in of_rank for g in turn):
            self.cluster.may_put_from(gradient)
        self.cluster.call(self._set_up, "setting up")
        for number in range(TURNS):
            self.cluster.call(lambda transport, number=number: self._turn(transport, number), f"turn {number}")
        self.cluster.mix(draw)

    def _watched(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy whose memory is known to be gone once nothing uses it."""
        memory = np.empty(max(tensor.nbytes, 1), dtype=np.uint8)
        self.memories.append(weakref.ref(memory))
        return torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _set_up(self, transport: SimulatedTransport) -> None:
        pool, rank, layout = SlotPool(transport), transport.rank, SlotLayout(self.spec)
        landing = LandingLayout(self.spec, dtype_name(self.dtype))
        options: dict[str, Any] = {"smallest_piece": self.smallest_piece, "run_nbytes": self.run_nbytes}
        gather = RailAllGather(layout, rank, self.topology, self.gather_pacing, **options)
        self.ranks[rank] = _Rank(
            pool.add(gather.slot_nbytes, "0", "a slot"),
            pool.add(rings_nbytes(self.topology, self.pacing), "0", "the rings"),
            gather,
            HierarchicalReduceScatter(landing, rank, self.topology, self.pacing, self.wire),
        )

    def _turn(self, transport: SimulatedTransport, number: int) -> None:
        rank, this = transport.rank, self.ranks[transport.rank]
        sources = [whole(t, 100 * number + i) for i, t in enumerate(self.spec.tensors)]
        shards = [part(t, self.world, rank, s) for t, s in zip(self.spec.tensors, sources, strict=True)]
        for shard in shards:
            self.cluster.may_put_from(shard)
        if number in self.dropped:
            others = [part(t, self.world, rank, whole(t, 5000 + i)) for i, t in enumerate(self.spec.tensors)]
            for other in others:
                self.cluster.may_put_from(other)
            this.alive += others
            this.gather.start(this.slot, others, "what nobody waits for", Traffic())
        this.gather.start(this.slot, shards, "the group", Traffic()).wait()

        def read_slot() -> None:
            for tensor, source, view in zip(self.spec.tensors, sources, this.gather.views(this.slot), strict=True):
                if not torch.equal(view, source.to(DTYPES[tensor.dtype])):
                    self.wrong.append(f"turn {number}, rank {rank}: {tensor} gathered wrong")
            this.slot.window.memory.fill_(POISON)

        transport.enqueue("read and poison the slot", read_slot, reads=[this.slot.window], writes=[this.slot.window])
        transport.enqueue("the optimizer steps", lambda: [shard.fill_(-1) for shard in shards])
        this.slot.vacate()

        gradients = self.gradients[rank][number]
        outputs = [self._watched(torch.full((numel,), torch.nan)) for numel in this.reducer.padded_numels]
        this.alive += [*shards, *outputs]
        reduction = Reduction(torch.float32, divisor=float(self.world))
        this.reducer(this.rings, list(enumerate(gradients)), outputs, reduction, "the group", Traffic())
        wanted = [self._reduced(index, number, rank) for index in range(len(self.spec.tensors))]

        def read_shards() -> None:
            for index, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
                padded = torch.zeros_like(output)
                padded[: want.numel()] = want.flatten()
                if not torch.equal(output, padded):
                    self.wrong.append(f"turn {number}, rank {rank}: {self.spec.tensors[index]} reduced wrong")
            for gradient in gradients:
                gradient.fill_(torch.nan)

        transport.enqueue("read shards and free gradients", read_shards)

    def _reduced(self, index: int, number: int, rank: int) -> torch.Tensor:
        tensor = self.spec.tensors[index]
        own = [
            part(tensor, self.world, rank, whole(tensor, 999 * r + 50 * number + index, self.dtype))
            for r in range(self.world)
        ]
        as_they_are = self.topology.gpus_per_node == 1 and self.wire is not None and self.dtype.itemsize <= 2
        return sum_over_nodes(own, self.topology, None if as_they_are else self.wire) / self.world


def _fails(topology: Topology, seed: int) -> bool:
    try:
        return bool(_Script(topology, seed, in_order=False).wrong)
    except AssertionError:
        return True


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("in_order", [False, True], ids=["streams", "one stream"])
def test_whatever_happens_when_both_collectives_stay_exact(topology: Topology, in_order: bool) -> None:
    with on_streams():
        for seed in range(4):
            assert not _Script(topology, seed, in_order).wrong


@pytest.mark.parametrize(
    ("counter", "own"),
    [
        ("landed", False),
        ("landed", True),
        ("vacated", False),
        ("vacated", True),
        ("acknowledged", False),
        ("summed", True),
    ],
)
def test_without_any_one_kind_of_wait_it_shows(counter: str, own: bool) -> None:
    """own: what a rank waits for of itself."""
    wait_for = PacedTurn.wait

    def wait(self: PacedTurn, lane: Lane, wait: Wait) -> None:
        if wait.counter != counter or (wait.rank == self.turn.slot.transport.rank) != own:
            wait_for(self, lane, wait)

    with on_streams(), mock.patch.object(PacedTurn, "wait", wait):
        assert any(_fails(topology, seed) for seed in range(3) for topology in TOPOLOGIES)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_steps_are_prepared_once_and_follow_gradients_and_outputs_that_lie_elsewhere(topology: Topology) -> None:
    with on_streams(), mock.patch.object(hierarchical_reduce, "Program", wraps=Program) as prepared:
        script = _Script(topology, seed=1, in_order=False)
    for turns in script.gradients:
        assert len({gradient.data_ptr() for turn in turns for gradient in turn}) > len(script.spec.tensors)
    assert not script.wrong
    assert prepared.call_count == topology.world_size


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_what_is_prepared_keeps_neither_gradients_nor_outputs_alive(topology: Topology) -> None:
    with on_streams():
        script = _Script(topology, seed=1, in_order=False)
    assert all(memory() is not None for memory in script.memories)
    script.gradients.clear()
    script.cluster.sources.clear()
    for this in script.ranks.values():
        this.alive.clear()
    gc.collect()
    assert all(this.reducer._programs._kept for this in script.ranks.values())
    assert all(memory() is None for memory in script.memories)


def test_tables_that_are_uploaded_in_another_order_than_they_are_read_show() -> None:
    in_lane = hierarchical_program._in
    with on_streams(), mock.patch.object(hierarchical_program, "_in", lambda to, _: in_lane(to, "receipts")):
        assert any(_fails(topology, seed) for seed in range(3) for topology in TOPOLOGIES)


@pytest.mark.parametrize("apart", [True, False])
def test_steps_for_gradients_that_share_memory_are_prepared_anew(apart: bool) -> None:
    """One of them may lie elsewhere the next time, and an address does not say whose it is."""
    topology, pacing = Topology(2, 1), Pacing(64, 2)
    spec = GroupSpec(2, (TensorSpec("v", (8, 4), "float32"), TensorSpec("w", (8, 4), "float32")))
    pool = SlotPool(Cluster(2).transports[0])
    slot = pool.add(rings_nbytes(topology, pacing), "0", "the rings")
    reducer = HierarchicalReduceScatter(LandingLayout(spec, "float32"), 0, topology, pacing)
    plan = reducer.plan((0, 1), Reduction())
    gradient = torch.zeros(8, 4)
    gradients = {0: gradient, 1: torch.zeros(8, 4) if apart else gradient}
    outputs = {index: torch.zeros(16) for index in gradients}
    with on_streams():
        memory = Memory(gradients, outputs, empty_accumulator(plan, slot.transport, torch.float32))
        assert Program(plan, slot, memory, Reduction(), None).is_reusable == apart


def test_what_is_unpacked_before_it_has_come_shows() -> None:
    wait_for = PacedTurn.wait

    def wait(self: PacedTurn, lane: Lane, wait: Wait) -> None:
        if lane != "unpack":
            wait_for(self, lane, wait)

    with on_streams(), mock.patch.object(PacedTurn, "wait", wait):
        assert any(_fails(topology, seed) for seed in range(3) for topology in TOPOLOGIES)


def test_what_is_read_before_it_is_unpacked_shows() -> None:
    def gathering(turn: Turn, _: object) -> Gathering:
        return Gathering(turn)

    with on_streams(), mock.patch.object(rail_gather, "Gathering", gathering):
        assert any(_fails(topology, seed) for seed in range(3) for topology in TOPOLOGIES)


def test_what_a_second_rail_has_not_yet_put_shows() -> None:
    mark_of = SimulatedTransport.mark

    def mark(self: SimulatedTransport) -> Mark | None:
        return None if self._current.name == "second_rail" else mark_of(self)

    with on_streams(), mock.patch.object(SimulatedTransport, "mark", mark):
        assert any(_fails(topology, seed) for seed in range(4) for topology in TOPOLOGIES)


def test_two_rails_share_a_chunk_in_its_order_and_about_by_half() -> None:
    def copies(*sizes: int) -> tuple[Copy, ...]:
        return tuple(Copy(0, 0, 1, size, size, size) for size in sizes)

    chunk = ((0, copies(30)), (1, copies(60, 40)), (2, copies(5, 20)))
    assert rail_gather.deal(chunk, 1) == (chunk,)
    assert rail_gather.deal(chunk, 2) == (
        ((0, copies(30)), (1, copies(40))),
        ((1, copies(60)), (2, copies(5, 20))),
    )
    assert rail_gather.deal(((0, copies(7)),), 2) == (((0, copies(7)),), ())


def test_a_slot_that_is_given_away_while_it_is_unpacked_shows() -> None:
    with on_streams(), mock.patch.object(Slot, "read_until"):
        assert any(_fails(topology, seed) for seed in range(6) for topology in TOPOLOGIES)


def test_without_credits_for_whole_turns_it_shows() -> None:
    with on_streams(), mock.patch.object(PacedTurn, "greet"):
        assert any(_fails(topology, seed) for seed in range(3) for topology in TOPOLOGIES)
