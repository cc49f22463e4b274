"""What the ranks do in the GPU tests: importable functions of (rank, world_size, ...)."""

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import tide_triton
from tests.test_collectives import part, random_spec, whole
from tide_triton import Collectives
from tide_triton.layouts import GroupSpec, TensorSpec, Topology
from tide_triton.views import DTYPES


def device_of(rank: int) -> torch.device:
    """This rank's GPU, or the CPU under gloo, where a job can be rehearsed."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


class Block(nn.Module):
    """Linear layers and a norm; `hidden` need not divide by the ranks."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, hidden: int, checkpointed: bool, blocks: int = 5) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(1001, 512)
        self.blocks = nn.ModuleList(Block(512, hidden) for _ in range(blocks))
        self.head = nn.Linear(512, 1001, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def _prefetch(model: Model) -> None:
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, index - 2) : index])))


#: Settings of the parity test: what differs from the plain one.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"hidden": 2051},
    "checkpointed": {"checkpointed": True},
    "not resharded": {"reshard": False},
    "prefetch of two": {"prepare": _prefetch},
    "accumulated without sync": {"microbatches": 2, "sync_last_only": True},
    "accumulated with sync": {"microbatches": 2},
    "bf16 reduction": {"reduce_dtype": torch.bfloat16},
    "through the ring": {"attach": {"slot_reuse": False, "ring_chunk_nbytes": 1 << 20, "ring_depth": 3}},
    "gradients sent early": {
        "attach": {"slot_reuse": False, "early_reduce": True, "ring_chunk_nbytes": 1 << 20},
        "steps": 6,
    },
    "shards kept as cast": {"attach": {"keep_cast": True, "reuse": False}},
    "sharded on dim 1": {"placement": lambda p: Shard(1) if p.ndim == 2 else Shard(0)},
}


def train(
    rank: int,
    transport: str | None,
    *,
    hidden: int = 2048,
    checkpointed: bool = False,
    reshard: bool = True,
    prepare: Callable[[Model], None] | None = None,
    microbatches: int = 1,
    sync_last_only: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    placement: Any = None,
    attach: dict[str, Any] | None = None,
    steps: int = 4,
) -> tuple[list[torch.Tensor], Any]:
    """Losses, gradients and final parameters of a short training, and TIDE's report (None for stock)."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    with device:
        model = Model(hidden, checkpointed)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": placement}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, **options)
    if prepare is not None:
        prepare(model)
    if transport is not None:
        tide_triton.attach(model, transport=transport, timeout_s=30, **(attach or {}))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen = []
    for step in range(steps):
        for microbatch in range(microbatches):
            if sync_last_only:
                model.set_requires_gradient_sync(microbatch == microbatches - 1)
            generator = torch.Generator(device).manual_seed(step * 100 + microbatch * 10 + rank)
            tokens = torch.randint(0, 1001, (4, 256), generator=generator, device=device)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad._local_tensor.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    seen += [p._local_tensor.clone() for p in model.parameters()]
    torch.cuda.synchronize()
    report = None
    if transport is not None:
        report = tide_triton.report(model, quiet=True)
        tide_triton.detach(model)
    return seen, report


def parity(rank: int, world: int, transport: str, setting: str) -> tuple[bool, bool, int, int]:
    """Whether stock repeats itself, whether TIDE equals it, and TIDE's fallbacks and layout-copy bytes."""
    stock, _ = train(rank, None, **SETTINGS[setting])
    again, _ = train(rank, None, **SETTINGS[setting])
    tide, report = train(rank, transport, **SETTINGS[setting])
    same = all(torch.equal(a, b) for a, b in zip(stock, tide, strict=True))
    repeats = all(torch.equal(a, b) for a, b in zip(stock, again, strict=True))
    fallbacks = report.gather.fallback + report.reduce.fallback
    return repeats, same, fallbacks, report.gather.layout_copy_bytes + report.reduce.layout_copy_bytes


