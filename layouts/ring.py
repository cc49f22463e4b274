"""A ring of chunks in which gradients land on their way into a shard, however large the group and the world.

A group's shards are cut into pieces, each small enough that what every other rank sends of it fits into one chunk:

    chunk     | from the next rank      | from the one after      | ...     (W - 1 senders: the own part stays in place)
    a sender  | w0: 4096 elements | w1: 512 elements | w2: its first 2048 elements |

Pieces are the same on every rank. Piece k lands in chunk k mod depth, as soon as the sums of piece k - depth are done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tide_triton.layouts.ranges import Range
from tide_triton.layouts.shards import shard
from tide_triton.layouts.slots import ALIGNMENT, LandingLayout, align
from tide_triton.layouts.spec import GroupSpec, SpecError

#: Bytes of a chunk where nobody says otherwise: large enough that few signals are needed, small enough not to matter
#: beside a slot.
RING_CHUNK_NBYTES: Final = 64 << 20
#: Chunks of a ring, likewise: one is filled while another is summed.
RING_DEPTH: Final = 2
#: A ring of more chunks gains nothing: a few are under way at once, and each is a window of its own.
MAX_RING_DEPTH: Final = 64

#: Elements to whose multiples shards are cut, where chunks are large enough for it to matter little.
CUT = 1024


@dataclass(frozen=True, slots=True)
class RingPiece:
    """Ranges that travel together, and where in a sender's part of the chunk each starts, in bytes."""

    ranges: tuple[Range, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class RingLayout:
    """How gradients of `landing` pass through chunks of `chunk_nbytes` bytes.

    Raises SpecError where a chunk cannot hold ALIGNMENT bytes of every other rank.
    """

    landing: LandingLayout
    chunk_nbytes: int

    def __post_init__(self) -> None:
        least = least_chunk(self.landing.spec.world_size)
        if self.chunk_nbytes < least:
            raise SpecError(
                f"ring_chunk_nbytes must be at least {least} for {self.landing.spec.world_size} ranks, got "
                f"{self.chunk_nbytes}"
            )

    @property
    def part_nbytes(self) -> int:
        """Bytes of a chunk that each sender has, a multiple of the alignment."""
        return self.chunk_nbytes // max(self.landing.spec.world_size - 1, 1) // ALIGNMENT * ALIGNMENT

    def place(self, source: int, owner: int) -> int:
        """Where rank `source`'s part of a chunk of rank `owner` starts, in bytes."""
        return (source - owner - 1) % self.landing.spec.world_size * self.part_nbytes

    def pieces(self, order: Sequence[int]) -> tuple[RingPiece, ...]:
        """The shards of tensors `order`, in that order, cut into pieces."""
        filling = _Filling(self.part_nbytes)
        for index in order:
            tensor = self.landing.tensors[index]
            own = shard(tensor, self.landing.spec.world_size, 0)
            row = own.padded_numel if tensor.outer == 1 else own.padded_size * tensor.inner
            filling.add(index, own.padded_numel, row, tensor.itemsize)
        return filling.finished()


def least_chunk(world_size: int) -> int:
    """Bytes that a chunk has at least."""
    return ALIGNMENT * max(world_size - 1, 1)


def chunk_for(specs: Sequence[GroupSpec], wanted: int) -> int:
    """Bytes of a chunk: `wanted`, but no more than the largest of the groups `specs` fills with fp32 gradients."""
    largest = 0
    for spec in specs:
        shards = [shard(tensor, spec.world_size, 0) for tensor in spec.tensors]
        part = sum(align(own.padded_numel * max(own.tensor.itemsize, 4)) for own in shards)
        largest = max(largest, part * max(spec.world_size - 1, 1))
    return align(max(min(wanted, largest), max(map(least_chunk, (spec.world_size for spec in specs)), default=0)))


class _Filling:
    """The pieces so far, and the one that is being filled."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._pieces: list[RingPiece] = []
        self._ranges: list[Range] = []
        self._offsets: list[int] = []
        self._filled = 0

    def add(self, index: int, numel: int, row: int, itemsize: int) -> None:
        start, before = 0, len(self._pieces)
        while start < numel:
            fits = (self._room - align(self._filled)) // itemsize
            stop = _stop(start, numel, row, fits, self._room // itemsize, ALIGNMENT // itemsize)
            if stop == start:
                self._close()
                continue
            self._ranges.append(Range(index, start, stop))
            self._offsets.append(align(self._filled))
            self._filled = align(self._filled) + (stop - start) * itemsize
            start = stop
        # The next tensor's gradient comes later: what is half full need not wait for it, nor may a large tensor's rest,
        # for all of that gradient would stay in memory.
        if 2 * self._filled >= self._room or (len(self._pieces) > before and self._ranges[0].start > 0):
            self._close()

    def _close(self) -> None:
        if self._ranges:
            self._pieces.append(RingPiece(tuple(self._ranges), tuple(self._offsets)))
        self._ranges, self._offsets, self._filled = [], [], 0

    def finished(self) -> tuple[RingPiece, ...]:
        self._close()
        return tuple(self._pieces)


def _stop(start: int, numel: int, row: int, fits: int, room: int, least: int) -> int:
    """Up to where elements from `start` on go into a piece with room for `fits`; `start` where nothing should.

    numel: elements of the shard. row: of one of its rows. room: what an empty piece holds. least: fewest worth cutting.
    """
    step = CUT if room >= 4 * CUT else least
    if start % row == 0 and (whole := min(fits, numel - start) // row * row):
        # Rows of a shard that is one run may be cut anywhere.
        return start + whole
    if start % row == 0 and row <= room and row != numel:
        return start
    left = row - start % row
    return start + (left if left <= fits else max(fits, 0) // step * step)
