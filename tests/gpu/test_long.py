"""A long training of random steps, with ranks that are late at random moments, is stock FSDP2's bit for bit."""

from typing import Any

import pytest

from tests.gpu.long_jobs import Case, equals_stock
from tests.gpu.marks import TWO_GPUS
from tests.ranks import Ranks

pytestmark = TWO_GPUS

TRANSPORTS = ["nccl", "symm"]

#: Options of attach under which everything holds.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "early": {"slot_reuse": False, "early_reduce": True, "keep_cast": True, "ring_chunk_nbytes": 1 << 20},
}


def _check(gpus: Ranks, case: Case) -> list[int]:
    """How many slots each rank had to add."""
    found = gpus.run(equals_stock, case)
    for one in found:
        assert one.unlike_itself == "", "stock does not repeat itself, so nothing can be compared with it"
        assert one.unlike_stock == ""
        assert one.why_not_zero_copy == []
        assert one.layout_copy_bytes == 0
    return [one.slots_grown for one in found]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("seed", "checkpointed", "options"), [(1, False, "default"), (2, True, "early")])
def test_random_steps_of_late_ranks_taking_turns_in_few_slots_do_no_harm(
    gpus: Ranks, transport: str, seed: int, checkpointed: bool, options: str
) -> None:
    assert _check(gpus, Case(transport, seed, False, checkpointed, OPTIONS[options])) == [0, 0]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("seed", "checkpointed", "options"), [(3, True, "default"), (4, False, "early")])
def test_random_steps_of_late_ranks_that_keep_blocks_unsharded_do_no_harm(
    gpus: Ranks, transport: str, seed: int, checkpointed: bool, options: str
) -> None:
    grown = _check(gpus, Case(transport, seed, True, checkpointed, OPTIONS[options]))
    assert grown[0] == grown[1] > 0
