"""Where tensors lie in a slot, and gradient slices in a landing."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import addresses, comparing, dtypes, group_specs, moving
from tide_triton.layouts import ALIGNMENT, ITEMSIZES, GroupSpec, LandingLayout, SlotLayout, SpecError, TensorSpec

alignments = st.sampled_from([16, 64, ALIGNMENT, 4096])
W = TensorSpec("w", (7, 3), "bfloat16")


def test_the_default_alignment_is_256_bytes() -> None:
    assert ALIGNMENT == 256


@given(group_specs(), alignments)
@comparing
def test_places_are_aligned_and_apart_with_their_padding(spec: GroupSpec, alignment: int) -> None:
    layout = SlotLayout(spec, alignment)
    assert [place.tensor for place in layout.places] == list(spec.tensors)
    for place in layout.places:
        assert place.offset % alignment == 0
        assert place.nbytes == place.tensor.nbytes <= place.padded_nbytes
        assert place.offset + place.padded_nbytes <= layout.nbytes
    for place, following in pairwise(sorted(layout.places, key=lambda place: (place.offset, place.nbytes))):
        assert place.offset + place.padded_nbytes <= following.offset
        assert following.offset < place.offset + place.padded_nbytes + alignment
    assert layout.nbytes % alignment == 0


def test_tensors_that_are_cut_alike_lie_side_by_side_and_equally_far_apart() -> None:
    shapes = [(64, 5), (7, 3), (64, 5), (7, 3), (3, 7), (7, 3), (64, 5)]
    spec = GroupSpec(3, tuple(TensorSpec(f"w{index}", shape, "bfloat16") for index, shape in enumerate(shapes)))
    for offsets in ([place.offset for place in SlotLayout(spec).places], LandingLayout(spec, "float32").offsets):
        order = sorted(range(len(shapes)), key=offsets.__getitem__)
        assert order == [0, 2, 6, 1, 3, 5, 4]
        assert offsets[2] - offsets[0] == offsets[6] - offsets[2]
        assert offsets[3] - offsets[1] == offsets[5] - offsets[3]


@given(group_specs())
@moving
def test_the_ranks_regions_of_a_tensor_cover_its_place_and_never_overlap(spec: GroupSpec) -> None:
    layout = SlotLayout(spec)
    for index, place in enumerate(layout.places):
        owned = [addresses(layout.region(index, rank)) for rank in range(spec.world_size)]
        together = sorted(address for bytes_of_rank in owned for address in bytes_of_rank)
        assert together == list(range(place.offset, place.offset + place.nbytes))


@given(group_specs(), alignments, st.none() | dtypes)
@comparing
def test_landings_start_each_tensor_aligned_and_after_the_one_before(
    spec: GroupSpec, alignment: int, dtype: str | None
) -> None:
    landing = LandingLayout(spec, dtype, alignment)
    ends = [o + s * spec.world_size for o, s in zip(landing.offsets, landing.strides, strict=True)]
    assert all(offset % alignment == 0 for offset in landing.offsets)
    in_order = sorted(zip(landing.offsets, ends, strict=True))
    assert all(end <= following for (_, end), (following, _) in pairwise(in_order))
    assert all(end <= landing.nbytes for end in ends)
    assert landing.nbytes % alignment == 0


@given(group_specs(), st.none() | dtypes)
@moving
def test_segments_of_an_owner_hold_its_shard_of_every_rank_and_never_overlap(
    spec: GroupSpec, dtype: str | None
) -> None:
    landing = LandingLayout(spec, dtype)
    world = range(spec.world_size)
    for owner in world:
        segments = [landing.segment(i, source, owner) for i in range(len(spec.tensors)) for source in world]
        written = [address for segment in segments for address in addresses(segment)]
        assert len(set(written)) == len(written)
        assert all(segment.rows <= 1 and segment.end <= max(landing.nbytes, segment.offset) for segment in segments)
    for index, tensor in enumerate(landing.tensors):
        assert tensor.dtype == (dtype or spec.tensors[index].dtype)
        assert all(
            sum(landing.segment(index, source, owner).nbytes for owner in world) == tensor.nbytes for source in world
        )


@given(group_specs(), alignments)
@comparing
def test_a_landing_of_the_parameters_dtype_is_exactly_the_slot(spec: GroupSpec, alignment: int) -> None:
    slot, landing = SlotLayout(spec, alignment), LandingLayout(spec, None, alignment)
    assert landing.nbytes == slot.nbytes
    assert landing.offsets == tuple(place.offset for place in slot.places)
    assert landing.tensors == spec.tensors


@given(group_specs(), dtypes)
@comparing
def test_a_landing_no_wider_than_any_parameter_fits_the_slot(spec: GroupSpec, dtype: str) -> None:
    if all(ITEMSIZES[dtype] <= tensor.itemsize for tensor in spec.tensors):
        assert LandingLayout(spec, dtype).nbytes <= SlotLayout(spec).nbytes


def test_a_landing_of_a_wider_dtype_may_not_fit_the_slot() -> None:
    spec = GroupSpec(2, (TensorSpec("w", (64, 64), "bfloat16"),))
    assert LandingLayout(spec, "float32").nbytes == 2 * SlotLayout(spec).nbytes


def test_the_layout_in_numbers_for_7_rows_over_3_ranks() -> None:
    spec = GroupSpec(3, (W, replace(W, name="v", shape=(64, 64))))
    layout, landing = SlotLayout(spec), LandingLayout(spec)
    assert [(p.offset, p.nbytes, p.padded_nbytes) for p in layout.places] == [(0, 42, 54), (256, 8192, 8448)]
    assert layout.nbytes == 8704
    assert [layout.region(0, rank).offset for rank in range(3)] == [0, 18, 36]
    assert layout.region(1, 1).offset == 256 + 22 * 64 * 2
    assert [landing.segment(0, source, 2).offset for source in range(3)] == [0, 18, 36]
    assert [landing.segment(0, source, 2).nbytes for source in range(3)] == [6, 6, 6]


def test_a_group_without_tensors_takes_no_bytes() -> None:
    spec = GroupSpec(4, ())
    assert (SlotLayout(spec).nbytes, SlotLayout(spec).places) == (0, ())
    assert (LandingLayout(spec).nbytes, LandingLayout(spec).offsets) == (0, ())


@pytest.mark.parametrize("alignment", [0, -256, 8, 48, 256.0, "256", True])
def test_a_bad_alignment_is_refused_naming_the_value(alignment: Any) -> None:
    for layout in (SlotLayout, lambda spec, alignment: LandingLayout(spec, None, alignment)):
        with pytest.raises(SpecError, match=f"alignment must be a power of two >= 16, got {alignment!r}"):
            layout(GroupSpec(1, ()), alignment)


@pytest.mark.parametrize("dtype", ["", "bf16", 2, ["float32"]])
def test_a_bad_gradient_dtype_is_refused_naming_the_value(dtype: Any) -> None:
    with pytest.raises(SpecError) as error:
        LandingLayout(GroupSpec(1, ()), dtype)
    assert f"gradient dtype {dtype!r} has no layout; use one of float64, float32" in str(error.value)


@pytest.mark.parametrize("outside", [-1, 3])
def test_a_rank_outside_the_world_has_neither_region_nor_segment(outside: int) -> None:
    spec = GroupSpec(3, (W,))
    with pytest.raises(SpecError, match=f"rank must be 0 to 2 for world_size=3, got {outside}"):
        SlotLayout(spec).region(0, outside)
    with pytest.raises(SpecError, match=f"rank must be 0 to 2 for world_size=3, got {outside}"):
        LandingLayout(spec).segment(0, 0, outside)
    with pytest.raises(SpecError, match=f"source must be 0 to 2, got {outside}"):
        LandingLayout(spec).segment(0, outside, 0)
