"""How much is under way at once: chunks, a window over them, and the counters that steps wait for.

Blocks are cut into chunks of `chunk_nbytes`, the last one shorter. A queue of puts may run `depth` chunks ahead of what
has been acknowledged:

    put     0  1  2  3  4  5  6  7          depth 3: put 5 waits until put 2 has been acknowledged
            acknowledged |in flight| wait

Steps wait for counters in the memory of the rank that waits, and these only grow. Puts from one rank to another, and
the signals after them, take effect in the order in which they were made, so that a count says which have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tide_triton.layouts.shards import Region, shard
from tide_triton.layouts.slots import ALIGNMENT, LandingLayout, align
from tide_triton.layouts.spec import GroupSpec, SpecError
from tide_triton.layouts.topology import Topology
from tide_triton.layouts.transfers import Copy, between

#: Bytes of whose multiples chunks are, so that they start aligned and cut no element.
GRAIN: Final = 16

#: What a counter counts. Of the rank that it names:
#:     landed        puts that have landed here
#:     acknowledged  puts from here which it says have landed there
#:     vacated       credits it has given: it has used what lay where the next put goes
#: and of this rank itself:
#:     summed        local sums it has done
Counter = Literal["landed", "acknowledged", "vacated", "summed"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Until this rank's counter `counter` of `rank` is at least `count`."""

    counter: Counter
    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class Pacing:
    """Chunks of `chunk_nbytes` bytes, of which `depth` are in flight at most. Both >= 1.

    Raises SpecError for anything else, and for chunks that are not a multiple of `GRAIN`.
    """

    chunk_nbytes: int
    depth: int

    def __post_init__(self) -> None:
        for field in ("chunk_nbytes", "depth"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{field} must be an integer >= 1, got {value!r}")
        if self.chunk_nbytes % GRAIN:
            raise SpecError(
                f"chunk_nbytes must be a multiple of {GRAIN}, so that chunks start aligned, got {self.chunk_nbytes}; "
                f"use {-(-self.chunk_nbytes // GRAIN) * GRAIN}"
            )

    @property
    def window_nbytes(self) -> int:
        """Bytes in flight at most."""
        return self.chunk_nbytes * self.depth

    def chunks(self, nbytes: int) -> int:
        """How many chunks `nbytes` bytes make."""
        return -(-nbytes // self.chunk_nbytes)

    def chunk_sizes(self, nbytes: int) -> tuple[int, ...]:
        """Bytes of each chunk of `nbytes` bytes: none is empty."""
        return tuple(min(self.chunk_nbytes, nbytes - start) for start in range(0, nbytes, self.chunk_nbytes))


#: A chunk as copies, each with the index of the copy that it is a part of.
Parts = tuple[tuple[int, Copy], ...]


def cut(copies: Sequence[Copy | None], chunk_nbytes: int) -> tuple[Parts, ...]:
    """The bytes of `copies`, one copy after the other and row after row, in chunks of `chunk_nbytes`.

    A chunk that starts or ends inside a row of a strided copy takes up to three copies for it: the rest of the row, the
    rows that are whole, and the start of the next.
    """
    chunks: list[Parts] = []
    filling: list[tuple[int, Copy]] = []
    room = chunk_nbytes
    for index, copy in enumerate(copies):
        start, nbytes = 0, copy.nbytes if copy is not None else 0
        while copy is not None and start < nbytes:
            stop = min(start + room, nbytes)
            filling += ((index, part) for part in _span(copy, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                chunks.append(tuple(filling))
                filling, room = [], chunk_nbytes
    if filling:
        chunks.append(tuple(filling))
    return tuple(chunks)


def _span(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """Bytes `start` to `stop` of `copy`, counted row after row."""
    first, skip = divmod(start, copy.width)
    last, take = divmod(stop, copy.width)
    if first == last:
        yield _rows(copy, first, 1, skip, take)
        return
    if skip:
        yield _rows(copy, first, 1, skip, copy.width)
        first += 1
    if first < last:
        yield _rows(copy, first, last - first, 0, copy.width)
    if take:
        yield _rows(copy, last, 1, 0, take)


def _rows(copy: Copy, first: int, rows: int, start: int, stop: int) -> Copy:
    """Bytes `start` to `stop` of each of `rows` rows, from row `first` on."""
    width = stop - start
    return Copy(
        copy.src_offset + first * copy.src_pitch + start,
        copy.dst_offset + first * copy.dst_pitch + start,
        rows,
        width,
        copy.src_pitch if rows > 1 else width,
        copy.dst_pitch if rows > 1 else width,
    )


def cut_slices(landing: LandingLayout, owner: int, chunk_nbytes: int) -> tuple[Parts, ...]:
    """A rank's slices of rank `owner`'s shards, tensor after tensor, in chunks of `chunk_nbytes`.

    Each part comes with the index of its tensor. `src_offset` counts from the start of that tensor's contiguous
    gradient, `dst_offset` from the start of where the chunk goes, which it fills without gaps.
    """
    copies, filled = [], 0
    for tensor in landing.tensors:
        region = shard(tensor, landing.spec.world_size, owner).region
        copies.append(between(region, Region(filled, 1, region.nbytes, region.nbytes)))
        filled += region.nbytes
    return tuple(
        tuple((index, replace(copy, dst_offset=copy.dst_offset - number * chunk_nbytes)) for index, copy in parts)
        for number, parts in enumerate(cut(copies, chunk_nbytes))
    )


def pacing_for(topology: Topology, specs: Sequence[GroupSpec] | None, nbytes: int, depth: int) -> Pacing:
    """Chunks so large that rings of `depth` of them take `nbytes` * `depth` bytes at most, but not below 256 bytes.

    specs: groups, none of whose shards in fp32 a chunk need exceed; None for any.
    """
    room = nbytes // (topology.gpus_per_node + 1) // ALIGNMENT * ALIGNMENT
    if specs is not None:
        shards = ([shard(tensor, spec.world_size, 0) for tensor in spec.tensors] for spec in specs)
        sizes = (sum(own.padded_numel * max(own.tensor.itemsize, 4) for own in of_group) for of_group in shards)
        room = min(room, align(max(sizes, default=0)))
    return Pacing(max(room, ALIGNMENT), depth)


def rings_nbytes(topology: Topology, pacing: Pacing) -> int:
    """Bytes of a window that holds the rings of any reduction over `topology`, whatever its dtypes."""
    # Slices from each other GPU, partials, and the outbox.
    return pacing.depth * (topology.gpus_per_node + 1) * align(pacing.chunk_nbytes)


#: Puts of one rank to another that a turn counts at most.
COUNTED: Final = (1 << 12) - 1


def chunks_of_each(nodes: int) -> int:
    """How many chunks of each of `nodes` nodes a turn counts. Raises SpecError where there are more nodes than that."""
    if nodes > COUNTED:
        raise SpecError(f"nodes must be at most {COUNTED}, got {nodes}")
    return COUNTED // nodes


def countable(pacing: Pacing, topology: Topology, nbytes: int) -> Pacing:
    """`pacing`, with chunks so large that a turn can count those of a block of `nbytes` bytes from every node.

    Raises SpecError where there are more nodes than a turn can count.
    """
    most = chunks_of_each(topology.nodes)
    return Pacing(max(pacing.chunk_nbytes, align(-(-nbytes // most))), pacing.depth)


#: In how many chunks a gather's block goes at most. Each costs two signals' way over the rail; inside a chunk, what has
#: been cast goes at once, and what forwards it lags behind by one.
BLOCK_CHUNKS: Final = 4


def gather_pacing(topology: Topology, block_nbytes: int, nbytes: int, depth: int) -> Pacing:
    """`pacing_for`, with chunks of at least a part in `BLOCK_CHUNKS` of a block of `block_nbytes` bytes.

    A gather's chunks lie where the slot has them, so that they take no memory, however large they are. Where nobody
    puts on what comes to it, in two nodes of one GPU, a block is one chunk. Raises SpecError for more nodes than a turn
    counts.
    """
    pacing = pacing_for(topology, None, nbytes, depth)
    chunks = BLOCK_CHUNKS if topology.world_size > 2 else 1
    return countable(Pacing(max(pacing.chunk_nbytes, align(-(-block_nbytes // chunks))), depth), topology, block_nbytes)
