"""What the ranks do in the tests of logical nodes: importable functions of (rank, world_size, ...).

Every rank is a node of its own, so that all that moves between two GPUs goes as it would between two machines, and
gradients are still added in rank order.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tests.gpu import jobs
from tests.test_collectives import gather_and_reduce, part, random_spec, whole
from tide_triton import Collectives
from tide_triton.errors import TideError
from tide_triton.layouts import GroupSpec, TensorSpec, Topology
from tide_triton.views import DTYPES

#: Settings of the parity test: what differs from the plain one. `attach` adds to {"nodes": world}.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"hidden": 2051},
    "checkpointed": {"checkpointed": True},
    "accumulated without sync": {"microbatches": 2, "sync_last_only": True},
    "bf16 reduction": {"reduce_dtype": torch.bfloat16},
    "small chunks": {"attach": {"ring_chunk_nbytes": 1 << 20, "ring_depth": 3}},
    "sharded on dim 1": {"placement": lambda p: Shard(1) if p.ndim == 2 else Shard(0)},
}


def opened(rank: int, world: int, spec: GroupSpec, transport: Any) -> Collectives:
    """Collectives over nodes of one rank each."""
    assert dist.group.WORLD is not None
    return Collectives(
        dist.group.WORLD,
        spec,
        transport=transport,
        device=jobs.device_of(rank),
        timeout_s=30,
        topology=Topology(world, 1),
    )


def exact(rank: int, world: int, transport: Any, seeds: int) -> str:
    """Both collectives of random layouts, bit for bit."""
    kind = jobs.device_of(rank).type
    for seed in range(seeds):
        wrong = gather_and_reduce(rank, world, seed, kind, transport, Topology(world, 1))
        if wrong:
            return f"seed {seed}: {wrong}"
    return ""


def interleave(rank: int, world: int, transport: Any, seed: int, steps: int) -> str:
    return jobs.interleave_slowly(rank, world, transport, seed, Topology(world, 1), steps)


def large(rank: int, world: int, transport: Any) -> str:
    """Groups whose chunks and fillings are many: several turns of everything, with slow ranks."""
    device = jobs.device_of(rank)
    spec = GroupSpec(world, (TensorSpec("a", (12_345, 4096), "bfloat16"), TensorSpec("b", (4096, 9001), "bfloat16", 1)))
    with opened(rank, world, spec, transport) as collectives:
        for turn in range(3):
            sources = [_noise(t, 10 * turn + i, device) for i, t in enumerate(spec.tensors)]
            collectives._slot.window.memory.fill_(0xFF)
            if rank == turn % world and device.type == "cuda":
                torch.cuda._sleep(50_000_000)
            got = collectives.all_gather([part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)])
            if not all(torch.equal(g, s) for g, s in zip(got, sources, strict=True)):
                return f"turn {turn}: gathered wrong"
            pushed = [[_noise(t, 100 * r + turn + i, device) for i, t in enumerate(spec.tensors)] for r in range(world)]
            sums = collectives.reduce_scatter(pushed[rank], average=False)
            for i, (tensor, got_sum) in enumerate(zip(spec.tensors, sums, strict=True)):
                total = part(tensor, world, rank, pushed[0][i]).float()
                for peer in range(1, world):
                    total = total + part(tensor, world, rank, pushed[peer][i]).float()
                if not torch.equal(got_sum, total):
                    return f"turn {turn}: {tensor} reduced wrong"
    return ""


def _noise(tensor: TensorSpec, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, device=device).to(DTYPES[tensor.dtype])


def parity(rank: int, world: int, transport: str, setting: str) -> tuple[bool, bool, int, int, str]:
    """Whether stock repeats itself, whether TIDE equals it; TIDE's fallbacks, copies in reductions, transport."""
    options = {**SETTINGS[setting]}
    attach = {"nodes": world, **options.pop("attach", {})}
    stock, _ = jobs.train(rank, None, **options)
    again, _ = jobs.train(rank, None, **options)
    tide, report = jobs.train(rank, transport, attach=attach, **options)
    same = all(torch.equal(a, b) for a, b in zip(stock, tide, strict=True))
    repeats = all(torch.equal(a, b) for a, b in zip(stock, again, strict=True))
    fallbacks = report.gather.fallback + report.reduce.fallback
    return repeats, same, fallbacks, report.reduce.layout_copy_bytes, report.transport


def engines(rank: int, world: int, transport: Any) -> tuple[list[str], int]:
    return jobs.engines_of_a_gather(rank, world, transport, Topology(world, 1))


def what_is_put(rank: int, world: int, transport: Any) -> tuple[int, int, list[int]]:
    """Bytes that the library put in a gather and in a reduction, and the peers' addresses that are known."""
    spec = GroupSpec(world, (TensorSpec("w", (512, 64), "bfloat16"),))
    device = jobs.device_of(rank)
    with opened(rank, world, spec, transport) as collectives:
        library: Any = collectives._pool.transport
        puts = library._put_pieces
        counted = 0

        def put_pieces(window: Any, peer: int, pieces: Any, stream: int) -> None:
            nonlocal counted
            counted += sum(piece.nbytes for piece in pieces if piece.nbytes > 8)
            puts(window, peer, pieces, stream)

        library._put_pieces = put_pieces
        collectives.all_gather([torch.ones(512 // world, 64, device=device)])
        gathered, counted = counted, 0
        collectives.reduce_scatter([torch.ones(512, 64, device=device, dtype=torch.bfloat16)])
        window: Any = collectives._slot.window
        known = [peer for peer in range(world) if peer != rank and window.addresses[peer]]
        del library._put_pieces
        return gathered, counted, known


def stop(rank: int, world: int, transport: Any, timeout_s: float) -> float:
    return jobs.stop(rank, world, transport, timeout_s, Topology(world, 1))


def reopen(rank: int, world: int, transport: Any) -> str:
    """Collectives that are opened and closed, one after the other and together, with what they gathered kept."""
    device = jobs.device_of(rank)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(4):
        spec = random_spec(world, 40 + turn)
        with opened(rank, world, spec, transport) as first, opened(rank, world, spec, transport) as second:
            for seed, collectives in enumerate((first, second)):
                sources = [whole(t, 10 * turn + seed + i).to(device) for i, t in enumerate(spec.tensors)]
                shards = [part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)]
                got = collectives.all_gather(shards)
                want = [s.to(DTYPES[t.dtype]) for t, s in zip(spec.tensors, sources, strict=True)]
                if turn == 1:
                    kept += zip(got, want, strict=True)
                if not all(torch.equal(g, w) for g, w in zip(got, want, strict=True)):
                    return f"turn {turn}: gathered wrong"
                del got
        if not all(torch.equal(g, w) for g, w in kept):
            return f"turn {turn}: what turn 1 gathered has changed"
        if turn == 2:
            kept.clear()
    return ""


def serve_other_ranks(rank: int, world: int) -> str:
    """What is said where NVSHMEM is already in use between other ranks."""
    alone = [dist.new_group([one]) for one in range(world)]
    spec = GroupSpec(1, (TensorSpec("w", (8, 8), "bfloat16"),))
    device = jobs.device_of(rank)
    with opened(rank, world, GroupSpec(world, spec.tensors), "nvshmem"):
        try:
            Collectives(alone[rank], spec, transport="nvshmem", device=device, timeout_s=30).close()
        except TideError as error:
            return str(error)
    return ""
