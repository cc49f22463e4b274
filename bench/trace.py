"""What a GPU did, from a profiler's trace: kernels on SMs, and copies.

SM-time of a kernel = its duration x the CTAs that are resident at once, taken as min(CTAs of its grid, SMs of the GPU):
the SMs that it holds against others. A kernel of 16 CTAs that runs 100 us takes 1600 SM-us, one of 5000 CTAs on 132 SMs
13200. It overstates kernels whose last wave does not fill the GPU, and counts NCCL's waiting for peers as NCCL does: in
full, so ranks are aligned before each repetition and the rank with the least SM-time counts.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ranks import Here
from bench.timing import Timer

#: Kernels that align the ranks before a repetition: no part of what is measured.
_SCAFFOLD = ("spin_kernel", "AllReduce")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ran on a GPU. ctas: of its grid, 0 where it is no kernel."""

    kind: str
    name: str
    start_us: float
    duration_us: float
    stream: int = 0
    ctas: int = 0
    nbytes: int = 0

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def is_kernel(self) -> bool:
        return self.kind == "kernel"


def events_of(trace: dict[str, Any]) -> list[Event]:
    """The kernels, copies and fills of a trace in Chrome's format, by start, without what aligns ranks."""
    events = []
    for entry in trace.get("traceEvents", ()):
        kind = entry.get("cat")
        if kind not in ("kernel", "gpu_memcpy", "gpu_memset") or entry.get("ph") != "X":
            continue
        name = str(entry.get("name", ""))
        if any(word in name for word in _SCAFFOLD):
            continue
        args = entry.get("args", {})
        ctas = math.prod(int(size) for size in args.get("grid", ())) if kind == "kernel" else 0
        events.append(
            Event(
                kind,
                name,
                float(entry["ts"]),
                float(entry.get("dur", 0.0)),
                int(args.get("stream", 0) or 0),
                ctas,
                int(args.get("bytes", 0) or 0),
            )
        )
    return sorted(events, key=lambda event: event.start_us)


def sm_time_us(events: Iterable[Event], sm_count: int) -> float:
    """SM-microseconds of all kernels in `events`, by the formula at the head of this module."""
    return sum(event.duration_us * min(event.ctas, sm_count) for event in events if event.is_kernel)


def overlapping(events: Iterable[Event], others: Sequence[Event]) -> list[Event]:
    """Those of `events` during some part of which one of `others` ran."""
    return [e for e in events if any(o.start_us < e.end_us and e.start_us < o.end_us for o in others)]


def short_name(name: str) -> str:
    """A kernel's name without return type, arguments and most of its template."""
    bare = name.removeprefix("void ").split("(")[0].split("<")[0]
    return bare.split("::")[-1][:60] or name[:60]


def kernel_names(events: Iterable[Event], repetitions: int = 1) -> dict[str, float]:
    """How often each SM kernel ran in one of `repetitions`."""
    counts = Counter(short_name(event.name) for event in events if event.is_kernel)
    return {name: round(count / repetitions, 2) for name, count in sorted(counts.items())}


def has_nccl_kernel(events: Iterable[Event]) -> bool:
    """Whether NCCL moved anything with SMs."""
    return any(event.is_kernel and "nccl" in event.name.lower() for event in events)


def record(here: Here, timer: Timer, function: Callable[[], object], *, repetitions: int = 3) -> list[Event]:
    """What `repetitions` of `function` run on this rank's GPU; nothing on a CPU. Run it once before: see `Timer`."""
    if not here.is_cuda:
        for _ in range(repetitions):
            function()
        return []
    from torch.profiler import ProfilerActivity, profile

    here.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            timer.align(2.0)
            function()
            here.synchronize()
    with tempfile.TemporaryDirectory(prefix="tide_trace_") as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        # Names of kernels may hold bytes that are no UTF-8.
        return events_of(json.loads(path.read_text(errors="replace")))


def sm_ms(here: Here, events: Iterable[Event], repetitions: int) -> float:
    """SM-milliseconds of one repetition, on the rank that took the least."""
    return here.smallest([sm_time_us(events, here.sm_count) / 1e3 / repetitions])[0]
