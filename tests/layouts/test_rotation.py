"""Which group uses which slot."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing
from tide_triton.layouts import GroupUse, Rotation, SlotShortageError, SpecError, assign

prefetches = st.integers(0, 4)
slot_counts = st.none() | st.integers(1, 8)


@st.composite
def group_uses(draw: st.DrawFn) -> list[GroupUse]:
    """Groups at up to three depths, and resident ones, in any order."""
    depths = draw(st.lists(st.none() | st.integers(0, 2), max_size=14))
    return [GroupUse(f"g{index}", draw(st.integers(0, 4)) * 256, depth) for index, depth in enumerate(depths)]


def rotating(groups: list[GroupUse]) -> dict[int, list[int]]:
    """The indices of the groups of each depth, in order."""
    depths = {group.depth for group in groups if group.depth is not None}
    return {depth: [index for index, group in enumerate(groups) if group.depth == depth] for depth in depths}


def assigned(groups: list[GroupUse], prefetch: int, slots: int | None) -> Rotation:
    """`assign`, or a discarded example where `slots` are too few."""
    try:
        return assign(groups, prefetch, slots)
    except SlotShortageError:
        assume(False)
        raise


@given(group_uses(), prefetches, slot_counts)
@comparing
def test_every_group_has_a_slot_and_every_slot_is_as_large_as_its_largest_group(
    groups: list[GroupUse], prefetch: int, slots: int | None
) -> None:
    rotation = assigned(groups, prefetch, slots)
    users: dict[int, list[int]] = {slot: [] for slot in range(len(rotation.slot_nbytes))}
    for slot, group in zip(rotation.slot_of, groups, strict=True):
        users[slot].append(group.nbytes)
    assert rotation.slot_nbytes == tuple(max(nbytes) for nbytes in users.values())


@given(group_uses(), prefetches, slot_counts)
@comparing
def test_groups_in_flight_together_never_share_a_slot(groups: list[GroupUse], prefetch: int, slots: int | None) -> None:
    rotation = assigned(groups, prefetch, slots)
    for members in rotating(groups).values():
        slot_of = [rotation.slot_of[index] for index in members]
        for first in range(len(members)):
            together = slot_of[first : first + prefetch + 1]
            assert len(set(together)) == len(together)


@given(group_uses(), prefetches, slot_counts)
@comparing
def test_neighbours_never_share_a_slot_where_there_are_two_or_more(
    groups: list[GroupUse], prefetch: int, slots: int | None
) -> None:
    rotation = assigned(groups, prefetch, slots)
    for members in rotating(groups).values():
        slot_of = [rotation.slot_of[index] for index in members]
        if len(set(slot_of)) >= 2:
            assert all(one != following for one, following in pairwise(slot_of))


@given(group_uses(), prefetches, slot_counts)
@comparing
def test_depths_never_share_slots_and_resident_groups_own_theirs(
    groups: list[GroupUse], prefetch: int, slots: int | None
) -> None:
    rotation = assigned(groups, prefetch, slots)
    depth_of: dict[int, int | None] = {}
    for slot, group in zip(rotation.slot_of, groups, strict=True):
        assert depth_of.setdefault(slot, group.depth) == group.depth
    resident = [slot for slot, group in zip(rotation.slot_of, groups, strict=True) if group.depth is None]
    assert len(set(resident)) == len(resident)


@given(group_uses(), prefetches)
@comparing
def test_without_a_count_slots_take_no_more_than_if_all_groups_took_turns_together(
    groups: list[GroupUse], prefetch: int
) -> None:
    rotation = assign(groups, prefetch)
    together = assign(groups, prefetch, max(prefetch + 1, 1))
    assert sum(rotation.slot_nbytes) <= sum(together.slot_nbytes)
    if len({group.nbytes for group in groups}) <= 1:
        assert rotation == together


def test_a_large_embedding_and_head_share_a_slot_and_leave_those_of_the_blocks_small() -> None:
    groups = [
        GroupUse("embedding", 4096, 0),
        *(GroupUse(f"layers.{i}", 256, 0) for i in range(4)),
        GroupUse("head", 4096, 0),
    ]
    assert assign(groups, prefetch=1) == Rotation((256, 256, 4096), (2, 0, 1, 0, 1, 2))


@given(group_uses(), prefetches, st.integers(1, 8))
@comparing
def test_a_count_gives_so_many_slots_a_depth_or_one_a_group(groups: list[GroupUse], prefetch: int, slots: int) -> None:
    rotation = assigned(groups, prefetch, slots)
    for members in rotating(groups).values():
        assert len({rotation.slot_of[index] for index in members}) == min(len(members), slots)


@given(group_uses(), prefetches)
@comparing
def test_a_shortage_says_how_many_slots_would_do_and_exactly_so_many_do(groups: list[GroupUse], prefetch: int) -> None:
    needed = max((min(len(members), prefetch + 1) for members in rotating(groups).values()), default=0)
    for slots in range(1, needed):
        with pytest.raises(SlotShortageError, match=rf"slots={slots} is too few: .* pass slots={needed} or more"):
            assign(groups, prefetch, slots)
    assign(groups, prefetch, max(needed, 1))


def test_a_shortage_names_the_groups_that_are_unsharded_at_once() -> None:
    groups = [GroupUse("root", 8, None), *(GroupUse(f"layers.{i}", 8, 0) for i in range(4))]
    with pytest.raises(SlotShortageError, match=r"2 groups are unsharded at once \(layers.0, layers.1\)"):
        assign(groups, prefetch=1, slots=1)


def test_the_advice_of_a_shortage_holds_for_every_depth_of_nesting() -> None:
    groups = [GroupUse("a", 8, 0), GroupUse("b", 8, 0), *(GroupUse(f"a.{i}", 8, 1) for i in range(3))]
    with pytest.raises(SlotShortageError, match="pass slots=3 or more"):
        assign(groups, prefetch=2, slots=1)


@pytest.mark.parametrize("slots", [0, -1, 1.0, True, "2"])
def test_a_bad_slot_count_is_refused_naming_field_and_value(slots: Any) -> None:
    with pytest.raises(SlotShortageError, match=rf"slots must be an integer >= 1 or None .*, got {slots!r}"):
        assign([], 1, slots)


@pytest.mark.parametrize("prefetch", [-1, -2, 1.0, True, None])
def test_a_bad_prefetch_is_refused_naming_field_and_value(prefetch: Any) -> None:
    with pytest.raises(SpecError, match=f"prefetch must be an integer >= 0, got {prefetch!r}"):
        assign([GroupUse("a", 8, 0)], prefetch)


def test_six_groups_take_turns_in_two_slots_as_drawn() -> None:
    groups = [GroupUse(f"layers.{index}", 256 * (index + 5), 0) for index in range(6)]
    assert assign(groups, prefetch=1) == Rotation((9 * 256, 10 * 256), (0, 1, 0, 1, 0, 1))


def test_no_groups_need_no_slots() -> None:
    assert assign([], prefetch=1) == Rotation((), ())
