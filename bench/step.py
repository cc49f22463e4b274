"""Whole training steps: forward, backward and AdamW of a few layers, with one FSDP group per layer.

| variant | what                                                                                              |
|---------|---------------------------------------------------------------------------------------------------|
| floor   | forward and backward of the same bf16 layers without FSDP, and AdamW (fp32) on 1/W of the weights  |
| stock   | FSDP2 as it is: bf16 parameters, fp32 reduction                                                   |
| symm    | the same, all-gather outputs in symmetric memory and NCCL's zero-CTA policy                       |
| tide    | the same under `tide_triton.attach`                                                               |
| tide_ring | the same with `slot_reuse=False`: gradients go through the ring                             |
| tide_early | the same, and they do so as autograd produces them                                         |

Each is built, run and freed before the next, from the same weights and inputs. Steps follow each other as in training:
a step ends where the next begins on the stream. First one step's gradients are compared, bit by bit through a 128-bit
fingerprint of every shard, with deterministic attention; stock twice, so that a difference means something, and TIDE
often enough for gradients to be sent as autograd produces them.

A row: model, layers, tokens, floor_ms, stock_ms, symm_ms, ... (each with _p20_ms, _p80_ms and _host_us: what the
host takes to enqueue a step), peak_gib {variant: allocator's peak in the timed steps + windows}, reserved_gib {variant:
what the allocator held at its peak + windows}, windows_gib, grads_equal (tide to stock; VARIANT_grads_equal for the
others), stock_repeats, closed (of the room between stock and floor), gain_over_stock, gain_over_symm, losses, notes.
"""

import contextlib
import functools
import itertools
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor

from bench import baselines, cases, training
from bench.baselines import ZeroCta
from bench.ranks import TIMEOUT_S, Here
from bench.results import Row, attempt
from bench.timing import Timing, percentile, slowest
from tide_triton.models import ModelSpec
from tide_triton.transports.select import TransportName

#: Options of `attach` by variant.
TIDE: Mapping[str, dict[str, Any]] = {
    "tide": {},
    "tide_ring": {"slot_reuse": False},
    "tide_early": {"slot_reuse": False, "early_reduce": True},
}
VARIANTS = ("floor", "stock", "symm", "tide")

_WARMUP = 3
_SEED = 1234
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


#: Windows of one size, and who has each: a weak reference to the tensor that was lent.
Lent = list[tuple[torch.Tensor, Callable[[], object]]]


def _nobody() -> None:
    return None


class WindowedAllGather(AllGather):
    """NCCL's all-gather into windows of a zero-CTA group, lent as FSDP2's allocator would lend memory.

    torch 2.13 has the like as `set_symm_mem_for_comm`; this one also runs on 2.11, on any NCCL with windows.
    A window is free again when FSDP2 has dropped its output, which it does after its streams wait for the copy-out.
    """

    def __init__(self, zero: ZeroCta, lent: dict[int, Lent]) -> None:
        """lent: windows by size and who has them, shared by all groups of a model."""
        self._zero, self._lent = zero, lent

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor over a window that nobody has."""
        nbytes = torch.Size(size).numel() * dtype.itemsize
        windows = self._lent.setdefault(nbytes, [])
        free = next((i for i, (_, holder) in enumerate(windows) if holder() is None), len(windows))
        if free == len(windows):
            windows.append((self._zero.window(nbytes), _nobody))
        window = windows[free][0]
        output = window.view(dtype).view(torch.Size(size))
        windows[free] = window, weakref.ref(output)
        return output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """In place: FSDP2 has copied the shards into this rank's part of the output."""
        return baselines.all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)


def run(
    here: Here,
    models: Sequence[ModelSpec],
    tokens: Sequence[int],
    transport: TransportName,
    *,
    layers: int | None = None,
    steps: int = 8,
    variants: Sequence[str] = VARIANTS,
) -> Iterator[Row]:
    """One row per model and number of tokens.

    layers: of every model, in place of `cases.step_layers`. steps: timed ones.
    """
    zero = ZeroCta(here)
    for model in models:
        for count in tokens:
            case = Case(here, model, layers or cases.step_layers(model), count, transport, steps, zero)
            identity = {"model": model.name, "layers": case.layers, "tokens": count}
            yield attempt(here, identity, functools.partial(_case, case, tuple(variants)))
            here.release()


@dataclass(frozen=True)
class Case:
    """What is trained, and how. strict: whether the compared step can be told to be deterministic."""

    here: Here
    model: ModelSpec
    layers: int
    tokens: int
    transport: TransportName
    steps: int
    zero: ZeroCta
    strict: bool = True


def _case(case: Case, variants: Sequence[str]) -> Row:
    experts, note = training.experts_that_work(case.here.device) if case.model.experts else ("none", "")
    why_not = training.why_not_deterministic(case.here.device, case.model)
    notes = [note] if note else []
    notes += [f"compared without strict determinism: {why_not}"] if why_not else []
    row: Row = {"experts": experts, "attention": "flash", "deterministic": not why_not, "notes": notes}
    case = replace(case, strict=not why_not)
    wanted = [v for v in ("floor", "stock", *TIDE, "symm") if v in variants]
    row |= {f"{variant}_ms": None for variant in wanted}
    outcomes: dict[str, Outcome] = {}
    for variant, outcome in trained(case, wanted, TIDE, experts, row, compare=True):
        outcomes[variant] = outcome
        row |= outcome.timing.as_row(variant)
        case.here.say(f"      {variant}: {outcome.timing.ms:.1f} ms, {outcome.peak_gib:.1f} GiB")
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
    variants: Sequence[str],
    attach: Mapping[str, dict[str, Any]],
    experts: str,
    row: Row,
    *,
    compare: bool = False,
) -> Iterator[tuple[str, Outcome]]:
    """Train `variants`, one after the other; `row` says which could not be, and why.

    attach: options of TIDE, by variant. compare: fingerprint gradients first.
    """
    for variant in variants:
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
        return _floor(case, experts)
    if variant == "symm":
        return _symm(case, experts, checks=1 if compare else 0)
    return _stock(case, experts, checks=2 if compare else 0)


