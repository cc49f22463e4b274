"""What crosses nodes packed: that every byte comes to its place, and what is packed at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.interleavings import topologies
from tests.layouts.strategies import (
    addresses,
    as_bytes,
    chunks,
    comparing,
    contents,
    moving,
    poisoned,
    read,
    tensor_specs,
    write,
)
from tide_triton.layouts import (
    Copy,
    GroupSpec,
    Packing,
    SlotLayout,
    SpecError,
    TensorSpec,
    Topology,
    cut,
    execute,
    pack,
)
from tide_triton.layouts.packing import FREE_NBYTES, SHARE


def layout_of(world_size: int, *shapes: tuple[int, ...], dtype: str = "bfloat16", shard_dim: int = 0) -> SlotLayout:
    tensors = (TensorSpec(f"w{index}", shape, dtype, shard_dim) for index, shape in enumerate(shapes))
    return SlotLayout(GroupSpec(world_size, tuple(tensors)))


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    topology = draw(topologies(5, 3))
    tensors = tuple(draw(tensor_specs(f"w{index}")) for index in range(draw(st.integers(0, 5))))
    layout = SlotLayout(GroupSpec(topology.world_size, tensors))
    return pack(layout, topology, draw(st.sampled_from([2, 16, 64, 1 << 20])))


@given(packings(), st.integers(0, 2**32 - 1), st.sampled_from([16, 48, 1 << 20]))
@moving
def test_what_crosses_nodes_packed_comes_to_its_places_chunk_by_chunk(
    packing: Packing, seed: int, chunk_nbytes: int
) -> None:
    layout, spec, topology = packing.layout, packing.layout.spec, packing.topology
    rng = np.random.default_rng(seed)
    tensors = {index: contents(spec.tensors[index], rng) for index in packing.indices}
    cuts = {i: chunks(tensor, spec.world_size, spec.tensors[i].shard_dim) for i, tensor in tensors.items()}
    expected = poisoned(packing.slot_nbytes)
    received = poisoned(packing.slot_nbytes)
    for rank in range(spec.world_size):
        sent = poisoned(packing.slot_nbytes)
        for index, region in packing.packed(rank).items():
            write(sent, region, as_bytes(cuts[index][rank]))
        across, unpacks = cut(packing.across(rank), chunk_nbytes), cut(packing.unpacks(rank), chunk_nbytes)
        assert len(across) == len(unpacks)
        # What a chunk unpacks has come with it, or before.
        for put, placed in zip(across, unpacks, strict=True):
            execute([copy for _, copy in put], sent, received)
            execute([copy for _, copy in placed], received, received)
        for index in packing.indices:
            write(expected, layout.region(index, rank), as_bytes(cuts[index][rank]))
        area = packing.area(rank)
        write(expected, area, read(sent, area))
        # An area is of one node, and of one rail; the next rail's block lies where this one's did.
        if topology.gpu(rank) != topology.gpus_per_node - 1:
            expected[layout.nbytes :] = received[layout.nbytes :] = poisoned(0)[0]
    assert np.array_equal(received, expected)


@given(packings())
@comparing
def test_areas_lie_behind_the_places_one_a_node_without_gaps_and_aligned(packing: Packing) -> None:
    layout, topology = packing.layout, packing.topology
    for gpu in range(topology.gpus_per_node):
        taken: list[int] = []
        for rank in topology.rail(gpu):
            regions = packing.packed(rank)
            taken += addresses(packing.area(rank))
            assert addresses(packing.area(rank)) == [at for region in regions.values() for at in addresses(region)]
            for index, region in regions.items():
                assert region.offset % layout.spec.tensors[index].itemsize == 0
                assert region.nbytes == layout.region(index, rank).nbytes
        assert len(set(taken)) == len(taken)
        assert all(layout.nbytes <= at < packing.slot_nbytes for at in taken)
    assert packing.slot_nbytes == layout.nbytes + packing.areas_nbytes


@given(packings())
@comparing
def test_a_rail_carries_one_copy_of_what_is_packed(packing: Packing) -> None:
    for rank in range(packing.layout.spec.world_size):
        nbytes = sum(packing.layout.region(index, rank).nbytes for index in packing.indices)
        assert [(copy.rows, copy.nbytes) for copy in packing.across(rank)] == [(1, nbytes)] * bool(nbytes)


def test_short_runs_are_packed_and_long_ones_are_not() -> None:
    layout = layout_of(4, (4096,), (1 << 20,), (64, 8), (1 << 18,))
    assert set(pack(layout, Topology(2, 2)).indices) == {0, 2, 3}
    assert set(pack(layout, Topology(2, 2), run_nbytes=1025).indices) == set()
    assert set(pack(layout, Topology(2, 2), run_nbytes=2049).indices) == {0, 2}


def test_a_shard_in_many_short_rows_is_packed_however_large_it_is() -> None:
    layout = layout_of(8, (4096, 4096), (1 << 24,), shard_dim=0)
    assert pack(layout, Topology(2, 4)).indices == ()
    columns = SlotLayout(GroupSpec(8, (TensorSpec("w", (4096, 4096), "bfloat16", 1), layout.spec.tensors[1])))
    for topology in (Topology(2, 4), Topology(8, 1)):
        packing = pack(columns, topology)
        assert packing.indices == (0,)
        # Of every node, what each GPU of a rail has of it.
        assert packing.areas_nbytes == 4096 * 4096 * 2 // topology.gpus_per_node


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(SpecError, match="2 nodes x 1 GPUs, but the layout is for 4 ranks"):
        pack(layout_of(4, (8,)), Topology(2, 1))


@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(1, 1)])
def test_nothing_is_packed_on_one_node(topology: Topology) -> None:
    layout = layout_of(topology.world_size, (4096,), (4096,))
    packing = pack(layout, topology)
    assert packing.indices == ()
    assert packing.slot_nbytes == layout.nbytes


def test_a_single_run_is_put_as_it_is_and_empty_tensors_are_none() -> None:
    assert pack(layout_of(2, (4096,), (1 << 24,), (0, 5)), Topology(2, 1)).indices == ()
    assert pack(layout_of(2, (0, 5), (0,)), Topology(2, 1)).indices == ()


def test_areas_take_no_more_than_their_share_and_hold_what_is_shortest() -> None:
    shapes = [(2 * 100_000,)] * 40 + [(2 * 50_000,)] * 20 + [(32_000_000,)]
    layout = layout_of(2, *shapes)
    packing = pack(layout, Topology(2, 1))
    room = max(layout.nbytes // SHARE, FREE_NBYTES)
    assert room == layout.nbytes // SHARE
    # 20 of 100 kB and as many of 200 kB as fit beside them, in two areas.
    assert packing.areas_nbytes <= room < packing.areas_nbytes + 2 * 200_000
    assert set(packing.indices) >= set(range(40, 60))


def test_what_is_packed_lies_side_by_side_by_size_and_is_unpacked_in_rows() -> None:
    layout = layout_of(2, *[(4096,), (8192,)] * 50)
    packing = pack(layout, Topology(2, 1))
    assert packing.indices == (*range(0, 100, 2), *range(1, 100, 2))
    second = layout.places[1].offset
    for rank in range(2):
        start = packing.area(rank).offset
        assert packing.unpacks(rank) == (
            Copy(start, rank * 4096, 50, 4096, 4096, 8192),
            Copy(start + 50 * 4096, second + rank * 8192, 50, 8192, 8192, 16384),
        )
