"""One process per GPU, started here or by torchrun, and what each rank knows about itself."""

import datetime
import gc
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tide_triton import parent

#: Seconds after which NCCL and TIDE give up on a rank that does not come.
TIMEOUT_S = 60


@dataclass(frozen=True)
class Here:
    """This rank. On a machine without GPUs `device` is the CPU, which runs all code and times nothing of interest."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sm_count(self) -> int:
        """SMs of this rank's GPU; 1 without one."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count if self.is_cuda else 1

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Until every rank is here and its GPU idle."""
        self.synchronize()
        if self.is_cuda:
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks: the slowest rank's."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def smallest(self, values: Sequence[float]) -> list[float]:
        """Each value's minimum over the ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def everywhere(self, holds: bool) -> bool:
        """Whether `holds` is true on every rank."""
        return self.smallest([float(holds)])[0] == 1.0

    def release(self) -> None:
        """Give freed memory back to the GPU."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return [float(value) for value in tensor.tolist()]


#: What every rank runs: (here, arguments).
Job = Callable[..., None]


def gpu_count() -> int:
    """GPUs of this machine, asked without starting CUDA."""
    return torch.cuda.device_count()


def rank_count() -> int:
    """How many ranks `run` has: torchrun's, or one a GPU, or two on a machine without any."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else gpu_count() or 2


def device_type() -> str:
    """Of the ranks' tensors: "cuda" where there are GPUs, else "cpu"."""
    return "cuda" if gpu_count() > 0 else "cpu"


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process is the one that sums up: not so for torchrun's other ranks."""
    return int(os.environ["RANK"]) == 0 if under_torchrun() else True


def run(job: Job, args: tuple[Any, ...], *, world_size: int | None = None, timeout_s: float = 600.0) -> str | None:
    """Let every rank call `job(here, *args)`; returns what went wrong, None where nothing did.

    Under torchrun this process is a rank already. Otherwise one process per GPU is started (two on a machine without
    any), and all are killed `timeout_s` seconds later.
    """
    if under_torchrun():
        rank, world = int(os.environ["RANK"]), rank_count()
        local = int(os.environ.get("LOCAL_RANK", rank))
        _run_rank(rank, world, local, None, job, args)
        return None
    world = world_size or rank_count()
    with tempfile.TemporaryDirectory(prefix="tide_bench_") as directory:
        store = os.path.join(directory, "store")
        context = torch.multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_run_rank, args=(rank, world, rank, store, job, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        return _join(processes, timeout_s)


def _join(processes: list[Any], timeout_s: float) -> str | None:
    """Wait for all; once one has failed, the others get seconds to end by themselves."""
    deadline = time.monotonic() + timeout_s
    problem: str | None = None
    while alive := [p for p in processes if p.is_alive()]:
        multiprocessing.connection.wait([p.sentinel for p in alive], timeout=min(1.0, timeout_s))
        failed = [(i, p.exitcode) for i, p in enumerate(processes) if p.exitcode not in (None, 0)]
        if failed and problem is None:
            problem = f"rank {failed[0][0]} ended with exit code {failed[0][1]}"
            deadline = min(deadline, time.monotonic() + 10.0)
        if time.monotonic() > deadline:
            problem = problem or f"not done after {timeout_s:g} s"
            for process in alive:
                process.kill()
    failed = [(i, p.exitcode) for i, p in enumerate(processes) if p.exitcode != 0]
    return problem or (f"rank {failed[0][0]} ended with exit code {failed[0][1]}" if failed else None)


def _run_rank(rank: int, world: int, local: int, store: str | None, job: Job, args: tuple[Any, ...]) -> None:
    parent.follow()
    cuda = device_type() == "cuda"
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    # What cuBLAS takes on Hopper anyway; torch wants it said before it calls a GEMM deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if cuda:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}" if store else "env://",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    here = Here(rank, world, device)
    job(here, *args)
    here.barrier()
    dist.destroy_process_group()
