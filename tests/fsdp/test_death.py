"""A rank that is killed in the middle of a step: the others raise in time, and nothing is left behind."""

import os
import re
import signal
import time

import pytest
import torch

import tide_triton
from tests.fsdp.models import line, seeded, sharded
from tests.ranks import fresh_ranks
from tide_triton.errors import AbortedError, PeerLostError
from tide_triton.transports.shared_memory import DIRECTORY

TIMEOUT_S = 20.0


def train_until_killed(rank: int, world_size: int) -> None:
    model = sharded(seeded(), line(world_size))
    tide_triton.attach(model, timeout_s=TIMEOUT_S)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        model(torch.randint(0, 11, (4, 6))).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_mid_step_is_named_by_the_others_and_nothing_stays_in_shared_memory(victim: int) -> None:
    before = set(os.listdir(DIRECTORY))
    with fresh_ranks(3) as ranks:
        ranks.start(train_until_killed)
        time.sleep(6)
        os.kill(ranks.processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = ranks.finish(timeout_s=TIMEOUT_S + 5)
        took = time.monotonic() - killed
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(outcomes[rank], (PeerLostError, AbortedError)), outcomes[rank]
        assert f"rank {victim} (pid " in str(outcomes[rank])
        assert re.search(r"(all-gather|reduce-scatter) of '(\(root\)|blocks\.\d)': (credit|data)", str(outcomes[rank]))
    assert took < TIMEOUT_S
    assert set(os.listdir(DIRECTORY)) == before
