"""No schedule lets two owners into one slot where a switch takes part: multicast gathers and sums by the switch.

The scripts and the checks are those of `tests/test_windows.py`, with a switch between the ranks: small pieces of
gathers are multicast, and bf16 gradients that go through a slot are summed by the switch, which reads every rank's.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulated_transport import ScheduleError, kernels_on_streams
from tests.test_windows import (
    ANY,
    ONE,
    STUCK,
    UNSAFE,
    Array,
    Group,
    Offered,
    Rank,
    Schedules,
    _bytes,
    _skip_the_credit_of_rank_0,
    _widened,
)
from tide_triton.all_gather import AllGather
from tide_triton.layouts import SwitchLayout
from tide_triton.reducers import Reducer
from tide_triton.switch_reduce import SwitchReduceScatter, SwitchReducing
from tide_triton.transports import Mark
from tide_triton.windows import Slot, Turn

#: Of pieces that are multicast: some of the tensors' shards are larger.
MULTICAST_NBYTES = 300

#: How often a gather or a reduction took the way that these tests are about.
taken = {"multicast": 0, "switch": 0}


def by_switch(group: Group, index: int, seed: int, rank: int) -> Array:
    """Rank `rank`'s shard of the average of a switch's sum: fp32 in rank order, rounded to bf16 once."""
    shape, _ = group.tensors[index]
    total: Array = np.zeros(0, np.float32)
    for source in range(group.world_size):
        addend = _widened(group.gradient(index, seed, source), group.gradient_dtype)
        total = addend if source == 0 else total + addend
    rounded = _widened(_bytes(total, "bfloat16"), "bfloat16").reshape(shape)
    return np.nan_to_num(group.shard(index, rank, rounded / np.float32(group.world_size)), nan=0.0)


class SwitchRank(Rank):
    @staticmethod
    def slot_nbytes(group: Group) -> int:
        return max(Rank.slot_nbytes(group), SwitchLayout(group.spec).nbytes)

    def collectives_of(self, group: Group) -> tuple[AllGather, Reducer]:
        piece = self.transport.piece_nbytes
        gatherer = AllGather(group.layout, self.rank, smallest_piece=piece, multicast_nbytes=MULTICAST_NBYTES)
        return gatherer, SwitchReduceScatter(group.landing, self.rank)

    def expected(self, offered: Offered, index: int) -> Array:
        if not isinstance(offered.reducing, SwitchReducing):
            return super().expected(offered, index)
        taken["switch"] += 1
        return by_switch(offered.buffers.group, index, offered.seed, self.rank)


class SwitchSchedules(Schedules):
    rank_type = SwitchRank
    multicasts = True


@pytest.fixture(autouse=True)
def _kernels_on_streams() -> Iterator[None]:
    with kernels_on_streams():
        yield


@pytest.fixture(autouse=True)
def _count_multicasts() -> Iterator[None]:
    prepare = AllGather._prepare

    def counted(gather: AllGather, *arguments: Any) -> Any:
        program = prepare(gather, *arguments)
        taken["multicast"] += program.multicast_nbytes > 0
        return program

    taken.update(dict.fromkeys(taken, 0))
    with mock.patch.object(AllGather, "_prepare", counted):
        yield


def test_no_schedule_lets_two_owners_into_a_slot() -> None:
    run_state_machine_as_test(SwitchSchedules, settings=settings(ANY, max_examples=100))
    assert all(taken.values()), f"a way was never taken: {taken}"


# --- what is broken on purpose ---

_await_credit, _await_part, _await_data, _vacate = Turn.await_credit, Turn.await_part, Turn.await_data, Slot.vacate


def _await_no_credit_but_of_rank_1(turn: Turn, peer: int) -> None:
    """As if a put went to one peer."""
    if peer == 1:
        _await_credit(turn, peer)


def _forget_to_await_what_is_read(turn: Turn) -> None:
    """As if a slot were vacant once this rank has read its part of every rank's."""
    if not turn.what.startswith("reduce-scatter"):
        _await_data(turn)


def _do_not_await_gradients(turn: Turn, part: int) -> None:
    if turn.parts == 1:
        _await_part(turn, part)


def _vacate_before(slot: Slot) -> Mark | None:
    before = slot._vacant
    _vacate(slot)
    slot._vacant = before
    return before


BROKEN: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "a multicast waits for one credit": (Turn, "await_credit", _await_no_credit_but_of_rank_1, UNSAFE),
    "a multicast does not wait for rank 0": (Turn, "await_credit", _skip_the_credit_of_rank_0, UNSAFE),
    "a slot is vacant before the others have read it": (Turn, "await_data", _forget_to_await_what_is_read, UNSAFE),
    "gradients are summed before they lie there": (Turn, "await_part", _do_not_await_gradients, UNSAFE),
    "a slot counts as vacant since it was vacated before": (Slot, "vacate", _vacate_before, UNSAFE),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_slot_is_found(broken: str) -> None:
    owner, name, replacement, message = BROKEN[broken]
    with mock.patch.object(owner, name, replacement), pytest.raises(ScheduleError, match=f"{message}|{STUCK}"):
        run_state_machine_as_test(SwitchSchedules, settings=ONE)
