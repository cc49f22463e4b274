"""The torch twins against the same formulas in numpy, where bf16 is rounded in integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import DEVICE, assert_same_bits, round_numpy, to_numpy, values
from tide_triton.kernels import accumulate_reference, place_reference

NARROW = (torch.float32, torch.bfloat16, torch.float16)
few = settings(deadline=None, max_examples=50)


@given(st.sampled_from(NARROW), st.sampled_from(NARROW), st.integers(0, 999))
@few
def test_placing_rounds_to_nearest_even(source: torch.dtype, destination: torch.dtype, seed: int) -> None:
    x = values(24, source, seed)
    slot = torch.zeros(4, 10, dtype=destination, device=DEVICE)
    place_reference([x], [slot[:, 2:8]])
    expected = torch.from_numpy(round_numpy(to_numpy(x), destination)).to(DEVICE)
    assert_same_bits(slot[:, 2:8].float(), expected)
    assert not slot[:, :2].any()
    assert not slot[:, 8:].any()


@given(
    st.lists(st.sampled_from(NARROW), min_size=1, max_size=8),
    st.sampled_from(NARROW),
    st.sampled_from([None, *NARROW]),
    st.sampled_from([1.0, 1 / 3, 0.25]),
    st.sampled_from([1.0, 3.0, 7.0]),
    st.booleans(),
    st.integers(0, 999),
)
@few
def test_accumulating_follows_its_formula(
    dtypes: list[torch.dtype],
    output: torch.dtype,
    wire: torch.dtype | None,
    premultiply: float,
    divisor: float,
    add: bool,
    seed: int,
) -> None:
    ranks = [values(50, dtype, seed + rank) for rank, dtype in enumerate(dtypes)]
    got = values(60, output, seed + 99)
    before = got.clone()

    with np.errstate(all="ignore"):
        total = None
        for contribution in ranks:
            x = to_numpy(contribution)
            x = x if wire is None else round_numpy(x, wire)
            if premultiply != 1.0:
                x = x * np.float32(premultiply)
                x = x if wire is None else round_numpy(x, wire)
            total = x if total is None else total + x
        assert total is not None
        value = round_numpy(total / np.float32(divisor), output)
        assert value.dtype == np.float32
        if add:
            value = round_numpy(to_numpy(before)[:50] + value, output)

    accumulate_reference(
        [ranks], [got], wire_dtype=wire, premultiply=premultiply, divisor=divisor, add=add, statistics=False
    )
    assert_same_bits(got[:50].float(), torch.from_numpy(value).to(DEVICE))
    assert_same_bits(got[50:], before[50:] if add else torch.zeros_like(before[50:]))


def test_fp64_reaches_16_bits_by_way_of_fp32() -> None:
    # Rounded at once this is just above a tie and goes up; fp32 makes it the tie first, which goes to even.
    x = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64, device=DEVICE)
    got = torch.empty(1, dtype=torch.bfloat16, device=DEVICE)
    place_reference([x], [got])
    assert got.item() == 1.0


def test_statistics_are_of_the_values_written() -> None:
    x = torch.tensor([1.0, 2.0, float("inf"), float("nan")], device=DEVICE)
    got = accumulate_reference(
        [[x[:2]], [x[2:]]], [torch.ones(5, device=DEVICE), x.clone()], add=False, statistics=True
    )
    assert got is not None
    assert got[1].item() == 2
    finite = accumulate_reference([[x[:2]]], [torch.ones(5, device=DEVICE)], add=True, statistics=True)
    assert finite is not None
    assert finite.tolist() == [2.0**2 + 3.0**2, 0.0]


@pytest.mark.parametrize("wire", [None, torch.float64])
def test_fp64_contributions_are_summed_in_fp64(wire: torch.dtype | None) -> None:
    x = [torch.tensor([v], dtype=torch.float64, device=DEVICE) for v in (1.0, 2**-50)]
    got = torch.empty(1, dtype=torch.float64, device=DEVICE)
    accumulate_reference([x], [got], wire_dtype=wire)
    assert got.item() == 1 + 2**-50
