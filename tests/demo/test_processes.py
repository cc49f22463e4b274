"""Ranks as processes: their messages, and every way to end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.demo import work
from tide_triton.demo.processes import RankFailedError, run_ranks


def _ignore(rank: int, what: object) -> None: ...


def test_ranks_are_heard_in_their_order_and_their_results_come_in_rank_order() -> None:
    heard: list[tuple[int, object]] = []
    results = run_ranks(3, work.count, 4, hear=lambda rank, what: heard.append((rank, what)))
    assert results == ["rank 0 counted", "rank 1 counted", "rank 2 counted"]
    for rank in range(3):
        assert [what for of, what in heard if of == rank] == [(step, 3) for step in range(4)]


def test_a_rank_that_raises_is_named_at_once_with_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: the cat sat on rank 1") as caught:
        run_ranks(2, work.raise_on_rank_1, hear=_ignore)
    assert "raise_on_rank_1" in caught.value.trace
    assert time.monotonic() - started < 60  # the other sleeps ten minutes


def test_a_rank_that_is_killed_is_named_rather_than_those_that_miss_it() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 failed: its process died \(SIGKILL\)"):
        run_ranks(3, work.be_killed_on_rank_1, hear=_ignore)


def test_a_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match=r"rank [01] failed: .*lambda"):
        run_ranks(2, work.return_what_cannot_be_sent, hear=_ignore)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_ends_every_rank(number: signal.Signals, raised: type[BaseException], tmp_path: Path) -> None:
    asleep = 0

    def hear(rank: int, what: object) -> None:
        nonlocal asleep
        asleep += 1
        if asleep == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(raised):
        run_ranks(2, work.leave_pid_and_sleep, str(tmp_path), hear=hear)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert [pid for pid in pids if _is_alive(pid)] == []


def test_what_hears_the_ranks_may_raise(tmp_path: Path) -> None:
    def hear(rank: int, what: object) -> None:
        raise LookupError("no ear")

    with pytest.raises(LookupError, match="no ear"):
        run_ranks(2, work.leave_pid_and_sleep, str(tmp_path), hear=hear)
    assert [pid for file in tmp_path.glob("*.pid") if _is_alive(pid := int(file.read_text()))] == []


def test_it_works_outside_the_main_thread_and_leaves_signal_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(run_ranks(2, work.count, 1, hear=_ignore)))
    thread.start()
    thread.join(60)
    assert results == ["rank 0 counted", "rank 1 counted"]
    run_ranks(2, work.count, 1, hear=_ignore)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
