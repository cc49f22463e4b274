"""The reduce-scatter over many nodes, on ranks that go on in any order, against a sum in the order that is stated."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.interleavings import FLOAT_DTYPES, Machine, Order, Task, hierarchies, orders, topologies
from tests.layouts.strategies import as_bytes, comparing, moving, read
from tide_triton.layouts import (
    FinalSum,
    GroupSpec,
    Hierarchy,
    LandingLayout,
    LocalPut,
    LocalSum,
    Pacing,
    RailPut,
    SpecError,
    Step,
    TensorSpec,
    Topology,
    Wait,
    cut_slices,
    execute,
    flat,
    shard,
)

Values = npt.NDArray[np.float64]
#: The slice of a rank's gradient that belongs to an owner, as float64 that hold values of the gradients' dtype.
Slice = Callable[[int, int], Values]

seeds = st.integers(0, 2**32 - 1)


def uneven(hierarchy: Hierarchy, seed: int) -> list[int]:
    """Shards of up to three chunks, some of them empty."""
    chunk = hierarchy.chunk_numel
    return Random(seed).choices((0, 1, chunk, chunk + 1, 3 * chunk), k=hierarchy.topology.world_size)


def rounded(values: Values, dtype: str) -> Values:
    """`values` as `dtype`, rounded to nearest even."""
    result: Values = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float64).numpy()
    return result


def added(one: Values, other: Values, dtype: str) -> Values:
    """The sum in fp32, or in fp64 where gradients of `dtype` are."""
    wide = np.float64 if dtype == "float64" else np.float32
    result: Values = (one.astype(wide) + other.astype(wide)).astype(np.float64)
    return result


def slices(hierarchy: Hierarchy, numels: Sequence[int], seed: int) -> Slice:
    """Random gradients of all ranks; of such a spread that the order in which they are added shows."""
    rng, world = np.random.default_rng(seed), range(hierarchy.topology.world_size)
    values = {
        (rank, owner): rounded(rng.normal(size=numels[owner]) * 4.0 ** rng.integers(-3, 4), hierarchy.dtype)
        for rank in world
        for owner in world
    }
    return lambda rank, owner: values[rank, owner]


def naive(hierarchy: Hierarchy, gradient: Slice, owner: int) -> Values:
    """Inside a node in GPU order, then over the nodes in node order; what travels is rounded."""
    topology, total = hierarchy.topology, None
    for node in range(topology.nodes):
        first, *others = topology.local_ranks(node)
        of_node = gradient(first, owner)
        for rank in others:
            of_node = added(of_node, gradient(rank, owner), hierarchy.dtype)
        if topology.nodes > 1:
            of_node = rounded(of_node, hierarchy.partial_dtype)
        total = of_node if total is None else added(total, of_node, hierarchy.dtype)
    assert total is not None
    return total


@dataclass(slots=True)
class Memory:
    """Slots of one buffer of one rank: who writes to one must find it empty, who reads it must find it full."""

    name: str
    count: int
    slots: dict[int, Values | None] = field(default_factory=dict)

    def reserve(self, slot: int) -> None:
        assert 0 <= slot < self.count, f"{self.name} has {self.count} slots, not {slot}"
        assert slot not in self.slots, f"slot {slot} of {self.name} is still in use"
        self.slots[slot] = None

    def fill(self, slot: int, values: Values) -> None:
        self.slots[slot] = values.copy()

    def value(self, slot: int) -> Values:
        values = self.slots.get(slot)
        assert values is not None, f"slot {slot} of {self.name} holds nothing yet"
        return values

    def take(self, slot: int) -> Values:
        values = self.value(slot)
        del self.slots[slot]
        return values


class Reduction:
    """A reduce-scatter of `gradient` on all ranks.

    one_by_one: whether a rank does its steps in order; else its four kinds of steps go on beside each other.
    without: the kind of counter that no step waits for.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        numels: Sequence[int],
        gradient: Slice,
        one_by_one: bool,
        without: str | None = None,
    ) -> None:
        self.hierarchy, self.gradient = hierarchy, gradient
        self.machine = Machine()
        world = range(hierarchy.topology.world_size)
        self.contributions = [Memory("contributions", hierarchy.contributions.slots) for _ in world]
        self.partials = [Memory("partials", hierarchy.partials.slots) for _ in world]
        self.outbox = [Memory("outbox", hierarchy.outbox.slots) for _ in world]
        self.shards = [np.full(numels[rank], np.nan) for rank in world]
        self.under_way: Counter[object] = Counter()
        self.rail_nbytes: Counter[int] = Counter()
        for rank in world:
            tasks = [self._task(rank, step) for step in hierarchy.steps(rank, numels)]
            kinds = [(LocalPut, LocalSum, RailPut, FinalSum)] if one_by_one else [LocalPut, LocalSum, RailPut, FinalSum]
            for kind in kinds:
                self.machine.add([task for task in tasks if isinstance(task.what, kind)], without)

    def run(self, order: Order) -> None:
        self.machine.run(order)
        for memory in (*self.contributions, *self.partials, *self.outbox):
            assert not memory.slots, f"{memory.name} is not empty at the end"

    def _task(self, rank: int, step: Step) -> Task:
        def start() -> None:
            match step:
                case LocalPut():
                    self._local_put(rank, step)
                case LocalSum():
                    self._local_sum(rank, step)
                case RailPut():
                    self._rail_put(rank, step)
                case FinalSum():
                    self._final_sum(rank, step)

        return Task(rank, step.waits_for, start, step)

    def _chunk(self, rank: int, owner: int, chunk: int) -> Values:
        size = self.hierarchy.chunk_numel
        return self.gradient(rank, owner)[chunk * size : (chunk + 1) * size]

    def _launch(self, rank: int, peer: int, link: object, number: int, land: Callable[[], None]) -> None:
        """Something is under way from `rank` to `peer`, until it is there."""
        self.under_way[link] += 1
        assert self.under_way[link] <= self.hierarchy.pacing.depth, f"too much in flight on {link}"

        def arrive() -> None:
            land()
            assert self.machine.count(peer, "landed", rank) == number
            self.under_way[link] -= 1

        self.machine.send((rank, peer), arrive)

    def _vacate(self, rank: int, ranks: Sequence[int]) -> None:
        for other in ranks:
            self.machine.send((rank, other, "vacated"), partial(self.machine.count, other, "vacated", rank))

    def _local_put(self, rank: int, step: LocalPut) -> None:
        assert self.hierarchy.topology.node(step.peer) == self.hierarchy.topology.node(rank)
        landing = self.contributions[step.peer]
        landing.reserve(step.slot)
        values = self._chunk(rank, step.owner, step.chunk)
        self._launch(rank, step.peer, (rank, step.peer), step.number, lambda: landing.fill(step.slot, values))

    def _local_sum(self, rank: int, step: LocalSum) -> None:
        total = None
        for slot in step.contributions:
            own = self._chunk(rank, step.owner, step.chunk)
            x = own if slot is None else self.contributions[rank].take(slot)
            total = x if total is None else added(total, x, self.hierarchy.dtype)
        assert total is not None
        if step.slot is None:
            assert step.into == "shard"
            size = self.hierarchy.chunk_numel
            self.shards[rank][step.chunk * size : (step.chunk + 1) * size] = total
        else:
            memory = self.outbox[rank] if step.into == "outbox" else self.partials[rank]
            memory.reserve(step.slot)
            memory.fill(step.slot, rounded(total, self.hierarchy.partial_dtype))
            if step.into == "partials":
                assert step.owner == rank
                self.machine.count(rank, "landed", rank)
        self._vacate(rank, step.vacates)
        self.machine.count(rank, "summed", rank)

    def _rail_put(self, rank: int, step: RailPut) -> None:
        topology, peer = self.hierarchy.topology, step.owner
        assert topology.gpu(peer) == topology.gpu(rank)
        assert topology.node(peer) != topology.node(rank)
        landing = self.partials[peer]
        landing.reserve(step.slot)
        if step.outbox is not None:
            self.outbox[rank].value(step.outbox)
        self.rail_nbytes[rank] += self._chunk(rank, peer, step.chunk).size

        def land() -> None:
            # As late as can be: what the outbox holds must not have changed since the put started.
            own = self._chunk(rank, peer, step.chunk)
            landing.fill(step.slot, own if step.outbox is None else self.outbox[rank].take(step.outbox))
            self.machine.send((peer, rank, "acknowledged"), partial(self.machine.count, rank, "acknowledged", peer))

        self._launch(rank, peer, (rank, "rail"), step.number, land)

    def _final_sum(self, rank: int, step: FinalSum) -> None:
        size = self.hierarchy.chunk_numel
        shard_chunk = self.shards[rank][step.chunk * size : (step.chunk + 1) * size]
        own = self._chunk(rank, rank, step.chunk)
        came = own if step.slot is None else self.partials[rank].take(step.slot)
        first = self.hierarchy.topology.node(step.source) == 0
        shard_chunk[:] = came if first else added(shard_chunk, came, self.hierarchy.dtype)
        self._vacate(rank, step.vacates)


