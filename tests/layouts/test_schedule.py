"""Who sends to whom, round by round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing
from tide_triton.layouts import SpecError, flat

worlds = st.integers(1, 64)


@given(worlds)
@comparing
def test_each_rank_sends_to_each_other_exactly_once(world_size: int) -> None:
    for rank in range(world_size):
        peers = flat(world_size, rank)
        assert sorted(peers) == [peer for peer in range(world_size) if peer != rank]


@given(worlds)
@comparing
def test_each_round_is_a_permutation_without_fixed_points(world_size: int) -> None:
    rounds = list(zip(*(flat(world_size, rank) for rank in range(world_size)), strict=True))
    assert len(rounds) == world_size - 1
    for targets in rounds:
        assert sorted(targets) == list(range(world_size))
        assert all(target != rank for rank, target in enumerate(targets))


def test_the_schedule_of_4_ranks_is_the_one_drawn() -> None:
    assert [flat(4, rank) for rank in range(4)] == [(1, 2, 3), (2, 3, 0), (3, 0, 1), (0, 1, 2)]


@pytest.mark.parametrize(("world_size", "rank"), [(4, -1), (4, 4), (1, 1)])
def test_a_rank_outside_the_world_is_refused(world_size: int, rank: int) -> None:
    with pytest.raises(SpecError, match=f"rank must be 0 to {world_size - 1} for world_size={world_size}, got {rank}"):
        flat(world_size, rank)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(SpecError, match=f"world_size must be an integer >= 1, got {world_size}"):
        flat(world_size, 0)
