"""A group in pieces, so that one piece can travel while the next is prepared or the last is summed.

Pieces follow from the layout alone and are the same on every rank. A gather's pieces are whole tensors: what is small
goes first and together, so that the link has work at once; the rest follows one by one, smallest first. A reduction's
pieces are ranges of shards, so that the sum of the last one takes little time after its bytes have come.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tide_triton.layouts.shards import shard
from tide_triton.layouts.slots import LandingLayout, SlotLayout
from tide_triton.layouts.transfers import Copy

#: Bytes of a shard below which tensors share a piece: a copy of its own would cost more in overhead than in bytes.
SMALL = 1 << 20


def gather_pieces(layout: SlotLayout, small: int | None = SMALL) -> tuple[tuple[int, ...], ...]:
    """Indices of a group's tensors in the order in which they are cast and put, by piece.

    small: bytes of a shard below which tensors share the first piece; None for one piece of everything.
    """
    world = layout.spec.world_size
    sizes = [shard(tensor, world, 0).padded_nbytes for tensor in layout.spec.tensors]
    if small is None:
        return (tuple(range(len(sizes))),) if sizes else ()
    together = tuple(index for index, size in enumerate(sizes) if size < small)
    alone = sorted((index for index, size in enumerate(sizes) if size >= small), key=lambda index: sizes[index])
    return ((together,) if together else ()) + tuple((index,) for index in alone)


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of tensor `index`'s padded shard, in the order of its contiguous form."""

    index: int
    start: int
    stop: int


def reduce_pieces(
    landing: LandingLayout, indices: Iterable[int], nbytes: int | None = None
) -> tuple[tuple[Range, ...], ...]:
    """The shards of tensors `indices` cut into pieces of about `nbytes` bytes on the wire; None for one piece.

    A shard that is strided in its tensor (shard dim > 0) is not cut: its copy stays one strided copy.
    """
    pieces: list[tuple[Range, ...]] = []
    filling: list[Range] = []
    room = nbytes
    for part in _ranges(landing, indices, nbytes):
        size = (part.stop - part.start) * landing.tensors[part.index].itemsize
        if nbytes is not None and room is not None:
            if filling and size > room:
                pieces.append(tuple(filling))
                filling, room = [], nbytes
            room -= size
        filling.append(part)
    if filling:
        pieces.append(tuple(filling))
    return tuple(pieces)


def _ranges(landing: LandingLayout, indices: Iterable[int], nbytes: int | None) -> Iterator[Range]:
    for index in indices:
        tensor = landing.tensors[index]
        numel = shard(tensor, landing.spec.world_size, 0).padded_numel
        step = numel if nbytes is None or tensor.outer > 1 else max(1, nbytes // tensor.itemsize)
        if numel == 0:
            yield Range(index, 0, 0)
        for start in range(0, numel, max(step, 1)):
            yield Range(index, start, min(start + step, numel))


def clip(copy: Copy | None, part: Range, itemsize: int) -> Copy | None:
    """What of `copy`, which moves a whole shard, falls into `part`; None where nothing does."""
    if copy is None:
        return None
    if copy.rows > 1:
        return copy
    start, stop = part.start * itemsize, min(part.stop * itemsize, copy.width)
    if start >= stop:
        return None
    width = stop - start
    return Copy(copy.src_offset + start, copy.dst_offset + start, 1, width, width, width)