def check(hierarchy: Hierarchy, numels: Sequence[int], gradient: Slice, order: Order, one_by_one: bool) -> None:
    reduction = Reduction(hierarchy, numels, gradient, one_by_one)
    reduction.run(order)
    nodes = hierarchy.topology.nodes
    for owner in range(hierarchy.topology.world_size):
        expected = naive(hierarchy, gradient, owner)
        assert reduction.shards[owner].tobytes() == expected.tobytes()
        rail = hierarchy.topology.rail(hierarchy.topology.gpu(owner))
        assert reduction.rail_nbytes[owner] == sum(numels[rank] for rank in rail if rank != owner)
        assert nodes > 1 or not reduction.rail_nbytes[owner]


@given(hierarchies(6, 4), seeds, orders, st.booleans())
@settings(deadline=None, max_examples=100)
def test_in_any_order_shards_are_the_stated_sum_bit_by_bit_and_no_slot_is_used_twice_at_once(
    hierarchy: Hierarchy, seed: int, order: Order, one_by_one: bool
) -> None:
    numels = uneven(hierarchy, seed)
    check(hierarchy, numels, slices(hierarchy, numels, seed), order, one_by_one)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 6, 7, 8, 12, 16])
def test_every_number_of_nodes_ends_whichever_rank_is_starved(nodes: int) -> None:
    for depth, haste, one_by_one in ((1, 0.0, False), (3, 1.0, False), (1, 1.0, True)):
        hierarchy = Hierarchy(Topology(nodes, 2), Pacing(16, depth), "bfloat16")
        numels = uneven(hierarchy, nodes)
        gradient = slices(hierarchy, numels, nodes)
        check(hierarchy, numels, gradient, Order(nodes, haste, starving=True), one_by_one)


