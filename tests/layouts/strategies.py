"""Random layouts, and the torch and numpy values that they are held against.

Sizes include 0, 1, primes and powers of two, so that shards come out even, uneven and empty. Tensors stay small (at
most `MAX_NUMEL` elements), since `execute` walks rows in Python.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import settings
from hypothesis import strategies as st

from tide_triton.layouts import ITEMSIZES, Copy, GroupSpec, Region, TensorSpec

Bytes = npt.NDArray[np.uint8]

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 64)
MAX_NUMEL = 512
MAX_WORLD = 16

#: What memory holds before anything is written to it. Contents never hold this byte, so a lost byte shows as well.
CANARY = 0xEE

#: Examples of a property that moves bytes, and of one that only compares numbers.
moving = settings(deadline=None, max_examples=120)
comparing = settings(deadline=None, max_examples=250)

world_sizes = st.integers(1, MAX_WORLD)
dtypes = st.sampled_from(sorted(ITEMSIZES))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """One to four dims of at most `MAX_NUMEL` elements together."""
    room, shape = MAX_NUMEL, []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([size for size in SIZES if size <= room]))
        room //= max(size, 1)
        shape.append(size)
    return tuple(shape)


@st.composite
def tensor_specs(draw: st.DrawFn, name: str = "w") -> TensorSpec:
    shape = draw(shapes())
    return TensorSpec(name, shape, draw(dtypes), draw(st.integers(0, len(shape) - 1)))


@st.composite
def group_specs(draw: st.DrawFn, min_tensors: int = 0, max_tensors: int = 3) -> GroupSpec:
    count = draw(st.integers(min_tensors, max_tensors))
    return GroupSpec(draw(world_sizes), tuple(draw(tensor_specs(f"w{index}")) for index in range(count)))


def contents(spec: TensorSpec, rng: np.random.Generator) -> torch.Tensor:
    """A contiguous tensor of `spec` with random bytes, none of them `CANARY`; bools hold 0 or 1."""
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    as_bytes(tensor)[:] = rng.integers(0, 2 if spec.dtype == "bool" else CANARY, spec.nbytes, dtype=np.uint8)
    return tensor


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of `tensor` in row-major order, as a 1-D array: a view where the tensor is contiguous."""
    raw: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def chunks(tensor: torch.Tensor, world_size: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, and for the ranks it has no chunk for, a chunk of no steps along `dim`."""
    cut = list(torch.chunk(tensor, world_size, dim))
    return cut + [tensor.narrow(dim, 0, 0)] * (world_size - len(cut))


def poisoned(nbytes: int) -> Bytes:
    """Memory of `nbytes` bytes and a guard after them, all `CANARY`."""
    return np.full(nbytes + 64, CANARY, dtype=np.uint8)


def addresses(region: Region) -> list[int]:
    """Every byte of `region`, in row order."""
    return [region.offset + row * region.pitch + byte for row in range(region.rows) for byte in range(region.width)]


def read(memory: Bytes, region: Region) -> Bytes:
    """The bytes of `region` as a contiguous array."""
    return memory[np.array(addresses(region), dtype=np.int64)]


def write(memory: Bytes, region: Region, data: Bytes) -> None:
    """Fill `region` with `data`."""
    memory[np.array(addresses(region), dtype=np.int64)] = data


def times_written(copies: Iterable[Copy], like: Bytes) -> npt.NDArray[np.int64]:
    """How often `copies` write each byte of a destination of `like`'s size."""
    times = np.zeros(like.size, dtype=np.int64)
    for copy in copies:
        np.add.at(times, np.array(addresses(copy.dst), dtype=np.int64), 1)
    return times


def mapping(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    """Every (destination, source) byte that `copies` move, sorted."""
    return sorted(pair for copy in copies for pair in zip(addresses(copy.dst), addresses(copy.src), strict=True))