def _built(case: Case, experts: str) -> training.Stack:
    with case.here.device:
        model = training.Stack(case.model, case.layers, experts)
    model.initialise(_SEED)
    return model


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    return training.make_inputs(case.model, case.tokens, _SEED + 1 + case.here.rank, case.here.device)


def _sharded(case: Case, experts: str, mesh: DeviceMesh | None = None) -> training.Stack:
    """mesh: None for all ranks."""
    if mesh is None:
        mesh = init_device_mesh(case.here.device.type, (case.here.world_size,))
    model = _built(case, experts)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _floor(case: Case, experts: str) -> Outcome:
    model = _built(case, experts).to(torch.bfloat16)
    world = case.here.world_size
    masters = []
    for parameter in model.parameters():
        master = nn.Parameter(torch.randn(-(-parameter.numel() // world), device=case.here.device))
        master.grad = torch.randn_like(master) * 1e-3
        masters.append(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def after_backward() -> None:
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return _measured(case, model, after_backward, lambda: 0, checks=0)


def _stock(case: Case, experts: str, *, checks: int) -> Outcome:
    return _trained(case, _sharded(case, experts), lambda: 0, checks=checks)


def _symm(case: Case, experts: str, *, checks: int) -> Outcome:
    assert case.zero.group is not None
    mesh = DeviceMesh.from_group(case.zero.group, case.here.device.type)
    model = _sharded(case, experts, mesh)
    lent: dict[int, Lent] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(WindowedAllGather(case.zero, lent))
    try:
        return _trained(case, model, lambda: case.zero.nbytes, checks=checks)
    finally:
        case.here.synchronize()
        lent.clear()
        del model
        case.here.release()
        case.zero.close()


def _tide(case: Case, experts: str, attach: dict[str, Any], *, checks: int) -> Outcome:
    import tide_triton

    model = _sharded(case, experts)
    with _attached(case, model, attach):
        outcome = _trained(case, model, lambda: tide_triton.report(model, quiet=True).window_nbytes, checks=checks)
        report = tide_triton.report(model, quiet=True)
    if report.gather.layout_copy_bytes or report.reduce.layout_copy_bytes or report.slots_grown:
        case.here.say(str(report))
    return outcome


@contextlib.contextmanager
def _attached(case: Case, model: training.Stack, options: dict[str, Any]) -> Iterator[None]:
    """`model` under TIDE. options: of `attach`."""
    import tide_triton

    tide_triton.attach(model, transport=case.transport, strict=True, timeout_s=TIMEOUT_S, **options)
    try:
        yield
    except BaseException:
        # Windows must go; a model that stopped half way through a step may refuse.
        with contextlib.suppress(Exception):
            tide_triton.detach(model)
        raise
    tide_triton.detach(model)


def _trained(case: Case, model: training.Stack, windows: Callable[[], int], *, checks: int) -> Outcome:
    return _measured(case, model, _updating(model), windows, checks=checks)


def _updating(model: training.Stack) -> Callable[[], None]:
    """What comes after backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def after_backward() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return after_backward


def by_turns(case: Case, attach: Mapping[str, dict[str, Any]], experts: str, *, rounds: int) -> dict[str, float]:
    """Milliseconds of a step under each of `attach`: the slowest rank's median over `rounds` turns of one model."""
    model = _sharded(case, experts)
    after_backward, inputs = _updating(model), _inputs(case)

    def step() -> None:
        model(*inputs).backward()
        after_backward()

    times: dict[str, list[float]] = {variant: [] for variant in attach}
    with training.flash_attention(case.here.device):
        for _ in range(rounds):
            for variant, options in attach.items():
                with _attached(case, model, options):
                    for _ in range(_WARMUP):
                        step()
                    case.here.barrier()
                    times[variant] += _times(case.here, case.steps, step)[0]
    return dict(zip(times, case.here.largest([percentile(of, 50) for of in times.values()]), strict=True))


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
    inputs = _inputs(case)
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
        timing = slowest(here, *_times(here, case.steps, step))
    peak = torch.cuda.max_memory_allocated(here.device) if here.is_cuda else 0
    reserved = torch.cuda.max_memory_reserved(here.device) if here.is_cuda else 0
    held = windows()
    sizes = [(peak + held) / _GIB, (reserved + held) / _GIB, held / _GIB]
    peak_gib, reserved_gib, windows_gib = here.largest(sizes)
    same = all(other == prints[0] for other in prints)
    return Outcome(timing, peak_gib, reserved_gib, windows_gib, losses, prints[0] if prints else [], same)


def _times(here: Here, steps: int, step: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Milliseconds of each of `steps` steps, one right after the other, and microseconds of the host."""
    hosts, marks = [], []
    for index in range(steps + 1):
        if here.is_cuda:
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        marks.append(mark)
        if index < steps:
            begin = time.perf_counter()
            step()
            hosts.append((time.perf_counter() - begin) * 1e6)
    here.synchronize()
    times = [a.elapsed_time(b) if here.is_cuda else (b - a) * 1e3 for a, b in itertools.pairwise(marks)]
    return times, hosts


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
