"""Two GPUs: exact, in time, by copy engine. Run by `make test-gpu`; skipped, and said so, elsewhere."""

import pytest

from tests.gpu import jobs
from tests.gpu.marks import TWO_GPUS
from tests.ranks import Ranks, fresh_ranks
from tests.test_collectives import gather_and_reduce
from tide_triton.errors import PeerError

pytestmark = TWO_GPUS

TRANSPORTS = ["nccl", "symm"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_first_collective_may_be_ours(transport: str) -> None:
    with fresh_ranks(2, "nccl") as ranks:
        assert ranks.run(gather_and_reduce, 1, "cuda", transport) == ["", ""]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_layouts_are_gathered_and_reduced_bit_for_bit(gpus: Ranks, transport: str) -> None:
    for seed in range(8):
        assert gpus.run(gather_and_reduce, seed, "cuda", transport) == ["", ""]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("setting", jobs.SETTINGS)
def test_training_equals_stock_bit_for_bit(gpus: Ranks, transport: str, setting: str) -> None:
    for repeats, same, fallbacks, copied in gpus.run(jobs.parity, transport, setting):
        assert repeats, "stock does not repeat itself, so nothing can be compared with it"
        assert same
        assert fallbacks == 0
        assert copied == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_slow_readers_and_poisoned_slots_do_no_harm(gpus: Ranks, transport: str, seed: int) -> None:
    assert gpus.run(jobs.interleave_slowly, transport, seed) == ["", ""]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gather_runs_no_kernel_but_the_cast(gpus: Ranks, transport: str) -> None:
    for kernels, copies in gpus.run(jobs.engines_of_a_gather, transport):
        assert kernels == ["place_kernel"]
        assert copies >= 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_captured_graphs_replay_with_changed_shards_and_gradients(gpus: Ranks, transport: str) -> None:
    assert gpus.run(jobs.replay, transport) == ["", ""]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_stops_is_named_within_the_time_limit(transport: str) -> None:
    with fresh_ranks(2, "nccl") as ranks:
        outcomes = ranks.outcomes(jobs.stop, transport, 3.0)
    assert isinstance(outcomes[0], PeerError)
    assert "rank 0 waited 3 s in all-gather of Collectives" in str(outcomes[0])
    assert "for rank 1" in str(outcomes[0])
