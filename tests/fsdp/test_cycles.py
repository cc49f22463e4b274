"""A thousand steps of attach, train and detach leave nothing behind: on the host transport, with options in turn."""

from dataclasses import replace
from unittest import mock

import pytest

from tests.gpu.cycle_jobs import BYTES, COUNTS, Case, Held, cycle, grown
from tests.ranks import fresh_ranks
from tide_triton.windows import SlotPool

#: Bytes by which a process may grow over the second half, for what allocators and the group's store keep.
RSS = 10 << 20


@pytest.mark.timeout(300)
def test_a_thousand_steps_of_attach_train_and_detach_leave_nothing_behind() -> None:
    # Four steps a cycle, for gradients go early from the third on.
    case = Case("host", cycles=250, steps=4, look_every=50)
    with fresh_ranks(2) as ranks:
        everyones = ranks.run(cycle, case, timeout_s=280)
    for found in everyones:
        assert found.cycles * case.steps == 1000
        assert grown(found.held, warm=50, rss=RSS) == []
        assert [h.segments for h in found.held] == [0] * 6
        assert found.fallbacks == 0
        # The two groups below the root, twice in each cycle with early gradients.
        assert found.early == 2 * 2 * 100
        assert found.in_slot > 0
        assert found.reused > 0


def _leak(rank: int, world: int) -> list[str]:
    """Cycles whose detach closes nothing."""
    kept: list[SlotPool] = []
    with mock.patch.object(SlotPool, "close", lambda pool: kept.append(pool)):
        found = cycle(rank, world, Case("host", cycles=4, steps=1, look_every=2))
    for pool in kept:
        pool.close()
    return grown(found.held, warm=2)


def test_windows_that_nobody_closes_are_seen() -> None:
    with fresh_ranks(2) as ranks:
        for words in ranks.run(_leak):
            assert [word.split(" ")[0] for word in words] == ["after", "after", "descriptors", "segments", "tensors"]
            assert "'HostWindow'" in words[0]


@pytest.mark.parametrize("name", [*COUNTS, *BYTES, "rss", "ours"])
def test_whatever_grows_is_named(name: str) -> None:
    held = [Held(cycle, *([7] * 5), ours={}, rss=7) for cycle in range(0, 100, 10)]
    assert grown(held, warm=20, rss=RSS) == []
    more = {"ours": {"Slot": 1}}.get(name, 8 + BYTES.get(name, RSS if name == "rss" else 0))
    held[-1] = replace(held[-1], **{name: more})
    (words,) = grown(held, warm=20, rss=RSS)
    assert ("Slot" if name == "ours" else name) in words
