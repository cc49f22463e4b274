"""Collectives over several nodes where streams run beside each other, as on GPUs: whatever happens when.

Ranks, streams and what happens when are those of `tests.simulated_transport`. Both collectives follow each other for
some turns of the same slots, and are held to the stated sums bit by bit; slots are poisoned once they have been read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from tests.simulated_transport import POISON, Cluster, SimulatedTransport, _OnStream, kernels_on_streams
from tests.test_collectives import part, random_spec, whole
from tests.test_many_nodes import sum_over_nodes
from tide_triton import hierarchical_steps
from tide_triton.hierarchical_reduce import HierarchicalReduceScatter, rings_nbytes
from tide_triton.layouts import LandingLayout, Pacing, SlotLayout, Topology, Wait
from tide_triton.paced import PacedTurn
from tide_triton.rail_gather import RailAllGather
from tide_triton.reducers import Reduction
from tide_triton.traffic import Traffic
from tide_triton.transports import Lane
from tide_triton.views import DTYPES, dtype_name
from tide_triton.windows import Slot, SlotPool

TOPOLOGIES = [Topology(2, 2), Topology(3, 2), Topology(2, 3), Topology(4, 1), Topology(3, 1)]
TURNS = 3


@contextmanager
def on_streams() -> Iterator[None]:
    """`kernels_on_streams`, for the sums of this reduce-scatter as well."""
    accumulate = hierarchical_steps.prepare_accumulate

    def prepare_accumulate(contributions: Any, outputs: Any, **options: Any) -> _OnStream:
        reads = [tensor for ranks in contributions for tensor in ranks]
        return _OnStream(accumulate(contributions, outputs, **options), "sum", reads, ())

    with kernels_on_streams(), mock.patch.object(hierarchical_steps, "prepare_accumulate", prepare_accumulate):
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
        self.cluster = Cluster(self.world, in_order=in_order)
        self.ranks: dict[int, _Rank] = {}
        self.wrong: list[str] = []
        self.gradients = [
            [
                [whole(t, 999 * r + 50 * n + i, self.dtype) for i, t in enumerate(self.spec.tensors)]
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

    def _set_up(self, transport: SimulatedTransport) -> None:
        pool, rank, layout = SlotPool(transport), transport.rank, SlotLayout(self.spec)
        landing = LandingLayout(self.spec, dtype_name(self.dtype))
        self.ranks[rank] = _Rank(
            pool.add(layout.nbytes, "0", "a slot"),
            pool.add(rings_nbytes(self.topology, self.pacing), "0", "the rings"),
            RailAllGather(layout, rank, self.topology, self.gather_pacing, smallest_piece=self.smallest_piece),
            HierarchicalReduceScatter(landing, rank, self.topology, self.pacing, self.wire),
        )

    def _turn(self, transport: SimulatedTransport, number: int) -> None:
        rank, this = transport.rank, self.ranks[transport.rank]
        sources = [whole(t, 100 * number + i) for i, t in enumerate(self.spec.tensors)]
        shards = [part(t, self.world, rank, s) for t, s in zip(self.spec.tensors, sources, strict=True)]
        for shard in shards:
            self.cluster.may_put_from(shard)
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
        outputs = [torch.full((numel,), torch.nan) for numel in this.reducer.padded_numels]
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


def test_without_credits_for_whole_turns_it_shows() -> None:
    with on_streams(), mock.patch.object(PacedTurn, "greet"):
        assert any(_fails(topology, seed) for seed in range(3) for topology in TOPOLOGIES)
