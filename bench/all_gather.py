"""All-gather of one transformer block: fp32 shards to bf16 parameters that compute can read.

A row: model, bytes (of the unsharded group), stock_ms, symm_ms, tide_ms, limit_ms (each with _p20_ms, _p80_ms and
_host_us), sm_kernels (what TIDE ran on SMs in one gather: {kernel: launches}), stock_sm_kernels, symm_sm_kernels,
*_sm_ms (SM-ms), symm_on_copy_engines (no NCCL kernel in symm's trace), exact (bitwise, on every rank).

`run_nodes` times it between logical nodes of one host, by each library that puts between nodes, beside the flat one by
copy engine. A row: model, nodes, transport, bytes, ms, flat_ms, over_flat host_us, flat_host_us,
p20_ms, p80_ms, exact. All transports of a model are timed in turns.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench import inputs, trace
from bench.baselines import PeerCopy, StockGather, ZeroCta, windowed, wire_nbytes
from bench.cases import Case
from bench.ranks import TIMEOUT_S, Here
from bench.results import Row, attempt
from bench.timing import Timer
from tide_triton import Collectives
from tide_triton.layouts import Topology
from tide_triton.transports.select import TransportName

#: Repetitions in a trace.
_TRACED = 5
#: What puts between nodes, by the type of device.
BETWEEN_NODES: Mapping[str, tuple[TransportName, ...]] = {
    "cuda": ("nccl_rma", "nvshmem"),
    "cpu": ("host",),
}


def run(here: Here, timer: Timer, cases: list[Case], transport: TransportName) -> Iterator[Row]:
    """One row per case."""
    zero = ZeroCta(here)
    for case in cases:
        yield attempt(
            here,
            {"model": case.name, "bytes": case.nbytes},
            functools.partial(_case, here, timer, case, zero, transport),
        )
        zero.close()
        here.release()


def _case(here: Here, timer: Timer, case: Case, zero: ZeroCta, transport: TransportName) -> Row:
    import tide_triton

    assert dist.group.WORLD is not None
    spec = case.spec
    shards = inputs.shards(here, spec)
    stock = StockGather(here, spec)
    row: Row = {}
    with tide_triton.Collectives(
        dist.group.WORLD, spec, transport=transport, device=here.device, timeout_s=TIMEOUT_S
    ) as tide:
        row["transport"] = tide._pool.transport.name
        functions: dict[str, Callable[[], object]] = {"stock": lambda: stock(shards)}
        views = {"stock": stock.views}
        symm, row["symm_note"] = windowed(zero, lambda: StockGather(here, spec, zero))
        if symm is not None:
            functions["symm"] = functools.partial(symm, shards)
            views["symm"] = symm.views
        row["symm_ms"] = None
        functions["tide"] = lambda: tide.all_gather(shards)
        exact = {name: _is_exact(here, case, function, views.get(name)) for name, function in functions.items()}
        row |= {"exact": exact["tide"], "stock_exact": exact["stock"], "symm_exact": exact.get("symm")}
        if not (exact["tide"] and exact["stock"]):
            raise ArithmeticError(f"not timed: {[name for name, good in exact.items() if not good]} gather other bits")
        if exact.get("symm") is False:
            del functions["symm"]
            row["symm_note"] = "not timed: gathers other bits"
        functions["limit"] = PeerCopy(here, wire_nbytes(spec, here.rank))
        for name, timing in timer.measure(functions).items():
            row |= timing.as_row(name)
        for name in [n for n in functions if n != "limit"]:
            events = trace.record(here, timer, functions[name], repetitions=_TRACED)
            prefix = "" if name == "tide" else f"{name}_"
            row[f"{prefix}sm_kernels"] = trace.kernel_names(events, _TRACED)
            row[f"{name}_sm_ms"] = trace.sm_ms(here, events, _TRACED)
            if name == "symm":
                row["symm_on_copy_engines"] = here.everywhere(not trace.has_nccl_kernel(events))
    row["tide_over_limit"] = row["tide_ms"] / row["limit_ms"]
    row["stock_over_limit"] = row["stock_ms"] / row["limit_ms"]
    return row


def run_nodes(here: Here, timer: Timer, cases: list[Case], transport: TransportName, nodes: int) -> Iterator[Row]:
    """One row per case and transport between `nodes` logical nodes.

    transport: one of the device's `BETWEEN_NODES`, or "auto" for each of them.
    """
    names = BETWEEN_NODES[here.device.type] if transport == "auto" else (transport,)
    for case in cases:
        yield from _nodes_case(here, timer, case, names, nodes)
        here.release()


def _nodes_case(here: Here, timer: Timer, case: Case, names: Sequence[TransportName], nodes: int) -> Iterator[Row]:
    shards = inputs.shards(here, case.spec)
    rows = {name: {"model": case.name, "nodes": nodes, "transport": name, "bytes": case.nbytes} for name in names}
    functions: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:

        def opened(name: TransportName, topology: Topology | None) -> Row:
            assert dist.group.WORLD is not None
            options: dict[str, Any] = {"transport": name, "device": here.device, "timeout_s": TIMEOUT_S}
            tide = stack.enter_context(Collectives(dist.group.WORLD, case.spec, topology=topology, **options))
            gather = functools.partial(tide.all_gather, shards)
            exact = _is_exact(here, case, gather, None)
            if not exact:
                raise ArithmeticError(f"not timed: {name} gathers other bits")
            functions["flat" if topology is None else name] = gather
            return {"exact": exact}

        flat = attempt(here, {"model": case.name, "transport": "flat"}, lambda: opened("auto", None))
        topology = Topology(nodes, max(1, here.world_size // nodes))
        for name in names:
            rows[name] = attempt(here, rows[name], functools.partial(opened, name, topology))
            if "error" in flat:
                rows[name]["error"] = f"flat: {flat['error']}"
        timings = timer.measure(functions) if "flat" in functions else {}
        for name, row in rows.items():
            if "error" in row:
                continue
            own, beside = timings[name], timings["flat"]
            row |= {"ms": own.ms, "p20_ms": own.p20_ms, "p80_ms": own.p80_ms, "host_us": own.host_us}
            row |= {"flat_ms": beside.ms, "flat_host_us": beside.host_us, "over_flat": own.ms / beside.ms}
    yield from rows.values()


def _is_exact(
    here: Here,
    case: Case,
    gather: Callable[[], Any],
    views: Callable[[], list[torch.Tensor]] | None,
) -> bool:
    """Whether what is gathered has the bits of the cast parameters, on every rank."""
    if views is not None:
        for tensor in views():
            tensor.fill_(float("nan"))
    result = gather()
    here.synchronize()
    got = result if views is None else views()
    good = all(
        inputs.same_bits(tensor, inputs.parameter(here, spec, index).to(torch.bfloat16))
        for index, (spec, tensor) in enumerate(zip(case.spec.tensors, got, strict=True))
    )
    return here.everywhere(good)
