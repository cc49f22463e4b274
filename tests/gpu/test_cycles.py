"""Attach, train and detach on GPUs, two hundred times: nothing of device, pinned or shared memory is left behind."""

import pytest

from tests.gpu.cycle_jobs import Case, cycle, grown
from tests.gpu.marks import TWO_GPUS
from tests.ranks import Ranks

pytestmark = TWO_GPUS


@pytest.mark.parametrize("transport", ["nccl", "symm"])
def test_two_hundred_cycles_of_attach_train_and_detach_leave_nothing_behind(gpus: Ranks, transport: str) -> None:
    for found in gpus.run(cycle, Case(transport, cycles=200, steps=3, look_every=40), timeout_s=280):
        assert found.cycles == 200
        assert grown(found.held, warm=40) == []
        assert found.fallbacks == 0
        assert found.early > 0
        assert found.in_slot > 0
        assert found.reused > 0
