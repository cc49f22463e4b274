"""Shards against `torch.chunk`, the cut that FSDP2 makes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.layouts.strategies import addresses, as_bytes, chunks, comparing, contents, moving, read, tensor_specs
from tests.layouts.strategies import world_sizes as worlds
from tide_triton.layouts import Region, SpecError, TensorSpec, chunk_size, shard

regions = st.builds(
    lambda offset, rows, width, gap: Region(offset, rows, width, width + gap),
    st.integers(0, 50),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 3),
)


@given(tensor_specs(), worlds, st.integers(0, 2**32 - 1))
@example(TensorSpec("7 rows over 3 ranks", (7, 3), "bfloat16"), 3, 0)
@example(TensorSpec("1 row over 2 ranks", (1, 8), "bfloat16"), 2, 0)
@example(TensorSpec("no rows", (0, 8), "bfloat16"), 3, 0)
@example(TensorSpec("even columns", (4, 6), "bfloat16", shard_dim=1), 2, 0)
@example(TensorSpec("uneven columns", (4, 5), "bfloat16", shard_dim=1), 2, 0)
@example(TensorSpec("no columns", (4, 0, 3), "float32", shard_dim=2), 2, 0)
@moving
def test_shards_agree_with_torch_chunk_in_shape_start_and_content(spec: TensorSpec, world_size: int, seed: int) -> None:
    tensor = contents(spec, np.random.default_rng(seed))
    start = 0
    for rank, chunk in enumerate(chunks(tensor, world_size, spec.shard_dim)):
        own = shard(spec, world_size, rank)
        assert own.shape == chunk.shape
        assert own.start == start
        assert (own.numel, own.nbytes) == (chunk.numel(), chunk.nbytes)
        assert np.array_equal(read(as_bytes(tensor), own.region), as_bytes(chunk))
        start += chunk.shape[spec.shard_dim]


@given(tensor_specs(), worlds)
@comparing
def test_padding_makes_shards_equal_and_reaches_no_further_than_one_shard(spec: TensorSpec, world_size: int) -> None:
    owned = [shard(spec, world_size, rank) for rank in range(world_size)]
    assert {own.padded_shape for own in owned} == {owned[0].padded_shape}
    for own in owned:
        assert own.padded_size == chunk_size(spec.shape[spec.shard_dim], world_size) == owned[0].size
        assert 0 <= own.size <= own.padded_size
        assert own.padded_nbytes == own.padded_numel * spec.itemsize
        assert own.nbytes == own.region.nbytes <= own.padded_nbytes
    assert spec.nbytes <= owned[0].padded_nbytes * world_size


@given(tensor_specs(), worlds)
@comparing
def test_shards_of_dim_0_are_one_run_and_of_other_dims_one_run_a_row(spec: TensorSpec, world_size: int) -> None:
    for rank in range(world_size):
        own = shard(spec, world_size, rank)
        whole_rows = own.size == spec.shape[spec.shard_dim]
        assert own.region.rows == (0 if own.nbytes == 0 else 1 if whole_rows else spec.outer)


def test_7_rows_over_3_ranks_start_at_0_3_6_and_1_row_over_2_leaves_one_empty() -> None:
    rows = [shard(TensorSpec("w", (7, 3), "bfloat16"), 3, rank) for rank in range(3)]
    assert [(s.start, s.size) for s in rows] == [(0, 3), (3, 3), (6, 1)]
    empty = shard(TensorSpec("w", (1, 8), "bfloat16"), 2, 1)
    assert (empty.start, empty.shape, empty.region.nbytes) == (1, (0, 8), 0)


def test_a_middle_rank_of_columns_owns_the_bytes_that_the_drawing_marks() -> None:
    assert shard(TensorSpec("w", (2, 6), "int8", shard_dim=1), 3, 1).region == Region(2, 2, 2, 6)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(SpecError, match=f"rank must be 0 to 2 for world_size=3, got {rank}"):
        shard(TensorSpec("w", (7, 3), "bfloat16"), 3, rank)


@given(st.integers(0, 1000), st.integers(1, 64))
@comparing
def test_a_chunk_is_the_smallest_that_covers_the_dim(size: int, world_size: int) -> None:
    chunk = chunk_size(size, world_size)
    assert chunk * world_size >= size
    assert chunk == 0 or (chunk - 1) * world_size < size


@given(regions)
@comparing
def test_merging_a_region_keeps_its_bytes_in_order_and_is_final(region: Region) -> None:
    merged = region.merged()
    assert addresses(merged) == addresses(region)
    assert merged.nbytes == region.nbytes
    assert merged.rows <= region.rows
    assert merged.merged() == merged
    if region.nbytes == 0:
        assert (merged.rows, merged.width, merged.pitch) == (0, 0, 0)
    elif region.width == region.pitch or region.rows == 1:
        assert merged == Region(region.offset, 1, region.nbytes, region.nbytes)


@given(regions, st.integers(0, 1000))
@comparing
def test_shifting_a_region_moves_every_byte_by_the_same(region: Region, by: int) -> None:
    assert addresses(region.shifted(by)) == [address + by for address in addresses(region)]


@given(regions)
@comparing
def test_a_region_ends_one_past_its_last_byte_or_where_it_starts_when_empty(region: Region) -> None:
    assert region.end == max((address + 1 for address in addresses(region)), default=region.offset)
