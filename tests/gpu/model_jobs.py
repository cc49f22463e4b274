"""What the ranks do in the tests of published models: train a few of a model's own blocks, and keep fingerprints.

The blocks are the benchmark's (`bench.training`): published shapes, checkpointed activations, bf16 parameters and fp32
reduction under FSDP2. Gigabytes of gradients stay on their GPU; what is compared is 128 bits of each.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide_triton
from bench import cases, training
from bench.ranks import Here
from bench.step import fingerprint
from tests.gpu.jobs import device_of
from tide_triton.models import ModelSpec

#: (of what, the loss itself or the fingerprint of a tensor)
Prints = list[tuple[str, object]]


@dataclass(frozen=True)
class Case:
    """What is trained: `layers` blocks of a model, on `tokens` tokens of each rank in each of `steps` steps.

    model: the name of a published model, or of one of `bench.cases.TINY`. options: of attach.
    """

    model: str
    transport: str
    layers: int
    tokens: int
    steps: int
    options: dict[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return cases.model_named(self.model)


@dataclass
class Found:
    """What one rank saw.

    unlike_itself, unlike_stock: what differs between two stock runs, and under TIDE from stock.
    moved: gathers that had to move something. reduces: reductions, all of them zero-copy.
    """

    unlike_itself: list[str]
    unlike_stock: list[str]
    losses: list[float]
    why_not_zero_copy: list[str]
    layout_copy_bytes: int
    moved: int
    reduces: int


def equals_stock(rank: int, world: int, case: Case) -> Found:
    """Train by stock FSDP2, by it again, and under TIDE, and compare all three."""
    # Torch reads it at the process's first GEMM, and calls no GEMM deterministic without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    here = Here(rank, world, device_of(rank))
    (stock, _), (again, _), (tide, report) = (_train(here, case, by_tide) for by_tide in (False, False, True))
    return Found(
        unlike_itself=_unlike(stock, again),
        unlike_stock=_unlike(stock, tide),
        losses=[value for _, value in tide if isinstance(value, float)],
        why_not_zero_copy=[
            f"{group.name}: {group.why}" for group in report.groups if group.gather.fallback + group.reduce.fallback
        ],
        layout_copy_bytes=report.gather.layout_copy_bytes + report.reduce.layout_copy_bytes,
        moved=report.gather.zero_copy - report.gather.reused,
        reduces=report.reduce.zero_copy,
    )


def _unlike(one: Prints, other: Prints) -> list[str]:
    return [name for (name, a), (_, b) in zip(one, other, strict=True) if a != b]


def _train(here: Here, case: Case, by_tide: bool) -> tuple[Prints, Any]:
    """What `_steps` gives, and TIDE's report (None for stock). Nothing of it stays on the GPU."""
    try:
        return _run(here, case, by_tide)
    finally:
        here.release()


def _run(here: Here, case: Case, by_tide: bool) -> tuple[Prints, Any]:
    model = _sharded(here, case)
    if not by_tide:
        return _steps(here, case, model), None
    tide_triton.attach(model, transport=case.transport, timeout_s=30, **case.options)  # type: ignore[arg-type]
    prints = _steps(here, case, model)
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return prints, report


def _sharded(here: Here, case: Case) -> training.Stack:
    """As the benchmark's step has it: a group for each block, and one for the norm."""
    experts = training.experts_that_work(here.device)[0] if case.spec.experts else "none"
    with here.device:
        model = training.Stack(case.spec, case.layers, experts)
    model.initialise(1)
    mesh = init_device_mesh(here.device.type, (here.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _steps(here: Here, case: Case, model: training.Stack) -> Prints:
    """Losses, and fingerprints of each step's gradients and of the final parameters."""
    # A rate at which the first step shows in the bf16 parameters of the second.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen: Prints = []
    for step in range(case.steps):
        inputs = training.make_inputs(case.spec, case.tokens, 100 * step + here.rank, here.device)
        with training.flash_attention(here.device), training.deterministic():
            loss = model(*inputs)
            loss.backward()
        seen.append((f"step {step}: loss", float(loss.detach())))
        seen += [(f"step {step}: gradient of {name}", fingerprint(p.grad)) for name, p in model.named_parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [(f"final {name}", fingerprint(p)) for name, p in model.named_parameters()]
