"""Runs benchmarks: one set of processes each, results kept after every row."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import all_gather, cases, interference, kernels, memory, plots, ranks, reduce_scatter, results, step
from bench.ranks import Here
from bench.timing import Timer
from bench.variants import VARIANTS
from tide_triton.models import LLAMA_3_1_70B, block_spec
from tide_triton.transports.select import TransportName

#: Seconds after which a benchmark is ended.
LIMITS_S = {
    "kernels": 120,
    "all_gather": 150,
    "nodes": 150,
    "reduce_scatter": 150,
    "interference": 120,
    "step": 420,
    "memory": 420,
}

BENCHMARKS = tuple(LIMITS_S)


@dataclass(frozen=True)
class Options:
    """What to measure: names of models and tokens (all where empty), and for steps also how; between how many nodes."""

    models: tuple[str, ...] = ()
    transport: TransportName = "auto"
    tokens: tuple[int, ...] = ()
    layers: int | None = None
    steps: int = 8
    variants: tuple[str, ...] = field(default=VARIANTS)
    nodes: int = 1


def rows_of(benchmark: str, here: Here, options: Options) -> Iterator[results.Row]:
    """The rows of `benchmark` on this rank."""
    if benchmark in ("step", "memory"):
        models, usual = cases.models_named(options.models), {"step": cases.STEP_TOKENS, "memory": cases.MEMORY_TOKENS}
        trained = (here, models, options.tokens or usual[benchmark], options.transport)
        if benchmark == "memory":
            yield from memory.run(*trained, layers=options.layers)
        else:
            yield from step.run(*trained, layers=options.layers, steps=options.steps, names=options.variants)
        return
    timer = Timer(here)
    if benchmark == "kernels":
        yield from kernels.run(here, timer, elements=kernels.ELEMENTS if here.is_cuda else 1 << 14)
    elif benchmark == "nodes":
        group_cases = cases.group_cases(options.models, here.world_size)
        yield from all_gather.run_nodes(here, timer, group_cases, options.transport, options.nodes)
    elif benchmark in ("all_gather", "reduce_scatter"):
        run_cases = all_gather.run if benchmark == "all_gather" else reduce_scatter.run
        yield from run_cases(here, timer, cases.group_cases(options.models, here.world_size), options.transport)
    else:
        model = cases.model_named(options.models[0]) if options.models else LLAMA_3_1_70B
        shape = interference.GEMM if here.is_cuda else (64, 64, 64)
        yield from interference.run(here, timer, block_spec(model, here.world_size), options.transport, shape=shape)


def run_on_rank(here: Here, benchmark: str, folder: Path, options: Options) -> None:
    """Run `benchmark`; rank 0 keeps what is there after every row."""
    rows: list[results.Row] = []
    meta = results.metadata() if here.rank == 0 else {}
    begin = time.monotonic()
    for row in rows_of(benchmark, here, options):
        rows.append(row)
        if here.rank == 0:
            results.write(folder / f"{benchmark}.json", benchmark, meta, rows)
            shown = {k: v for k, v in row.items() if k in results.COLUMNS[benchmark] or k == "error"}
            here.say(f"[{time.monotonic() - begin:6.1f} s] {shown}")


def run(benchmarks: Sequence[str], folder: Path, options: Options, *, budget_s: float = 590.0) -> bool:
    """Run them one after the other, then show and draw those of which there are rows. Whether there were no errors.

    budget_s: seconds for all of them; what does not fit is cut off, and its rows so far stay.
    """

    def last_runs() -> dict[str, results.Row]:
        return {benchmark: results.read(folder / f"{benchmark}.json")["meta"] for benchmark in benchmarks}

    problems, before = [], last_runs()
    deadline = time.monotonic() + budget_s
    for benchmark in benchmarks:
        begin = time.monotonic()
        print(f"=== {benchmark}", flush=True)
        allowed = min(LIMITS_S[benchmark], deadline - begin)
        problem = ranks.run(run_on_rank, (benchmark, folder, options), timeout_s=allowed) if allowed > 0 else "no time"
        print(f"=== {benchmark}: {problem or 'done'} in {time.monotonic() - begin:.0f} s", flush=True)
        if problem:
            problems.append(f"{benchmark}: {problem}")
    if not ranks.is_first():
        return not problems
    after = last_runs()
    measured = [benchmark for benchmark in benchmarks if after[benchmark] != before[benchmark]]
    good, undrawn = show(measured, folder) if measured else (True, [])
    if measured:
        print(f"results are in {folder}")
    for problem in problems + undrawn:
        print(f"error: {problem}", flush=True)
    return good and not problems


def show(benchmarks: Sequence[str], folder: Path) -> tuple[bool, list[str]]:
    """Print and draw the results in `folder`: whether no row of the last runs has an error; what was not drawn, why."""
    good, undrawn, found = True, [], False
    for benchmark in benchmarks:
        kept = results.read(folder / f"{benchmark}.json")
        if not kept["rows"]:
            continue
        found = True
        print(results.summary(benchmark, kept), flush=True)
        good &= not results.failed(kept)
        try:
            plots.draw(benchmark, kept["rows"], folder / f"{benchmark}.png")
        except Exception as error:
            undrawn.append(f"{benchmark}: not drawn: {error!r}")
    if not found:
        print(f"there are no results in {folder}", flush=True)
    return good, undrawn
