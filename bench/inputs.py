"""Shards, gradients and exact references of a group: every rank makes all ranks' data from seeds, none is sent."""

from collections.abc import Iterator

import torch

from bench.ranks import Here
from tide_triton.layouts import GroupSpec, TensorSpec, shard


def parameter(here: Here, tensor: TensorSpec, index: int) -> torch.Tensor:
    """The unsharded fp32 tensor, the same on every rank."""
    return torch.randn(tensor.shape, device=here.device, generator=_seeded(here, 1000 + index))


def shards(here: Here, spec: GroupSpec) -> list[torch.Tensor]:
    """This rank's fp32 shards, 1-D, zeros in the padding."""
    result = []
    for index, tensor in enumerate(spec.tensors):
        own = shard(tensor, spec.world_size, here.rank)
        padded = torch.zeros(own.padded_numel, device=here.device)
        step = tensor.inner
        padded[: own.numel] = parameter(here, tensor, index).view(-1)[own.start * step : own.start * step + own.numel]
        result.append(padded)
    return result


def gradient(here: Here, tensor: TensorSpec, index: int, rank: int) -> torch.Tensor:
    """Rank `rank`'s unsharded bf16 gradient."""
    seed = 100_000 * (rank + 1) + index
    return torch.randn(tensor.shape, device=here.device, generator=_seeded(here, seed)).to(torch.bfloat16)


def gradients(here: Here, spec: GroupSpec) -> list[torch.Tensor]:
    """This rank's gradients."""
    return [gradient(here, tensor, index, here.rank) for index, tensor in enumerate(spec.tensors)]


def averaged(here: Here, spec: GroupSpec) -> Iterator[torch.Tensor]:
    """The exact result of the reduce-scatter, shard by shard: added in rank order in fp32, divided by the ranks."""
    for index, tensor in enumerate(spec.tensors):
        own = shard(tensor, spec.world_size, here.rank)
        begin = own.start * tensor.inner
        total: torch.Tensor | None = None
        for rank in range(spec.world_size):
            part = gradient(here, tensor, index, rank).view(-1)[begin : begin + own.numel].float()
            total = part if total is None else total + part
        assert total is not None
        yield total / spec.world_size


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether both hold the same bits, NaN and signed zeros included."""
    integers = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    return got.dtype == wanted.dtype and torch.equal(
        got.contiguous().view(-1).view(integers), wanted.contiguous().view(-1).view(integers)
    )


def _seeded(here: Here, seed: int) -> torch.Generator:
    return torch.Generator(here.device).manual_seed(seed)
