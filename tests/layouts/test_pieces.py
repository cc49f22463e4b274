"""Pieces of a group: together they are the whole group, and each is as small as it was asked to be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing, group_specs, mapping, moving
from tide_triton.layouts import Copy, GroupSpec, LandingLayout, SlotLayout, TensorSpec, scatter_copies, shard
from tide_triton.layouts.pieces import Range, clip, gather_pieces, reduce_pieces

budgets = st.none() | st.integers(1, 600)


@given(group_specs(max_tensors=5), st.none() | st.integers(0, 300))
@comparing
def test_a_gathers_pieces_hold_every_tensor_once_small_ones_first_and_together(
    spec: GroupSpec, small: int | None
) -> None:
    def size(index: int) -> int:
        return shard(spec.tensors[index], spec.world_size, 0).padded_nbytes

    pieces = gather_pieces(SlotLayout(spec), small)
    every = range(len(spec.tensors))
    assert sorted(index for piece in pieces for index in piece) == list(every)
    assert all(pieces)
    together = tuple(index for index in every if small is None or size(index) < small)
    if together:
        assert pieces[0] == together
    alone = pieces[1:] if together else pieces
    assert all(len(piece) == 1 for piece in alone)
    assert all(size(one) <= size(following) for (one,), (following,) in pairwise(alone))


@given(group_specs(), budgets, st.data())
@comparing
def test_a_reductions_pieces_cover_each_shard_once_and_in_order(
    spec: GroupSpec, nbytes: int | None, data: st.DataObject
) -> None:
    landing = LandingLayout(spec)
    indices = data.draw(st.permutations(range(len(spec.tensors))))
    pieces = reduce_pieces(landing, indices, nbytes)
    parts = [part for piece in pieces for part in piece]
    covered = [(part.index, element) for part in parts for element in range(part.start, part.stop)]
    padded = {index: shard(landing.tensors[index], spec.world_size, 0).padded_numel for index in indices}
    assert covered == [(index, element) for index in indices for element in range(padded[index])]
    assert {part.index for part in parts} == set(indices)
    assert all(pieces)
    if nbytes is None:
        assert len(pieces) == (1 if indices else 0)


@given(group_specs(), st.integers(1, 600))
@comparing
def test_a_piece_keeps_to_its_bytes_unless_one_part_cannot_be_cut(spec: GroupSpec, nbytes: int) -> None:
    landing = LandingLayout(spec)
    for piece in reduce_pieces(landing, range(len(spec.tensors)), nbytes):
        sizes = [(part.stop - part.start) * landing.tensors[part.index].itemsize for part in piece]
        if sum(sizes) > nbytes:
            [part] = [part for part, size in zip(piece, sizes, strict=True) if size]
            tensor = landing.tensors[part.index]
            assert tensor.outer > 1 or part.stop - part.start == 1


@given(group_specs(), budgets)
@moving
def test_copies_clipped_to_the_pieces_move_each_byte_of_the_whole_copies_once(
    spec: GroupSpec, nbytes: int | None
) -> None:
    landing = LandingLayout(spec)
    parts = [part for piece in reduce_pieces(landing, range(len(spec.tensors)), nbytes) for part in piece]
    for owner in range(spec.world_size):
        copies = scatter_copies(landing, spec.world_size - 1, owner)
        for index, copy in enumerate(copies):
            itemsize = landing.tensors[index].itemsize
            clipped = [clip(copy, part, itemsize) for part in parts if part.index == index]
            assert mapping([c for c in clipped if c is not None]) == mapping([copy] if copy is not None else [])
            assert all(c is None or c.nbytes > 0 for c in clipped)


def test_nothing_of_nothing_falls_into_a_part() -> None:
    assert clip(None, Range(0, 0, 4), 2) is None
    assert clip(Copy(0, 8, 1, 4, 4, 4), Range(0, 2, 4), 2) is None


def test_a_part_that_ends_in_padding_is_cut_to_the_bytes_there_are() -> None:
    assert clip(Copy(10, 100, 1, 6, 6, 6), Range(0, 2, 4), 2) == Copy(14, 104, 1, 2, 2, 2)


@pytest.mark.parametrize(
    ("nbytes", "parts"), [(None, [(0, 12)]), (8, [(0, 4), (4, 8), (8, 12)]), (10, [(0, 5), (5, 10), (10, 12)])]
)
def test_a_contiguous_shard_is_cut_into_parts_of_the_bytes_asked_for(
    nbytes: int | None, parts: list[tuple[int, int]]
) -> None:
    landing = LandingLayout(GroupSpec(2, (TensorSpec("w", (8, 3), "bfloat16"),)))
    assert [(p.start, p.stop) for piece in reduce_pieces(landing, [0], nbytes) for p in piece] == parts


def test_a_strided_shard_is_never_cut() -> None:
    landing = LandingLayout(GroupSpec(2, (TensorSpec("w", (8, 6), "bfloat16", shard_dim=1),)))
    assert reduce_pieces(landing, [0], 8) == ((Range(0, 0, 24),),)
