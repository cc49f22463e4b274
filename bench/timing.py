"""Time on every rank, as the slowest rank's median.

A repetition on a GPU is laid out so that neither the host nor a rank that came early is part of what is timed:

    flush L2 | sleep while the host enqueues the rest | barrier on the stream | start | what is timed | end
"""

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.ranks import Here

#: Bytes written between repetitions: five times the L2 of an H200.
FLUSH_NBYTES = 256 << 20

#: Cycles of a GPU's clock in a millisecond, about; how long `torch.cuda._sleep` holds a stream.
_CYCLES_PER_MS = 2_000_000


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % lie, interpolated linearly between neighbours. Raises ValueError for none."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100.0
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds on the stream: median, 20th and 80th percentile, each the slowest rank's.

    host_us: microseconds that the host took to enqueue it, the median of the slowest rank.
    """

    ms: float
    p20_ms: float
    p80_ms: float
    host_us: float

    def as_row(self, prefix: str) -> dict[str, float]:
        """As fields of a result's row: `stock_ms`, `stock_p20_ms`, ..."""
        return {f"{prefix}_{name}": value for name, value in asdict(self).items()}


class Timer:
    """Times functions in turns, on all ranks at once."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._flush = torch.empty(FLUSH_NBYTES if here.is_cuda else 1, dtype=torch.uint8, device=here.device)
        self._token = torch.zeros(1, device=here.device)

    def align(self, host_ms: float = 0.5) -> None:
        """Hold the stream for about twice `host_ms`, then until every rank's stream is here; returns at once."""
        if self._here.is_cuda:
            torch.cuda._sleep(int((2.0 * host_ms + 0.3) * _CYCLES_PER_MS))
        dist.all_reduce(self._token)

    def flush(self) -> None:
        """Write more bytes than L2 holds."""
        self._flush.fill_(1)

    def measure(
        self, functions: Mapping[str, Callable[[], object]], *, repetitions: int = 12, warmup: int = 3
    ) -> dict[str, Timing]:
        """Time every function, by turns, so that drift meets all of them."""
        host_ms: dict[str, float] = {}
        for name, function in functions.items():
            for _ in range(warmup):
                begin = time.perf_counter()
                function()
                host_ms[name] = (time.perf_counter() - begin) * 1e3
                self._here.synchronize()
        times: dict[str, list[float]] = {name: [] for name in functions}
        hosts: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(repetitions):
            for name, function in functions.items():
                ms, host = self._once(function, min(host_ms[name], 20.0))
                times[name].append(ms)
                hosts[name].append(host * 1e6)
        return {name: slowest(self._here, times[name], hosts[name]) for name in functions}

    def _once(self, function: Callable[[], object], host_ms: float) -> tuple[float, float]:
        """Milliseconds on the stream and seconds of the host."""
        if not self._here.is_cuda:
            dist.barrier()
            begin = time.perf_counter()
            function()
            host = time.perf_counter() - begin
            return host * 1e3, host
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush()
        self.align(host_ms)
        start.record()
        begin = time.perf_counter()
        function()
        host = time.perf_counter() - begin
        end.record()
        torch.cuda.synchronize(self._here.device)
        return start.elapsed_time(end), host


def slowest(here: Here, times: Sequence[float], hosts: Sequence[float]) -> Timing:
    """What the slowest rank took. times: milliseconds, on this rank. hosts: microseconds, of its host."""
    return Timing(
        *here.largest([percentile(times, 50), percentile(times, 20), percentile(times, 80), percentile(hosts, 50)])
    )


def consecutive(here: Here, steps: int, step: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Milliseconds of each of `steps` steps, one right after the other, and microseconds of the host.

    Python collects no garbage meanwhile, as training frameworks have it too: its pauses would meet any of the steps.
    """

    def mark() -> Any:
        if not here.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    gc.collect()
    gc.disable()
    try:
        hosts, marks = [], [mark()]
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            hosts.append((time.perf_counter() - begin) * 1e6)
            marks.append(mark())
    finally:
        gc.enable()
    here.synchronize()
    times = [a.elapsed_time(b) if here.is_cuda else (b - a) * 1e3 for a, b in itertools.pairwise(marks)]
    return times, hosts