@pytest.mark.parametrize(
    ("without", "gpus", "message"),
    [
        ("landed", 2, "holds nothing yet"),
        ("vacated", 2, "is still in use"),
        ("acknowledged", 2, "slot . of outbox is still in use"),
        ("acknowledged", 1, "too much in flight"),
        ("summed", 2, "slot . of outbox holds nothing yet"),
    ],
)
def test_a_schedule_that_waits_for_too_little_does_not_pass(without: str, gpus: int, message: str) -> None:
    hierarchy = Hierarchy(Topology(4, gpus), Pacing(16, 2), "float32")
    numels = [12] * hierarchy.topology.world_size
    reduction = Reduction(hierarchy, numels, slices(hierarchy, numels, 0), False, without)
    with pytest.raises(AssertionError, match=message):
        reduction.run(Order(0, 1.0, starving=False))


def test_another_order_of_the_sum_would_show() -> None:
    hierarchy = Hierarchy(Topology(3, 2), Pacing(16, 2), "float32")
    gradient = slices(hierarchy, [64] * 6, 0)
    in_order = naive(hierarchy, gradient, 0)
    swapped = naive(hierarchy, lambda rank, owner: gradient({0: 4, 4: 0}.get(rank, rank), owner), 0)
    assert in_order.tobytes() != swapped.tobytes()
    narrow = replace(hierarchy, wire="bfloat16")
    assert naive(narrow, gradient, 0).tobytes() != in_order.tobytes()