def interleave_slowly(
    rank: int, world: int, transport: Any, seed: int, topology: Topology | None = None, steps: int = 60
) -> str:
    """Random gathers and reductions of several groups, readers that are late, and slots refilled with NaN.

    topology: nodes of one rank each, which add in rank order too, or None.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    order, delay = random.Random(seed), random.Random(seed * 31 + rank)
    specs = [random_spec(world, seed + index) for index in range(3)]
    options: dict[str, Any] = {"transport": transport, "device": device, "timeout_s": 30, "topology": topology}
    groups = [Collectives(dist.group.WORLD, spec, **options) for spec in specs]
    wrong = ""
    for step in range(steps):
        index = order.randrange(3)
        spec, collectives = specs[index], groups[index]
        if delay.random() < 0.4:
            torch.cuda._sleep(int(delay.random() * 4_000_000))
        if order.random() < 0.5:
            sources = [whole(t, step + 50 * i).to(device) for i, t in enumerate(spec.tensors)]
            got = collectives.all_gather([part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)])
            want = [s.to(DTYPES[t.dtype]) for t, s in zip(spec.tensors, sources, strict=True)]
        else:
            grads = [
                [whole(t, step + 50 * i + 999 * r).to(device) for i, t in enumerate(spec.tensors)] for r in range(world)
            ]
            got = collectives.reduce_scatter(grads[rank], average=False)
            want = []
            for i, tensor in enumerate(spec.tensors):
                total = part(tensor, world, rank, grads[0][i])
                for peer in range(1, world):
                    total = total + part(tensor, world, rank, grads[peer][i])
                want.append(total)
        # The slow reader: a copy that starts late must still see this turn's data.
        if delay.random() < 0.4:
            torch.cuda._sleep(int(delay.random() * 4_000_000))
        late = [tensor.clone() for tensor in got]
        collectives._slot.window.memory.fill_(0xFF)
        collectives._slot.vacate()
        if not all(torch.equal(g, w) for g, w in zip(late, want, strict=True)):
            wrong = wrong or f"step {step} on group {index} is wrong"
    for collectives in groups:
        collectives.close()
    return wrong


def engines_of_a_gather(
    rank: int, world: int, transport: Any, topology: Topology | None = None
) -> tuple[list[str], int]:
    """Names of the kernels that run during all-gathers, and how many peer copies do."""
    device = torch.device("cuda", torch.cuda.current_device())
    spec = GroupSpec(world, tuple(TensorSpec(f"w{i}", (4096, 1024), "bfloat16") for i in range(6)))
    shards = [torch.randn(4096 // world, 1024, device=device) for _ in spec.tensors]
    options: dict[str, Any] = {"transport": transport, "device": device, "timeout_s": 30, "topology": topology}
    with Collectives(dist.group.WORLD, spec, **options) as collectives:
        for _ in range(3):
            collectives.all_gather(shards)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                collectives.all_gather(shards)
            torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.name for e in events if e.name.startswith("Memcpy")]
    kernels = sorted({e.name for e in events if not e.name.startswith("Mem")})
    return kernels, len(copies)


def stop(rank: int, world: int, transport: Any, timeout_s: float, topology: Topology | None = None) -> float:
    """Rank 1 stops taking part; the others are told, and their streams go on."""
    device = torch.device("cuda", torch.cuda.current_device())
    spec = GroupSpec(world, (TensorSpec("w", (1024, 64), "bfloat16"),))
    options: dict[str, Any] = {"transport": transport, "device": device, "timeout_s": timeout_s, "topology": topology}
    collectives = Collectives(dist.group.WORLD, spec, **options)
    shard = torch.ones(1024 // world, 64, device=device)
    collectives.all_gather([shard])
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(timeout_s + 6)
        return 0.0
    started = time.monotonic()
    collectives.all_gather([shard])
    torch.cuda.synchronize()
    waited = time.monotonic() - started
    try:
        collectives.all_gather([shard])
    finally:
        collectives.close()
    return waited


def replay(rank: int, world: int, transport: Any) -> str:
    """Both collectives in a graph, replayed with changed shards and gradients, eager calls and delays in between."""
    device = device_of(rank)
    specs = [random_spec(world, 77), GroupSpec(world, (TensorSpec("w", (5000, 801), "bfloat16"),))]
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(Collectives(dist.group.WORLD, spec, transport=transport, device=device, timeout_s=30))
            for spec in specs
        ]
        graphs = [_captured(rank, world, spec, group, device) for spec, group in zip(specs, groups, strict=True)]
        delay = random.Random(rank)
        for step in range(12):
            for index, (graph, shards, gradients, views, outputs) in enumerate(graphs):
                sources = [whole(t, 100 * step + i).to(device) for i, t in enumerate(specs[index].tensors)]
                for shard, tensor, source in zip(shards, specs[index].tensors, sources, strict=True):
                    shard.copy_(part(tensor, world, rank, source))
                pushed = [
                    [whole(t, 100 * step + 50 * r + i).to(device) for i, t in enumerate(specs[index].tensors)]
                    for r in range(world)
                ]
                for gradient, now in zip(gradients, pushed[rank], strict=True):
                    gradient.copy_(now)
                torch.cuda._sleep(int(delay.random() * 3_000_000))
                graph.replay()
                got = [view.clone() for view in views], [output.clone() for output in outputs]
                want = [s.to(DTYPES[t.dtype]) for t, s in zip(specs[index].tensors, sources, strict=True)]
                sums = []
                for i, tensor in enumerate(specs[index].tensors):
                    total = part(tensor, world, rank, pushed[0][i])
                    for peer in range(1, world):
                        total = total + part(tensor, world, rank, pushed[peer][i])
                    sums.append(total)
                if not all(torch.equal(a, b) for a, b in zip(got[0], want, strict=True)):
                    return f"step {step}: graph {index} gathers something else"
                if not all(torch.equal(a, b) for a, b in zip(got[1], sums, strict=True)):
                    return f"step {step}: graph {index} reduces to something else"
                if step % 3 == 1:
                    again = groups[index].all_gather(shards), groups[index].reduce_scatter(gradients, average=False)
                    if not all(torch.equal(a, b) for a, b in zip(again[0] + again[1], got[0] + got[1], strict=True)):
                        return f"step {step}: called after a replay, group {index} gives something else"
        torch.cuda.synchronize()
    return ""


def _captured(rank: int, world: int, spec: GroupSpec, group: Collectives, device: torch.device) -> tuple[Any, ...]:
    shards = [part(t, world, rank, whole(t, 1).to(device)).clone() for t in spec.tensors]
    gradients = [whole(t, 2).to(device) for t in spec.tensors]
    for _ in range(2):
        group.all_gather(shards)
        group.reduce_scatter(gradients, average=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = group.all_gather(shards)
        outputs = group.reduce_scatter(gradients, average=False)
    return graph, shards, gradients, views, outputs
