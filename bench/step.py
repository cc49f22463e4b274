"""Whole training steps: forward, backward and AdamW of a few layers, with one FSDP group per layer.

`bench.variants` says what is trained in each variant. Each is built, run and freed before the next, from the same
weights and inputs: one step's gradients are compared, bit by bit through a 128-bit fingerprint of every shard, with
deterministic attention; stock twice, so that a difference means something, and TIDE often enough for gradients to be
sent as autograd produces them; then a few steps give the peak of memory. Times are taken after that, by turns
(`bench.turns`). Steps follow each other as in training: a step ends where the next begins on the stream.

A row: model, layers, tokens, floor_ms, stock_ms, symm_ms, ... (each with _p20_ms, _p80_ms and _host_us: what the
host takes to enqueue a step), peak_gib {variant: allocator's peak in the timed steps + windows}, reserved_gib {variant:
what the allocator held at its peak + windows}, windows_gib, grads_equal (tide to stock; VARIANT_grads_equal for the
others), stock_repeats, closed (of the room between stock and floor), gain_over_stock, gain_over_symm, losses, notes.
"""

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

import tide_triton
from bench import cases, training, turns, variants
from bench.baselines import ZeroCta
from bench.ranks import Here
from bench.results import Row, attempt
from bench.timing import Timing, consecutive, slowest
from bench.variants import TIDE, VARIANTS, Case
from tide_triton.models import ModelSpec
from tide_triton.transports.select import TransportName

_WARMUP = 3
#: Steps of each variant for the peak of memory; and how often each has its turn to be timed.
_PEAK_STEPS = 2
_ROUNDS = 3
_GIB = 1 << 30

Fingerprints = list[tuple[int, int]]

Measured = TypeVar("Measured")


@dataclass
class Outcome:
    """What one variant's run gave. peak_gib, reserved_gib: windows included."""

    timing: Timing
    peak_gib: float
    reserved_gib: float
    windows_gib: float
    losses: list[float]
    fingerprints: Fingerprints
    repeats: bool


def run(
    here: Here,
    models: Sequence[ModelSpec],
    tokens: Sequence[int],
    transport: TransportName,
    *,
    layers: int | None = None,
    steps: int = 8,
    names: Sequence[str] = VARIANTS,
) -> Iterator[Row]:
    """One row per model and number of tokens.

    layers: of every model, in place of `cases.step_layers`. steps: timed ones, at least. names: of variants.
    """
    zero = ZeroCta(here)
    for model in models:
        for count in tokens:
            case = Case(here, model, layers or cases.step_layers(model), count, transport, steps, zero)
            identity = {"model": model.name, "layers": case.layers, "tokens": count}
            yield attempt(here, identity, functools.partial(_case, case, tuple(names)))
            here.release()


