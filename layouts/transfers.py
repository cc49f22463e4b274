"""From layouts to strided copies.

| collective     | from                                   | to                                           |
|----------------|----------------------------------------|----------------------------------------------|
| all-gather     | the shard's place in the own slot      | the same offsets of every other rank's slot  |
| reduce-scatter | the owner's slice of a gradient tensor | the sender's segment of the owner's landing  |

A copy is what a copy engine takes: rows of `width` bytes with a pitch on either side. One row where both sides are
contiguous, so that nothing is strided without need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tide_triton.layouts.shards import Region, shard
from tide_triton.layouts.slots import LandingLayout, SlotLayout

if TYPE_CHECKING:  # only `execute` takes arrays, and planning should not have to import numpy
    import numpy as np
    import numpy.typing as npt


#: Bytes between two rows of one copy at most: what copy engines take.
MOST_PITCH: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Copy:
    """`rows` runs of `width` bytes from `src_offset` to `dst_offset`, `src_pitch` and `dst_pitch` bytes apart."""

    src_offset: int
    dst_offset: int
    rows: int
    width: int
    src_pitch: int
    dst_pitch: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    @property
    def src(self) -> Region:
        return Region(self.src_offset, self.rows, self.width, self.src_pitch)

    @property
    def dst(self) -> Region:
        return Region(self.dst_offset, self.rows, self.width, self.dst_pitch)


def between(src: Region, dst: Region) -> Copy | None:
    """The copy that fills `dst` from `src`, in as few rows as their shapes allow; None where there is nothing to copy.

    Raises ValueError where the regions hold different numbers of bytes, or rows that do not match.
    """
    if src.nbytes != dst.nbytes:
        raise ValueError(f"cannot copy {src.nbytes} bytes ({src}) into {dst.nbytes} bytes ({dst})")
    if src.nbytes == 0:
        return None
    src, dst = src.merged(), dst.merged()
    if src.rows == dst.rows:
        return Copy(src.offset, dst.offset, src.rows, src.width, src.pitch, dst.pitch)
    if dst.rows == 1:
        return Copy(src.offset, dst.offset, src.rows, src.width, src.pitch, src.width)
    if src.rows == 1:
        return Copy(src.offset, dst.offset, dst.rows, dst.width, dst.width, dst.pitch)
    raise ValueError(f"cannot copy between {src.rows} and {dst.rows} rows ({src} to {dst})")


def merge(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """The same bytes in fewer copies: contiguous copies that continue each other on both sides become one.

    Copies come back ordered by `src_offset`, so they must not overlap on the destination.
    """
    return _joined(sorted(copies, key=lambda c: c.src_offset), _continued)


def in_rows(copies: Iterable[Copy | None]) -> tuple[Copy, ...]:
    """The same bytes in the same order, in fewer copies: neighbours that are equally far apart are rows of one."""
    return _joined((copy for copy in copies if copy is not None), _next_row)


def _joined(copies: Iterable[Copy], join: Callable[[Copy, Copy], Copy | None]) -> tuple[Copy, ...]:
    """`copies`, each as one with the one before where `join` can make one of both."""
    done: list[Copy] = []
    for copy in copies:
        both = join(done[-1], copy) if done else None
        if both is None:
            done.append(copy)
        else:
            done[-1] = both
    return tuple(done)


def _continued(last: Copy, copy: Copy) -> Copy | None:
    """Both as one row; None where they are not one row each that touch on both sides."""
    from_source, from_destination = copy.src_offset - last.src_offset, copy.dst_offset - last.dst_offset
    if not (last.rows == copy.rows == 1 and from_source == from_destination == last.width):
        return None
    width = last.width + copy.width
    return Copy(last.src_offset, last.dst_offset, 1, width, width, width)


def _next_row(above: Copy, copy: Copy) -> Copy | None:
    """`copy` as the end of the only row of `above`, or as its next row; None where it is neither."""
    if copy.rows > 1:
        return None
    if (whole := _continued(above, copy)) is not None:
        return whole
    from_source, from_destination = copy.src_offset - above.src_offset, copy.dst_offset - above.dst_offset
    src_pitch, dst_pitch = (above.src_pitch, above.dst_pitch) if above.rows > 1 else (from_source, from_destination)
    is_next = (from_source, from_destination) == (above.rows * src_pitch, above.rows * dst_pitch)
    fits = copy.width <= min(src_pitch, dst_pitch) and max(src_pitch, dst_pitch) <= MOST_PITCH
    if copy.width != above.width or not fits or not is_next:
        return None
    return replace(above, rows=above.rows + 1, src_pitch=src_pitch, dst_pitch=dst_pitch)


def gather_copies(layout: SlotLayout, src: int, indices: Iterable[int] | None = None) -> tuple[Copy, ...]:
    """What rank `src` puts into each other rank's slot, from its own: both offsets count from a slot's start.

    indices: of the tensors to put, in their order; None for all.
    """
    regions = (layout.region(index, src) for index in (range(len(layout.places)) if indices is None else indices))
    return merge(copy for region in regions if (copy := between(region, region)) is not None)


def scatter_copies(landing: LandingLayout, src: int, owner: int) -> tuple[Copy | None, ...]:
    """What rank `src` puts into rank `owner`'s landing, one entry a tensor (None where the owner's shard is empty).

    `src_offset` counts from the start of that tensor's contiguous gradient, `dst_offset` from the landing's.
    """
    world = landing.spec.world_size
    return tuple(
        between(shard(tensor, world, owner).region, landing.segment(index, src, owner))
        for index, tensor in enumerate(landing.tensors)
    )


def execute(copies: Sequence[Copy], src: npt.NDArray[np.uint8], dst: npt.NDArray[np.uint8]) -> None:
    """Run `copies` from the 1-D byte array `src` to `dst`, row by row: the naive twin of every transport's put.

    Raises ValueError for arrays of anything but bytes, and for a copy that leaves one, before any of it is written: a
    slice past the end would be cut short in silence, where hardware writes on.
    """
    for side, array in (("source", src), ("destination", dst)):
        if array.ndim != 1 or array.itemsize != 1:
            raise ValueError(f"the {side} must be a 1-D array of bytes, got {array.ndim} dims of {array.dtype}")
    for copy in copies:
        for side, region, array in (("source", copy.src, src), ("destination", copy.dst, dst)):
            if region.offset < 0 or region.end > array.size:
                raise ValueError(f"{copy} leaves its {side} of {array.size} bytes: {region.offset} to {region.end}")
        for row in range(copy.rows):
            read, write = copy.src_offset + row * copy.src_pitch, copy.dst_offset + row * copy.dst_pitch
            dst[write : write + copy.width] = src[read : read + copy.width]
