"""Ranges of padded shards: on every rank they are its own bytes, once, in order, and in one strided copy each."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import MAX_WORLD, addresses, comparing, tensor_specs
from tide_triton.layouts import Region, TensorSpec, shard
from tide_triton.layouts.ranges import Range, owned, source_region


@given(tensor_specs(), st.integers(1, MAX_WORLD), st.data())
@comparing
def test_ranges_that_cover_a_padded_shard_cover_each_ranks_own_bytes_once_and_in_order(
    tensor: TensorSpec, world: int, data: st.DataObject
) -> None:
    own = shard(tensor, world, 0)
    row = own.padded_numel if tensor.outer == 1 else own.padded_size * tensor.inner
    rows = own.padded_numel // row if row else 0
    # Cut between rows, and one row within.
    cuts = {0, own.padded_numel, *(row * data.draw(st.integers(0, rows)) for _ in range(2))}
    if row:
        torn = data.draw(st.integers(0, max(rows - 1, 0))) * row
        cuts |= {torn, torn + row, torn + data.draw(st.integers(0, row))} if rows else set()
    bounds = sorted(cut for cut in cuts if cut <= own.padded_numel)
    parts = [Range(0, start, stop) for start, stop in pairwise(bounds)]
    for rank in range(world):
        regions = [source_region(tensor, world, part, rank) for part in parts]
        assert [a for region in regions for a in addresses(region)] == addresses(shard(tensor, world, rank).region)
        for part, region in zip(parts, regions, strict=True):
            start, stop = owned(tensor, world, part, rank)
            assert region.nbytes == (stop - start) * tensor.itemsize


def test_a_range_of_rows_is_one_strided_region_and_one_within_a_row_a_run() -> None:
    tensor = TensorSpec("w", (4, 6), "bfloat16", 1)
    assert source_region(tensor, 2, Range(0, 3, 9), 1) == Region(18, 2, 6, 12)
    assert source_region(tensor, 2, Range(0, 4, 6), 1) == Region(20, 1, 4, 4)


def test_what_lies_beyond_a_ranks_own_elements_is_empty() -> None:
    tensor = TensorSpec("w", (5,), "bfloat16")
    assert owned(tensor, 2, Range(0, 1, 3), 1) == (1, 2)
    assert source_region(tensor, 2, Range(0, 2, 3), 1).nbytes == 0
