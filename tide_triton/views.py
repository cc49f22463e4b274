"""Layouts as torch tensors: dtypes by name, and the views of a slot that a region describes."""

import torch

from tide_triton.layouts import ITEMSIZES, Region

#: torch's dtypes by the names that layouts use.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZES}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous `tensor` as uint8, shape (nbytes,). Raises ValueError where it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8)


def region_view(memory: torch.Tensor, region: Region, dtype: torch.dtype) -> torch.Tensor:
    """`region` of `memory` (uint8, 1-D) as `dtype`: 1-D where it is one run, else (rows, elements per row).

    Raises ValueError where the region's bytes do not fall on whole elements.
    """
    size = dtype.itemsize
    if region.nbytes == 0:
        return memory[:0].view(dtype)
    if region.offset % size or region.width % size or (region.rows > 1 and region.pitch % size):
        raise ValueError(f"{region} does not fall on elements of {dtype}")
    span = memory[region.offset : region.end]
    if region.rows == 1:
        return span.view(dtype)
    # `view` needs whole elements, which the last row's end guarantees.
    return torch.as_strided(
        span.view(dtype),
        (region.rows, region.width // size),
        (region.pitch // size, 1),
        (memory.storage_offset() + region.offset) // size,
    )