def _case(case: Case, names: Sequence[str]) -> Row:
    experts, note = training.experts_that_work(case.here.device) if case.model.experts else ("none", "")
    why_not = training.why_not_deterministic(case.here.device, case.model)
    notes = [note] if note else []
    notes += [f"compared without strict determinism: {why_not}"] if why_not else []
    row: Row = {"experts": experts, "attention": "flash", "deterministic": not why_not, "notes": notes}
    case = replace(case, strict=not why_not)
    wanted = [v for v in ("floor", "stock", *TIDE, "symm") if v in names]
    row |= {f"{variant}_ms": None for variant in wanted}
    outcomes: dict[str, Outcome] = {}
    for variant, outcome in trained(replace(case, steps=_PEAK_STEPS), wanted, TIDE, experts, row, compare=True):
        outcomes[variant] = outcome
        case.here.say(f"      {variant}: {outcome.peak_gib:.1f} GiB")
    timed = functools.partial(
        turns.by_turns, replace(case, steps=-(-case.steps // _ROUNDS)), list(outcomes), TIDE, experts, rounds=_ROUNDS
    )
    for variant, timing in (tried(case, "by turns", timed, row) or {}).items():
        row |= timing.as_row(variant)
    row["peak_gib"] = {name: o.peak_gib for name, o in outcomes.items()}
    row["reserved_gib"] = {name: o.reserved_gib for name, o in outcomes.items()}
    row["windows_gib"] = {name: o.windows_gib for name, o in outcomes.items()}
    row["losses"] = {name: o.losses for name, o in outcomes.items()}
    stock = outcomes.get("stock")
    row["stock_repeats"] = None if stock is None else case.here.everywhere(stock.repeats)
    fields = {name: "grads_equal" if name == "tide" else f"{name}_grads_equal" for name in ("symm", *TIDE)}
    for name, field in fields.items():
        other = outcomes.get(name)
        row[field] = None
        if stock is not None and other is not None:
            same = stock.fingerprints == other.fingerprints and (other.repeats or not stock.repeats)
            row[field] = case.here.everywhere(same)
    for name, field in fields.items():
        if row[field] is False and row["stock_repeats"]:
            row[f"{name}_unchecked_ms"], row[f"{name}_ms"] = row[f"{name}_ms"], None
            row["error"] = f"{name}'s gradients differ from stock's, which repeat themselves: its time does not count"
    return row | _ratios(row)


def trained(
    case: Case,
    names: Sequence[str],
    attach: Mapping[str, dict[str, Any]],
    experts: str,
    row: Row,
    *,
    compare: bool = False,
) -> Iterator[tuple[str, Outcome]]:
    """Train the variants called `names`, one after the other; `row` says which could not be, and why.

    attach: options of TIDE, by variant. compare: fingerprint gradients first.
    """
    for variant in names:
        if variant == "symm" and case.zero.why_not is not None:
            row["notes"].append(f"symm: {case.zero.why_not}")
            continue
        measure = functools.partial(_train, case, variant, experts, attach.get(variant), compare=compare)
        outcome = tried(case, variant, measure, row)
        if outcome is not None:
            yield variant, outcome


def tried(case: Case, what: str, measure: Callable[[], Measured], row: Row) -> Measured | None:
    """What `measure` returns; where it raises, the row says so and whatever else is measured goes on."""
    try:
        return measure()
    except Exception as error:
        print(f"rank {case.here.rank}: {traceback.format_exc()}", flush=True)
        row["error"] = f"{what}: {type(error).__name__}: {error}"[:500]
        # The frames that the error holds keep the model alive.
        error.__traceback__ = None
        return None
    finally:
        case.here.release()


def _ratios(row: Row) -> Row:
    floor, stock, symm, tide = (row.get(f"{name}_ms") for name in ("floor", "stock", "symm", "tide"))
    ratios: Row = {}
    if tide and stock:
        ratios["gain_over_stock"] = 1 - tide / stock
        if floor:
            ratios["closed"] = (stock - tide) / (stock - floor)
    if tide and symm:
        ratios["gain_over_symm"] = 1 - tide / symm
    return ratios


# --- the variants ---


def _train(case: Case, variant: str, experts: str, attach: dict[str, Any] | None, *, compare: bool) -> Outcome:
    """Train `variant`. attach: options of TIDE, None for the others. compare: fingerprint gradients first."""
    if attach is not None:
        # From the third backward on gradients may be sent as they come.
        return _tide(case, experts, attach, checks=4 if compare else 0)
    if variant == "floor":
        return _measured(case, *variants.floor(case, experts), lambda: 0, checks=0)
    if variant == "symm":
        return _symm(case, experts, checks=1 if compare else 0)
    return _trained(case, variants.sharded(case, experts), lambda: 0, checks=2 if compare else 0)


def _symm(case: Case, experts: str, *, checks: int) -> Outcome:
    model = variants.sharded(case, experts)
    with variants.windowed(case, model):
        return _trained(case, model, lambda: case.zero.nbytes, checks=checks)


def _tide(case: Case, experts: str, attach: dict[str, Any], *, checks: int) -> Outcome:
    model = variants.sharded(case, experts)
    with variants.attached(case, model, attach):
        outcome = _trained(case, model, lambda: tide_triton.report(model, quiet=True).window_nbytes, checks=checks)
        report = tide_triton.report(model, quiet=True)
    if report.gather.layout_copy_bytes or report.reduce.layout_copy_bytes or report.slots_grown:
        case.here.say(str(report))
    return outcome


def _trained(case: Case, model: training.Stack, windows: Callable[[], int], *, checks: int) -> Outcome:
    return _measured(case, model, variants.updating(model), windows, checks=checks)


# --- measuring ---


def _measured(
    case: Case,
    model: training.Stack,
    after_backward: Callable[[], None],
    windows: Callable[[], int],
    *,
    checks: int,
) -> Outcome:
    """Compare first, then warm up and time. checks: how often gradients are fingerprinted."""
    here = case.here
    inputs = variants.inputs(case)
    losses: list[float] = []

    def forward_backward() -> torch.Tensor:
        loss: torch.Tensor = model(*inputs)
        loss.backward()
        return loss.detach()

    def step() -> None:
        forward_backward()
        after_backward()

    prints: list[Fingerprints] = []
    with training.flash_attention(here.device):
        for _ in range(checks):
            with training.deterministic(strict=case.strict):
                losses.append(float(forward_backward()))
            prints.append([fingerprint(parameter.grad) for parameter in model.parameters()])
            model.zero_grad(set_to_none=True)
        for _ in range(_WARMUP):
            loss = forward_backward()
            after_backward()
        losses.append(float(loss))
        here.barrier()
        if here.is_cuda:
            torch.cuda.reset_peak_memory_stats(here.device)
        timing = slowest(here, *consecutive(here, case.steps, step))
    peak = torch.cuda.max_memory_allocated(here.device) if here.is_cuda else 0
    reserved = torch.cuda.max_memory_reserved(here.device) if here.is_cuda else 0
    held = windows()
    sizes = [(peak + held) / _GIB, (reserved + held) / _GIB, held / _GIB]
    peak_gib, reserved_gib, windows_gib = here.largest(sizes)
    same = all(other == prints[0] for other in prints)
    return Outcome(timing, peak_gib, reserved_gib, windows_gib, losses, prints[0] if prints else [], same)


def fingerprint(tensor: torch.Tensor | None) -> tuple[int, int]:
    """128 bits of a tensor's bits and of where they stand: two sums of its 32-bit words, weighted by position.

    Sums wrap at 64 bits, so they do not depend on the order of addition. (0, 0) for None and for an empty tensor.
    """
    if tensor is None:
        return 0, 0
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().contiguous().view(-1)
    words = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.int16)
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    chunk = 1 << 24
    for begin in range(0, words.numel(), chunk):
        part = words[begin : begin + chunk].to(torch.int64)
        place = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device)
        sums[0] += (part * (place * -7046029254386353131 | 1)).sum()
        sums[1] += ((part ^ place) * (place * -4417276706812531889 | 1)).sum()
    first, second = sums.tolist()
    return int(first), int(second)
