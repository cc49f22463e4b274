"""Where a rank's gradients lie in its slot for a switch to sum them: the same places on every rank.

The switch adds what lies at one offset of all ranks' windows, 16 bytes at a time. So each rank keeps its own gradients
whole, owner by owner, and each owner's part starts on 16 bytes:

    on every rank    | w0: for r0 | for r1 | for r2 | w1: for r0 | for r1 | for r2 | ...
    rank 1 reads                  |  sum   |                     |  sum   |

What a part leaves of its last 16 bytes is never written; where it ends on an odd bf16 element, the one after is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tide_triton.layouts.shards import Region, chunk_size, shard
from tide_triton.layouts.slots import align
from tide_triton.layouts.spec import GroupSpec, TensorSpec
from tide_triton.layouts.transfers import Copy, between

#: Bytes on which every owner's part starts: what a switch reads at once.
PART_ALIGNMENT = 16


@dataclass(frozen=True)
class SwitchLayout:
    """Parts of bf16 gradients of the tensors of `spec`, by tensor and owner, each on 16 bytes."""

    spec: GroupSpec

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The group's tensors in bf16."""
        return tuple(TensorSpec(t.name, t.shape, "bfloat16", t.shard_dim) for t in self.spec.tensors)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one owner's part to the next, per tensor: the padded shard's, aligned."""
        world = self.spec.world_size
        sizes = (t.outer * chunk_size(t.shape[t.shard_dim], world) * t.inner * t.itemsize for t in self.tensors)
        return tuple(align(size, PART_ALIGNMENT) for size in sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor's first part starts, in bytes."""
        offsets, offset = [], 0
        for stride in self.strides:
            offsets.append(offset)
            offset = align(offset + stride * self.spec.world_size)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parts, a multiple of a slot's alignment."""
        if not self.offsets:
            return 0
        return align(self.offsets[-1] + self.strides[-1] * self.spec.world_size)

    def part(self, index: int, owner: int) -> Region:
        """Where the part of tensor `index` that `owner` gets the sum of lies on every rank: contiguous, unpadded.

        Raises SpecError for an owner outside the world.
        """
        nbytes = shard(self.tensors[index], self.spec.world_size, owner).nbytes
        return Region(self.offsets[index] + owner * self.strides[index], 1, nbytes, nbytes).merged()

    def copies(self, index: int) -> Iterator[Copy]:
        """From the gradient of tensor `index`, contiguous, to its parts, owner by owner."""
        for owner in range(self.spec.world_size):
            source = shard(self.tensors[index], self.spec.world_size, owner).region
            if (copy := between(source, self.part(index, owner))) is not None:
                yield copy
