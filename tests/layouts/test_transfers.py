"""Copies, run on byte arrays, against the tensors that `torch.chunk` and `torch.cat` make."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import (
    CANARY,
    addresses,
    as_bytes,
    chunks,
    comparing,
    contents,
    dtypes,
    group_specs,
    mapping,
    moving,
    poisoned,
    read,
    times_written,
    write,
)
from tide_triton.layouts import (
    Copy,
    GroupSpec,
    LandingLayout,
    Region,
    SlotLayout,
    TensorSpec,
    execute,
    flat,
    gather_copies,
    merge,
    scatter_copies,
)
from tide_triton.layouts.transfers import MOST_PITCH, between, in_rows

seeds = st.integers(0, 2**32 - 1)


@given(group_specs(), seeds)
@moving
def test_all_gather_puts_the_unsharded_tensors_into_every_slot_and_nothing_elsewhere(
    spec: GroupSpec, seed: int
) -> None:
    layout, world = SlotLayout(spec), range(spec.world_size)
    rng = np.random.default_rng(seed)
    tensors = [contents(tensor, rng) for tensor in spec.tensors]
    cut = [chunks(tensor, spec.world_size, t.shard_dim) for tensor, t in zip(tensors, spec.tensors, strict=True)]
    slots = [poisoned(layout.nbytes) for _ in world]
    for rank in world:
        for index, of_ranks in enumerate(cut):
            write(slots[rank], layout.region(index, rank), as_bytes(of_ranks[rank]))

    for rank in world:
        for peer in flat(spec.world_size, rank):
            execute(gather_copies(layout, rank), slots[rank], slots[peer])

    expected = poisoned(layout.nbytes)
    for place, of_ranks in zip(layout.places, cut, strict=True):
        whole = torch.cat(of_ranks, place.tensor.shard_dim)
        expected[place.offset : place.offset + place.nbytes] = as_bytes(whole)
    for slot in slots:
        assert np.array_equal(slot, expected)
    for place, tensor in zip(layout.places, tensors, strict=True):
        assert np.array_equal(expected[place.offset : place.offset + place.nbytes], as_bytes(tensor))


@given(group_specs())
@moving
def test_all_gather_writes_every_byte_of_every_other_ranks_shard_exactly_once(spec: GroupSpec) -> None:
    layout, world = SlotLayout(spec), range(spec.world_size)
    slot = poisoned(layout.nbytes)
    by_rank = [times_written(gather_copies(layout, rank), slot) for rank in world]
    for peer in world:
        expected = np.zeros(slot.size, dtype=np.int64)
        for rank in world:
            for index in range(len(spec.tensors)):
                write_once = addresses(layout.region(index, rank)) if rank != peer else []
                expected[np.array(write_once, dtype=np.int64)] = 1
        assert np.array_equal(sum((by_rank[rank] for rank in world if rank != peer), expected * 0), expected)


@given(group_specs())
@comparing
def test_all_gather_reads_where_it_writes_and_has_no_empty_copies(spec: GroupSpec) -> None:
    layout = SlotLayout(spec)
    for rank in range(spec.world_size):
        copies = gather_copies(layout, rank)
        assert all(copy.src == copy.dst for copy in copies)
        assert all(copy.rows >= 1 and copy.width >= 1 for copy in copies)
        assert len(copies) <= len(spec.tensors)


def test_a_short_last_shard_is_not_read_as_a_whole_slab() -> None:
    layout = SlotLayout(GroupSpec(2, (TensorSpec("w", (5, 1), "uint8"),)))
    assert [gather_copies(layout, rank) for rank in range(2)] == [(Copy(0, 0, 1, 3, 3, 3),), (Copy(3, 3, 1, 2, 2, 2),)]


def test_a_rank_without_rows_sends_nothing() -> None:
    layout = SlotLayout(GroupSpec(2, (TensorSpec("w", (1, 8), "bfloat16"),)))
    assert gather_copies(layout, 1) == ()
    assert scatter_copies(LandingLayout(layout.spec), 0, 1) == (None,)


@given(group_specs(), st.none() | dtypes, seeds)
@moving
def test_reduce_scatter_lands_the_torch_chunk_slice_of_every_rank_and_nothing_else(
    spec: GroupSpec, dtype: str | None, seed: int
) -> None:
    landing, world = LandingLayout(spec, dtype), range(spec.world_size)
    rng = np.random.default_rng(seed)
    gradients = [[contents(tensor, rng) for tensor in landing.tensors] for _ in world]
    slices = [
        [chunks(g, spec.world_size, t.shard_dim) for g, t in zip(of_rank, landing.tensors, strict=True)]
        for of_rank in gradients
    ]
    for owner in world:
        memory, times = poisoned(landing.nbytes), np.zeros(landing.nbytes + 64, dtype=np.int64)
        expected = np.zeros_like(times)
        for source in world:
            for index, copy in enumerate(scatter_copies(landing, source, owner)):
                copies = () if copy is None else (copy,)
                execute(copies, as_bytes(gradients[source][index]), memory)
                times += times_written(copies, memory)
        for source in world:
            for index in range(len(spec.tensors)):
                segment = landing.segment(index, source, owner)
                assert np.array_equal(read(memory, segment), as_bytes(slices[source][index][owner]))
                expected[np.array(addresses(segment), dtype=np.int64)] = 1
        assert np.array_equal(times, expected)
        assert np.all(memory[expected == 0] == CANARY)


@st.composite
def copy_lists(draw: st.DrawFn) -> list[Copy]:
    """Copies, contiguous and strided, some continuing each other on one side or both; they overlap on neither side."""
    count = draw(st.integers(0, 8))
    gaps = st.sampled_from([0, 0, 0, 3])
    shapes = [
        (draw(st.sampled_from([1, 1, 1, 2])), draw(st.integers(0, 4)), draw(gaps), draw(gaps)) for _ in range(count)
    ]
    sources, targets = {}, {}
    position = 0
    for index, (rows, width, gap, _) in enumerate(shapes):
        position += draw(gaps)
        sources[index] = position
        position += rows * (width + gap) - gap
    position = 100
    for index in draw(st.permutations(range(count))) if draw(st.booleans()) else range(count):
        rows, width, _, gap = shapes[index]
        position += draw(gaps)
        targets[index] = position
        position += rows * (width + gap) - gap
    copies = [
        Copy(sources[index], targets[index], rows, width, width + src_gap, width + dst_gap)
        for index, (rows, width, src_gap, dst_gap) in enumerate(shapes)
        if rows * width > 0
    ]
    return draw(st.permutations(copies))


@given(copy_lists())
@comparing
def test_merging_keeps_the_mapping_of_bytes_and_never_adds_copies(copies: list[Copy]) -> None:
    merged = merge(copies)
    assert mapping(merged) == mapping(copies)
    assert len(merged) <= len(copies)
    assert merge(merged) == merged


@given(copy_lists())
@comparing
def test_merging_leaves_no_contiguous_pair_that_continues_each_other(copies: list[Copy]) -> None:
    runs = [copy for copy in merge(copies) if copy.rows == 1]
    starts = {(copy.src_offset, copy.dst_offset) for copy in runs}
    assert not starts & {(copy.src.end, copy.dst.end) for copy in runs}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 50), st.integers(0, 50), st.randoms())
@comparing
def test_merging_the_pieces_of_a_run_in_any_order_gives_the_run(
    widths: list[int], src: int, dst: int, random: Random
) -> None:
    starts = [sum(widths[:index]) for index in range(len(widths))]
    pieces = [Copy(src + at, dst + at, 1, width, width, width) for at, width in zip(starts, widths, strict=True)]
    random.shuffle(pieces)
    assert merge(pieces) == (Copy(src, dst, 1, sum(widths), sum(widths), sum(widths)),)


@pytest.mark.parametrize(
    "second",
    [
        Copy(5, 14, 1, 4, 4, 4),
        Copy(4, 15, 1, 4, 4, 4),
        Copy(4, 14, 2, 4, 6, 6),
        Copy(3, 13, 1, 4, 4, 4),
    ],
    ids=["gap in the source", "gap in the destination", "strided", "overlapping"],
)
def test_copies_that_do_not_continue_each_other_stay_apart(second: Copy) -> None:
    first = Copy(0, 10, 1, 4, 4, 4)
    assert merge([first, second]) == (first, second)
    assert merge([Copy(0, 10, 2, 2, 3, 2), Copy(5, 14, 1, 2, 2, 2)]) == (
        Copy(0, 10, 2, 2, 3, 2),
        Copy(5, 14, 1, 2, 2, 2),
    )


@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), st.integers(0, 50), st.integers(0, 50)
)
@comparing
def test_a_copy_between_regions_moves_their_bytes_in_order(
    rows: int, width: int, src_gap: int, dst_gap: int, src_offset: int, dst_offset: int
) -> None:
    src, dst = Region(src_offset, rows, width, width + src_gap), Region(dst_offset, rows, width, width + dst_gap)
    flat_src, flat_dst = replace(src, rows=1, width=src.nbytes), replace(dst, rows=1, width=dst.nbytes)
    for source, target in ((src, dst), (src, flat_dst), (flat_src, dst)):
        copy = between(source, target)
        assert copy is not None
        assert addresses(copy.src) == addresses(source)
        assert addresses(copy.dst) == addresses(target)
        assert copy.nbytes == source.nbytes
        assert copy.rows <= rows
    if src_gap == dst_gap == 0:
        assert between(src, dst) == Copy(src_offset, dst_offset, 1, rows * width, rows * width, rows * width)


@pytest.mark.parametrize("empty", [Region(0, 0, 0, 0), Region(8, 3, 0, 4), Region(8, 0, 4, 4)])
def test_nothing_is_copied_between_empty_regions(empty: Region) -> None:
    assert between(empty, Region(16, 0, 0, 0)) is None


def test_regions_of_different_bytes_are_refused_naming_both() -> None:
    with pytest.raises(ValueError, match=r"cannot copy 6 bytes \(Region\(.*\)\) into 8 bytes"):
        between(Region(0, 2, 3, 5), Region(0, 2, 4, 5))
    with pytest.raises(ValueError, match="cannot copy 0 bytes"):
        between(Region(0, 0, 0, 0), Region(0, 1, 1, 1))


def test_regions_whose_rows_do_not_match_are_refused_naming_both() -> None:
    with pytest.raises(ValueError, match=r"cannot copy between 2 and 3 rows \(Region\(.*to Region\("):
        between(Region(0, 2, 6, 8), Region(0, 3, 4, 8))


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (Copy(5, 0, 1, 4, 4, 4), "leaves its source of 8 bytes: 5 to 9"),
        (Copy(0, 0, 2, 2, 7, 2), "leaves its source of 8 bytes: 0 to 9"),
        (Copy(0, 13, 1, 4, 4, 4), "leaves its destination of 16 bytes: 13 to 17"),
        (Copy(-1, 0, 1, 4, 4, 4), "leaves its source of 8 bytes: -1 to 3"),
        (Copy(0, -4, 1, 4, 4, 4), "leaves its destination of 16 bytes: -4 to 0"),
    ],
)
def test_a_copy_that_leaves_its_memory_is_refused_before_it_writes(copy: Copy, message: str) -> None:
    memory = poisoned(16)[:16]
    with pytest.raises(ValueError, match=message):
        execute([copy], np.zeros(8, dtype=np.uint8), memory)
    assert np.all(memory == CANARY)


def test_only_one_dimensional_byte_arrays_are_copied() -> None:
    with pytest.raises(ValueError, match="the source must be a 1-D array of bytes, got 1 dims of int16"):
        execute([], np.zeros(8, dtype=np.int16), poisoned(0))
    with pytest.raises(ValueError, match="the destination must be a 1-D array of bytes, got 2 dims of uint8"):
        execute([], poisoned(0), np.zeros((2, 2), dtype=np.uint8))


@given(st.lists(st.builds(Copy, *[st.integers(0, 12)] * 2, st.integers(1, 3), st.integers(1, 4), *[st.just(9)] * 2)))
@comparing
def test_rows_of_one_copy_move_the_same_bytes_in_the_same_order(copies: list[Copy]) -> None:
    joined = in_rows([None, *copies])
    assert len(joined) <= len(copies)
    assert mapping(joined) == mapping(copies)
    for at in ("src", "dst"):
        in_order = [byte for copy in copies for byte in addresses(getattr(copy, at))]
        assert in_order == [byte for copy in joined for byte in addresses(getattr(copy, at))]


def test_equally_far_neighbours_become_rows_and_touching_ones_one() -> None:
    def one(src: int, dst: int, width: int = 4) -> Copy:
        return Copy(src, dst, 1, width, width, width)

    assert in_rows([one(0, 0), one(4, 10), one(8, 20)]) == (Copy(0, 0, 3, 4, 4, 10),)
    assert in_rows([one(0, 0), one(4, 4), one(8, 8, 2)]) == (one(0, 0, 10),)
    assert in_rows([one(0, 0), one(4, 10), one(8, 21)]) == (Copy(0, 0, 2, 4, 4, 10), one(8, 21))
    assert in_rows([one(0, 0), one(4, 10, 5)]) == (one(0, 0), one(4, 10, 5))
    assert in_rows([one(0, 0), one(4, MOST_PITCH)]) == (Copy(0, 0, 2, 4, 4, MOST_PITCH),)
    assert in_rows([one(0, 0), one(4, MOST_PITCH + 1)]) == (one(0, 0), one(4, MOST_PITCH + 1))
    # Rows that would overlap or go back are copies of their own.
    assert in_rows([one(0, 0), one(4, 2)]) == (one(0, 0), one(4, 2))
    assert in_rows([one(8, 0), one(0, 10)]) == (one(8, 0), one(0, 10))
