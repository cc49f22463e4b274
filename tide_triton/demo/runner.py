"""The three trainings on all ranks: one start of the processes, one after the other in the same order on each."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tide_triton.demo.processes import Tell, run_ranks
from tide_triton.demo.results import Corpus, Results, Run, Way, combine

#: More processes than this are no demo.
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Progress:
    """Rank 0 has done `step` steps of training `way`, the last with its own `loss`."""

    way: Way
    step: int
    loss: float


def run(ranks: int, steps: int, hear: Callable[[Progress], None]) -> Results:
    """Train `steps` steps in every way on `ranks` processes.

    hear: called with every step of rank 0.

    Raises RankFailedError where a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="tide_demo_") as directory:
        store = os.path.join(directory, "store")
        answers = run_ranks(ranks, train_all_ways, steps, store, hear=lambda _rank, progress: hear(progress))
    _, corpus, versions = answers[0]
    return combine([runs for runs, _, _ in answers], corpus, versions)


def train_all_ways(
    rank: int, ranks: int, tell: Tell, steps: int, store: str
) -> tuple[dict[Way, Run], Corpus, dict[str, str]]:
    """What one rank does: its runs, what it trained on, and with which versions.

    store: path of a file that does not exist yet, through which the ranks meet, in a directory for temporary files.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; the ranks are the parallelism
    # Importing torch's compiler, which the optimizer does, leaves a directory behind.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.dirname(store))
    import datetime
    import platform
    from importlib.metadata import version

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tide_triton.demo.data import NAME, corpus
    from tide_triton.demo.training import TIMEOUT_S, train

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=ranks, timeout=timeout)
    mesh = init_device_mesh("cpu", (ranks,))
    text = corpus()

    def say(way: Way) -> Callable[[int, float], None]:
        return lambda step, loss: tell(Progress(way, step, loss)) if rank == 0 else None

    runs = {way: train(way, steps, text, mesh, say(way)) for way in Way}
    dist.destroy_process_group()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "tide_triton": version("tide_triton")}
    return runs, Corpus(name=NAME, bytes=len(text)), versions
