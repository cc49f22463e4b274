"""The all-gather over many nodes, block by block."""

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.interleavings import topologies
from tests.layouts.strategies import comparing
from tide_triton.layouts import Forward, Receive, Send, SpecError, Topology, flat, forwards, receives, rounds, sends
from tide_triton.layouts.rails import source

rail_lengths = st.integers(1, 64)


def rail_sends(nodes: int) -> list[tuple[Send, ...]]:
    """What each node puts over a rail: with one GPU a node, a node is its rank."""
    topology = Topology(nodes, 1)
    return [sends(topology, rank) for rank in range(nodes)]


@given(rail_lengths)
@comparing
def test_rounds_are_the_logarithm_of_the_nodes_rounded_up(nodes: int) -> None:
    assert rounds(nodes) == ceil(log2(nodes))
    for of_node in rail_sends(nodes):
        assert [send.round for send in of_node] == list(range(rounds(nodes)))


@given(rail_lengths)
@comparing
def test_every_block_reaches_every_node_of_a_rail_once_and_only_after_its_sender_had_it(nodes: int) -> None:
    of_nodes = rail_sends(nodes)
    holds = [{node} for node in range(nodes)]
    for number in range(rounds(nodes)):
        held = [set(blocks) for blocks in holds]
        for node, of_node in enumerate(of_nodes):
            send = of_node[number]
            assert held[node].issuperset(send.blocks)
            assert send.waits_for == tuple(block for block in send.blocks if block != node)
            assert holds[send.peer].isdisjoint(send.blocks)
            holds[send.peer].update(send.blocks)
    assert all(blocks == set(range(nodes)) for blocks in holds)


@given(rail_lengths)
@comparing
def test_in_each_round_a_node_puts_to_one_other_and_is_put_to_by_one(nodes: int) -> None:
    for in_round in zip(*rail_sends(nodes), strict=True):
        assert sorted(send.peer for send in in_round) == list(range(nodes))
        assert all(send.peer != node for node, send in enumerate(in_round))


@given(rail_lengths)
@comparing
def test_a_node_puts_and_gets_one_block_less_than_there_are_nodes(nodes: int) -> None:
    topology = Topology(nodes, 1)
    for rank in range(nodes):
        assert sum(len(send.blocks) for send in sends(topology, rank)) == nodes - 1
        assert sum(len(receive.blocks) for receive in receives(topology, rank)) == nodes - 1


@given(topologies(64, 8), st.data())
@comparing
def test_what_a_rank_receives_is_what_others_send_to_it(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world_size - 1))
    rail = topology.rail(topology.gpu(rank))
    sent = [(peer, send) for peer in rail for send in sends(topology, peer) if send.peer == rank]
    expected = [Receive(send.round, peer, send.blocks) for peer, send in sent]
    assert sorted(expected, key=lambda receive: receive.round) == list(receives(topology, rank))
    assert len({receive.source for receive in receives(topology, rank)}) == rounds(topology.nodes)


@given(topologies(64, 8))
@settings(deadline=None, max_examples=25)
def test_over_rails_and_inside_nodes_every_block_reaches_every_rank_once_from_its_source(topology: Topology) -> None:
    world = range(topology.world_size)
    came: list[list[tuple[int, int]]] = [[] for _ in world]
    for rank in world:
        for send in sends(topology, rank):
            came[send.peer] += ((block, rank) for block in send.blocks)
        for forward in forwards(topology, rank):
            for peer in forward.peers:
                came[peer].append((forward.block, rank))
    for rank in world:
        assert sorted(block for block, _ in came[rank]) == [block for block in world if block != rank]
        for block, peer in came[rank][:: max(len(world) // 8, 1)]:
            assert source(topology, rank, block) == peer
        assert source(topology, rank, rank) == rank


@given(topologies(64, 8), st.data())
@comparing
def test_a_rank_passes_on_its_own_block_and_what_its_rail_brings_as_it_comes(
    topology: Topology, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, topology.world_size - 1))
    came = [block for receive in receives(topology, rank) for block in receive.blocks]
    local = topology.local_ranks(topology.node(rank))
    peers = tuple(local[peer] for peer in flat(topology.gpus_per_node, topology.gpu(rank)))
    expected = (Forward(rank, peers, ()), *(Forward(block, peers, (block,)) for block in came))
    assert forwards(topology, rank) == (expected if peers else ())


def test_one_node_forwards_as_the_flat_schedule_does_and_has_no_rails() -> None:
    topology = Topology(1, 4)
    for rank in range(4):
        assert forwards(topology, rank) == (Forward(rank, flat(4, rank), ()),)
        assert (sends(topology, rank), receives(topology, rank)) == ((), ())


def test_one_gpu_a_node_forwards_nothing_and_one_rank_does_nothing() -> None:
    assert all(forwards(Topology(5, 1), rank) == () for rank in range(5))
    lone = Topology(1, 1)
    assert (sends(lone, 0), receives(lone, 0), forwards(lone, 0)) == ((), (), ())


def test_the_schedule_of_5_nodes_is_the_one_drawn() -> None:
    assert [[(send.blocks, send.peer) for send in of_node] for of_node in rail_sends(5)] == [
        [((0,), 4), ((0, 1), 3), ((0,), 1)],
        [((1,), 0), ((1, 2), 4), ((1,), 2)],
        [((2,), 1), ((2, 3), 0), ((2,), 3)],
        [((3,), 2), ((3, 4), 1), ((3,), 4)],
        [((4,), 3), ((4, 0), 2), ((4,), 0)],
    ]


def test_rails_of_several_gpus_carry_ranks_not_nodes() -> None:
    assert sends(Topology(3, 2), 3) == (Send(0, 1, (3,), ()), Send(1, 5, (3,), ()))
    assert forwards(Topology(3, 2), 3) == (Forward(3, (2,), ()), Forward(5, (2,), (5,)), Forward(1, (2,), (1,)))


@pytest.mark.parametrize("nodes", [0, -1])
def test_a_rail_without_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(SpecError, match=f"nodes must be an integer >= 1, got {nodes}"):
        rounds(nodes)


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_the_topology_is_refused(rank: int) -> None:
    for view in (sends, receives, forwards):
        with pytest.raises(SpecError, match=f"rank must be 0 to 5, got {rank}"):
            view(Topology(3, 2), rank)
