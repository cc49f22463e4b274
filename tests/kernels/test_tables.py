"""How tables are laid out, numbered and kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide_triton.kernels import TableCache
from tide_triton.kernels.tables import Launch, block_counts, float_bits, make_launch, tensor_key

CPU = torch.device("cpu")


def launch(value: int) -> tuple[Launch, ...]:
    return (make_launch((value,), [(1, 2)], [(3, 1)], CPU, {}, 4),)


def test_a_table_holds_header_first_blocks_and_rows_in_that_order() -> None:
    made = make_launch((7, 8), [(10, 11), (20, 21), (30, 31)], [(2, 1), (0, 1), (5, 0)], CPU, {"X": 1}, 4)
    assert made.table.tolist() == [7, 8, 0, 2, 2, 0, 1, 2, 10, 11, 20, 21, 30, 31]
    assert made.table.dtype == torch.int64
    assert (made.tensors, made.full_blocks, made.edge_blocks, made.blocks) == (3, 7, 2, 9)
    assert made.constants == {"X": 1, "TENSORS": 4}


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.sampled_from([16, 2048, 8192]))
def test_full_and_edge_blocks_cover_what_is_written_once(numel: int, padding: int, block: int) -> None:
    full, edge = block_counts(numel, numel + padding, block)
    assert full * block <= numel < (full + 1) * block
    assert (full + edge - 1) * block < numel + padding <= (full + edge) * block or numel + padding == 0


@given(st.floats())
def test_floats_travel_as_their_bits(value: float) -> None:
    assert (
        torch.tensor([float_bits(value)]).view(torch.float64).numpy().tobytes()
        == torch.tensor([value], dtype=torch.float64).numpy().tobytes()
    )


def test_the_cache_drops_what_was_used_least_recently() -> None:
    cache = TableCache(capacity=2)
    a = cache.get("a", lambda: launch(1))
    cache.get("b", lambda: launch(2))
    assert cache.get("a", lambda: launch(3)) is a
    cache.get("c", lambda: launch(4))
    assert len(cache) == 2
    assert cache.get("a", lambda: launch(5)) is a
    assert cache.get("b", lambda: launch(6))[0].table[0] == 6
    assert (cache.hits, cache.misses) == (2, 4)
    cache.clear()
    assert len(cache) == 0


def test_what_fails_to_build_is_not_kept() -> None:
    cache = TableCache()

    def fail() -> tuple[Launch, ...]:
        raise ValueError("no table")

    with pytest.raises(ValueError, match="no table"):
        cache.get("a", fail)
    assert len(cache) == 0


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be >= 1, got 0"):
        TableCache(0)


def test_the_key_of_a_tensor_changes_with_all_that_a_table_takes_from_it() -> None:
    x = torch.zeros(8, 8)
    others = [x[1:], x[:, :4], x.view(-1), x.t(), x.view(torch.int32), torch.zeros(8, 8)]
    assert len({tensor_key(x), *map(tensor_key, others)}) == 1 + len(others)
    assert tensor_key(x) == tensor_key(x.view(8, 8))
