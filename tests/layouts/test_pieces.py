"""Pieces of a group: together they are the whole group, and they grow away from where the link must not wait."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing, group_specs
from tide_triton.layouts import GroupSpec, LandingLayout, SlotLayout, TensorSpec, shard
from tide_triton.layouts.pieces import GATHER_GROWTH, REDUCE_GROWTH, gather_pieces, reduce_pieces
from tide_triton.layouts.ranges import Range

budgets = st.none() | st.integers(1, 600)


@given(group_specs(max_tensors=5), budgets)
@comparing
def test_a_gathers_pieces_hold_every_tensor_once_the_smallest_first(spec: GroupSpec, smallest: int | None) -> None:
    def size(index: int) -> int:
        return shard(spec.tensors[index], spec.world_size, 0).padded_nbytes

    pieces = gather_pieces(SlotLayout(spec), smallest)
    order = [index for piece in pieces for index in piece]
    assert sorted(order) == list(range(len(spec.tensors)))
    assert all(pieces)
    if smallest is None:
        assert len(pieces) == (1 if order else 0)
        return
    assert all(size(one) <= size(later) for piece in pieces[1:] for later in piece for one in pieces[0])
    sizes = [sum(map(size, piece)) for piece in pieces]
    assert all(following >= GATHER_GROWTH * one for one, following in pairwise(sizes[:-1]))
    assert len(pieces) <= 1 or sizes[0] >= smallest


@given(group_specs(), budgets, st.integers(1, 40), st.data())
@comparing
def test_a_reductions_pieces_cover_each_shard_once_and_in_order(
    spec: GroupSpec, smallest: int | None, most: int, data: st.DataObject
) -> None:
    landing = LandingLayout(spec)
    indices = data.draw(st.permutations(range(len(spec.tensors))))
    pieces = reduce_pieces(landing, indices, smallest, most, cut=1)
    parts = [part for piece in pieces for part in piece]
    covered = [(part.index, element) for part in parts for element in range(part.start, part.stop)]
    padded = {index: shard(landing.tensors[index], spec.world_size, 0).padded_numel for index in indices}
    assert covered == [(index, element) for index in indices for element in range(padded[index])]
    assert {part.index for part in parts} == set(indices)
    assert all(pieces)
    assert len(pieces) <= most
    if smallest is None:
        assert len(pieces) == (1 if indices else 0)


@given(st.integers(1, 16), st.integers(20, 4000), st.integers(1, 200))
@comparing
def test_a_reductions_pieces_shrink_towards_the_last_which_is_as_small_as_was_asked(
    world: int, rows: int, smallest: int
) -> None:
    landing = LandingLayout(GroupSpec(world, (TensorSpec("w", (rows, 3), "bfloat16"),)))
    pieces = reduce_pieces(landing, [0], smallest, cut=1)
    sizes = [sum(part.stop - part.start for part in piece) * 2 for piece in pieces]
    # Whole elements of two bytes are cut, so a piece may be off by one on either side.
    assert sizes[-1] <= smallest * REDUCE_GROWTH + 4
    # The first takes what is left, which may be less than a full step.
    assert all(one + 4 >= following for one, following in pairwise(sizes[1:]))
    assert all(one <= REDUCE_GROWTH * following + 8 for one, following in pairwise(sizes[1:]))


def test_parts_start_at_multiples_of_the_cut() -> None:
    landing = LandingLayout(GroupSpec(2, (TensorSpec("w", (100_001, 7), "bfloat16"),)))
    pieces = reduce_pieces(landing, [0], 1000)
    assert len(pieces) > 3
    assert all(part.start % 1024 == 0 for piece in pieces for part in piece)


def test_a_strided_shard_is_never_cut() -> None:
    landing = LandingLayout(GroupSpec(2, (TensorSpec("w", (8, 6), "bfloat16", shard_dim=1),)))
    assert reduce_pieces(landing, [0], 8, cut=1) == ((Range(0, 0, 24),),)


def _in_elements(*sizes: int) -> SlotLayout:
    """Of which each of two ranks has so many elements of two bytes."""
    return SlotLayout(GroupSpec(2, tuple(TensorSpec(f"t{i}", (2 * n,), "bfloat16") for i, n in enumerate(sizes))))


def test_the_last_piece_begins_with_what_is_to_come_last() -> None:
    layout = _in_elements(4, 400, 40, 4000, 2)
    assert gather_pieces(layout, 1, [2, 0]) == ((4,), (1,), (2, 0, 3))
    assert gather_pieces(layout, 1) == ((4,), (0, 2), (1,), (3,))
    assert gather_pieces(layout, None, [2, 0]) == ((0, 1, 2, 3, 4),)
    assert gather_pieces(_in_elements(4, 2), 1, [1, 0]) == ((1, 0),)


def test_a_piece_takes_the_largest_that_fit_before_others() -> None:
    # 75 fit into the second, of three times 25; 225 into the third.
    assert gather_pieces(_in_elements(25, 25, 25, 25, 70, 70, 25), 50) == ((0,), (5, 1), (4, 6, 3, 2))
    assert gather_pieces(_in_elements(8, 8, 67, 67, 235, 235), 32) == ((0, 1), (2,), (3, 4), (5,))
