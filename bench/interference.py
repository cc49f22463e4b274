"""A GEMM that fills the GPU in one wave, beside each collective of a Llama block.

GEMMs run back to back on one stream while the collective runs on another; those that lie wholly within the collective
count. A row: gemm ("1408x3072x8192"), beside, alone_us, beside_us (mean of those that count), slowdown (of the mean),
slowdown_median, samples, kernel and ctas of the GEMM (132 on an H200: one wave).
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench import inputs, trace
from bench.baselines import PeerCopy, StockGather, StockReduce, all_gather_flat, padded_numels, wire_nbytes
from bench.ranks import TIMEOUT_S, Here
from bench.reduce_scatter import TideReduce
from bench.results import Row, attempt
from bench.timing import Timer, percentile
from tide_triton.layouts import GroupSpec
from tide_triton.transports.select import TransportName

#: (M, N, K): 11 x 12 tiles of 128 x 256, one for each SM of an H200.
GEMM = (1408, 3072, 8192)

#: GEMMs in a row: longer than any of the collectives takes.
_GEMMS = 160

_REPETITIONS = 4


def run(
    here: Here, timer: Timer, spec: GroupSpec, transport: TransportName, *, shape: tuple[int, int, int] = GEMM
) -> Iterator[Row]:
    """One row per collective, "nothing" first. shape: (M, N, K) of the bf16 GEMM."""
    import tide_triton
    from tide_triton.fsdp.group_reduce import SUM_CTAS

    assert dist.group.WORLD is not None
    m, n, k = shape
    a = torch.randn(m, k, device=here.device).to(torch.bfloat16)
    b = torch.randn(k, n, device=here.device).to(torch.bfloat16)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=here.device)
    gemm = functools.partial(torch.mm, a, b, out=out)
    name = "x".join(map(str, shape))
    facts: Row = {}

    def measure_alone() -> Row:
        facts.update(_facts(here, timer, gemm))
        return {**facts, "beside_us": facts["alone_us"], "slowdown": 1.0, "slowdown_median": 1.0}

    yield attempt(here, {"gemm": name, "beside": "nothing"}, measure_alone)
    shards, gradients = inputs.shards(here, spec), inputs.gradients(here, spec)
    with tide_triton.Collectives(
        dist.group.WORLD, spec, transport=transport, device=here.device, timeout_s=TIMEOUT_S
    ) as tide:
        bf16 = [shard.to(torch.bfloat16) for shard in shards]
        stock, stock_bf16 = StockReduce(here, spec), StockReduce(here, spec, wire_dtype=torch.bfloat16)
        flat, flat_bf16 = stock.copied_in(), stock_bf16.copied_in()
        gather = StockGather(here, spec)
        gathered, own = _gather_buffers(here, spec)
        neighbours: dict[str, Callable[[], object]] = {
            "nccl_reduce_scatter_fp32": lambda: stock.communicate(flat),
            "nccl_reduce_scatter_bf16": lambda: stock_bf16.communicate(flat_bf16),
            "stock_reduce_scatter": lambda: stock(gradients),
            "nccl_all_gather": lambda: all_gather_flat(gathered, own),
            "stock_all_gather": lambda: gather(shards),
            "peer_copy": PeerCopy(here, wire_nbytes(spec, here.rank)),
            "tide_all_gather": lambda: tide.all_gather(shards),
            "tide_all_gather_bf16_shards": lambda: tide.all_gather(bf16),
            "tide_reduce_scatter": TideReduce(here, tide, gradients, SUM_CTAS),
            "tide_reduce_scatter_16_ctas": TideReduce(here, tide, gradients, 16),
            "tide_reduce_scatter_all_ctas": TideReduce(here, tide, gradients, None),
        }
        for beside, neighbour in neighbours.items():
            measure = functools.partial(_beside, here, timer, gemm, neighbour, facts)
            yield attempt(here, {"gemm": name, "beside": beside}, measure)


def _gather_buffers(here: Here, spec: GroupSpec) -> tuple[torch.Tensor, torch.Tensor]:
    own = sum(padded_numels(spec))
    output = torch.randn(own * spec.world_size, device=here.device).to(torch.bfloat16)
    return output, output[here.rank * own : (here.rank + 1) * own]


def _facts(here: Here, timer: Timer, gemm: Callable[[], object]) -> Row:
    """The GEMM alone: time of one in a row of many, its kernel and its grid."""
    for _ in range(3):
        gemm()
    times = []
    for _ in range(_REPETITIONS):
        times += [end - start for start, end in _spans(here, timer, gemm, None)[0]]
    events = [e for e in trace.record(here, timer, gemm, repetitions=1) if e.is_kernel]
    mean, median = here.largest([sum(times) / len(times), percentile(times, 50)])
    largest = max(events, key=lambda e: e.duration_us, default=None)
    return {
        "alone_us": mean,
        "alone_median_us": median,
        "kernel": largest.name[:80] if largest else None,
        "ctas": largest.ctas if largest else None,
        "samples": len(times),
        "note": None if here.is_cuda else "no GPU: nothing overlaps, and ratios mean nothing",
    }


def _beside(here: Here, timer: Timer, gemm: Callable[[], object], neighbour: Callable[[], object], facts: Row) -> Row:
    neighbour()
    here.synchronize()
    within: list[float] = []
    lasted: list[float] = []
    for _ in range(_REPETITIONS):
        spans, (begin, end) = _spans(here, timer, gemm, neighbour)
        within += [stop - start for start, stop in spans if start >= begin and stop <= end]
        lasted.append(end - begin)
    if not here.everywhere(bool(within)):
        raise RuntimeError(f"no GEMM ran wholly within the collective, which took {percentile(lasted, 50):.0f} us")
    mean, median = here.largest([sum(within) / len(within), percentile(within, 50)])
    return {
        **facts,
        "beside_us": mean,
        "slowdown": mean / facts["alone_us"],
        "slowdown_median": median / facts["alone_median_us"],
        "slowdown_p20": percentile(within, 20) / facts["alone_us"],
        "slowdown_p80": percentile(within, 80) / facts["alone_us"],
        "samples": len(within),
        "collective_us": percentile(lasted, 50),
    }


def _spans(
    here: Here, timer: Timer, gemm: Callable[[], object], neighbour: Callable[[], object] | None
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """(start, end) of each GEMM and of the neighbour, in us since they were let go together."""
    if not here.is_cuda:
        # One after the other: this shows that the code runs, and nothing about interference.
        begin_s = time.perf_counter()
        gemm()
        middle = (time.perf_counter() - begin_s) * 1e6
        if neighbour is not None:
            neighbour()
        return [(0.0, middle)], (0.0, (time.perf_counter() - begin_s) * 1e6)
    main = torch.cuda.current_stream(here.device)
    side = _side_stream(here)
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(_GEMMS + 1)]
    zero, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    # Time for the host to enqueue everything: about 10 us a GEMM.
    timer.align(2.0)
    zero.record(main)
    side.wait_event(zero)
    with torch.cuda.stream(side):
        begin.record(side)
        if neighbour is not None:
            neighbour()
        end.record(side)
    for index in range(_GEMMS):
        marks[index].record(main)
        gemm()
    marks[_GEMMS].record(main)
    main.wait_stream(side)
    torch.cuda.synchronize(here.device)
    times = [zero.elapsed_time(mark) * 1e3 for mark in marks]
    return list(itertools.pairwise(times)), (zero.elapsed_time(begin) * 1e3, zero.elapsed_time(end) * 1e3)


@functools.cache
def _side_stream(here: Here) -> Any:
    return torch.cuda.Stream(here.device)
