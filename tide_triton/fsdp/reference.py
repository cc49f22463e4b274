"""FSDP2's own collectives, metered, and a reduce-scatter that adds in rank order.

`StockAllGather` and `StockReduceScatter` do what FSDP2 does by itself and count it. `RankOrderedReduceScatter` is what
a result can be compared with bit for bit at any number of ranks: gloo and NCCL add in orders of their own. It adds as
several nodes do, too, where it is told of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tide_triton.fsdp.group_reduce import reduction_of
from tide_triton.fsdp.internals import groups_of
from tide_triton.kernels import accumulate_reference
from tide_triton.traffic import Traffic


class StockAllGather(DefaultAllGather):  # type: ignore[misc]
    """FSDP2's all-gather, counted in `traffic` as `reason`."""

    def __init__(self, traffic: Traffic, reason: str) -> None:
        self.traffic, self.reason = traffic, reason

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # Copied in once, and out again in full.
        copied = input_tensor.nbytes + output_tensor.nbytes
        self.traffic.fell_back(self.reason, input_tensor.nbytes * (group.size() - 1), copied)
        work: dist.Work | None = super().__call__(output_tensor, input_tensor, group, async_op)
        return work


class StockReduceScatter(DefaultReduceScatter):  # type: ignore[misc]
    """FSDP2's reduce-scatter, counted in `traffic` as `reason`."""

    def __init__(self, traffic: Traffic, reason: str) -> None:
        self.traffic, self.reason = traffic, reason

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        wire = input_tensor.nbytes // group.size() * (group.size() - 1)
        self.traffic.fell_back(self.reason, wire, input_tensor.nbytes)
        work: dist.Work | None = super().__call__(output_tensor, input_tensor, group, op, async_op)
        return work


@dataclass
class RankOrderedReduceScatter(ReduceScatter):  # type: ignore[misc]
    """A reduce-scatter of FSDP2's flat buffers that adds contributions in rank order.

    nodes: over how many nodes; with more than one, contributions are added in rank order inside each, and these sums,
    rounded to `wire_dtype` (None: not rounded), in node order.
    """

    nodes: int = 1
    wire_dtype: torch.dtype | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        reduction = reduction_of(op, group.size(), input_tensor.dtype, 1.0)
        contributions = list(received.chunk(group.size()))
        add_up = partial(accumulate_reference, wire_dtype=reduction.wire_dtype, premultiply=reduction.premultiply)
        if self.nodes == 1:
            add_up([contributions], [output_tensor], divisor=reduction.divisor)
            return None
        gpus = group.size() // self.nodes
        wide = torch.float64 if input_tensor.dtype == torch.float64 else torch.float32
        partials = [torch.empty_like(contributions[0], dtype=self.wire_dtype or wide) for _ in range(self.nodes)]
        of_nodes = [contributions[node * gpus : (node + 1) * gpus] for node in range(self.nodes)]
        add_up(of_nodes, partials)
        accumulate_reference([[of_node.to(wide) for of_node in partials]], [output_tensor], divisor=reduction.divisor)
        return None


def meter_stock(model: nn.Module) -> tuple[Traffic, Traffic]:
    """Count what stock FSDP2 moves below `model` from now on: (all-gather, reduce-scatter)."""
    gather, reduce = Traffic(), Traffic()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module):
                group._all_gather_comm = StockAllGather(gather, "stock")
                group._reduce_scatter_comm = StockReduceScatter(reduce, "stock")
    return gather, reduce


def reduce_in_rank_order(model: nn.Module, nodes: int = 1, wire_dtype: torch.dtype | None = None) -> None:
    """Let stock FSDP2 below `model` add gradients in rank order, or as `attach` does with `nodes` and `wire_dtype`.

    Gradients that go over a rail as they are (nodes of one GPU) are rounded to `wire_dtype` here and not there: the
    same unless FSDP2 scales them first by what is no power of two, or they are of another dtype of its size.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module):
                group._reduce_scatter_comm = RankOrderedReduceScatter(nodes, wire_dtype)
