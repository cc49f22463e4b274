"""Two GPUs as two nodes of one: exact, by `put_signal` and by NVSHMEM, and never by each other's addresses."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.gpu import node_jobs
from tests.gpu.marks import TWO_GPUS
from tests.ranks import Ranks, fresh_ranks
from tide_triton.errors import PeerError

pytestmark = TWO_GPUS

TRANSPORTS = ["nccl_rma", "nvshmem"]


class Nodes(NamedTuple):
    """Two ranks with a GPU each, which no other transport has used."""

    ranks: Ranks
    transport: str


@pytest.fixture(scope="module", params=TRANSPORTS)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with fresh_ranks(2, "nccl") as ranks:
        yield Nodes(ranks, request.param)


def test_all_bytes_cross_by_the_librarys_puts(nodes: Nodes) -> None:
    for gathered, reduced, known in nodes.ranks.run(node_jobs.what_is_put, nodes.transport):
        assert gathered == 256 * 64 * 2
        assert reduced == 256 * 64 * 2
        assert known == []


def test_random_layouts_cross_nodes_bit_for_bit(nodes: Nodes) -> None:
    assert nodes.ranks.run(node_jobs.exact, nodes.transport, 8) == ["", ""]


@pytest.mark.parametrize("seed", [1, 2])
def test_slow_readers_and_poisoned_slots_do_no_harm(nodes: Nodes, seed: int) -> None:
    assert nodes.ranks.run(node_jobs.interleave, nodes.transport, seed, 60) == ["", ""]


def test_groups_of_many_chunks_are_exact(nodes: Nodes) -> None:
    assert nodes.ranks.run(node_jobs.large, nodes.transport) == ["", ""]


@pytest.mark.parametrize("setting", node_jobs.SETTINGS)
def test_training_over_nodes_equals_stock_bit_for_bit(nodes: Nodes, setting: str) -> None:
    for repeats, same, fallbacks, copied, used in nodes.ranks.run(node_jobs.parity, nodes.transport, setting):
        assert repeats, "stock does not repeat itself, so nothing can be compared with it"
        assert same
        assert fallbacks == 0
        assert copied == 0
        assert used == nodes.transport


def test_a_gather_over_nodes_runs_no_kernel_but_the_cast(nodes: Nodes) -> None:
    for kernels, copies in nodes.ranks.run(node_jobs.engines, nodes.transport):
        assert kernels == ["place_kernel"]
        assert copies >= 4


def test_transports_open_close_and_open_again_and_what_they_gathered_stays(nodes: Nodes) -> None:
    assert nodes.ranks.run(node_jobs.reopen, nodes.transport) == ["", ""]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_that_stops_is_named_within_the_time_limit(transport: str) -> None:
    with fresh_ranks(2, "nccl") as ranks:
        outcomes = ranks.outcomes(node_jobs.stop, transport, 3.0)
    assert isinstance(outcomes[0], PeerError)
    assert "rank 0 waited 3 s in all-gather of Collectives" in str(outcomes[0])
    assert "for rank 1" in str(outcomes[0])


def test_nvshmem_refuses_other_ranks_while_it_is_in_use() -> None:
    with fresh_ranks(2, "nccl") as ranks:
        for rank, message in enumerate(ranks.run(node_jobs.serve_other_ranks)):
            assert f"on rank {rank} it is so for ranks [0, 1]: it cannot also serve ranks [{rank}]" in message
