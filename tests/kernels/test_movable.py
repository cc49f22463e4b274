"""Prepared sums follow their tensors to other addresses."""

from unittest import mock

import pytest
import torch

from tests.kernels.helpers import DEVICE
from tide_triton.kernels import accumulate_reference, prepare_accumulate
from tide_triton.kernels.movable import Movable

SIZES = (100, 0, 37, 256)


def _tensors(seed: int, shift: int = 0) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Two contributions and a poisoned output for each size, `shift` elements into their storages."""
    generator = torch.Generator().manual_seed(seed)

    def make(numel: int) -> torch.Tensor:
        return torch.randn(numel + shift, generator=generator).to(DEVICE)[shift:]

    contributions = [[make(n), make(n)] for n in SIZES]
    return contributions, [torch.full((n,), float("nan"), device=DEVICE) for n in SIZES]


def _flat(contributions: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(x for pair in contributions for x in pair), *outputs]


def test_sums_are_made_where_the_tensors_have_moved_and_nowhere_else() -> None:
    contributions, outputs = _tensors(1)
    pieces = [slice(0, 2), slice(2, 4)]
    sums = [prepare_accumulate(contributions[p], outputs[p], divisor=2.0, engine="triton") for p in pieces]
    movable = Movable(sums, _flat(contributions, outputs))
    for seed in (1, 2, 3):
        moved, into = (contributions, outputs) if seed == 1 else _tensors(seed)
        for output in outputs:
            output.fill_(float("nan"))
        assert movable.move([x.data_ptr() for x in _flat(moved, into)])
        for one in movable.prepared:
            one()
        expected = [torch.empty_like(output) for output in into]
        accumulate_reference(moved, expected, divisor=2.0)
        assert all(torch.equal(got, want) for got, want in zip(into, expected, strict=True))
        if seed > 1:
            assert all(bool(output.isnan().all()) for output in outputs)


def test_a_move_that_changes_alignment_is_refused_and_changes_nothing() -> None:
    contributions, outputs = _tensors(1)
    movable = Movable([prepare_accumulate(contributions, outputs, engine="triton")], _flat(contributions, outputs))
    shifted, into = _tensors(2, shift=1)
    assert not movable.move([x.data_ptr() for x in _flat(shifted, into)])
    for one in movable.prepared:
        one()
    expected = [torch.empty_like(output) for output in outputs]
    accumulate_reference(contributions, expected)
    assert all(torch.equal(got, want) for got, want in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_is_not_said_to_move_stays_where_it_was(kept: bool) -> None:
    contributions, outputs = _tensors(1)
    moving = _flat([], outputs) if kept else _flat(contributions, outputs)
    movable = Movable([prepare_accumulate(contributions, outputs, engine="triton")], moving)
    others, into = _tensors(2)
    assert movable.move([x.data_ptr() for x in (_flat([], into) if kept else _flat(others, into))])
    movable.prepared[0]()
    expected = [torch.empty_like(output) for output in into]
    accumulate_reference(contributions if kept else others, expected)
    assert all(torch.equal(got, want) for got, want in zip(into, expected, strict=True))


def test_nothing_is_uploaded_where_only_tensors_have_moved_that_no_launch_uses() -> None:
    contributions, outputs = _tensors(1)
    unused = torch.zeros(64, device=DEVICE)
    moving = [*_flat(contributions, outputs), unused]
    movable = Movable([prepare_accumulate(contributions, outputs, engine="triton")], moving)
    addresses = [x.data_ptr() for x in moving]
    with mock.patch.object(movable, "_upload") as upload:
        assert movable.move([*addresses[:-1], addresses[-1] + 64])
        upload.assert_not_called()
        assert movable.move([addresses[0] + 64, *addresses[1:]])
        upload.assert_called_once()
