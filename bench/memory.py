"""What training takes of a GPU's memory, windows included, beside what `tide_triton.memory` plans from shapes.

One row per model and number of tokens: model, layers, tokens, and by variant (those of `bench.variants`, and
`tide_in_slots`: gradients sent early, those of linear layers written over their weights)

    held_gib      what the allocator had taken from the GPU at its peak, and windows: memory in use on the device
    peak_gib      what was allocated of it at its peak, and windows
    windows_gib   windows alone
    planned_gib   the plan's peak, without activations
    over_plan     peak_gib / planned_gib
    step_ms       time of a step

held_below_stock_gib {variant: how much less is in use than under stock FSDP2}, and what Slot-Reuse costs in time:
turns_ms {tide, tide_ring: median step of one model that trains with and without it by turns, so that drift and where
the allocator put things meet both}, slot_over_ring their ratio. Then one row per model and number of GPUs for the
buffer of the reduce-scatter: model, gpus, ring_bytes, flag_bytes.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench import cases, step, training, turns, variants
from bench.baselines import ZeroCta
from bench.ranks import Here
from bench.results import Row, attempt
from tide_triton.layouts import Topology
from tide_triton.memory import plan_memory
from tide_triton.models import MODELS, ModelSpec
from tide_triton.transports.select import TransportName

#: Options of `attach` by variant.
TIDE: Mapping[str, dict[str, Any]] = {
    **variants.TIDE,
    "tide_in_slots": {"slot_reuse": False, "early_reduce": True, "grads_in_slots": True},
}
VARIANTS = ("stock", "symm", *TIDE)

_GIB = 1 << 30
_STEPS = 3
#: Of which two the step's time is compared by turns, and how often each has its turn.
_BY_TURNS = ("tide", "tide_ring")
_ROUNDS = 3


def run(
    here: Here,
    models: Sequence[ModelSpec],
    tokens: Sequence[int],
    transport: TransportName,
    *,
    layers: int | None = None,
) -> Iterator[Row]:
    """One row per model and number of tokens, then those of the reduce-scatter's buffer."""
    zero = ZeroCta(here)
    for model in models:
        for count in tokens:
            case = variants.Case(here, model, layers or cases.step_layers(model), count, transport, _STEPS, zero)
            identity = {"model": model.name, "tokens": count, "gpus": here.world_size}
            yield attempt(here, identity, functools.partial(_measure, case))
            here.release()
    for model in models:
        if model.name in MODELS:
            for buffer in plan_memory(model, Topology(1, max(here.world_size, 2))).buffers:
                yield {
                    "model": model.name,
                    "tokens": None,
                    "gpus": buffer.world_size,
                    "ring_bytes": buffer.ring,
                    "flag_bytes": buffer.flags,
                }


def _measure(case: variants.Case) -> Row:
    experts, note = training.experts_that_work(case.here.device) if case.model.experts else ("none", "")
    row: Row = {"layers": case.layers, "experts": experts, "notes": [note] if note else []}
    outcomes: dict[str, step.Outcome] = {}
    for name, outcome in step.trained(case, VARIANTS, TIDE, experts, row):
        outcomes[name] = outcome
        if case.here.is_cuda:
            case.here.say(f"      {name}: {outcome.reserved_gib:.2f} GiB held, {outcome.peak_gib:.2f} at the peak")
    if case.here.is_cuda:
        row |= _held(outcomes)
    else:
        row["notes"].append("no GPU: memory in use was not measured")
    row["windows_gib"] = {name: o.windows_gib for name, o in outcomes.items()}
    row["step_ms"] = {name: o.timing.ms for name, o in outcomes.items()}
    row["planned_gib"] = planned = _planned(case)
    peaks = row.get("peak_gib", {})
    row["over_plan"] = {name: peaks[name] / plan for name, plan in planned.items() if name in peaks}
    timed = functools.partial(turns.by_turns, case, _BY_TURNS, TIDE, experts, rounds=_ROUNDS)
    timings = step.tried(case, "by turns", timed, row)
    if timings is not None:
        times = {name: timing.ms for name, timing in timings.items()}
        row |= {"turns_ms": times, "slot_over_ring": times["tide"] / times["tide_ring"]}
    return row


def _held(outcomes: Mapping[str, step.Outcome]) -> Row:
    held = {name: o.reserved_gib for name, o in outcomes.items()}
    row: Row = {"held_gib": held, "peak_gib": {name: o.peak_gib for name, o in outcomes.items()}}
    if "stock" in held:
        row["held_below_stock_gib"] = {name: held["stock"] - own for name, own in held.items() if name != "stock"}
    return row


def _planned(case: variants.Case) -> dict[str, float]:
    """The plan of what is trained here: blocks, and a root without embedding and head."""
    if case.model.name not in MODELS or case.here.world_size < 2:
        return {}
    plan = plan_memory(replace(case.model, vocab=0), Topology(1, case.here.world_size), layers=case.layers)
    return {variant.name: variant.peak / _GIB for variant in plan.variants}
