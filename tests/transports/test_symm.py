"""What torch's symmetric memory leaves behind goes with the memory, where torch is known not to free it."""

from types import SimpleNamespace

import pytest
import torch

from tide_triton.transports import symm
from tide_triton.transports.symm import Rendezvoused, keeps_arrays


@pytest.mark.parametrize(("keeps", "freed"), [(True, [512, 1024]), (False, [])])
def test_arrays_that_torch_keeps_are_freed_with_the_memory_and_not_before(
    keeps: bool, freed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", seen.append)
    monkeypatch.setattr(symm, "keeps_arrays", lambda: keeps)
    handle = SimpleNamespace(buffer_ptrs_dev=512, signal_pad_ptrs_dev=1024)
    memory = Rendezvoused(torch.empty(1), handle)
    assert seen == []
    del memory
    assert seen == freed


def test_only_versions_that_are_known_to_keep_them_have_them_freed_here() -> None:
    kept = ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"]
    assert [keeps_arrays(version) for version in kept] == [True] * 3
    assert [keeps_arrays(version) for version in ("2.10.0", "2.14.0", "3.11.0")] == [False] * 3