@st.composite
def landings(draw: st.DrawFn, topology: Topology) -> LandingLayout:
    """Up to three tensors, uneven and strided, several of which may share a chunk."""
    shapes = draw(st.lists(st.sampled_from([(7, 3), (3, 7), (1, 5), (17,), (4, 6)]), max_size=3))
    tensors = (
        TensorSpec(f"w{i}", shape, "float32", draw(st.integers(0, len(shape) - 1))) for i, shape in enumerate(shapes)
    )
    return LandingLayout(GroupSpec(topology.world_size, tuple(tensors)))


@given(topologies(4, 3), st.integers(1, 3), orders, seeds, st.data())
@settings(deadline=None, max_examples=30)
def test_chunks_of_real_gradients_are_the_slices_that_the_schedule_speaks_of(
    topology: Topology, depth: int, order: Order, seed: int, data: st.DataObject
) -> None:
    landing, world = data.draw(landings(topology)), range(topology.world_size)
    hierarchy = Hierarchy(topology, Pacing(32, depth), "float32")
    rng = np.random.default_rng(seed)
    gradients = [[torch.from_numpy(rng.normal(size=t.shape)).float() for t in landing.tensors] for _ in world]
    owned = [[shard(tensor, topology.world_size, owner) for tensor in landing.tensors] for owner in world]

    def gradient(rank: int, owner: int) -> Values:
        """Chunk by chunk, as LocalPut and LocalSum read it."""
        chunks = [np.zeros(0, dtype=np.float32)]
        for parts in cut_slices(landing, owner, hierarchy.chunk_numel * 4):
            slot = np.zeros(sum(copy.nbytes for _, copy in parts), dtype=np.uint8)
            for index, copy in parts:
                execute((copy,), as_bytes(gradients[rank][index]), slot)
            chunks.append(slot.view(np.float32))
        return np.concatenate(chunks).astype(np.float64)

    numels = [sum(part.numel for part in parts) for parts in owned]
    check(hierarchy, numels, gradient, order, one_by_one=False)
    for owner, parts in enumerate(owned):
        expected = [read(as_bytes(g), part.region) for g, part in zip(gradients[0], parts, strict=True)]
        flat_bytes = np.concatenate([np.zeros(0, dtype=np.uint8), *expected])
        assert np.array_equal(gradient(0, owner), flat_bytes.view(np.float32).astype(np.float64))


