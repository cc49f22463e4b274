"""Real processes for tests: `world_size` ranks with a gloo process group, kept between tests.

    def step(rank: int, world_size: int, scale: float) -> float: ...      # importable, at module level

    results = ranks(2).run(step, 3.0)               # one result a rank; raises RankError where a rank raised
    outcomes = ranks(2).outcomes(step, 3.0)         # results, or the exceptions that ranks raised

Importing torch takes seconds, so ranks are forked from a server that has imported it, and the same ones serve every
test of a session. A test that kills one takes `Ranks` of its own.
"""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

#: What the fork server imports once for all ranks.
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "tide_triton.fsdp", "tide_triton.collectives"]


class RankError(AssertionError):
    """A rank raised what the test did not expect; the message holds its traceback."""


class Ranks:
    """`world_size` processes that run the same function when told to.

    backend: of their process group; "nccl" gives each rank the GPU of its number, or all of them the only one.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="tide_ranks_")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, backend, os.path.join(self._directory.name, "store"), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Let every rank call `function(rank, world_size, *args)`."""
        for connection in self._connections:
            connection.send((function, args))

    def finish(self, timeout_s: float = 120.0) -> list[Any]:
        """What each rank returned, or the exception it raised; EOFError for a rank that died."""
        return [self._receive(rank, timeout_s) for rank in range(self.world_size)]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        self.start(function, *args)
        return self.finish(timeout_s)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        results = self.outcomes(function, *args, timeout_s=timeout_s)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                raise RankError(f"rank {rank}: {result!r}\n{getattr(result, 'rank_traceback', '')}") from result
        return results

    def _receive(self, rank: int, timeout_s: float) -> Any:
        if not self._connections[rank].poll(timeout_s):
            self.stop()
            raise RankError(f"rank {rank} did not finish within {timeout_s} s")
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            return EOFError(f"rank {rank} died: {error}")

    def stop(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()


class RankPools:
    """One `Ranks` per world size, started on first use and again after one has died."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def __call__(self, world_size: int) -> Ranks:
        pool = self._pools.get(world_size)
        if pool is None or not pool.is_alive:
            if pool is not None:
                pool.stop()
            pool = self._pools[world_size] = Ranks(world_size)
        return pool

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools.clear()


@contextlib.contextmanager
def fresh_ranks(world_size: int, backend: str = "gloo") -> Iterator[Ranks]:
    """Ranks of their own, for a test that may not leave them usable."""
    ranks = Ranks(world_size, backend)
    try:
        yield ranks
    finally:
        ranks.stop()


def _serve(rank: int, world_size: int, backend: str, store: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        if torch.cuda.device_count() < world_size:
            # Both libraries refuse to share a GPU unless they are told so. NCCL can from 2.30 on.
            os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    while (job := connection.recv()) is not None:
        function, args = job
        try:
            result = function(rank, world_size, *args)
        except BaseException as error:
            error.rank_traceback = traceback.format_exc()  # type: ignore[attr-defined]
            result = error
        try:
            connection.send(result)
        except Exception as error:
            connection.send(RuntimeError(f"the result of {function} cannot be sent: {error!r}; {result!r}"))
    os._exit(0)
