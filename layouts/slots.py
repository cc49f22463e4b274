"""Where a group's tensors lie in a slot, and where its gradient slices land in one.

A slot holds every tensor of a group unsharded and contiguous, one after the other, each aligned, and those that are
sharded alike side by side, so that a rank's shards of them are equally far apart:

    offset 0             256-aligned          256-aligned         256-aligned
    | w0: (7, 3) bf16    | w2: (7, 3) bf16    | w1: (64, 64) bf16  | w3 ...
    | r0 | r1 | r2 | pad | r0 | r1 | r2 | pad |  r0  |  r1  |  r2  |

A rank's shard lies at its final place, so an all-gather is a copy of that region from the own slot to the same offsets
of every other rank's. What `padded_nbytes` reserves past a tensor's end (torch.chunk's padding) is never written.

Incoming gradients use the same bytes differently: the owner of a shard receives one contiguous contribution from every
rank, each in a segment of its own. With gradients no wider than the parameters this fits the very slot that the group
has just vacated (Slot-Reuse):

    | w0: from r0 | from r1 | from r2 | w1: from r0 | from r1 | from r2 | ...
"""

from dataclasses import dataclass
from functools import cached_property

from tide_triton.layouts.shards import Region, chunk_size, shard
from tide_triton.layouts.spec import GroupSpec, SpecError, TensorSpec, check_dtype

#: Bytes to which a tensor's place and its first segment are aligned: enough for 16-byte accesses, TMA and copy engines.
#: What lies inside is as dense as its dtype: a later rank's shard or segment starts on an element, no more.
ALIGNMENT = 256


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def _check_alignment(alignment: int) -> None:
    if not isinstance(alignment, int) or alignment < 16 or alignment & (alignment - 1):
        raise SpecError(f"alignment must be a power of two >= 16, got {alignment!r}")


def _side_by_side(spec: GroupSpec) -> list[int]:
    """Indices of the tensors of `spec` in the order in which they lie: those alike after the first of them."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index, tensor in enumerate(spec.tensors):
        cut_so = tensor.outer, tensor.shape[tensor.shard_dim], tensor.inner * tensor.itemsize
        alike.setdefault(cut_so, []).append(index)
    return [index for indices in alike.values() for index in indices]


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in a slot: `nbytes` at `offset`, with `padded_nbytes` reserved for it."""

    tensor: TensorSpec
    offset: int
    nbytes: int
    padded_nbytes: int


@dataclass(frozen=True)
class SlotLayout:
    """Places of a group's tensors in a slot, parameter-contiguous and aligned; in the order of the spec."""

    spec: GroupSpec
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        places, offset = {}, 0
        for index in _side_by_side(self.spec):
            tensor = self.spec.tensors[index]
            padded = shard(tensor, self.spec.world_size, 0).padded_nbytes * self.spec.world_size
            places[index] = Place(tensor, offset, tensor.nbytes, padded)
            offset = align(offset + padded, self.alignment)
        return tuple(places[index] for index in range(len(places)))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the slot, a multiple of the alignment."""
        return align(max((place.offset + place.padded_nbytes for place in self.places), default=0), self.alignment)

    def region(self, index: int, rank: int) -> Region:
        """Where rank `rank`'s shard of tensor `index` lies in the slot, in bytes."""
        place = self.places[index]
        return shard(place.tensor, self.spec.world_size, rank).region.shifted(place.offset)


@dataclass(frozen=True)
class LandingLayout:
    """Segments in which a shard's owner receives one contiguous gradient slice per rank and tensor.

    dtype: the gradients' dtype on the wire, which may be wider than the parameters' (fp32 after accumulation); None
    for gradients of their parameter's dtype.
    """

    spec: GroupSpec
    dtype: str | None = None
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)
        if self.dtype is not None:
            check_dtype(self.dtype, "gradient dtype")

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The group's tensors with the gradients' dtype."""
        return tuple(TensorSpec(t.name, t.shape, self.dtype or t.dtype, t.shard_dim) for t in self.spec.tensors)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one rank's segment to the next, per tensor: the padded shard's."""
        world = self.spec.world_size
        return tuple(t.outer * chunk_size(t.shape[t.shard_dim], world) * t.inner * t.itemsize for t in self.tensors)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor's first segment starts, in bytes."""
        offsets, offset = {}, 0
        for index in _side_by_side(self.spec):
            offsets[index] = offset
            offset = align(offset + self.strides[index] * self.spec.world_size, self.alignment)
        return tuple(offsets[index] for index in range(len(offsets)))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the landing, a multiple of the alignment."""
        ends = (o + s * self.spec.world_size for o, s in zip(self.offsets, self.strides, strict=True))
        return align(max(ends, default=0), self.alignment)

    def segment(self, index: int, source: int, owner: int) -> Region:
        """Where rank `source`'s slice of tensor `index` lands with its owner: contiguous, without padding.

        Raises SpecError for a source or owner outside the world: its segment would be the next tensor's.
        """
        if not 0 <= source < self.spec.world_size:
            raise SpecError(f"source must be 0 to {self.spec.world_size - 1}, got {source}")
        own = shard(self.tensors[index], self.spec.world_size, owner)
        offset = self.offsets[index] + source * self.strides[index]
        return Region(offset, 1, own.nbytes, own.nbytes).merged()
