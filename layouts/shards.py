"""Which elements each rank owns, cut as `torch.chunk` cuts them.

`torch.chunk(t, W, dim)` gives every rank ceil(n / W) steps along the dim until they run out, so later ranks may own
fewer, or none. 7 rows over 3 ranks, and 1 row over 2:

    rows   0 1 2 3 4 5 6          row  0
    rank   0 0 0 1 1 1 2          rank 0, and rank 1 owns nothing

A shard of dim 0 is one run of bytes of the unsharded tensor. A shard of a later dim is a run in every row:

    (2, 6) over 3 ranks, dim 1    rank 1 owns the bytes marked 1: rows=2, width=2 items, pitch=6 items
    0 0 1 1 2 2
    0 0 1 1 2 2
"""

from dataclasses import dataclass

from tide_triton.layouts.spec import SpecError, TensorSpec


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes as `rows` runs of `width`, one every `pitch`, from `offset` on. Empty regions have rows == width == 0."""

    offset: int
    rows: int
    width: int
    pitch: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset if self.nbytes == 0 else self.offset + (self.rows - 1) * self.pitch + self.width

    def merged(self) -> "Region":
        """The same bytes in one run where the runs touch, and in one canonical form where there are none."""
        if self.nbytes == 0:
            return Region(self.offset, 0, 0, 0)
        if self.rows == 1 or self.width == self.pitch:
            return Region(self.offset, 1, self.nbytes, self.nbytes)
        return self

    def shifted(self, by: int) -> "Region":
        return Region(self.offset + by, self.rows, self.width, self.pitch)


def chunk_size(size: int, world_size: int) -> int:
    """Steps along the shard dim that every rank but the last ones owns: ceil(size / world_size)."""
    return -(-size // world_size)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank`'s part of `tensor`: `size` steps from `start` along the shard dim, `padded_size` with padding."""

    tensor: TensorSpec
    rank: int
    start: int
    size: int
    padded_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the shard as its own contiguous tensor, without padding."""
        return self._shape(self.size)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Sizes with padding: the same on every rank."""
        return self._shape(self.padded_size)

    def _shape(self, size: int) -> tuple[int, ...]:
        dim = self.tensor.shard_dim
        return (*self.tensor.shape[:dim], size, *self.tensor.shape[dim + 1 :])

    @property
    def numel(self) -> int:
        return self.tensor.outer * self.size * self.tensor.inner

    @property
    def padded_numel(self) -> int:
        return self.tensor.outer * self.padded_size * self.tensor.inner

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.itemsize

    @property
    def padded_nbytes(self) -> int:
        return self.padded_numel * self.tensor.itemsize

    @property
    def region(self) -> Region:
        """Where the shard's bytes lie in the contiguous unsharded tensor."""
        step = self.tensor.inner * self.tensor.itemsize
        pitch = self.tensor.shape[self.tensor.shard_dim] * step
        return Region(self.start * step, self.tensor.outer, self.size * step, pitch).merged()


def shard(tensor: TensorSpec, world_size: int, rank: int) -> Shard:
    """Rank `rank`'s shard of `tensor` over `world_size` ranks. Raises SpecError for a rank outside the world."""
    if not 0 <= rank < world_size:
        raise SpecError(f"rank must be 0 to {world_size - 1} for world_size={world_size}, got {rank}")
    total = tensor.shape[tensor.shard_dim]
    chunk = chunk_size(total, world_size)
    start = min(rank * chunk, total)
    return Shard(tensor, rank, start, min(chunk, total - start), chunk)
