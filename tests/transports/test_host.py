"""The host transport, between real processes."""

import os
import re
import signal
import time

import pytest

from tests.ranks import RankPools, fresh_ranks
from tests.transports import jobs
from tide_triton.errors import (
    AbortedError,
    MismatchError,
    PeerLostError,
    SharedMemoryError,
    WaitTimeoutError,
)
from tide_triton.transports.shared_memory import DIRECTORY


@pytest.mark.parametrize("world", [2, 3, 4])
def test_puts_reach_every_peer_and_touch_nothing_else(ranks: RankPools, world: int) -> None:
    assert ranks(world).run(jobs.put_to_everyone) == [[*range(world), 255]] * world


def test_strided_puts_fill_rows_and_leave_the_bytes_between(ranks: RankPools) -> None:
    untouched, written = ranks(2).run(jobs.put_rows)
    assert untouched == [[9] * 6] * 4
    assert written == [[9, *(6 * row + column for column in (2, 3, 4)), 9, 9] for row in range(4)]


def test_puts_and_counters_past_the_end_are_refused(ranks: RankPools) -> None:
    for refused in ranks(2).run(jobs.leave_the_window):
        assert len(refused) == 6


def test_a_wait_that_takes_too_long_raises_on_every_rank_and_names_who_waited_for_whom() -> None:
    with fresh_ranks(3) as group:
        outcomes = group.outcomes(jobs.wait_forever, 1.0)
    # Whoever's time is up first tells the other, and what it says leads to rank 1 either way.
    assert {type(outcomes[0]), type(outcomes[2])} <= {AbortedError, WaitTimeoutError}
    for rank in (0, 2):
        assert f"rank {rank}" in str(outcomes[rank])
        assert "waited 1 s in all-gather of 'blocks.3': credit for rank" in str(outcomes[rank])
        assert "for rank 1" in str(outcomes[rank])


def test_ranks_that_go_different_ways_are_told_where_each_of_them_is() -> None:
    with fresh_ranks(2) as group:
        outcomes = group.outcomes(jobs.go_different_ways)
    assert isinstance(outcomes[0], WaitTimeoutError)
    for outcome in outcomes:
        assert "rank 0 waited 1 s in all-gather of 'blocks.0': credit for rank 1" in str(outcome)
        assert "while rank 1 waits for rank 0 in all-gather of 'blocks.1': credit" in str(outcome)


def test_a_killed_peer_is_named_at_once_and_leaves_nothing_behind() -> None:
    with fresh_ranks(3) as group:
        group.start(jobs.wait_for_a_peer_that_is_killed, 60.0)
        time.sleep(2)
        killed = time.monotonic()
        os.kill(group.processes[2].pid, signal.SIGKILL)
        outcomes = group.finish()
        took = time.monotonic() - killed
    assert isinstance(outcomes[1], PeerLostError)
    assert re.search(
        r"rank 2 \(pid \d+\) died while rank 1 waited for it in reduce-scatter of 'head'", str(outcomes[1])
    )
    assert isinstance(outcomes[0], AbortedError)
    assert "rank 2" in str(outcomes[0])
    assert isinstance(outcomes[2], EOFError)
    assert took < 10
    assert not [name for name in os.listdir(DIRECTORY) if "tide" in name]


@pytest.mark.parametrize("what", ["size", "digest"])
def test_ranks_that_want_different_windows_are_told_so(ranks: RankPools, what: str) -> None:
    for outcome in ranks(2).outcomes(jobs.disagree, what):
        assert isinstance(outcome, MismatchError)
        assert "blocks.0" in str(outcome)
    assert ranks(2).run(jobs.still_works) == [2.0, 2.0]


@pytest.mark.parametrize("only", [None, 1])
def test_too_little_shared_memory_is_an_error_on_every_rank_with_bytes_wanted_and_free(
    ranks: RankPools, only: int | None
) -> None:
    for outcome in ranks(2).run(jobs.ask_for_too_much, only):
        assert outcome.startswith(SharedMemoryError.__name__)
        assert re.search(r"\d+ bytes wanted, \d+ bytes free", outcome)
    assert ranks(2).run(jobs.put_to_everyone) == [[0, 1, 255]] * 2


def test_transports_and_windows_come_and_go_without_a_trace(ranks: RankPools) -> None:
    for descriptors, mappings, names in ranks(2).run(jobs.repeat_windows, 25):
        assert descriptors <= 0
        assert mappings <= 0
        assert not [name for name in names if "tide" in name]


def test_a_subgroup_may_meet_before_the_world_does(ranks: RankPools) -> None:
    assert ranks(3).run(jobs.meet_in_a_subgroup_then_all, timeout_s=30) == [
        [[0, 1], [0, 1, 2]],
        [[0, 1], [0, 1, 2]],
        [[0, 1, 2]],
    ]


def test_a_rank_that_does_not_come_is_named_and_the_group_stays_usable() -> None:
    with fresh_ranks(2) as group:
        outcomes = group.outcomes(jobs.come_late, 1.0)
        assert isinstance(outcomes[0], WaitTimeoutError)
        assert "for ranks [1]" in str(outcomes[0])
        assert group.run(jobs.still_works) == [2.0, 2.0]