@given(hierarchies(64, 8), seeds, st.data())
@settings(deadline=None, max_examples=40)
def test_what_a_rank_sums_is_what_others_put_to_it_into_the_slots_it_reads(
    hierarchy: Hierarchy, seed: int, data: st.DataObject
) -> None:
    topology, numels = hierarchy.topology, uneven(hierarchy, seed)
    rank = data.draw(st.integers(0, topology.world_size - 1))
    node, gpu = topology.node(rank), topology.gpu(rank)
    steps = hierarchy.steps(rank, numels)
    local: set[object] = set()
    for peer in topology.local_ranks(node):
        puts = [s for s in hierarchy.steps(peer, numels) if isinstance(s, LocalPut) and s.peer == rank]
        assert [put.number for put in puts] == list(range(1, len(puts) + 1))
        local.update((s.round, s.owner, s.chunk, topology.gpu(peer), s.slot) for s in puts)
    assert local == {
        (s.round, s.owner, s.chunk, source, slot)
        for s in steps
        if isinstance(s, LocalSum)
        for source, slot in enumerate(s.contributions)
        if slot is not None
    }
    rail: set[object] = set()
    for peer in topology.rail(gpu)[:: max(topology.nodes // 8, 1)]:
        puts_to = [s for s in hierarchy.steps(peer, numels) if isinstance(s, RailPut) and s.owner == rank]
        rail.update((s.round, peer, s.chunk, s.slot) for s in puts_to)
    sampled = set(topology.rail(gpu)[:: max(topology.nodes // 8, 1)]) - {rank}
    assert rail == {
        (s.round, s.source, s.chunk, s.slot) for s in steps if isinstance(s, FinalSum) and s.source in sampled
    }


@given(hierarchies(6, 4), seeds)
@moving
def test_in_each_round_no_two_nodes_put_to_the_same_and_no_two_gpus_do_at_a_time(
    hierarchy: Hierarchy, seed: int
) -> None:
    topology, numels = hierarchy.topology, uneven(hierarchy, seed)
    rails: list[tuple[int, int]] = []
    for rank in range(topology.world_size):
        steps = hierarchy.steps(rank, numels)
        assert [s.round for s in steps] == sorted(s.round for s in steps)
        rails += ((s.round, s.owner) for s in steps if isinstance(s, RailPut))
        # A GPU's puts of a round go the way the flat schedule does, and empty shards leave gaps in it.
        for number in {s.round for s in steps}:
            peers = [topology.gpu(s.peer) for s in steps if isinstance(s, LocalPut) and s.round == number]
            order = flat(topology.gpus_per_node, topology.gpu(rank))
            assert peers == [peer for peer in order if peer in peers]
    assert len(set(rails)) == len(rails)


@given(topologies(64, 8), topologies(64, 8), st.sampled_from(FLOAT_DTYPES), st.integers(1, 8))
@comparing
def test_buffers_lie_apart_and_do_not_grow_with_the_nodes(
    one: Topology, other: Topology, dtype: str, depth: int
) -> None:
    few, many = (
        Hierarchy(Topology(nodes, one.gpus_per_node), Pacing(4096, depth), dtype) for nodes in (2, other.nodes + 1)
    )
    assert few.nbytes == many.nbytes
    assert few.contributions.offset == 0
    for buffer, following in ((few.contributions, few.partials), (few.partials, few.outbox)):
        assert buffer.at(buffer.slots) == following.offset == buffer.offset + buffer.nbytes
    for buffer in (few.contributions, few.partials, few.outbox):
        assert buffer.slot_nbytes <= 4096
        assert buffer.slot_nbytes % 256 == 0


def test_a_chunk_fits_the_slots_of_either_dtype() -> None:
    narrow = Hierarchy(Topology(2, 2), Pacing(4096, 1), "bfloat16")
    assert (narrow.chunk_numel, narrow.contributions.slot_nbytes, narrow.partials.slot_nbytes) == (1024, 2048, 4096)
    same = replace(narrow, wire="bfloat16")
    assert (same.chunk_numel, same.contributions.slot_nbytes, same.partials.slot_nbytes) == (2048, 4096, 4096)
    assert replace(narrow, dtype="float64").partial_dtype == "float64"


def test_the_schedule_of_3_nodes_is_the_one_drawn() -> None:
    hierarchy = Hierarchy(Topology(3, 1), Pacing(16, 1), "float64", "float32")
    drawn = [
        {s.round: (s.owner, s.chunk) for s in hierarchy.steps(rank, [4, 4, 4]) if isinstance(s, LocalSum)}
        for rank in range(3)
    ]
    order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert drawn == [dict(enumerate(order, start=node)) for node in range(3)]


def test_a_ranks_steps_say_slots_and_waits() -> None:
    hierarchy = Hierarchy(Topology(2, 2), Pacing(16, 1), "float32")
    assert hierarchy.steps(0, [4, 4, 4, 4]) == (
        LocalPut(0, 1, 0, 1, 0, 1, ()),
        LocalSum(0, 0, 0, (None, 0), "partials", 0, (Wait("landed", 1, 1),), (1,)),
        FinalSum(0, 0, 0, 0, (Wait("landed", 0, 1),), (2,)),
        LocalPut(1, 3, 0, 1, 0, 2, (Wait("vacated", 1, 1),)),
        LocalSum(1, 2, 0, (None, 0), "outbox", 0, (Wait("landed", 1, 2),), ()),
        RailPut(1, 2, 0, 0, 0, 1, (Wait("summed", 0, 2),)),
        FinalSum(1, 2, 0, 0, (Wait("landed", 2, 1),), ()),
    )


def test_one_node_sums_straight_into_its_shards() -> None:
    hierarchy = Hierarchy(Topology(1, 3), Pacing(16, 2), "bfloat16")
    for rank in range(3):
        steps = hierarchy.steps(rank, [4, 4, 0])
        assert {type(step) for step in steps} <= {LocalPut, LocalSum}
        assert all(s.into == "shard" and s.slot is None for s in steps if isinstance(s, LocalSum))
    assert hierarchy.partials.nbytes == hierarchy.outbox.nbytes == 0


def test_one_gpu_a_node_puts_gradients_over_rails_as_they_are() -> None:
    hierarchy = Hierarchy(Topology(4, 1), Pacing(16, 2), "bfloat16")
    assert hierarchy.is_in_place
    assert hierarchy.partial_dtype == "bfloat16"
    assert hierarchy.contributions.nbytes == hierarchy.outbox.nbytes == 0
    assert {type(step) for step in hierarchy.steps(1, [8] * 4)} == {RailPut, FinalSum}


def test_one_gpu_a_node_rounds_first_where_the_wire_is_narrower() -> None:
    hierarchy = Hierarchy(Topology(4, 1), Pacing(16, 2), "float32", "bfloat16")
    assert not hierarchy.is_in_place
    assert hierarchy.partial_dtype == "bfloat16"
    assert {type(step) for step in hierarchy.steps(1, [8] * 4)} == {LocalSum, RailPut, FinalSum}


def test_one_rank_only_casts_and_no_elements_take_no_steps() -> None:
    (step,) = Hierarchy(Topology(1, 1), Pacing(16, 2), "float32", "bfloat16").steps(0, [4])
    assert step == LocalSum(0, 0, 0, (None,), "shard", None, (), ())
    assert all(Hierarchy(Topology(3, 2), Pacing(16, 2), "float32").steps(rank, [0] * 6) == () for rank in range(6))


@pytest.mark.parametrize("dtype", ["int32", "bool", "fp32", torch.float32, None])
def test_a_dtype_that_cannot_be_summed_is_refused_naming_it(dtype: Any) -> None:
    with pytest.raises(SpecError, match=rf"gradient dtype {dtype!r} cannot be summed; use one of float64, .*float16"):
        Hierarchy(Topology(2, 2), Pacing(16, 1), dtype)
    if dtype is not None:
        with pytest.raises(SpecError, match=f"wire dtype {dtype!r} cannot be summed"):
            Hierarchy(Topology(2, 2), Pacing(16, 1), "float32", dtype)


@pytest.mark.parametrize("count", [0, 5, 7])
def test_shards_of_another_world_are_refused_naming_both(count: int) -> None:
    with pytest.raises(SpecError, match=f"one entry for each of 3 nodes x 2 GPUs, got {count}"):
        Hierarchy(Topology(3, 2), Pacing(16, 1), "float32").steps(0, [1] * count)
