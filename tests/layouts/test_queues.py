"""The all-gather over many nodes, chunk by chunk, on ranks that go on in any order."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.interleavings import Machine, Order, Stuck, Task, orders, pacings, topologies
from tests.layouts.strategies import (
    as_bytes,
    chunks,
    comparing,
    contents,
    group_specs,
    moving,
    poisoned,
    tensor_specs,
    write,
)
from tide_triton.layouts import (
    ChunkPut,
    GroupSpec,
    Pacing,
    PutQueue,
    Receipt,
    SlotLayout,
    SpecError,
    TensorSpec,
    Topology,
    Wait,
    arrivals,
    block_sizes,
    cut,
    execute,
    flat,
    gather_copies,
    in_turn,
    local_queue,
    local_receipts,
    rail_queue,
    rail_receipts,
    rounds,
    sends,
)

seeds = st.integers(0, 2**32 - 1)


def uneven(topology: Topology, seed: int) -> list[int]:
    """Blocks of up to three chunks, some of them empty."""
    return Random(seed).choices((0, 1, 16, 17, 48), k=topology.world_size)


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather of blocks of `sizes` bytes.

    one_by_one: whether a rank goes through its rail's queue before its node's; else they go on beside each other.
    move: called where a put lands, with source, peer, block and chunk.
    without: the kind of counter that no put waits for.
    """

    topology: Topology
    sizes: Sequence[int]
    pacing: Pacing
    one_by_one: bool
    move: Callable[[int, int, int, int], None] = lambda *_: None
    without: str | None = None

    def run(self, order: Order) -> None:
        """Every put once, checked: what is put has arrived, it arrives once, and no more is in flight than may be."""
        machine = Machine()
        world = range(self.topology.world_size)
        holds = [{(rank, chunk) for chunk in range(self.pacing.chunks(self.sizes[rank]))} for rank in world]
        under_way: Counter[object] = Counter()

        def task(rank: int, kind: str, queue: PutQueue, index: int) -> Task:
            put = queue.puts[index]
            waits = tuple(wait for wait in (put.waits_for, queue.credit(index)) if wait is not None)
            # A rail carries `depth` chunks in all, a link inside the node `depth` to each peer.
            link = (rank, kind) if kind == "rail" else (rank, put.peer)

            def start() -> None:
                assert (put.block, put.chunk) in holds[rank], f"rank {rank} puts what has not arrived: {put}"
                under_way[link] += put.nbytes
                under_way[link, "puts"] += 1
                assert under_way[link] <= self.pacing.window_nbytes, f"too much in flight from rank {rank}: {put}"
                assert under_way[link, "puts"] <= self.pacing.depth
                machine.send((rank, put.peer), land)

            def land() -> None:
                assert (put.block, put.chunk) not in holds[put.peer], f"arrives twice: {put}"
                holds[put.peer].add((put.block, put.chunk))
                self.move(rank, put.peer, put.block, put.chunk)
                assert machine.count(put.peer, "landed", rank) == put.number
                machine.send((put.peer, rank, "acknowledged"), acknowledge)

            def acknowledge() -> None:
                under_way[link] -= put.nbytes
                under_way[link, "puts"] -= 1
                machine.count(rank, "acknowledged", put.peer)

            return Task(rank, waits, start, put)

        def end(rank: int) -> None:
            assert holds[rank] == everything
            done.append(rank)

        everything = {(block, chunk) for block in world for chunk in range(self.pacing.chunks(self.sizes[block]))}
        arguments = (self.sizes, self.pacing)
        done: list[int] = []
        for rank in world:
            rail, local = rail_queue(self.topology, rank, *arguments), local_queue(self.topology, rank, *arguments)
            over_rail = [task(rank, "rail", rail, index) for index in range(len(rail.puts))]
            inside = [task(rank, "local", local, index) for index in range(len(local.puts))]
            for lane in [over_rail + inside] if self.one_by_one else [over_rail, inside]:
                machine.add(lane, self.without)
            wait = arrivals(self.topology, rank, *arguments)
            machine.add([Task(rank, wait, partial(end, rank), "the end")])
        machine.run(order)
        assert sorted(done) == list(world)


