"""Ranks with a GPU each, for the tests of one module."""

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def enough_gpus(request: pytest.FixtureRequest) -> None:
    """Skips where there are too few GPUs; with --share-gpu one will do."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < (1 if request.config.getoption("--share-gpu") else 2):
        pytest.skip("needs two NVIDIA GPUs of one machine (or one, with --share-gpu)")


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Two ranks, a GPU each; one for both with --share-gpu."""
    ranks = Ranks(2, "nccl")
    yield ranks
    ranks.stop()
