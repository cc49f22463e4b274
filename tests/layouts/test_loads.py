"""Figures of the many-node collectives, against their schedules."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.interleavings import hierarchies, pacings, topologies
from tests.layouts.strategies import moving
from tide_triton.layouts import (
    ITEMSIZES,
    Hierarchy,
    Load,
    LocalPut,
    Pacing,
    RailPut,
    Topology,
    gather_load,
    local_queue,
    rail_queue,
    reduce_load,
    sends,
)
from tide_triton.layouts.queues import PutQueue


def window(queue: PutQueue, depth: int) -> int:
    """Bytes of the largest run of `depth` puts."""
    sizes = [put.nbytes for put in queue.puts]
    return max((sum(sizes[start : start + depth]) for start in range(len(sizes))), default=0)


@given(topologies(12, 4), st.sampled_from([0, 1, 16, 32, 33, 64]), pacings, st.data())
@moving
def test_figures_of_an_all_gather_are_those_of_every_rank(
    topology: Topology, nbytes: int, pacing: Pacing, data: st.DataObject
) -> None:
    load = gather_load(topology, nbytes, pacing)
    rank = data.draw(st.integers(0, topology.world_size - 1))
    sizes = [nbytes] * topology.world_size
    rail, local = rail_queue(topology, rank, sizes, pacing), local_queue(topology, rank, sizes, pacing)
    assert load.rounds == len({put.round for put in rail.puts})
    assert load.rail_peers == len({send.peer for send in sends(topology, rank)})
    assert load.rail_nbytes == sum(put.nbytes for put in rail.puts)
    to_peers: Counter[int] = Counter()
    for put in local.puts:
        to_peers[put.peer] += put.nbytes
    assert set(to_peers.values()) == ({load.link_nbytes} if local.puts else set())
    assert load.link_peers == topology.gpus_per_node - 1
    assert load.rail_in_flight_nbytes >= window(rail, pacing.depth)
    if nbytes % pacing.chunk_nbytes == 0 or nbytes < pacing.chunk_nbytes:
        assert load.rail_in_flight_nbytes == window(rail, pacing.depth)
    to_one = PutQueue(tuple(put for put in local.puts if put.peer == min(to_peers)), pacing.depth)
    assert load.link_in_flight_nbytes >= window(to_one, pacing.depth)
    assert load.buffer_nbytes == 0


@given(hierarchies(8, 4), st.integers(0, 3), st.integers(0, 1), st.data())
@moving
def test_figures_of_a_reduce_scatter_are_those_of_every_rank(
    hierarchy: Hierarchy, chunks: int, more: int, data: st.DataObject
) -> None:
    topology, numel = hierarchy.topology, chunks * hierarchy.chunk_numel + more
    numels = [numel] * topology.world_size
    load = reduce_load(hierarchy, numel)
    rank = data.draw(st.integers(0, topology.world_size - 1))
    last = hierarchy.steps(topology.world_size - 1, numels)
    assert load.rounds == (last[-1].round + 1 if last else 0)
    partial, gradient, size = ITEMSIZES[hierarchy.partial_dtype], ITEMSIZES[hierarchy.dtype], hierarchy.chunk_numel
    rail, links = 0, Counter[int]()
    for step in hierarchy.steps(rank, numels):
        if isinstance(step, RailPut):
            rail += min(size, numel - step.chunk * size) * partial
        if isinstance(step, LocalPut):
            links[step.peer] += min(size, numel - step.chunk * size) * gradient
    assert load.rail_nbytes == rail == (topology.nodes - 1) * numel * partial
    assert set(links.values()) == ({load.link_nbytes} if links else set())
    assert (load.rail_peers, load.link_peers) == (topology.nodes - 1, topology.gpus_per_node - 1)
    assert load.rail_in_flight_nbytes <= min(rail, hierarchy.pacing.window_nbytes)
    assert load.link_in_flight_nbytes <= min(load.link_nbytes, hierarchy.pacing.window_nbytes)
    assert load.buffer_nbytes == hierarchy.nbytes


@given(hierarchies(8, 3), st.lists(st.integers(0, 40), min_size=24, max_size=24))
@settings(deadline=None, max_examples=50)
def test_no_rank_has_more_to_do_than_the_largest_shard_or_block_makes(hierarchy: Hierarchy, sizes: list[int]) -> None:
    topology, pacing = hierarchy.topology, hierarchy.pacing
    numels = sizes[: topology.world_size]
    reducing, gathering = reduce_load(hierarchy, max(numels)), gather_load(topology, max(numels), pacing)
    for rank in range(topology.world_size):
        steps = hierarchy.steps(rank, numels)
        assert all(step.round < reducing.rounds for step in steps)
        assert sum(put.nbytes for put in rail_queue(topology, rank, numels, pacing).puts) <= gathering.rail_nbytes


def test_figures_of_16384_ranks_are_there_at_once_and_so_are_the_steps_of_one() -> None:
    topology, pacing = Topology(2048, 8), Pacing(1 << 20, 8)
    block = 856_000_000 * 2 // topology.world_size
    assert gather_load(topology, block, pacing) == Load(
        rounds=11,
        rail_peers=11,
        link_peers=7,
        rail_nbytes=2047 * block,
        link_nbytes=2048 * block,
        rail_in_flight_nbytes=8 * block,
        link_in_flight_nbytes=8 * block,
        buffer_nbytes=0,
    )
    hierarchy = Hierarchy(topology, pacing, "bfloat16")
    load = reduce_load(hierarchy, block // 2)
    assert load.rounds == 2048 + 2047
    assert load.rail_nbytes == 2047 * block * 2
    assert load.buffer_nbytes == (7 * 8) * (1 << 19) + 2 * 8 * (1 << 20)
    assert len(local_queue(topology, 4711, [block] * topology.world_size, pacing).puts) == 2048 * 7
    assert len(hierarchy.steps(4711, [block // 2] * topology.world_size)) == 2048 * (7 + 1 + 1) + 2047