@given(topologies(9, 4), seeds, pacings, orders, st.booleans())
@settings(deadline=None, max_examples=60)
def test_in_any_order_each_chunk_arrives_once_within_the_windows_and_nobody_puts_what_it_lacks(
    topology: Topology, seed: int, pacing: Pacing, order: Order, one_by_one: bool
) -> None:
    Gather(topology, uneven(topology, seed), pacing, one_by_one).run(order)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 6, 7, 8, 12, 16])
def test_every_number_of_nodes_ends_whichever_rank_is_starved(nodes: int) -> None:
    topology = Topology(nodes, 2)
    for haste, one_by_one in ((0.0, False), (1.0, False), (1.0, True)):
        Gather(topology, uneven(topology, nodes), Pacing(16, 1), one_by_one).run(Order(nodes, haste, starving=True))


@pytest.mark.parametrize(
    ("without", "message"), [("landed", "puts what has not arrived"), ("acknowledged", "too much in flight")]
)
def test_a_schedule_that_waits_for_too_little_does_not_pass(without: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        Gather(Topology(4, 2), [48] * 8, Pacing(16, 2), False, without=without).run(Order(0, 1.0, starving=False))


def test_a_schedule_that_waits_for_what_never_comes_does_not_pass() -> None:
    machine = Machine()
    machine.add([Task(3, (Wait("landed", 1, 1),), lambda: None, "a put")])
    with pytest.raises(Stuck, match="rank 3: a put"):
        machine.run(Order(0, 1.0, starving=False))


class _Telling:
    """Ranks that do one thing at a time, and whose acknowledgements are things to do as well."""

    def __init__(self, topology: Topology, sizes: Sequence[int], pacing: Pacing, swapped: bool = False) -> None:
        self.machine = Machine()
        self.sent: Counter[tuple[int, int]] = Counter()
        self.told: Counter[tuple[int, int]] = Counter()
        arguments = (sizes, pacing)
        for rank in range(topology.world_size):
            steps: list[tuple[ChunkPut, Wait | None] | Receipt] = []
            for queue, receipts in (
                (rail_queue(topology, rank, *arguments), rail_receipts(topology, rank, *arguments)),
                (local_queue(topology, rank, *arguments), local_receipts(topology, rank, *arguments)),
            ):
                ordered = in_turn(queue, receipts)
                assert [step[0] for step in ordered if not isinstance(step, Receipt)] == list(queue.puts)
                # The other way round, everyone would put all it has before it acknowledges anything.
                steps += sorted(ordered, key=lambda step: isinstance(step, Receipt)) if swapped else ordered
            tasks = [self._task(rank, step) for step in steps]
            tasks.append(Task(rank, arrivals(topology, rank, *arguments), lambda: None, "the end"))
            self.machine.add(tasks)

    def _task(self, rank: int, step: tuple[ChunkPut, Wait | None] | Receipt) -> Task:
        if isinstance(step, Receipt):
            return Task(rank, (step.waits_for,), partial(self._tell, rank, step), step)
        put, credit = step
        waits = tuple(wait for wait in (put.waits_for, credit) if wait is not None)
        return Task(rank, waits, partial(self._put, rank, put), put)

    def _put(self, rank: int, put: ChunkPut) -> None:
        self.sent[rank, put.peer] += 1
        assert self.sent[rank, put.peer] == put.number
        self.machine.send((rank, put.peer), partial(self.machine.count, put.peer, "landed", rank))

    def _tell(self, rank: int, step: Receipt) -> None:
        # Receipts that nobody waits for are left out, those before them are not: counters take no leaps.
        self.told[rank, step.source] += 1
        assert self.told[rank, step.source] == step.number
        self.machine.send((rank, step.source), partial(self.machine.count, step.source, "acknowledged", rank))


@given(topologies(9, 4), seeds, pacings, orders)
@settings(deadline=None, max_examples=60)
def test_ranks_that_do_one_thing_at_a_time_and_acknowledge_themselves_come_to_an_end(
    topology: Topology, seed: int, pacing: Pacing, order: Order
) -> None:
    _Telling(topology, uneven(topology, seed), pacing).machine.run(order)


def test_ranks_that_put_first_and_acknowledge_then_get_stuck() -> None:
    with pytest.raises(Stuck):
        _Telling(Topology(1, 2), [48, 48], Pacing(16, 1), swapped=True).machine.run(Order(0, 0.0, starving=False))


def test_what_nobody_waits_for_is_not_acknowledged() -> None:
    assert rail_receipts(Topology(2, 1), 0, [48, 48], Pacing(16, 2)) == (Receipt(0, 1, 1),)
    assert local_receipts(Topology(1, 2), 0, [48, 48], Pacing(16, 3)) == ()
    queue, receipts = rail_queue(Topology(2, 1), 0, [48, 48], Pacing(16, 2)), (Receipt(0, 1, 1),)
    first, second, third = queue.puts
    assert in_turn(queue, receipts) == (
        (first, None),
        receipts[0],
        (second, None),
        (third, Wait("acknowledged", 1, 1)),
    )


@st.composite
def slot_layouts(draw: st.DrawFn, topology: Topology) -> SlotLayout:
    tensors = tuple(draw(tensor_specs(f"w{index}")) for index in range(draw(st.integers(0, 2))))
    return SlotLayout(GroupSpec(topology.world_size, tensors))


@given(topologies(5, 3), pacings, orders, seeds, st.data())
@settings(deadline=None, max_examples=60)
def test_every_slot_holds_the_unsharded_tensors_and_nothing_elsewhere(
    topology: Topology, pacing: Pacing, order: Order, seed: int, data: st.DataObject
) -> None:
    layout = data.draw(slot_layouts(topology))
    spec, world = layout.spec, range(topology.world_size)
    rng = np.random.default_rng(seed)
    tensors = [contents(tensor, rng) for tensor in spec.tensors]
    cuts = [chunks(tensor, spec.world_size, t.shard_dim) for tensor, t in zip(tensors, spec.tensors, strict=True)]
    slots = [poisoned(layout.nbytes) for _ in world]
    for rank in world:
        for index, of_ranks in enumerate(cuts):
            write(slots[rank], layout.region(index, rank), as_bytes(of_ranks[rank]))
    parts = [cut(gather_copies(layout, rank), pacing.chunk_nbytes) for rank in world]

    def move(rank: int, peer: int, block: int, chunk: int) -> None:
        execute([copy for _, copy in parts[block][chunk]], slots[rank], slots[peer])

    Gather(topology, block_sizes(layout), pacing, False, move).run(order)
    expected = poisoned(layout.nbytes)
    for place, tensor in zip(layout.places, tensors, strict=True):
        expected[place.offset : place.offset + place.nbytes] = as_bytes(tensor)
    assert all(np.array_equal(slot, expected) for slot in slots)


@given(topologies(64, 8), seeds, st.data())
@moving
def test_a_rail_carries_the_blocks_of_its_schedule_chunk_by_chunk(
    topology: Topology, seed: int, data: st.DataObject
) -> None:
    sizes, pacing = uneven(topology, seed), Pacing(16, 2)
    rank = data.draw(st.integers(0, topology.world_size - 1))
    queue = rail_queue(topology, rank, sizes, pacing)
    assert [(put.round, put.peer, put.block, put.chunk, put.nbytes) for put in queue.puts] == [
        (send.round, send.peer, block, chunk, nbytes)
        for send in sends(topology, rank)
        for block in send.blocks
        for chunk, nbytes in enumerate(pacing.chunk_sizes(sizes[block]))
    ]
    assert all((put.waits_for is None) == (put.block == rank) for put in queue.puts)


@given(topologies(12, 8), seeds)
@moving
def test_ranks_in_the_same_round_put_to_different_ranks(topology: Topology, seed: int) -> None:
    sizes, pacing = uneven(topology, seed), Pacing(16, 2)
    world = range(topology.world_size)
    for queues in (
        [rail_queue(topology, rank, sizes, pacing) for rank in world],
        [local_queue(topology, rank, sizes, pacing) for rank in topology.local_ranks(0)],
    ):
        peers = [(put.round, put.peer) for queue in queues for put in {put.round: put for put in queue.puts}.values()]
        assert len(set(peers)) == len(peers)
        for queue in queues:
            assert sorted(put.round for put in queue.puts) == [put.round for put in queue.puts]
            assert len({(put.round, put.peer) for put in queue.puts}) == len({put.round for put in queue.puts})


@given(topologies(64, 8), st.data())
@comparing
def test_a_rank_is_put_to_by_few_ranks_whatever_the_world(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world_size - 1))
    waits = arrivals(topology, rank, [1] * topology.world_size, Pacing(16, 1))
    assert len({wait.rank for wait in waits}) == len(waits) == rounds(topology.nodes) + topology.gpus_per_node - 1
    assert sum(wait.count for wait in waits) == topology.world_size - 1


