"""Tensors as the kernels address them: a base address, a number of elements, and rows of `cols` every `pitch`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton.language as tl

#: Dtypes that the kernels cast between and add up. Their order is the kernels' code for them (`tiles.load_float`).
FLOAT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Triton's name for each.
TRITON_DTYPES: Mapping[torch.dtype, Any] = MappingProxyType(
    {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float64: tl.float64,
    }
)


class UnsupportedDtypeError(TypeError):
    """A dtype that a kernel neither casts nor copies. The message names it and says which would do."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor's memory as runs of `cols` elements, `pitch` elements apart, from `address` (in bytes) on.

    A contiguous tensor is one run (cols == pitch == numel); an empty one has cols == pitch == numel == 0.
    """

    address: int
    numel: int
    cols: int
    pitch: int
    itemsize: int

    @property
    def contiguous(self) -> bool:
        return self.cols == self.numel

    def aligned(self, vector: int) -> bool:
        """Whether groups of `vector` elements, counted from any run's start, lie whole in a run on 16-byte bounds."""
        if self.address % 16:
            return False
        return self.contiguous or (self.cols % vector == 0 and self.pitch * self.itemsize % 16 == 0)


def view_of(tensor: torch.Tensor, what: str) -> View:
    """The memory of `tensor`, which is contiguous (any shape), or 2-D (rows, cols) with strides (pitch, 1).

    what: how an error names the tensor, e.g. "sources[3]".

    Raises ValueError for other strides, and for rows that overlap (pitch < cols).
    """
    itemsize = tensor.element_size()
    numel = tensor.numel()
    if numel == 0:
        return View(0, 0, 0, 0, itemsize)
    if tensor.is_contiguous():
        return View(tensor.data_ptr(), numel, numel, numel, itemsize)
    if tensor.dim() == 2:
        rows, cols = tensor.shape
        pitch, step = tensor.stride()
        if (step == 1 or cols == 1) and (rows == 1 or pitch >= cols):
            if rows == 1:
                return View(tensor.data_ptr(), numel, numel, numel, itemsize)
            return View(tensor.data_ptr(), numel, cols, pitch, itemsize)
    raise ValueError(
        f"{what} must be contiguous, or 2-D (rows, cols) with strides (pitch >= cols, 1); "
        f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
    )


def common_cols(views: Sequence[View], what: str) -> int:
    """The run length that all of `views` share, of which contiguous ones take any. All hold equally many elements.

    Raises ValueError where two views fall into runs of different lengths.
    """
    cols = {view.cols for view in views if not view.contiguous}
    if len(cols) > 1:
        raise ValueError(f"{what}: strided views of one tensor must have equally long rows, got {sorted(cols)}")
    return cols.pop() if cols else views[0].numel


def check_float(dtype: torch.dtype, what: str) -> None:
    """Raises UnsupportedDtypeError unless `dtype` is one of `FLOAT_DTYPES`."""
    if dtype not in FLOAT_DTYPES:
        supported = ", ".join(str(d).removeprefix("torch.") for d in FLOAT_DTYPES)
        raise UnsupportedDtypeError(f"{what} has dtype {str(dtype).removeprefix('torch.')}; supported are {supported}")


def check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where `tensors` lie on several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")
