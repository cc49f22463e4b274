"""Fixtures for all tests, and the one switch that must be thrown before Triton is imported."""

import os
from collections.abc import Iterator

import pytest

try:
    import torch

    _has_gpu = torch.cuda.is_available()
except ImportError:
    _has_gpu = False

if not _has_gpu:
    # Triton decides at decoration time whether kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.ranks import RankPools


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share-gpu`."""
    parser.addoption(
        "--share-gpu",
        action="store_true",
        help="where there is one GPU only, let both ranks of the gpu tests use it (same results, no meaningful times)",
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(4)` gives four processes with a gloo process group, shared by the tests of a session."""
    pools = RankPools()
    yield pools
    pools.stop()