def test_a_put_waits_for_its_chunk_and_for_the_put_a_window_before_it() -> None:
    queue = rail_queue(Topology(3, 1), 0, [32, 32, 32], Pacing(16, 2))
    assert queue.puts == (
        ChunkPut(0, 2, 0, 0, 16, 1, None),
        ChunkPut(0, 2, 0, 1, 16, 2, None),
        ChunkPut(1, 1, 0, 0, 16, 1, None),
        ChunkPut(1, 1, 0, 1, 16, 2, None),
    )
    assert [queue.credit(index) for index in range(4)] == [
        None,
        None,
        Wait("acknowledged", 2, 1),
        Wait("acknowledged", 2, 2),
    ]
    later = rail_queue(Topology(4, 1), 0, [32] * 4, Pacing(16, 2)).puts[-1]
    assert later == ChunkPut(1, 2, 1, 1, 16, 4, Wait("landed", 1, 2))


def test_inside_the_node_peers_take_turns_chunk_after_chunk() -> None:
    queue = local_queue(Topology(2, 3), 1, [32, 32, 16, 0, 17, 0], Pacing(16, 1))
    assert queue.depth == 2
    assert [(put.round, put.peer, put.block, put.chunk, put.waits_for) for put in queue.puts] == [
        (0, 2, 1, 0, None),
        (1, 0, 1, 0, None),
        (2, 2, 1, 1, None),
        (3, 0, 1, 1, None),
        (4, 2, 4, 0, Wait("landed", 4, 1)),
        (5, 0, 4, 0, Wait("landed", 4, 1)),
        (6, 2, 4, 1, Wait("landed", 4, 2)),
        (7, 0, 4, 1, Wait("landed", 4, 2)),
    ]
    assert queue.credit(5) == Wait("acknowledged", 0, 2)


