"""Parts of shards, counted so that they mean the same on every rank.

A `Range` counts elements of a tensor's *padded* shard, which every rank has alike; what of it an owner really has
follows from its own shard. Where the shard dim is not the first, a shard falls into rows of the unsharded tensor, and a
range holds whole rows or lies within one, so that its bytes are always one strided copy:

    padded shard of (2, 5) over 2 ranks, dim 1        rank 0 owns 3 of each row, rank 1 owns 2
    rows    0 1 2 | 3 4 5                             Range(3, 6) is row 1: three elements of rank 0, two of rank 1
"""

from dataclasses import dataclass

from tide_triton.layouts.shards import Region, shard
from tide_triton.layouts.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of tensor `index`'s padded shard, in the order of its contiguous form."""

    index: int
    start: int
    stop: int


def owned(tensor: TensorSpec, world_size: int, part: Range, owner: int) -> tuple[int, int]:
    """What of `part` rank `owner` has: start and stop, in elements of its own contiguous shard without padding."""
    own = shard(tensor, world_size, owner)
    padded_row, row = own.padded_size * tensor.inner, own.size * tensor.inner

    def position(at: int) -> int:
        if padded_row == 0:
            return 0
        whole, rest = divmod(at, padded_row)
        return whole * row + min(rest, row)

    return position(part.start), position(part.stop)


def source_region(tensor: TensorSpec, world_size: int, part: Range, owner: int) -> Region:
    """Where the bytes that `owner` has of `part` lie in the contiguous unsharded tensor."""
    own = shard(tensor, world_size, owner)
    region, size = own.region, tensor.itemsize
    start, stop = owned(tensor, world_size, part, owner)
    if start == stop:
        return Region(region.offset, 0, 0, 0)
    nbytes = (stop - start) * size
    if region.rows == 1:
        return Region(region.offset + start * size, 1, nbytes, nbytes)
    row = own.size * tensor.inner
    first, within = divmod(start, row)
    offset = region.offset + first * region.pitch + within * size
    if within + (stop - start) <= row:
        return Region(offset, 1, nbytes, nbytes)
    return Region(offset, (stop - start) // row, region.width, region.pitch)
