"""A group in pieces, so that one piece can travel while the next is prepared or the last is summed.

Pieces follow from the layout alone and are the same on every rank. Preparing and summing are faster than the link, so
few pieces do, if each is in proportion to its neighbour:

    gather    [.][...][..............]     the first is small, so that the link has work at once; each further one is
                                           cast while the one before it travels
    reduce    [..............][......][.]  the last is small, so that its sum ends soon after its bytes have come; each
                                           is summed while the one after it travels
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from tide_triton.layouts.ranges import Range
from tide_triton.layouts.shards import shard
from tide_triton.layouts.slots import LandingLayout, SlotLayout

#: How much larger a gather's piece is than the one before: casting outruns the link by more than this.
GATHER_GROWTH: Final = 3.0
#: How much larger a reduction's piece is than the one after: summing outruns the link by more than this.
REDUCE_GROWTH: Final = 1.25
#: Elements to whose multiples shards are cut, so that every part starts aligned.
CUT: Final = 1024


def gather_pieces(layout: SlotLayout, smallest: int | None, last: Iterable[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Indices of a group's tensors in the order in which they are cast and put, by piece.

    The smallest make the first piece. Each further one begins with the largest that are no more than its share: puts
    that begin while others are cast take longest, and so they are few.

    smallest: bytes of a rank's shards that the first piece has at least; None for one piece of everything.
    last: tensors that the last piece begins with.
    """
    world = layout.spec.world_size
    sizes = [shard(tensor, world, 0).padded_nbytes for tensor in layout.spec.tensors]
    if smallest is None:
        return (tuple(range(len(sizes))),) if sizes else ()
    at_the_end = tuple(last)
    left = sorted(set(range(len(sizes))) - set(at_the_end), key=lambda index: (sizes[index], index))
    pieces: list[tuple[int, ...]] = []
    filling: list[int] = []
    filled, wanted = 0, float(smallest)
    while left:
        fitting = bisect_right(left, wanted - filled, key=sizes.__getitem__)
        index = left.pop(fitting - 1 if pieces and fitting else 0)
        filling.append(index)
        filled += sizes[index]
        if filled >= wanted or not left:
            pieces.append(tuple(filling))
            wanted = filled * GATHER_GROWTH
            filling, filled = [], 0
    if at_the_end:
        pieces.append((*at_the_end, *(pieces.pop() if pieces else ())))
    return tuple(pieces)


def reduce_pieces(
    landing: LandingLayout, indices: Iterable[int], smallest: int | None, most: int = 1 << 10, cut: int = CUT
) -> tuple[tuple[Range, ...], ...]:
    """The shards of tensors `indices`, in that order, cut into pieces.

    smallest: bytes on the wire, from one rank to one owner, of the last piece; None for one piece of everything.
    most: how many pieces there may be.
    cut: elements to whose multiples a shard is cut.

    A shard that is strided in its tensor (shard dim > 0) is not cut: its copy stays one strided copy.
    """
    whole = [Range(index, 0, _numel(landing, index)) for index in indices]
    if smallest is None:
        return (tuple(whole),) if whole else ()
    budgets = _budgets(sum(_nbytes(landing, part) for part in whole), smallest, most)
    pieces: list[tuple[Range, ...]] = []
    filling: list[Range] = []
    room = budgets.pop()
    for part in whole:
        rest: Range | None = part
        while rest is not None:
            head, rest = _cut(landing, rest, room, cut) if budgets else (rest, None)
            if head is not None:
                filling.append(head)
                room -= _nbytes(landing, head)
            if budgets and (room <= 0 or rest is not None):
                pieces.append(tuple(filling))
                filling = []
                room += budgets.pop()
    if filling:
        pieces.append(tuple(filling))
    return tuple(piece for piece in pieces if piece)


def _numel(landing: LandingLayout, index: int) -> int:
    return shard(landing.tensors[index], landing.spec.world_size, 0).padded_numel


def _nbytes(landing: LandingLayout, part: Range) -> int:
    return (part.stop - part.start) * landing.tensors[part.index].itemsize


def _budgets(total: int, smallest: int, most: int) -> list[int]:
    """Bytes of each piece, last piece first: they grow towards the first, which takes what is left."""
    budgets: list[int] = []
    size, left = float(max(smallest, 1)), total
    while left > size * REDUCE_GROWTH and len(budgets) < most - 1:
        budgets.append(int(size))
        left -= int(size)
        size *= REDUCE_GROWTH
    budgets.append(left)
    return budgets


def _cut(landing: LandingLayout, part: Range, room: int, cut: int) -> tuple[Range | None, Range | None]:
    """`part` as what fits into `room` bytes and what is left; what cannot be cut goes whole where more of it fits."""
    tensor = landing.tensors[part.index]
    fitting = max(room, 0) // tensor.itemsize // cut * cut
    if part.stop - part.start <= max(fitting, room // tensor.itemsize):
        return part, None
    if tensor.outer > 1:
        return (part, None) if 2 * room >= _nbytes(landing, part) else (None, part)
    if fitting == 0:
        return None, part
    middle = part.start + fitting
    return Range(part.index, part.start, middle), Range(part.index, middle, part.stop)
