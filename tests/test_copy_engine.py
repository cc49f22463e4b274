"""Copies by their addresses: what a batch is made of, and where it goes when its sources move."""

from tide_triton.copy_engine import batch
from tide_triton.layouts import Copy

COPIES = [
    (1000, 5000, Copy(1, 2, 1, 8, 8, 8)),
    (2000, 6000, Copy(3, 4, 3, 16, 64, 32)),
    (3000, 7000, Copy(0, 0, 1, 4, 4, 4)),
]


def test_a_batch_holds_contiguous_copies_as_lists_and_strided_ones_by_themselves() -> None:
    made = batch(COPIES)
    assert (made.destinations, made.sources, made.sizes) == ([1002, 3000], [5001, 7000], [8, 4])
    assert made.strided == ((2004, 32, 6003, 64, 16, 3),)
    assert made.order == (0, 2, 1)


def test_moved_sources_take_each_copy_along_and_leave_destinations() -> None:
    made = batch(COPIES).moved([10, 200, -3000])
    assert made == batch([(dst, src + by, c) for (dst, src, c), by in zip(COPIES, (10, 200, -3000), strict=True)])


def test_a_batch_moved_twice_is_moved_by_the_sum() -> None:
    assert batch(COPIES).moved([1, 2, 3]).moved([4, 5, 6]) == batch(COPIES).moved([5, 7, 9])
