"""What ranks are told to do in the tests. Imported by their processes, so it imports little."""

import os
import signal
import time
from pathlib import Path

from tide_triton.demo.processes import Tell


def count(rank: int, ranks: int, tell: Tell, steps: int) -> str:
    for step in range(steps):
        tell((step, ranks))
    return f"rank {rank} counted"


def raise_on_rank_1(rank: int, ranks: int, tell: Tell, *unused: object) -> None:
    if rank == 1:
        raise ValueError("the cat sat on rank 1")
    time.sleep(600)


def be_killed_on_rank_1(rank: int, ranks: int, tell: Tell) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConnectionError("a peer is gone")


def return_what_cannot_be_sent(rank: int, ranks: int, tell: Tell) -> object:
    return lambda: rank


def leave_pid_and_sleep(rank: int, ranks: int, tell: Tell, directory: str) -> None:
    # A rank may be ended at any moment: never leave half a file.
    unfinished = Path(directory, f"{rank}.unfinished")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(unfinished.with_suffix(".pid"))
    tell("asleep")
    time.sleep(600)
