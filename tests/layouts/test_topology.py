"""Ranks as nodes x GPUs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing
from tide_triton.layouts import SpecError, Topology

topologies = st.builds(Topology, st.integers(1, 12), st.integers(1, 9))


@given(topologies)
@comparing
def test_rank_node_and_gpu_are_inverse(topology: Topology) -> None:
    for rank in range(topology.world_size):
        assert topology.rank(topology.node(rank), topology.gpu(rank)) == rank
    for node in range(topology.nodes):
        for gpu in range(topology.gpus_per_node):
            rank = topology.rank(node, gpu)
            assert (topology.node(rank), topology.gpu(rank)) == (node, gpu)


@given(topologies)
@comparing
def test_rails_and_nodes_each_partition_the_world(topology: Topology) -> None:
    world = list(range(topology.world_size))
    rails = [topology.rail(gpu) for gpu in range(topology.gpus_per_node)]
    nodes = [topology.local_ranks(node) for node in range(topology.nodes)]
    assert sorted(rank for rail in rails for rank in rail) == world
    assert [rank for node in nodes for rank in node] == world
    assert all(len(set(rail) & set(node)) == 1 for rail in rails for node in nodes)


@given(topologies)
@comparing
def test_a_rail_holds_one_gpu_index_and_is_in_node_order(topology: Topology) -> None:
    for gpu in range(topology.gpus_per_node):
        rail = topology.rail(gpu)
        assert [topology.node(rank) for rank in rail] == list(range(topology.nodes))
        assert {topology.gpu(rank) for rank in rail} == {gpu}


@given(topologies)
@comparing
def test_whatever_is_outside_is_refused(topology: Topology) -> None:
    for rank in (-1, topology.world_size):
        for of_rank in (topology.node, topology.gpu):
            with pytest.raises(SpecError, match=f"rank must be 0 to {topology.world_size - 1}, got {rank}"):
                of_rank(rank)
    for node, gpu in ((-1, 0), (topology.nodes, 0), (0, -1), (0, topology.gpus_per_node)):
        with pytest.raises(SpecError, match=f"node={node}, gpu={gpu} is outside"):
            topology.rank(node, gpu)
    with pytest.raises(SpecError, match="is outside"):
        topology.rail(topology.gpus_per_node)
    with pytest.raises(SpecError, match="is outside"):
        topology.local_ranks(topology.nodes)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
@pytest.mark.parametrize("field", ["nodes", "gpus_per_node"])
def test_a_bad_count_is_refused_naming_field_and_value(field: str, value: Any) -> None:
    counts: dict[str, Any] = {"nodes": 2, "gpus_per_node": 8, field: value}
    with pytest.raises(SpecError, match=f"{field} must be an integer >= 1, got {value!r}"):
        Topology(**counts)
