"""When NVSHMEM is initialised, freed from and finalised: between real ranks, with a library that only takes notes."""

import ctypes
import gc
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPools
from tide_triton.errors import SharedMemoryError, TideError
from tide_triton.transports import nvshmem_runtime
from tide_triton.transports.rendezvous import Rendezvous

CPU = torch.device("cpu")


class _UniqueId:
    def __init__(self) -> None:
        self.bytes = np.zeros(128, dtype=np.uint8)
        self.ptr = self.bytes.ctypes.data


class Library:
    """The bindings, taking notes in `calls`. The heap has room for a hundred bytes."""

    uniqueid = _UniqueId
    InitAttr = _UniqueId
    Flags = SimpleNamespace(INIT_WITH_UNIQUEID=8)
    Init_status = SimpleNamespace(STATUS_IS_INITIALIZED=2)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.status = 2
        self._made = 0
        self._next = 4096

    def get_uniqueid(self, address: int) -> None:
        self._made += 1
        ctypes.memset(address, self._made, 128)

    def set_attr_uniqueid_args(self, rank: int, world: int, unique_id: int, attributes: int) -> None:
        self.calls.append(("arguments", rank, world, ctypes.string_at(unique_id, 128)[-1]))

    def hostlib_init_attr(self, flags: int, attributes: int) -> None:
        self.calls.append("initialise")

    def init_status(self) -> int:
        return self.status

    def malloc(self, nbytes: int) -> int:
        if nbytes > 100:
            return 0
        self._next += 4096
        self.calls.append(("malloc", self._next))
        return self._next

    def free(self, address: int) -> None:
        self.calls.append(("free", address))

    def hostlib_finalize(self) -> None:
        self.calls.append("finalise")


class _Case:
    """A fresh state of the module on this rank, with `library` in it."""

    def __init__(self) -> None:
        self.library = Library()
        self.meeting = Rendezvous(dist.group.WORLD, 20.0)
        self._patches = [
            mock.patch.object(nvshmem_runtime, "load", return_value=self.library),
            mock.patch.object(nvshmem_runtime, "_runtime", None),
            mock.patch.object(nvshmem_runtime, "PATIENCE_S", 0.5),
            mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
            mock.patch.object(torch.cuda, "synchronize", return_value=None),
        ]

    def __enter__(self) -> "_Case":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def enter(self, group: Any = None) -> nvshmem_runtime.Runtime:
        meeting = self.meeting if group is None else Rendezvous(group, 20.0)
        return nvshmem_runtime.enter(meeting, CPU, None)


def two_transports(rank: int, world: int) -> list[Any]:
    with _Case() as case:
        first, second = case.enter(), case.enter()
        assert first is second
        _, block = first.allocate(10, case.meeting)
        del block
        first.leave(case.meeting, is_well=True)
        second.leave(case.meeting, is_well=True)
        again = case.enter()
        again.leave(case.meeting, is_well=True)
        return case.library.calls


def test_the_first_transport_initialises_and_the_last_finalises(ranks: RankPools) -> None:
    for rank, calls in enumerate(ranks(2).run(two_transports)):
        once = [("arguments", rank, 2, 1), "initialise", ("malloc", 8192), "finalise"]
        assert calls == [*once, ("arguments", rank, 2, 2), "initialise", "finalise"]


def hold_on_one_rank(rank: int, world: int) -> tuple[list[Any], bool, float]:
    with _Case() as case:
        runtime = case.enter()
        blocks = [runtime.allocate(10, case.meeting)[1] for _ in range(3)]
        if rank == 0:
            blocks[1] = None
        blocks[2] = None
        gc.collect()
        started = time.monotonic()
        runtime.leave(case.meeting, is_well=True)
        took = time.monotonic() - started
        again = case.enter()
        again.allocate(10, case.meeting)
        return case.library.calls, again is runtime, took


def test_what_one_rank_still_holds_is_neither_freed_nor_finalised_anywhere(ranks: RankPools) -> None:
    for calls, is_same, took in ranks(2).run(hold_on_one_rank):
        assert is_same
        assert took < 5
        assert "finalise" not in calls
        # Only the third was let go of by both.
        assert [call for call in calls if call[0] == "free"] == [("free", 3 * 4096 + 4096)]
        assert calls.index(("free", 16384)) < calls.index(("malloc", 20480))


def leave_alone(rank: int, world: int) -> tuple[list[Any], float]:
    with _Case() as case:
        runtime = case.enter()
        started = time.monotonic()
        if rank == 1:
            time.sleep(1.5)
        runtime.leave(case.meeting, is_well=True)
        return case.library.calls, time.monotonic() - started


def test_a_rank_that_leaves_alone_goes_on_without_finalising_and_so_does_the_other(ranks: RankPools) -> None:
    first, second = ranks(2).run(leave_alone)
    assert "finalise" not in first[0] + second[0]
    assert first[1] < 1.4


def leave_after_a_failure(rank: int, world: int) -> tuple[list[Any], float]:
    with _Case() as case:
        runtime = case.enter()
        started = time.monotonic()
        runtime.leave(case.meeting, is_well=rank == 0)
        return case.library.calls, time.monotonic() - started


def test_nothing_is_finalised_where_a_rank_has_failed(ranks: RankPools) -> None:
    for calls, _ in ranks(2).run(leave_after_a_failure):
        assert "finalise" not in calls


def serve_other_ranks(rank: int, world: int) -> list[str]:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    messages = []
    with _Case() as case:
        runtime = case.enter(groups[0]) if rank < 2 else None
        try:
            case.enter(groups[1])
        except TideError as error:
            messages.append(str(error))
        if runtime is not None:
            runtime.leave(Rendezvous(groups[0], 20.0), is_well=True)
        case.enter(groups[1])
    return messages


def test_other_ranks_are_refused_on_every_rank_until_the_first_have_left(ranks: RankPools) -> None:
    for messages in ranks(3).run(serve_other_ranks):
        assert len(messages) == 1
        assert "on rank 0 it is so for ranks [0, 1]: it cannot also serve ranks [0, 1, 2]" in messages[0]


def fail(rank: int, world: int, how: str) -> str:
    with _Case() as case:
        if how == "no room":
            runtime = case.enter()
            with pytest.raises(SharedMemoryError) as caught:
                runtime.allocate(101, case.meeting)
            return str(caught.value)
        if rank == 0 and how == "no id":
            case.library.get_uniqueid = mock.Mock(side_effect=RuntimeError("no interface"))  # type: ignore[method-assign]
        if rank == 1 and how == "no status":
            case.library.status = 1
        with pytest.raises(TideError) as failed:
            case.enter()
        return str(failed.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no room", "no room for 101 bytes"),
        ("no id", "cannot be initialised on rank 0: no interface"),
        ("no status", "cannot be initialised on rank 1: its status is 1"),
    ],
)
def test_a_failure_is_told_to_every_rank(ranks: RankPools, how: str, said: str) -> None:
    for message in ranks(2).run(fail, how):
        assert said in message
