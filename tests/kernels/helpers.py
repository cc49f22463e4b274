"""What the kernel tests share: poisoned memory, views into it, values that round badly, and comparison by bits."""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from tide_triton.layouts import GroupSpec, Region, TensorSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: A NaN in every float dtype, and nothing that a kernel would write.
POISON = 0xFF

INT_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poisoned(nbytes: int) -> torch.Tensor:
    """Memory full of NaN, uint8 [nbytes rounded up to 8], aligned to 16 bytes."""
    return torch.full((-(-nbytes // 8) * 8,), POISON, dtype=torch.uint8, device=DEVICE)


def region_view(memory: torch.Tensor, region: Region, dtype: torch.dtype) -> torch.Tensor:
    """The region's elements: 1-D where they are one run, else (rows, cols) with strides (pitch, 1)."""
    typed = memory.view(dtype)
    size = dtype.itemsize
    assert region.offset % size == region.width % size == region.pitch % size == 0
    if region.rows <= 1:
        return typed[region.offset // size :][: region.nbytes // size]
    shape, strides = (region.rows, region.width // size), (region.pitch // size, 1)
    return torch.as_strided(typed, shape, strides, region.offset // size)


def values(numel: int, dtype: torch.dtype, seed: int, *, special: bool = True) -> torch.Tensor:
    """Normal values over many magnitudes, with ties, signed zeros, subnormals, infinities and NaNs strewn in."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-8, 9, (numel,), generator=generator)
    if special:
        # Ties of bf16, subnormals of fp32, a tie of fp16 with its infinity, and what bf16 rounds to infinity.
        odd = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3e-39, -1e-41, 65520.0, 3.4e38, math.inf, -math.inf, math.nan]
        choice = torch.tensor(odd, dtype=torch.float64)[torch.randint(0, len(odd), (numel,), generator=generator)]
        x = torch.where(torch.rand(numel, generator=generator) < 0.2, choice, x)
    return x.to(dtype).to(DEVICE)


def canonical_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of `tensor` as integers, with all NaNs made alike: IEEE leaves their payload open."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_floating_point():
        flat = torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat)
    return flat.view(INT_OF[flat.element_size()])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal bit by bit but for NaN payloads; -0.0 is not 0.0."""
    assert got.dtype == expected.dtype
    a, b = canonical_bits(got), canonical_bits(expected)
    assert a.numel() == b.numel()
    wrong = (a != b).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        flat_got, flat_expected = got.reshape(-1), expected.reshape(-1)
        raise AssertionError(
            f"{what}: {wrong.numel()} of {a.numel()} differ, first at {at}: got {flat_got[at].item()} "
            f"({int(a[at]):#x}), expected {flat_expected[at].item()} ({int(b[at]):#x})"
        )


def assert_only_written(memory: torch.Tensor, written: Iterable[torch.Tensor]) -> None:
    """All of `memory` but the views `written` into it is poison still. Overwrites the views."""
    for view in written:
        bytes_of(view).fill_(POISON)
    assert bool((memory == POISON).all())


def bytes_of(view: torch.Tensor) -> torch.Tensor:
    """The bytes of a view's elements, as a view of them."""
    if view.dim() == 1:
        return view.view(torch.uint8)
    size = view.element_size()
    base = torch.empty(0, dtype=torch.uint8, device=view.device)
    shape, strides = (view.shape[0], view.shape[1] * size), (view.stride(0) * size, 1)
    return base.set_(view.untyped_storage(), view.storage_offset() * size, shape, strides)


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """A float tensor of at most 32 bits as float32 values, exactly."""
    return tensor.detach().reshape(-1).float().cpu().numpy()


def round_numpy(x: npt.NDArray[np.float32], dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """float32 values rounded to a float dtype of at most 32 bits, by numpy alone."""
    if dtype == torch.float32:
        return x
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    low, kept = bits & 0xFFFF, bits & 0xFFFF0000
    up = (low > 0x8000) | ((low == 0x8000) & ((bits >> 16) & 1 == 1))
    with np.errstate(over="ignore"):
        rounded = (kept + np.where(up, np.uint32(0x10000), np.uint32(0))).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded).astype(np.float32)


@st.composite
def groups(draw: st.DrawFn, dtype: str | None = None) -> GroupSpec:
    """One to three float tensors over 1 to 8 ranks: even, uneven and empty shards of any dim, aligned or not."""
    sizes = st.sampled_from((0, 1, 3, 7, 8, 16, 32, 64))
    tensors = []
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
        if math.prod(shape) > 16384:
            shape = shape[:2]
        name = dtype or draw(st.sampled_from(("float32", "bfloat16", "float16", "float64")))
        tensors.append(TensorSpec(f"w{index}", shape, name, draw(st.integers(0, len(shape) - 1))))
    return GroupSpec(draw(st.integers(1, 8)), tuple(tensors))
