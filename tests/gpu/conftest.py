"""Ranks with a GPU each, for the tests of one module."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Two ranks, a GPU each."""
    ranks = Ranks(2, "nccl")
    yield ranks
    ranks.stop()
