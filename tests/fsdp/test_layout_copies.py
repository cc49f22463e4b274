"""Layout copies, counted from the operators that make them: stock makes what the meters say, TIDE makes none."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import tide_triton
from tests.fsdp.models import BF16, FP16, FULL, MIXED, Model, line, seeded, sharded
from tests.fsdp.parity import Loop, train
from tests.fsdp.test_attach import attach
from tests.ranks import RankPools
from tide_triton.fsdp.reference import meter_stock
from tide_triton.fsdp.tickets import GatherTicket, GradTicket, ReduceTicket

_fsdp = torch.ops.fsdp
_TICKETS = (GatherTicket, GradTicket, ReduceTicket)


class LayoutCopies(TorchDispatchMode):
    """Bytes that FSDP2's layout operators write to real memory, by operator.

    copy-in writes the all-gather's input, copy-out writes its outputs, `chunk_cat` the reduce-scatter's input. Casts to
    the gathered dtype go through `_foreach_copy_`; they are kept apart, since what they write is no layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = {"copy_in": 0, "copy_out": 0, "chunk_cat": 0, "foreach_copy": 0}
        self.on_tickets = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _fsdp.all_gather_copy_in.default:
            self._count("copy_in", [args[1]], args[3] * args[1].itemsize)
        elif func is _fsdp.split_with_sizes_copy.default:
            out = kwargs["out"]
            self._count("copy_out", [args[0]], sum(t.nbytes for t in out))
        elif func is _fsdp.chunk_cat.default:
            self._count("chunk_cat", [kwargs["out"]], kwargs["out"].nbytes)
        elif func is torch.ops.aten._foreach_copy_.default:
            self._count("foreach_copy", args[0], sum(t.nbytes for t in args[0]))
        return func(*args, **kwargs)

    def _count(self, name: str, written: list[torch.Tensor], nbytes: int) -> None:
        if all(isinstance(t, _TICKETS) for t in written) and written:
            self.on_tickets += 1
        else:
            self.nbytes[name] += nbytes


def _model(world_size: int, policy: MixedPrecisionPolicy) -> nn.Module:
    return sharded(seeded(Model), line(world_size), policy)


def _counts(rank: int, world_size: int, policy: MixedPrecisionPolicy, micro: int) -> dict[str, Any]:
    loop = Loop(steps=2, micro=micro, sync=False)
    stock = _model(world_size, policy)
    gather, reduce = meter_stock(stock)
    with LayoutCopies() as counted:
        train(stock, rank, loop)
    tide = _model(world_size, policy)
    attach(tide)
    with LayoutCopies() as attached:
        train(tide, rank, loop)
    report = tide_triton.report(tide, quiet=True)
    tide_triton.detach(tide)
    return {
        "stock": counted.nbytes,
        "stock on tickets": counted.on_tickets,
        "metered": (gather.layout_copy_bytes, reduce.layout_copy_bytes),
        "tide": attached.nbytes,
        "tide on tickets": attached.on_tickets,
        "calls": report.gather.calls * 2 + report.reduce.calls,
        "reported": report.gather.layout_copy_bytes + report.reduce.layout_copy_bytes,
        "wire": (gather.wire_bytes, report.gather.wire_bytes, reduce.wire_bytes, report.reduce.wire_bytes),
    }


@pytest.mark.parametrize(("policy", "micro"), [(MIXED, 1), (MIXED, 2), (BF16, 1), (FP16, 1), (FULL, 2)])
def test_stock_writes_what_its_meter_counts_and_tide_writes_nothing(
    ranks: RankPools, policy: MixedPrecisionPolicy, micro: int
) -> None:
    for found in ranks(2).run(_counts, policy, micro):
        stock = found["stock"]
        assert found["metered"] == (stock["copy_in"] + stock["copy_out"], stock["chunk_cat"])
        assert min(stock["copy_in"], stock["copy_out"], stock["chunk_cat"]) > 0
        assert found["stock on tickets"] == 0

        # Every operator still runs, on tickets: one copy-in and one copy-out a gather, one chunk_cat a reduction.
        assert found["tide"] == {"copy_in": 0, "copy_out": 0, "chunk_cat": 0, "foreach_copy": 0}
        assert found["tide on tickets"] == found["calls"]
        assert found["reported"] == 0


def test_bf16_gradients_cross_the_wire_in_half_the_bytes_of_an_fp32_reduce(ranks: RankPools) -> None:
    for found in ranks(2).run(_counts, MIXED, 1):
        stock_gather, tide_gather, stock_reduce, tide_reduce = found["wire"]
        # Stock also sends padding.
        assert tide_gather <= stock_gather
        assert 0.4 * stock_reduce < tide_reduce <= 0.5 * stock_reduce
