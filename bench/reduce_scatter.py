"""Reduce-scatter of one transformer block: bf16 gradients to averaged fp32 shards, and its SM-time.

A row: model, bytes (of the bf16 gradients), stock_ms, symm_ms, tide_ms (landing in a slot), tide_ring_ms (through a
ring), limit_ms (each with _p20_ms, _p80_ms and _host_us), stock_sm_ms (chunk_cat and NCCL's kernel), tide_sm_ms (the
sums), exact (both ways bitwise equal to the sum in rank order, on every rank), by_ctas ({CTAs: {ms, sm_ms}}).

`stock` is exact only for two ranks: beyond those NCCL adds in an order of its own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from bench import inputs, trace
from bench.baselines import PeerCopy, StockReduce, ZeroCta, padded_numels, windowed, wire_nbytes
from bench.cases import MANY_SMALL, Case
from bench.ranks import TIMEOUT_S, Here
from bench.results import Row, attempt
from bench.timing import Timer
from tide_triton.transports.select import TransportName

_TRACED = 5

#: CTAs of the sum that are compared; None is a CTA per block.
_CTAS = (8, 16, 32, 64, None)


class TideReduce:
    """TIDE's reduce-scatter as FSDP2 gets it: gradients as they are, into a fresh flat output.

    collectives: open ones for the group. ctas: of the sum, None for one per block. ring: through the ring, and not into
    the slot.
    """

    def __init__(
        self,
        here: Here,
        collectives: object,
        gradients: Sequence[torch.Tensor],
        ctas: int | None,
        *,
        ring: bool = False,
    ) -> None:
        from tide_triton.collectives import Collectives
        from tide_triton.layouts import LandingLayout
        from tide_triton.reduce_scatter import ReduceScatter
        from tide_triton.reducers import Reduction

        assert isinstance(collectives, Collectives)
        spec = collectives.spec
        landing = LandingLayout(spec, "bfloat16")
        self._reduce = ReduceScatter(landing, here.rank, ctas=ctas)
        self._through = collectives._ring if ring else collectives._slot
        self._traffic = collectives.reduce_traffic
        self._gradients = list(enumerate(gradients))
        self._numels = padded_numels(spec)
        self._device = here.device
        self._reduction = Reduction(torch.float32, divisor=float(spec.world_size))

    def __call__(self) -> list[torch.Tensor]:
        """This rank's padded shards, 1-D, fresh."""
        flat = torch.empty(sum(self._numels), device=self._device)
        outputs = list(torch.split(flat, self._numels))
        self._reduce(self._through, self._gradients, outputs, self._reduction, "bench", self._traffic)
        return outputs


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
    from tide_triton.fsdp.group_reduce import SUM_CTAS

    assert dist.group.WORLD is not None
    spec = case.spec
    gradients = inputs.gradients(here, spec)
    stock = StockReduce(here, spec)
    row: Row = {"ctas": SUM_CTAS}
    with tide_triton.Collectives(
        dist.group.WORLD, spec, transport=transport, device=here.device, timeout_s=TIMEOUT_S
    ) as collectives:
        row["transport"] = collectives._pool.transport.name
        functions: dict[str, Callable[[], list[torch.Tensor]]] = {"stock": lambda: stock(gradients)}
        symm, row["symm_note"] = windowed(zero, lambda: StockReduce(here, spec, zero))
        if symm is not None:
            functions["symm"] = functools.partial(symm, gradients)
        row["symm_ms"] = None
        functions["tide"] = TideReduce(here, collectives, gradients, SUM_CTAS)
        functions["tide_ring"] = TideReduce(here, collectives, gradients, SUM_CTAS, ring=True)
        _check(here, case, functions, row)
        timed: dict[str, Callable[[], object]] = {**functions, "limit": PeerCopy(here, wire_nbytes(spec, here.rank))}
        for name, timing in timer.measure(timed).items():
            row |= timing.as_row(name)
        for name, function in functions.items():
            events = trace.record(here, timer, function, repetitions=_TRACED)
            row[f"{name}_sm_ms"] = trace.sm_ms(here, events, _TRACED)
            row[f"{name}_sm_kernels"] = trace.kernel_names(events, _TRACED)
        if case.name != MANY_SMALL:
            row["by_ctas"] = _by_ctas(here, timer, collectives, gradients)
    row["tide_over_limit"] = row["tide_ms"] / row["limit_ms"]
    row["stock_over_tide"] = row["stock_ms"] / row["tide_ms"]
    if row["tide_sm_ms"]:
        row["stock_over_tide_sm"] = row["stock_sm_ms"] / row["tide_sm_ms"]
    return row


def _check(here: Here, case: Case, functions: dict[str, Callable[[], list[torch.Tensor]]], row: Row) -> None:
    """Compare with the exact average. Raises ArithmeticError where TIDE has other bits, or another is not close."""
    results = {name: function() for name, function in functions.items()}
    here.synchronize()
    exact = dict.fromkeys(functions, True)
    close = dict.fromkeys(functions, True)
    for index, wanted in enumerate(inputs.averaged(here, case.spec)):
        for name, outputs in results.items():
            got = outputs[index][: wanted.numel()]
            exact[name] &= inputs.same_bits(got, wanted)
            close[name] &= torch.allclose(got.float(), wanted, rtol=1e-5, atol=1e-6)
    exact = {name: here.everywhere(good) for name, good in exact.items()}
    exact["tide"] &= exact["tide_ring"]
    close = {name: here.everywhere(good) for name, good in close.items()}
    row |= {"exact": exact["tide"], "stock_exact": exact["stock"], "symm_exact": exact.get("symm")}
    if close.get("symm") is False:
        del functions["symm"]
        row["symm_note"] = "not timed: reduces to other values"
    wrong = [name for name in functions if not close[name]] + ([] if exact["tide"] else ["tide"])
    if wrong:
        raise ArithmeticError(f"not timed: {', '.join(sorted(set(wrong)))} reduce to other values")


def _by_ctas(here: Here, timer: Timer, collectives: object, gradients: Sequence[torch.Tensor]) -> dict[str, Row]:
    functions: dict[str, Callable[[], object]] = {
        str(ctas or "all"): TideReduce(here, collectives, gradients, ctas) for ctas in _CTAS
    }
    timings = timer.measure(functions, repetitions=6)
    result = {}
    for name, function in functions.items():
        events = trace.record(here, timer, function, repetitions=2)
        result[name] = {"ms": timings[name].ms, "sm_ms": trace.sm_ms(here, events, 2)}
    return result
