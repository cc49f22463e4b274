"""Naive torch twins of the kernels: the same results bit by bit (but for NaN payloads), one tensor after the other.

They run on CPU tensors, and say what the kernels mean. They check nothing: `place`, `accumulate` and
`prepare_multimem` do, before either engine runs.
"""

from collections.abc import Sequence

import torch


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as `dtype`, rounded to nearest even; from fp64 to 16 bits by way of fp32."""
    if tensor.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.to(torch.float32)
    return tensor.to(dtype)


def accumulation_dtype(contributions: Sequence[torch.Tensor], wire_dtype: torch.dtype | None) -> torch.dtype:
    """fp64 where what is added up is fp64, else fp32."""
    dtypes = {wire_dtype} if wire_dtype is not None else {x.dtype for x in contributions}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def place_reference(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Twin of `place`."""
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(cast(source, destination.dtype).reshape(destination.shape))


def accumulate_reference(
    contributions: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[torch.Tensor],
    *,
    wire_dtype: torch.dtype | None = None,
    premultiply: float = 1.0,
    divisor: float = 1.0,
    add: bool = False,
    statistics: bool = False,
) -> torch.Tensor | None:
    """Twin of `accumulate`."""
    squares, nonfinite = 0.0, 0
    for ranks, output in zip(contributions, outputs, strict=True):
        wide = accumulation_dtype(ranks, wire_dtype)
        # Factors are tensors: torch divides a CUDA tensor by a Python number as a product with its inverse.
        factor = torch.tensor(premultiply, dtype=wide, device=output.device)
        divide_by = torch.tensor(divisor, dtype=wide, device=output.device)

        total = None
        for contribution in ranks:
            x = contribution.reshape(-1)
            x = (cast(x, wire_dtype) if wire_dtype is not None else x).to(wide)
            if premultiply != 1.0:
                x = x * factor
                x = (cast(x, wire_dtype) if wire_dtype is not None else x).to(wide)
            # Starting from x_0, not from 0: 0.0 + -0.0 would be 0.0.
            total = x if total is None else total + x
        assert total is not None
        if divisor != 1.0:
            total = total / divide_by

        value = cast(total, output.dtype)
        flat = output.view(-1)
        if add:
            sum_dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
            value = cast(flat[: value.numel()].to(sum_dtype) + value.to(sum_dtype), output.dtype)
        else:
            flat[value.numel() :] = 0
        flat[: value.numel()] = value

        if statistics:
            squared = value.to(torch.float64 if output.dtype == torch.float64 else torch.float32).square()
            squares += squared.sum(dtype=torch.float64).item()
            nonfinite += int((~torch.isfinite(value)).sum())
    if not statistics:
        return None
    device = outputs[0].device if outputs else torch.device("cpu")
    return torch.tensor([squares, nonfinite], dtype=torch.float64, device=device)


def multimem_reference(
    contributions: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[torch.Tensor],
    *,
    premultiply: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """Twin of `prepare_multimem` with the emulated switch: bf16 added in fp32 in rank order, sums rounded to bf16."""
    for ranks, output in zip(contributions, outputs, strict=True):
        total = ranks[0].reshape(-1).to(torch.float32)
        for contribution in ranks[1:]:
            total = total + contribution.reshape(-1).to(torch.float32)
        total = cast(total, torch.bfloat16).to(torch.float32)
        if premultiply != 1.0:
            total = total * torch.tensor(premultiply, dtype=torch.float32, device=output.device)
        if divisor != 1.0:
            total = total / torch.tensor(divisor, dtype=torch.float32, device=output.device)
        flat = output.view(-1)
        flat[: total.numel()] = cast(total, output.dtype)
        flat[total.numel() :] = 0
