"""No schedule lets two owners into one slot, whatever happens when: the real slots, ring and collectives, simulated.

A test draws a *script*, which every rank's host follows: gathers of several groups into few slots, some waited for and
read for long, some never waited for, some found in place again; reductions through the ring or through a slot that was
vacated, of gradients that come one by one and in other orders on other ranks, or that stand where parameters were. It
also draws what happens when: which rank's which stream goes on (tests/simulated_transport.py). All along

    a slot is written only once its owner is done with what lay there
    what is read is what a naive twin in numpy gives, bit for bit; what nobody may read any more is NaN
    counters only grow
    at the end nobody waits

Broken slots, below, show that each of these can fail.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.simulated_transport import (
    POISON,
    Cluster,
    ScheduleError,
    SimulatedTransport,
    SimulatedWindow,
    kernels_on_streams,
)
from tide_triton.all_gather import AllGather, CastShards, Gathering
from tide_triton.layouts import GroupSpec, LandingLayout, SlotLayout, TensorSpec
from tide_triton.layouts.ring import least_chunk
from tide_triton.reduce_scatter import ReduceScatter
from tide_triton.reducers import Kept, Reducer, Reduction, Underway
from tide_triton.traffic import Traffic
from tide_triton.transports import Mark
from tide_triton.views import as_bytes
from tide_triton.windows import Ring, Slot, SlotPool, Turn

Array = npt.NDArray[Any]

#: Even, uneven, empty and strided shards; the large ones fill several chunks of a ring.
TENSORS = (
    ((1,), 0),
    ((5,), 0),
    ((3, 7), 0),
    ((8, 4), 0),
    ((2, 5), 1),
    ((6, 3, 40), 1),
    ((70, 8), 0),
    ((9, 150), 0),
    ((12, 130), 1),
    ((1031,), 0),
    ((4500,), 0),
)
GROUPS = 3
SLOTS = 2


# --- the naive twin ---


@dataclass(frozen=True)
class Group:
    """Tensors as (shape, shard dim), their dtypes and that of all gradients, and what collectives of them must give."""

    name: str
    world_size: int
    tensors: tuple[tuple[tuple[int, ...], int], ...]
    dtypes: tuple[str, ...]
    gradient_dtype: str

    @cached_property
    def spec(self) -> GroupSpec:
        named = enumerate(zip(self.tensors, self.dtypes, strict=True))
        tensors = tuple(TensorSpec(f"w{i}", shape, dtype, dim) for i, ((shape, dim), dtype) in named)
        return GroupSpec(self.world_size, tensors)

    @cached_property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.spec)

    @cached_property
    def landing(self) -> LandingLayout:
        return LandingLayout(self.spec, self.gradient_dtype)

    def shard(self, index: int, rank: int, of: Array) -> Array:
        """Rank `rank`'s shard of tensor `index`, whose values are `of`: contiguous, padded to the largest with NaN."""
        shape, dim = self.tensors[index]
        size = -(-shape[dim] // self.world_size)
        own = np.take(of, range(min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])), dim).ravel()
        padded = np.full(of.size // max(shape[dim], 1) * size, np.nan, np.float32)
        padded[: own.size] = own
        return padded

    def parameter(self, index: int, seed: int) -> Array:
        return _values(self.tensors[index][0], seed, index)

    def gathered(self, index: int, seed: int) -> Array:
        """Bytes of the unsharded parameter."""
        return _bytes(self.parameter(index, seed), self.dtypes[index])

    def gradient(self, index: int, seed: int, rank: int) -> Array:
        """Bytes of rank `rank`'s gradient."""
        return _bytes(_values(self.tensors[index][0], seed, index, rank), self.gradient_dtype)

    def reduced(self, index: int, seed: int, rank: int) -> Array:
        """Rank `rank`'s shard of the average, in rank order, with zeros in the padding."""
        shape, _ = self.tensors[index]
        total: Array = np.zeros(0, np.float32)
        for source in range(self.world_size):
            addend = _widened(self.gradient(index, seed, source), self.gradient_dtype).reshape(shape)
            total = addend if source == 0 else total + addend
        average = self.shard(index, rank, total / np.float32(self.world_size))
        return np.nan_to_num(average, nan=0.0)


@lru_cache(4096)
def _values(shape: tuple[int, ...], *seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _bytes(values: Array, dtype: str) -> Array:
    """`values` in `dtype`, rounded to nearest even."""
    bits = np.ascontiguousarray(values).ravel().view(np.uint32)
    if dtype == "bfloat16":
        bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return bits.view(np.uint8)


def _widened(raw: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32)


def _check(what: str, got: torch.Tensor, want: Array) -> None:
    raw = as_bytes(got).numpy()
    if not np.array_equal(raw, want):
        differ = np.flatnonzero(raw != want)
        poisoned = int((raw[differ] == POISON).sum())
        raise ScheduleError(
            f"{what}: {differ.size} of {raw.size} bytes differ from byte {differ[0]} on, {poisoned} poisoned"
        )


# --- one rank ---


@dataclass(eq=False)
class Buffers:
    """A group's collectives and memory on one rank: shards, and gradients in two places that take turns."""

    group: Group
    gatherer: AllGather
    reducer: Reducer
    shards: list[torch.Tensor]
    cast: CastShards
    gradients: list[list[torch.Tensor]]
    reductions: int = 0
    #: After these, gradients may be written again.
    read: list[Mark | None] = field(default_factory=list)


@dataclass(eq=False)
class Offered:
    """A reduction under way."""

    buffers: Buffers
    seed: int
    reducing: Underway
    outputs: dict[int, torch.Tensor]
    gradients: list[torch.Tensor]
    kept: list[Kept] = field(default_factory=list)
    #: In which gradients may stand.
    slot: Slot | None = None

    def keep(self, kept: Kept) -> None:
        """Nobody may gather into the slot before those that stand there were read; the others are kept."""
        buffers = {gradient.data_ptr() for gradient in self.gradients}
        apart = [gradient for gradient in kept.gradients if gradient.data_ptr() in buffers]
        if self.slot is not None and len(apart) < len(kept.gradients):
            self.slot.read_until(kept.mark)
        self.kept.append(Kept(apart, kept.mark))


class Rank:
    """What one rank's host does: the calls of FSDP2's hook, each from the stream that FSDP2 makes it from.

    Parameters are read, and gradients written, on "compute"; gathers are started on "gathers", and reductions end on
    "reduces".
    """

    def __init__(self, transport: SimulatedTransport, groups: Sequence[Group], depth: int, chunk_nbytes: int) -> None:
        self.transport = transport
        pool = SlotPool(transport)
        nbytes = max(map(self.slot_nbytes, groups))
        self.slots = [pool.add(nbytes, "0", f"slot {number}") for number in range(SLOTS)]
        self.ring: Ring = pool.ring(chunk_nbytes, depth, "0")
        self.buffers = [self._buffers_of(group) for group in groups]
        self.gatherings: dict[int, Gathering] = {}
        self.offered: dict[int, Offered] = {}

    @staticmethod
    def slot_nbytes(group: Group) -> int:
        return max(group.layout.nbytes, group.landing.nbytes)

    def collectives_of(self, group: Group) -> tuple[AllGather, Reducer]:
        gatherer = AllGather(group.layout, self.rank, smallest_piece=self.transport.piece_nbytes)
        return gatherer, ReduceScatter(group.landing, self.rank)

    def _buffers_of(self, group: Group) -> Buffers:
        rank = self.transport.rank
        dtype = getattr(torch, group.gradient_dtype)
        gradients = [[torch.empty(shape, dtype=dtype) for shape, _ in group.tensors] for _ in range(2)]
        shards = [torch.from_numpy(group.shard(i, rank, group.parameter(i, 0))) for i in range(len(group.tensors))]
        gatherer, reducer = self.collectives_of(group)
        cast = CastShards(gatherer, self.transport.device)
        for source in (*shards, cast.memory, *gradients[0], *gradients[1]):
            self.transport.cluster.may_put_from(source)
        return Buffers(group, gatherer, reducer, shards, cast, gradients)

    @property
    def rank(self) -> int:
        return self.transport.rank

    # --- gathers ---

    def gather(self, number: int, group: int, seed: int, keep: str, settle: bool) -> None:
        """keep: "" to keep nothing, "cast" to keep the shards as cast, "found" to gather what was kept then."""
        slot, buffers = self.slots[number], self.buffers[group]

        def update() -> None:
            for index, shard in enumerate(buffers.shards):
                shard.numpy()[:] = buffers.group.shard(index, self.rank, buffers.group.parameter(index, seed))

        with self.transport.calling("gathers"):
            if keep != "found":
                self.transport.enqueue("update shards", update)
            if settle:
                slot.settle()
            buffers.cast.is_fresh = keep == "found"
            cast = buffers.cast if keep else None
            self.gatherings[number] = buffers.gatherer.start(slot, buffers.shards, buffers.group.name, Traffic(), cast)
            slot.content = buffers
            # The optimizer may change them at once.
            self.transport.enqueue("poison shards", lambda: _poison(buffers.shards))

    def wait(self, number: int) -> None:
        self.gatherings[number].wait()

    def read(self, number: int, group: int, seed: int) -> None:
        slot, buffers = self.slots[number], self.buffers[group]

        def compare() -> None:
            for index, tensor in enumerate(buffers.gatherer.views(slot)):
                what = f"rank {self.rank} reads tensor {index} of group {group} in {slot.label}"
                _check(what, tensor, buffers.group.gathered(index, seed))

        assert slot.content is buffers
        self.transport.enqueue(f"read {slot.label}", compare, reads=[_window(slot)])

    def vacate(self, number: int, poison: bool) -> None:
        slot = self.slots[number]
        if poison:
            memory = slot.window.memory
            self.transport.enqueue(f"poison {slot.label}", lambda: memory.fill_(POISON), writes=[_window(slot)])
        slot.vacate()

    # --- reductions ---

    def begin(self, key: int, group: int, indices: Sequence[int], seed: int, slot: int | None) -> None:
        buffers = self.buffers[group]
        padded = buffers.reducer.padded_numels
        outputs = {index: torch.full((padded[index],), torch.nan) for index in indices}
        through = self.ring if slot is None else self.slots[slot]
        reduction = Reduction(divisor=float(self.transport.world_size))
        reducing = buffers.reducer.start(through, outputs, reduction, buffers.group.name)
        self._after(buffers.read)
        self.offered[key] = Offered(buffers, seed, reducing, outputs, buffers.gradients[buffers.reductions % 2])
        buffers.reductions += 1
        buffers.read = []

    def offer(self, key: int, orders: Sequence[Sequence[int]], drop: bool, number: int | None = None) -> None:
        """Gradients are there, in this rank's order; what may be dropped is, at once or at the end.

        number: the slot that holds the group's parameters, over which gradients are written where their dtype allows.
        """
        offered = self.offered[key]
        if number is not None:
            offered.slot = self.slots[number]
        for index in orders[self.rank]:
            gradient = self._write(offered, index, None if number is None else self.slots[number])
            kept = offered.reducing.offer(index, gradient)
            if kept is not None:
                offered.keep(kept)
            if kept is not None and drop:
                self._drop(offered)

    def _write(self, offered: Offered, index: int, slot: Slot | None = None) -> torch.Tensor:
        """Let the gradient be produced: in the slot if given and of its dtype, else in the group's buffers."""
        gradient, group, rank = offered.gradients[index], offered.buffers.group, self.rank
        writes = []
        if slot is not None and group.dtypes[index] == group.gradient_dtype:
            gradient, slot.content, writes = offered.buffers.gatherer.views(slot)[index], None, [_window(slot)]

        def write() -> None:
            as_bytes(gradient).numpy()[:] = group.gradient(index, offered.seed, rank)

        self.transport.enqueue(f"write gradient {index}", write, writes=writes)
        return gradient

    def _drop(self, offered: Offered) -> None:
        """What is being read may be written again after its mark."""
        for kept in offered.kept:
            gradients = list(kept.gradients)
            self.transport.after(kept.mark)
            self.transport.enqueue("poison gradients", lambda gradients=gradients: _poison(gradients))  # type: ignore[misc]
        offered.kept.clear()

    def finish(self, key: int, drop: bool) -> None:
        offered = self.offered.pop(key)
        if drop:
            self._drop(offered)
        produced = self.transport.mark()
        with self.transport.calling("reduces"):
            self.transport.after(produced)
            offered.reducing.finish(Traffic())
            self._end(offered)

    def expected(self, offered: Offered, index: int) -> Array:
        """What this rank's sum of tensor `index` must be."""
        return offered.buffers.group.reduced(index, offered.seed, self.rank)

    def _end(self, offered: Offered) -> None:
        """The reduction is over, in the order that is current."""
        buffers = offered.buffers

        def compare() -> None:
            for index, output in offered.outputs.items():
                want = self.expected(offered, index)
                _check(f"rank {self.rank}'s sum of tensor {index} of {buffers.group.name}", output, want.view(np.uint8))

        self.transport.enqueue("read sums", compare)
        self.transport.enqueue("poison gradients", lambda: _poison(offered.gradients))
        buffers.read.append(self.transport.mark())

    def reduce(
        self, slot: int | None, group: int, indices: Sequence[int], orders: Sequence[Sequence[int]], seed: int
    ) -> None:
        """All at once, as FSDP2 asks for it."""
        self.begin(-1, group, indices, seed, slot)
        offered = self.offered.pop(-1)
        for index in indices:
            self._write(offered, index)
        produced = self.transport.mark()
        with self.transport.calling("reduces"):
            self.transport.after(produced)
            for index in orders[self.rank]:
                offered.reducing.offer(index, offered.gradients[index])
            offered.reducing.finish(Traffic())
            self._end(offered)

    def _after(self, marks: Sequence[Mark | None]) -> None:
        for mark in marks:
            self.transport.after(mark)


def _window(slot: Slot) -> SimulatedWindow:
    assert isinstance(slot.window, SimulatedWindow)
    return slot.window


def _poison(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        as_bytes(tensor).fill_(POISON)


# --- the script, and what happens when ---


@dataclass
class Use:
    """What the script has made of a slot so far: whose parameters lie there, and what may be done with them."""

    phase: str = "vacant"
    group: int = -1
    seed: int = 0
    is_whole: bool = False


@dataclass
class Open:
    """A reduction that the script has begun."""

    key: int
    group: int
    #: Not offered yet.
    left: list[int]


picks = st.integers(0, 1000)
seeds = st.integers(0, 2**20)


class Schedules(RuleBasedStateMachine):
    """Scripts that keep to the collectives' contracts, and all that may happen under them."""

    cluster: Cluster
    groups: list[Group]
    #: What the ranks are, and whether a switch is between them.
    rank_type: type[Rank] = Rank
    multicasts = False

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        world = data.draw(st.integers(2, 4), "ranks")
        in_order = data.draw(st.sampled_from([False, False, False, True]), "in order")
        piece = data.draw(st.sampled_from([None, 64, 512]), "bytes of a piece")
        depth = data.draw(st.sampled_from([1, 2, 4]), "ring depth")
        chunk = least_chunk(world) * data.draw(st.sampled_from([1, 2, 5]), "chunk") + data.draw(st.sampled_from([0, 8]))
        dtypes = st.sampled_from(["bfloat16", "float32"])
        tensors = st.lists(st.sampled_from(TENSORS), min_size=1, max_size=4)
        self.groups = []
        for name in range(GROUPS):
            shapes = data.draw(tensors, f"tensors of {name}")
            gradients = data.draw(dtypes, "gradients")
            own = tuple(data.draw(st.just(gradients) | dtypes, "dtype") for _ in shapes)
            self.groups.append(Group(f"'{name}'", world, tuple(shapes), own, gradients))
        self.cluster = Cluster(world, in_order=in_order, piece_nbytes=piece, multicasts=self.multicasts)
        self.ranks = [self.rank_type(transport, self.groups, depth, chunk) for transport in self.cluster.transports]
        self.uses = [Use() for _ in range(SLOTS)]
        #: By group, the seed of the shards that are kept as they were cast.
        self.cast: dict[int, int] = {}
        self.open: list[Open] = []
        self.begun = 0

    def call(self, label: str, action: Callable[[Rank], object]) -> None:
        """Append to every rank's script."""
        self.cluster.call(lambda transport: action(self.ranks[transport.rank]), label)

    def slots_in(self, *phases: str) -> list[int]:
        return [number for number, use in enumerate(self.uses) if use.phase in phases]

    def free_slots(self) -> list[int]:
        """Those whose next turn may begin: vacant, or with a gather that nobody waits for."""
        return self.slots_in("vacant", "started")

    def idle_groups(self) -> list[int]:
        return [group for group in range(GROUPS) if all(group != opened.group for opened in self.open)]

    # --- gathers ---

    @precondition(lambda self: self.free_slots())
    @rule(
        slot=picks,
        group=st.integers(0, GROUPS - 1),
        seed=seeds,
        keep=st.sampled_from(["", "cast", "found"]),
        settle=st.booleans(),
    )
    def gather(self, slot: int, group: int, seed: int, keep: str, settle: bool) -> None:
        """Into a vacant slot, or one whose gather nobody has waited for: that is given up."""
        number = _pick(self.free_slots(), slot)
        keep = "cast" if keep == "found" and group not in self.cast else keep
        seed = self.cast[group] if keep == "found" else seed
        if keep:
            self.cast[group] = seed
        self.uses[number] = Use("started", group, seed, True)
        self.call(f"gather {group} in slot {number}", lambda rank: rank.gather(number, group, seed, keep, settle))

    @precondition(lambda self: self.slots_in("started", "held"))
    @rule(slot=picks)
    def wait(self, slot: int) -> None:
        number = _pick(self.slots_in("started", "held"), slot)
        self.uses[number].phase = "held"
        self.call(f"wait for slot {number}", lambda rank: rank.wait(number))

    @precondition(lambda self: self.slots_in("held"))
    @rule(slot=picks)
    def read(self, slot: int) -> None:
        number = _pick(self.slots_in("held"), slot)
        use = self.uses[number]
        group, seed = use.group, use.seed
        self.call(f"read slot {number}", lambda rank: rank.read(number, group, seed))

    @precondition(lambda self: self.slots_in("held"))
    @rule(slot=picks, poison=st.booleans())
    def vacate(self, slot: int, poison: bool) -> None:
        number = _pick(self.slots_in("held"), slot)
        self.uses[number].phase = "vacant"
        self.uses[number].is_whole = not poison
        self.call(f"vacate slot {number}", lambda rank: rank.vacate(number, poison))

    @precondition(lambda self: any(self.uses[number].is_whole for number in self.slots_in("vacant")))
    @rule(slot=picks)
    def find_in_place(self, slot: int) -> None:
        """Parameters that lie there still are used again, as by a backward, without moving a byte."""
        number = _pick([number for number in self.slots_in("vacant") if self.uses[number].is_whole], slot)
        use = self.uses[number]
        use.phase = "held"
        group, seed = use.group, use.seed
        self.call(f"read slot {number} again", lambda rank: rank.read(number, group, seed))

    # --- reductions ---

    @precondition(lambda self: self.idle_groups())
    @rule(slot=st.none() | picks, group=picks, seed=seeds)
    def reduce(self, slot: int | None, group: int, seed: int) -> None:
        """Through a slot, vacant or with a gather that is given up, or through the ring."""
        free = self.free_slots()
        number = None if slot is None or not free else _pick(free, slot)
        if number is not None:
            self.uses[number] = Use()
        which = _pick(self.idle_groups(), group)
        indices = self.some_of(which, seed)
        orders = self.orders_of(indices, seed)
        where = "the ring" if number is None else f"slot {number}"
        self.call(f"reduce {which} through {where}", lambda rank: rank.reduce(number, which, indices, orders, seed))

    @precondition(lambda self: self.idle_groups())
    @rule(group=picks, seed=seeds)
    def begin(self, group: int, seed: int) -> None:
        """A reduction through the ring whose gradients come one by one, maybe with others in between."""
        which, key = _pick(self.idle_groups(), group), self.begun
        self.begun += 1
        indices = self.some_of(which, seed)
        self.open.append(Open(key, which, list(indices)))
        self.call(f"begin to reduce {which}", lambda rank: rank.begin(key, which, indices, seed, None))

    @precondition(lambda self: any(opened.left for opened in self.open))
    @rule(which=picks, count=st.integers(1, 3), seed=seeds, drop=st.booleans())
    def offer(self, which: int, count: int, seed: int, drop: bool) -> None:
        """A few gradients of one reduction: all ranks have the same ones then, in orders of their own."""
        opened = _pick([opened for opened in self.open if opened.left], which)
        ready = Random(seed).sample(opened.left, min(count, len(opened.left)))
        opened.left = [index for index in opened.left if index not in ready]
        orders, key = self.orders_of(ready, seed), opened.key
        self.call(f"offer {ready} of {opened.group}", lambda rank: rank.offer(key, orders, drop))

    @precondition(lambda self: any(not opened.left for opened in self.open))
    @rule(which=picks, drop=st.booleans())
    def finish(self, which: int, drop: bool) -> None:
        opened = _pick([opened for opened in self.open if not opened.left], which)
        self.open.remove(opened)
        self.call(f"finish reducing {opened.group}", lambda rank: rank.finish(opened.key, drop))

    @precondition(lambda self: self.idle_groups() and self.free_slots())
    @rule(slot=picks, group=picks, seed=seeds, drop=st.booleans())
    def backward(self, slot: int, group: int, seed: int, drop: bool) -> None:
        """Of one group, whole: gradients are written over its parameters, and leave from there."""
        number, which, key = _pick(self.free_slots(), slot), _pick(self.idle_groups(), group), self.begun
        self.begun += 1
        self.uses[number] = Use()
        indices = self.some_of(which, seed)
        orders = self.orders_of(indices, seed)
        self.call(f"gather {which} in slot {number}", lambda rank: rank.gather(number, which, seed, "", False))
        self.call(f"wait for slot {number}", lambda rank: rank.wait(number))
        self.call(f"read slot {number}", lambda rank: rank.read(number, which, seed))
        self.call(f"begin to reduce {which}", lambda rank: rank.begin(key, which, indices, seed, None))
        self.call(f"offer {indices} in slot {number}", lambda rank: rank.offer(key, orders, drop, number))
        self.call(f"vacate slot {number}", lambda rank: rank.vacate(number, False))
        self.call(f"finish reducing {which}", lambda rank: rank.finish(key, drop))

    def some_of(self, group: int, seed: int) -> list[int]:
        """Some tensors of a group, in some order, the same on every rank."""
        draw, count = Random(seed), len(self.groups[group].tensors)
        return draw.sample(range(count), draw.randint(1, count))

    def orders_of(self, indices: Sequence[int], seed: int) -> list[list[int]]:
        """An order for each rank."""
        return [Random(seed + rank).sample(indices, len(indices)) for rank in range(self.cluster.world_size)]

    # --- what happens when ---

    @precondition(lambda self: any(stream.is_runnable for stream in self.cluster.streams))
    @rule(stream=picks, count=st.integers(1, 30))
    def rush(self, stream: int, count: int) -> None:
        """One stream, or one host, goes as far as it can while nothing else happens."""
        self.cluster.rush(_pick([stream for stream in self.cluster.streams if stream.is_runnable], stream), count)

    @rule(seed=seeds, count=st.integers(1, 200))
    def mix(self, seed: int, count: int) -> None:
        self.cluster.mix(Random(seed), count)

    @rule(seed=seeds)
    def drain(self, seed: int) -> None:
        """Everything happens that was asked for."""
        self.cluster.mix(Random(seed))

    def teardown(self) -> None:
        if not hasattr(self, "ranks") or self.cluster.failure is not None:
            return
        for opened in self.open:
            orders = self.orders_of(opened.left, opened.key)
            self.call("offer the rest", lambda rank, key=opened.key, orders=orders: rank.offer(key, orders, False))
            self.call("finish", lambda rank, key=opened.key: rank.finish(key, False))
        self.cluster.mix(Random(self.begun))


def _pick(options: Sequence[Any], number: int) -> Any:
    return options[number % len(options)]


# --- tests ---


@pytest.fixture(autouse=True)
def _kernels_on_streams() -> Iterator[None]:
    with kernels_on_streams():
        yield


ANY = settings(
    deadline=None,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
#: The same search each time, up to the first thing that it finds.
ONE = settings(
    ANY, derandomize=True, database=None, report_multiple_bugs=False, phases=[Phase.generate], max_examples=300
)


def test_no_schedule_lets_two_owners_into_a_slot() -> None:
    run_state_machine_as_test(Schedules, settings=settings(ANY, max_examples=120))


# --- what is broken on purpose ---

_open, _vacate, _take = Slot.open, Slot.vacate, Ring.take
_await_credit, _await_part = Turn.await_credit, Turn.await_part


def _open_at_once(slot: Slot, *arguments: Any) -> Turn:
    slot._vacant = None
    return _open(slot, *arguments)


def _open_a_turn_of_before(slot: Slot, *arguments: Any) -> Turn:
    slot.turn = max(slot.turn - 1, 0)
    return _open(slot, *arguments)


def _vacate_as_before(slot: Slot) -> Mark | None:
    """As if the slot were vacant since its owner vacated it the last time."""
    before = slot._vacant
    _vacate(slot)
    slot._vacant = before
    return before


def _take_backwards(ring: Ring, count: int) -> list[Slot]:
    taken = _take(ring, count)
    return taken[::-1] if ring.transport.rank == 1 else taken


def _skip_the_credit_of_rank_0(turn: Turn, peer: int) -> None:
    if peer != 0:
        _await_credit(turn, peer)


def _await_the_credit_of_the_next_turn(turn: Turn, peer: int) -> None:
    _await_credit(Turn(turn.slot, turn.number + 1, turn.what), peer)


#: What the ledger, the twin or a counter says first, which hangs on the schedule.
UNSAFE = (
    "which its owner still uses|whose owner is in turn|comes late into|bytes differ|counter . of rank . .* goes from"
)
STUCK = "nothing can happen any more"

#: What stands in place of what, and what must be said of it.
BROKEN: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "a slot is opened before its owner is done": (Slot, "open", _open_at_once, UNSAFE),
    "a slot counts as vacant since it was vacated before": (Slot, "vacate", _vacate_as_before, UNSAFE),
    "a turn is not counted": (Slot, "open", _open_a_turn_of_before, UNSAFE),
    "gathers that were given up are forgotten": (Slot, "settle", lambda slot: None, UNSAFE),
    "others who read a slot are forgotten": (Slot, "read_until", lambda slot, mark: None, UNSAFE),
    "nobody waits for credits": (Turn, "await_credit", lambda turn, peer: None, UNSAFE),
    "one rank's credit is not waited for": (Turn, "await_credit", _skip_the_credit_of_rank_0, UNSAFE),
    "nobody waits for data": (Turn, "await_part", lambda turn, part: None, UNSAFE),
    "the last part is not waited for": (Turn, "await_part", lambda turn, part: _await_part(turn, part - 1), UNSAFE),
    "one rank takes chunks in another order": (Ring, "take", _take_backwards, f"{UNSAFE}|{STUCK}"),
    "a credit to come is waited for": (Turn, "await_credit", _await_the_credit_of_the_next_turn, STUCK),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_slot_is_found(broken: str) -> None:
    owner, name, replacement, message = BROKEN[broken]
    with mock.patch.object(owner, name, replacement), pytest.raises(ScheduleError, match=message):
        run_state_machine_as_test(Schedules, settings=ONE)