def test_empty_blocks_are_not_sent_and_leave_rounds_as_they_are() -> None:
    full = local_queue(Topology(2, 3), 4, [16] * 6, Pacing(16, 1)).puts
    without_own = local_queue(Topology(2, 3), 4, [16, 16, 16, 16, 0, 16], Pacing(16, 1)).puts
    assert [put.round for put in full] == [0, 1, 2, 3]
    assert [(put.round, put.block) for put in without_own] == [(2, 1), (3, 1)]


def test_one_node_puts_as_the_flat_schedule_does_and_one_rank_puts_nothing() -> None:
    for rank in range(4):
        queue = local_queue(Topology(1, 4), rank, [16] * 4, Pacing(16, 1))
        assert tuple(put.peer for put in queue.puts) == flat(4, rank)
        assert rail_queue(Topology(1, 4), rank, [16] * 4, Pacing(16, 1)).puts == ()
    for queue_of in (rail_queue, local_queue):
        assert queue_of(Topology(1, 1), 0, [16], Pacing(16, 1)).puts == ()
    assert arrivals(Topology(1, 1), 0, [16], Pacing(16, 1)) == ()
    assert local_queue(Topology(4, 1), 0, [16] * 4, Pacing(16, 1)).puts == ()


@given(group_specs(max_tensors=4))
@comparing
def test_block_sizes_are_the_bytes_of_each_ranks_regions(spec: GroupSpec) -> None:
    layout, indices = SlotLayout(spec), range(len(spec.tensors))
    assert block_sizes(layout) == tuple(
        sum(layout.region(index, rank).nbytes for index in indices) for rank in range(spec.world_size)
    )


def test_block_sizes_are_the_bytes_of_each_ranks_shards() -> None:
    layout = SlotLayout(GroupSpec(3, (TensorSpec("w", (7, 3), "bfloat16"), TensorSpec("b", (2,), "float32"))))
    assert block_sizes(layout) == (22, 22, 6)
    whole = torch.empty(7, 3, dtype=torch.bfloat16)
    assert [c.nbytes for c in chunks(whole, 3, 0)] == [18, 18, 6]


@pytest.mark.parametrize("count", [0, 5, 7])
def test_sizes_for_another_world_are_refused_naming_both(count: int) -> None:
    for queue_of in (rail_queue, local_queue, arrivals):
        with pytest.raises(SpecError, match=f"one entry for each of 3 nodes x 2 GPUs, got {count}"):
            queue_of(Topology(3, 2), 0, [1] * count, Pacing(16, 1))
