"""One training on one rank: the same seeds, data and steps, through whichever collectives."""

import hashlib
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import tide_triton
from tide_triton.demo.data import batches
from tide_triton.demo.memory import BufferMeter
from tide_triton.demo.model import GPT, Shape
from tide_triton.demo.results import Run, Way
from tide_triton.fsdp.reference import meter_stock, reduce_in_rank_order
from tide_triton.traffic import Traffic

SEED = 0
#: Windows a rank and step.
BATCH = 4
#: Low enough that differences in rounding hardly grow within 30 steps, high enough that the loss falls by then.
LEARNING_RATE = 1e-3
#: Seconds that a rank waits for another, whose process may share its core.
TIMEOUT_S = 120.0


def train(way: Way, steps: int, text: bytes, mesh: DeviceMesh, on_step: Callable[[int, float], None]) -> Run:
    """Train a fresh model for `steps` steps; called on every rank of `mesh`.

    on_step: called after each step with how many are done and this rank's loss.
    """
    shape = Shape()
    model = sharded_model(shape, mesh)
    gather, reduce, meter = Traffic(), Traffic(), None
    if way is Way.STOCK:
        gather, reduce = meter_stock(model)
        meter = BufferMeter(model)
    elif way is Way.TIDE:
        tide_triton.attach(model, transport="host", timeout_s=TIMEOUT_S)
    else:
        reduce_in_rank_order(model)

    rank, ranks = mesh.get_rank(), mesh.size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    windows = batches(text, rank, ranks, batch=BATCH, context=shape.context, seed=SEED)
    losses, digests, durations = [], [], []
    for step in range(steps):
        tokens = next(windows)
        # What a rank does between steps must not show in the others' time.
        dist.barrier()
        started = time.perf_counter()
        loss = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        paused = time.perf_counter()
        digests.append(digest(p.grad for p in model.parameters()))
        resumed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        durations.append(time.perf_counter() - resumed + paused - started)
        on_step(step + 1, losses[-1])
    digests.append(digest([*model.parameters(), *_state(optimizer)]))

    transport, buffer_nbytes = "", meter.peak_nbytes if meter else 0
    if way is Way.TIDE:
        report = tide_triton.report(model, quiet=True)
        transport, gather, reduce, buffer_nbytes = report.transport, report.gather, report.reduce, report.window_nbytes
        tide_triton.detach(model)
    return Run(
        losses=tuple(losses),
        digests=tuple(digests),
        # The first step warms up, unless there is no other.
        seconds=sum(durations[1:] or durations),
        gather=gather,
        reduce=reduce,
        buffer_nbytes=buffer_nbytes,
        transport=transport,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def sharded_model(shape: Shape, mesh: DeviceMesh) -> nn.Module:
    """A GPT with the weights of SEED, sharded over `mesh`: bf16 to compute, fp32 to reduce."""
    torch.manual_seed(SEED)
    model = GPT(shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """SHA-256 of dtypes, shapes and bytes; of DTensors, the local shards."""
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            sha.update(b"none")
            continue
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        sha.update(f"{local.dtype}{tuple(local.shape)}".encode())
        sha.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Everything the optimizer keeps, in the order of the parameters and then of names."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for _, value in sorted(optimizer.state[parameter].items()):
                yield torch.as_tensor(value)
