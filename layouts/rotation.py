"""Which group uses which slot.

A group that reshards after forward needs a slot only while its parameters are unsharded, so groups take turns in a few
slots. A parameter must come back at the same address between forward and backward (autograd keeps aliases), so each
group has one slot for good. Groups follow each other in the order of the model's modules; with `n` slots, group `j`
takes slot `j % n`, and neighbours never share one:

    group   0  1  2  3  4  5        one slot for the group that computes, and one for each gathered ahead of it
    slot    0  1  2  0  1  2        (here two)

A group that is much larger than the others (an embedding beside small blocks) would make its slot as large for all that
share it. Where that saves memory, large groups take turns in slots of their own: one, if no two of them are neighbours.

Groups nested in each other are unsharded together, so each depth of nesting rotates in slots of its own. A group that
stays unsharded (the root, `reshard_after_forward=False`) has a slot to itself.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tide_triton.layouts.spec import SpecError


class SlotShortageError(SpecError):
    """An explicit slot count that cannot hold what the model holds at once. The message says how many would do."""


@dataclass(frozen=True, slots=True)
class GroupUse:
    """How a group uses its slot.

    nbytes: bytes of its slot layout.
    depth: how many groups that rotate enclose it, or None where it stays unsharded and so needs a slot of its own.
    """

    name: str
    nbytes: int
    depth: int | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Slot sizes in bytes, and the slot of each group."""

    slot_nbytes: tuple[int, ...]
    slot_of: tuple[int, ...]


def assign(groups: Sequence[GroupUse], prefetch: int, slots: int | None = None) -> Rotation:
    """Give every group a slot.

    prefetch: how many groups are gathered ahead of the one that computes, at most.
    slots: slots per depth of nesting in which groups rotate; None for as many as `prefetch` needs.

    Raises SlotShortageError where `slots` is less than 1 or than the groups unsharded at once at any depth, and
    SpecError where `prefetch` is not an integer >= 0.
    """
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise SpecError(f"prefetch must be an integer >= 0, got {prefetch!r}")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise SlotShortageError(f"slots must be an integer >= 1 or None (sized from the model), got {slots!r}")
    depths = sorted({g.depth for g in groups if g.depth is not None})
    rotating = [[index for index, g in enumerate(groups) if g.depth == depth] for depth in depths]
    if slots is not None and rotating:
        # The fullest depth decides: naming a shallower one's need would only lead to the next error.
        fullest = max(rotating, key=len)
        needed = min(len(fullest), prefetch + 1)
        if slots < needed:
            raise SlotShortageError(
                f"slots={slots} is too few: with a prefetch depth of {prefetch}, {needed} groups are unsharded at once "
                f"({', '.join(groups[i].name for i in fullest[:needed])}); pass slots={needed} or more, or leave "
                f"slots=None to have it sized from the model"
            )
    slot_of = [-1] * len(groups)
    slot_nbytes: list[int] = []
    for members in rotating:
        sizes = [groups[index].nbytes for index in members]
        turns = _turns(sizes, prefetch) if slots is None else [turn % slots for turn in range(len(members))]
        for index, turn in zip(members, turns, strict=True):
            slot_of[index] = len(slot_nbytes) + turn
        slot_nbytes += _slot_sizes(sizes, turns)
    for index, group in enumerate(groups):
        if group.depth is None:
            slot_of[index] = len(slot_nbytes)
            slot_nbytes.append(group.nbytes)
    return Rotation(tuple(slot_nbytes), tuple(slot_of))


def _slot_sizes(sizes: Sequence[int], turns: Sequence[int]) -> list[int]:
    slots = [0] * (max(turns, default=-1) + 1)
    for size, turn in zip(sizes, turns, strict=True):
        slots[turn] = max(slots[turn], size)
    return slots


def _turns(sizes: Sequence[int], prefetch: int) -> list[int]:
    """The slot of each of one depth's groups, in the fewest bytes: all together, or the largest ones apart."""
    together = [turn % (prefetch + 1) for turn in range(len(sizes))]
    best, least = together, sum(_slot_sizes(sizes, together))
    for limit in sorted(set(sizes))[:-1]:
        apart = _apart([size > limit for size in sizes], prefetch)
        if (total := sum(_slot_sizes(sizes, apart))) < least:
            best, least = apart, total
    return best


def _apart(is_large: Sequence[bool], prefetch: int) -> list[int]:
    """Large groups and the others take turns apart from each other, neighbours never in the same slot."""
    turns = [0] * len(is_large)
    first = 0
    for kind in (False, True):
        members = [index for index, large in enumerate(is_large) if large == kind]
        # As many as there are of the kind in any stretch that may be unsharded at once.
        count = max(bisect_right(members, at + prefetch) - number for number, at in enumerate(members))
        for turn, index in enumerate(members):
            turns[index] = first + turn % count
        first += count
    return turns
