"""Train the same model under stock FSDP2, under its rank-ordered reference and under TIDE, and compare every tensor.

A *run* trains some steps and keeps everything a difference could show in: losses, gradients of each step, parameters
and optimizer state. Adam hides a wrong scale, so tests of scales pass "sgd".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tide_triton
from tests.fsdp.models import VOCABULARY, fsdp_modules
from tide_triton.fsdp import Report
from tide_triton.fsdp.reference import reduce_in_rank_order

#: Enough for a loaded machine, little enough for a test to fail in time.
TIMEOUT_S = 30.0

Trace = list[tuple[str, torch.Tensor]]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the model's logits; runs the backward too, as every loss of a run does."""
    loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss.detach()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, -2), targets.flatten())


def batch(rank: int, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets that differ between ranks, steps and microbatches."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 6), generator=generator)
    return tokens, torch.randint(0, VOCABULARY, (4, 6), generator=generator)


@dataclass(frozen=True)
class Loop:
    """How a model is trained.

    micro: microbatches per step; sync: whether gradients are reduced in each of them, or only in the last.
    before: called with the model before each forward. data_rank: which data a rank sees (tensor-parallel ranks share).
    """

    steps: int = 3
    micro: int = 1
    sync: bool = True
    optimizer: str = "adamw"
    loss: Loss = plain_loss
    before: Callable[[nn.Module], Any] | None = None
    wrap: Callable[[nn.Module], Callable[..., Any]] | None = None
    data_rank: Callable[[int], int] = lambda rank: rank


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, rank: int, loop: Loop) -> Trace:
    optimizer = optimizer_of(model, loop.optimizer)
    forward = model if loop.wrap is None else loop.wrap(model)
    trace: Trace = []
    for step in range(loop.steps):
        for micro in range(loop.micro):
            if not loop.sync:
                model.set_requires_gradient_sync(micro == loop.micro - 1)
            if loop.before is not None:
                loop.before(model)
            tokens, targets = batch(loop.data_rank(rank), step, micro)
            trace.append((f"step {step}.{micro}: loss", loop.loss(forward, tokens, targets)))
        trace += gradients(model, f"step {step}: ")
        optimizer.step()
        optimizer.zero_grad()
        trace += parameters(model, f"step {step}: ")
    return trace + list(optimizer_state(model, optimizer))


def gradients(model: nn.Module, prefix: str = "") -> Trace:
    """A copy of every gradient; one that is absent is an empty tensor of a dtype that no gradient has."""
    absent = torch.empty(0, dtype=torch.int8)
    return [
        (f"{prefix}grad {name}", absent if p.grad is None else local(p.grad).clone())
        for name, p in model.named_parameters()
    ]


