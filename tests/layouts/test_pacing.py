"""Chunks, and copies cut into them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import (
    addresses,
    as_bytes,
    comparing,
    contents,
    dtypes,
    group_specs,
    mapping,
    moving,
    poisoned,
    read,
)
from tide_triton.layouts import (
    Copy,
    GroupSpec,
    LandingLayout,
    Pacing,
    SlotLayout,
    SpecError,
    cut,
    cut_slices,
    execute,
    gather_copies,
    scatter_copies,
    shard,
)

chunk_sizes = st.integers(1, 8).map(lambda grains: grains * 16)


@given(st.integers(0, 1000), chunk_sizes)
@comparing
def test_chunks_are_full_but_for_the_last_and_none_is_empty(nbytes: int, chunk_nbytes: int) -> None:
    pacing = Pacing(chunk_nbytes, 3)
    sizes = pacing.chunk_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert len(sizes) == pacing.chunks(nbytes)
    assert all(size == chunk_nbytes for size in sizes[:-1])
    assert all(0 < size <= chunk_nbytes for size in sizes)
    assert pacing.window_nbytes == 3 * chunk_nbytes


@given(group_specs(), chunk_sizes, st.data())
@moving
def test_a_block_cut_into_chunks_moves_the_same_bytes_in_the_same_order(
    spec: GroupSpec, chunk_nbytes: int, data: st.DataObject
) -> None:
    copies = gather_copies(SlotLayout(spec), data.draw(st.integers(0, spec.world_size - 1)))
    chunks = cut(copies, chunk_nbytes)
    sizes = tuple(sum(part.nbytes for _, part in parts) for parts in chunks)
    assert sizes == Pacing(chunk_nbytes, 1).chunk_sizes(sum(copy.nbytes for copy in copies))
    cut_up = [part for parts in chunks for _, part in parts]
    assert [a for part in cut_up for a in addresses(part.src)] == [a for copy in copies for a in addresses(copy.src)]
    assert mapping(cut_up) == mapping(copies)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9), chunk_sizes)
@comparing
def test_a_strided_copy_takes_at_most_three_copies_a_chunk(
    rows: int, width: int, src_gap: int, dst_gap: int, chunk_nbytes: int
) -> None:
    copy = Copy(5, 7, rows, width, width + src_gap, width + dst_gap)
    chunks = cut([copy], chunk_nbytes)
    assert mapping([part for parts in chunks for _, part in parts]) == mapping([copy])
    assert all(1 <= len(parts) <= 3 for parts in chunks)
    assert all(part.rows >= 1 and part.width >= 1 for parts in chunks for _, part in parts)


def test_chunks_say_which_copy_each_part_is_of_and_pass_over_nothing() -> None:
    whole = Copy(100, 200, 1, 24, 24, 24)
    assert cut([None, Copy(0, 0, 1, 8, 8, 8), None, whole], 16) == (
        ((1, Copy(0, 0, 1, 8, 8, 8)), (3, Copy(100, 200, 1, 8, 8, 8))),
        ((3, Copy(108, 208, 1, 16, 16, 16)),),
    )
    assert cut([None], 16) == cut([], 16) == ()


def test_a_chunk_ends_and_the_next_starts_inside_a_row() -> None:
    assert cut([Copy(0, 0, 3, 12, 20, 12)], 16) == (
        ((0, Copy(0, 0, 1, 12, 12, 12)), (0, Copy(20, 12, 1, 4, 4, 4))),
        ((0, Copy(24, 16, 1, 8, 8, 8)), (0, Copy(40, 24, 1, 8, 8, 8))),
        ((0, Copy(48, 32, 1, 4, 4, 4)),),
    )


@given(group_specs(), st.none() | dtypes, chunk_sizes, st.integers(0, 2**32 - 1), st.data())
@moving
def test_a_gradients_slices_fill_their_chunks_with_what_would_have_landed(
    spec: GroupSpec, dtype: str | None, chunk_nbytes: int, seed: int, data: st.DataObject
) -> None:
    landing, rng = LandingLayout(spec, dtype), np.random.default_rng(seed)
    owner = data.draw(st.integers(0, spec.world_size - 1))
    gradients = [as_bytes(contents(tensor, rng)) for tensor in landing.tensors]
    landed = poisoned(landing.nbytes)
    for gradient, copy in zip(gradients, scatter_copies(landing, 0, owner), strict=True):
        execute(() if copy is None else (copy,), gradient, landed)
    expected = [read(landed, landing.segment(index, 0, owner)) for index in range(len(gradients))]

    chunks = []
    for parts in cut_slices(landing, owner, chunk_nbytes):
        slot = poisoned(chunk_nbytes)[:chunk_nbytes]
        for index, copy in parts:
            execute((copy,), gradients[index], slot)
        chunks.append(slot[: sum(copy.nbytes for _, copy in parts)])
    nothing = [np.zeros(0, dtype=np.uint8)]
    assert np.array_equal(np.concatenate(nothing + chunks), np.concatenate(nothing + expected))
    nbytes = sum(shard(tensor, spec.world_size, owner).nbytes for tensor in landing.tensors)
    assert tuple(chunk.size for chunk in chunks) == Pacing(chunk_nbytes, 1).chunk_sizes(nbytes)


@pytest.mark.parametrize("value", [0, -16, 16.0, True, None])
@pytest.mark.parametrize("field", ["chunk_nbytes", "depth"])
def test_a_bad_pacing_is_refused_naming_field_and_value(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"chunk_nbytes": 64, "depth": 2, field: value}
    with pytest.raises(SpecError, match=f"{field} must be an integer >= 1, got {value!r}"):
        Pacing(**fields)


def test_chunks_that_would_start_unaligned_are_refused_with_a_size_that_would_do() -> None:
    with pytest.raises(SpecError, match=r"chunk_nbytes must be a multiple of 16, .* got 1000; use 1008"):
        Pacing(1000, 1)
