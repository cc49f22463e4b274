"""The kernels alone, on every GPU at once: `place` against a device copy, `accumulate` by CTAs and ranks.

A row: kernel, world (contributions), ctas ("all" for one per block), ms, gb_per_s (bytes read and written), of_copy
(that bandwidth / a device copy's), sm_us_per_gb (SM-us per GB moved, by `trace`'s formula), exact (bitwise equal to the
naive twin).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import astuple

import torch

from bench import inputs
from bench.baselines import padded_numels
from bench.ranks import Here
from bench.results import Row, attempt
from bench.timing import Timer, Timing
from tide_triton.models import LLAMA_3_1_70B, block_spec

#: Contributions in all, in elements: 64 Mi for two ranks, as in the notes.
ELEMENTS = 128 << 20

#: Launches that are timed together, so that what is between two events counts little; each moves more than L2 holds.
_IN_A_ROW = 4

_CTAS = (4, 8, 16, 32, 64, 132, None)


def run(here: Here, timer: Timer, *, elements: int = ELEMENTS) -> Iterator[Row]:
    """Rows of `copy`, `place` and `accumulate` for 2 and 8 ranks.

    elements: of all contributions together; the place is of a Llama block's shards at the default.
    """
    copy: Row = {}

    def measure_copy() -> Row:
        copy.update(_copy(here, timer, elements))
        return copy

    yield attempt(here, {"kernel": "copy", "world": 1, "ctas": "all"}, measure_copy)
    bandwidth = copy.get("gb_per_s", float("nan"))
    for ctas in (16, 32, None):
        identity = {"kernel": "place", "world": 1, "ctas": ctas or "all"}
        yield attempt(here, identity, functools.partial(_place, here, timer, ctas, bandwidth, elements))
        here.release()
    for world in (2, 8):
        for ctas in _CTAS:
            identity = {"kernel": "accumulate", "world": world, "ctas": ctas or "all"}
            measure = functools.partial(_accumulate, here, timer, world, ctas, bandwidth, elements)
            yield attempt(here, identity, measure)
            here.release()


def _timed(
    here: Here, timer: Timer, function: Callable[[], object], nbytes: int, ctas: int | None, bandwidth: float
) -> Row:
    def in_a_row() -> None:
        for _ in range(_IN_A_ROW):
            function()

    whole = timer.measure({"kernel": in_a_row}, repetitions=9)["kernel"]
    timing = Timing(*(value / _IN_A_ROW for value in astuple(whole)))
    gigabytes = nbytes / 1e9
    sms = min(ctas or here.sm_count, here.sm_count)
    rate = gigabytes / timing.ms * 1e3
    return {
        "bytes": nbytes,
        "ms": timing.ms,
        "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms,
        "gb_per_s": rate,
        "of_copy": rate / bandwidth,
        "sm_us_per_gb": sms * timing.ms * 1e3 / gigabytes,
        "exact": True,
    }


def _copy(here: Here, timer: Timer, elements: int) -> Row:
    source = torch.randn(elements, device=here.device)
    target = torch.empty_like(source)
    row = _timed(here, timer, lambda: target.copy_(source), 2 * source.nbytes, None, float("nan"))
    return {**row, "of_copy": 1.0}


def _place(here: Here, timer: Timer, ctas: int | None, bandwidth: float, elements: int) -> Row:
    from tide_triton.kernels import place_reference, prepare_place

    numels = padded_numels(block_spec(LLAMA_3_1_70B, 2)) if elements == ELEMENTS else [elements // 2, elements // 4]
    sources = [torch.randn(numel, device=here.device) for numel in numels]
    places = [torch.full((numel,), float("nan"), dtype=torch.bfloat16, device=here.device) for numel in numels]
    wanted = [torch.empty_like(place) for place in places]
    run_kernel = prepare_place(sources, places, ctas=ctas)
    run_kernel()
    place_reference(sources, wanted)
    _require_equal(here, places, wanted, "place")
    return _timed(here, timer, run_kernel, sum(numels) * 6, ctas, bandwidth)


def _accumulate(here: Here, timer: Timer, world: int, ctas: int | None, bandwidth: float, elements: int) -> Row:
    from tide_triton.kernels import accumulate_reference, prepare_accumulate

    numel = elements // world
    parts = [torch.randn(numel, device=here.device).to(torch.bfloat16) for _ in range(world)]
    output = torch.full((numel,), float("nan"), device=here.device)
    wanted = torch.empty_like(output)
    run_kernel = prepare_accumulate([parts], [output], wire_dtype=torch.float32, divisor=float(world), ctas=ctas)
    run_kernel()
    accumulate_reference([parts], [wanted], wire_dtype=torch.float32, divisor=float(world))
    _require_equal(here, [output], [wanted], "accumulate")
    return _timed(here, timer, run_kernel, numel * (2 * world + 4), ctas, bandwidth)


def _require_equal(here: Here, got: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    good = all(inputs.same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    if not here.everywhere(good):
        raise ArithmeticError(f"not timed: {what} differs from its twin")