def parameters(model: nn.Module, prefix: str = "") -> Trace:
    """A copy of every sharded parameter; FSDP2 registers these again for a state dict."""
    return [(f"{prefix}{name}", local(p).detach().clone()) for name, p in model.state_dict().items()]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(p): name for name, p in model.named_parameters()}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of {names.get(id(param), '?')}", local(value).clone()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def difference(expected: Trace, got: Trace) -> str:
    """What differs first, bit by bit; empty where nothing does."""
    if [name for name, _ in expected] != [name for name, _ in got]:
        return f"not the same tensors: {sorted(set(map(first, expected)) ^ set(map(first, got)))[:5]}"
    for (name, a), (_, b) in zip(expected, got, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
        if not torch.equal(a, b):
            where = (a != b).flatten().nonzero().flatten()
            at = int(where[0]) if len(where) else -1
            values = f"{a.flatten()[at]} against {b.flatten()[at]}"
            return f"{name}: {len(where)} of {a.numel()} differ, first at {at}: {values}"
    return ""


def first(pair: tuple[str, torch.Tensor]) -> str:
    return pair[0]


def distance(expected: Trace, got: Trace) -> float:
    """How far the first step's gradients are from each other: the largest difference over the tensor's largest value.

    Later steps are left out, because Adam makes any difference in a gradient near zero a difference of a whole step.
    """
    worst = 0.0
    # The shorter run ends with optimizer state where the longer one goes on.
    for (name, a), (_, b) in zip(expected, got, strict=False):
        if name.startswith("step 0: grad") and a.numel() and a.dtype.is_floating_point:
            scale = max(float(a.abs().max()), 1e-30)
            worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
    return worst


def losses(trace: Trace) -> list[float]:
    return [float(value) for name, value in trace if name.endswith(": loss")]


# --- what the ranks send back ---


@dataclass
class Row:
    """A group of the report, as plain data."""

    name: str
    gather: str
    reduce: str
    why: str
    gathers: int
    reduces: int
    wire_bytes: int
    layout_copy_bytes: int
    slot: str


@dataclass
class Outcome:
    """What one rank found. Differences are empty where there are none."""

    from_stock: str = ""
    from_reference: str = ""
    distance: float = 0.0
    losses: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    grown: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def rows_of(report: Report) -> list[Row]:
    return [
        Row(
            g.name,
            g.gather_path,
            g.reduce_path,
            g.why,
            g.gather.calls,
            g.reduce.calls,
            g.gather.wire_bytes + g.reduce.wire_bytes,
            g.gather.layout_copy_bytes + g.reduce.layout_copy_bytes,
            g.slot,
        )
        for g in report.groups
    ]


def compare(
    build: Callable[[], nn.Module],
    rank: int,
    loop: Loop,
    *,
    after: Callable[[nn.Module], Any] | None = None,
    reference: bool = False,
    **attach: Any,
) -> Outcome:
    """Train what `build` gives under stock and under TIDE, and report on TIDE's run."""
    (outcome,) = compare_all(build, rank, loop, [attach], after=after, reference=reference)
    return outcome


def compare_all(
    build: Callable[[], nn.Module],
    rank: int,
    loop: Loop,
    variants: Sequence[dict[str, Any]],
    *,
    after: Callable[[nn.Module], Any] | None = None,
    reference: bool = False,
) -> list[Outcome]:
    """Train what `build` gives under stock and, with each of `variants` as options of attach, under TIDE.

    after: called with each model once its comms are set, before training (to_empty, load, setters).
    reference: compare with the rank-ordered reference, and with stock only the first step's gradients.
    """
    torch._dynamo.reset()

    def run(mode: str, options: dict[str, Any]) -> tuple[Trace, Outcome]:
        # With a reference, stock is only looked at after one step.
        looped = replace(loop, steps=1) if mode == "stock" and reference else loop
        model, outcome = build(), Outcome()
        if mode == "reference":
            reduce_in_rank_order(model)
        if mode == "tide":
            tide_triton.attach(model, **{"timeout_s": TIMEOUT_S, **options})
        if after is not None:
            after(model)
        trace = train(model, rank, looped)
        if mode == "tide":
            report = tide_triton.report(model, quiet=True)
            outcome.rows, outcome.grown = rows_of(report), report.slots_grown
            tide_triton.detach(model)
        return trace, outcome

    stock, _ = run("stock", {})
    ordered = run("reference", {})[0] if reference else None
    outcomes = []
    for options in variants:
        tide, outcome = run("tide", options)
        outcome.distance = distance(stock, tide)
        if ordered is not None:
            outcome.from_reference = difference(ordered, tide)
        else:
            outcome.from_stock = difference(stock, tide)
        outcome.losses = losses(tide)
        outcomes.append(outcome)
    return outcomes


# --- what tests assert ---


def assert_zero_copy(outcomes: list[Outcome], *, except_for: dict[str, str] | None = None) -> None:
    """Every group of every rank was zero-copy, without a layout copy.

    except_for: groups that were not, and a part of the reason that the report must give for each.
    """
    expected = except_for or {}
    for rank, outcome in enumerate(outcomes):
        assert outcome.rows, "no groups in the report"
        assert set(expected) <= {row.name for row in outcome.rows}
        for row in outcome.rows:
            if row.name in expected:
                assert expected[row.name] in row.why, (rank, row)
                continue
            assert (row.gather, row.reduce) == ("zero-copy", "zero-copy"), (rank, row)
            # With Slot-Reuse, what cannot land in its slot says so; that is no layout copy.
            assert all(why.startswith("reduce: through the ring") for why in row.why.split("; ") if why), (rank, row)
            assert row.layout_copy_bytes == 0, (rank, row)
            assert row.gathers > 0, (rank, row)


def assert_equal_to_stock(outcomes: list[Outcome]) -> None:
    assert [o.from_stock for o in outcomes] == [""] * len(outcomes)


def assert_equal_to_reference(outcomes: list[Outcome]) -> None:
    assert [o.from_reference for o in outcomes] == [""] * len(outcomes)


def set_prefetch(model: nn.Module, depth: int) -> None:
    """Let every block gather the next `depth` ones in forward, and the `depth` before it in backward."""
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])


def set_divide_factor(model: nn.Module, factor: float) -> None:
    for module in fsdp_modules(model):
        # Gloo has no PREMUL_SUM.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(factor)
