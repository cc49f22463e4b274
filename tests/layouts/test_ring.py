"""Rings: every shard passes through chunks once and in order, and chunks are as large as was asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing, group_specs
from tide_triton.layouts import ALIGNMENT, GroupSpec, LandingLayout, SpecError, TensorSpec, shard
from tide_triton.layouts.ring import RingLayout, chunk_for, least_chunk


@given(group_specs(max_tensors=5), st.integers(1, 40), st.data())
@comparing
def test_pieces_hold_each_padded_shard_once_in_the_order_that_was_asked_for(
    spec: GroupSpec, size: int, data: st.DataObject
) -> None:
    landing = LandingLayout(spec)
    ring = RingLayout(landing, size * least_chunk(spec.world_size))
    order = data.draw(st.permutations(range(len(spec.tensors))))
    pieces = ring.pieces(order)
    found = [
        (part.index, element) for piece in pieces for part in piece.ranges for element in range(part.start, part.stop)
    ]
    padded = [shard(tensor, spec.world_size, 0).padded_numel for tensor in landing.tensors]
    assert found == [(index, element) for index in order for element in range(padded[index])]
    assert all(piece.ranges for piece in pieces)


@given(group_specs(max_tensors=5), st.integers(1, 40))
@comparing
def test_a_pieces_ranges_lie_in_a_senders_part_aligned_and_one_after_the_other(spec: GroupSpec, size: int) -> None:
    landing = LandingLayout(spec)
    ring = RingLayout(landing, size * least_chunk(spec.world_size))
    for piece in ring.pieces(range(len(spec.tensors))):
        end = 0
        for part, offset in zip(piece.ranges, piece.offsets, strict=True):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + (part.stop - part.start) * landing.tensors[part.index].itemsize
        assert end <= ring.part_nbytes


@given(st.integers(2, 64), st.integers(1, 1 << 20))
@comparing
def test_every_other_rank_has_a_part_of_a_chunk_to_itself(world: int, extra: int) -> None:
    ring = RingLayout(LandingLayout(GroupSpec(world, ())), least_chunk(world) + extra)
    for owner in (0, world - 1):
        places = sorted(ring.place(source, owner) for source in range(world) if source != owner)
        assert places == [number * ring.part_nbytes for number in range(world - 1)]
        assert places[-1] + ring.part_nbytes <= ring.chunk_nbytes


@given(st.integers(2, 1 << 14), st.integers(1 << 12, 1 << 16))
@comparing
def test_a_chunk_does_not_grow_with_the_world_where_every_rank_owns_as_much(world: int, rows: int) -> None:
    spec = GroupSpec(world, (TensorSpec("w", (rows * world, 4096), "bfloat16"),))
    assert chunk_for([spec], 16 << 20) == 16 << 20


def test_a_chunk_is_no_larger_than_the_largest_group_fills() -> None:
    small = GroupSpec(3, (TensorSpec("w", (6, 4), "bfloat16"), TensorSpec("b", (5,), "bfloat16")))
    assert chunk_for([small], 64 << 20) == 2 * 2 * ALIGNMENT
    assert chunk_for([], 64 << 20) == 0


def test_a_chunk_without_room_for_every_rank_is_refused_with_what_it_takes() -> None:
    landing = LandingLayout(GroupSpec(9, ()))
    with pytest.raises(SpecError, match="ring_chunk_nbytes must be at least 2048 for 9 ranks, got 2047"):
        RingLayout(landing, 2047)
