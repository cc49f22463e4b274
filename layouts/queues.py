"""The all-gather over many nodes, chunk by chunk: what a rank puts, in which order, and what each put waits for.

A rank has two queues, one over its rail and one inside its node. They run beside each other; a rank that can do but one
thing at a time goes through the rail's first. Puts of a queue start in order; a put waits until its chunk has landed,
and until the put `depth` places before it has been acknowledged:

    rail    b0.0  b0.1 | b0.0  b0.1  b1.0  b1.1 | ...       own block b0 first, then what earlier rounds brought
            round 0    | round 1: b1.0 as soon as it has landed, though b1.1 is still under way
    local   b0.0 -> g+1, g+2, ...   b0.1 -> g+1, g+2, ...   b1.0 -> g+1, g+2, ...

`depth` counts the chunks of the rail's queue, and inside the node those to each peer. An acknowledgement says that a
chunk has landed and waits for nothing else, so neither window can block for good: what a put waits for comes from an
earlier round, from earlier in its own queue, or, inside the node, from a rail.

Where a rank must send acknowledgements itself, they are steps too, *receipts*, and those that nobody waits for are left
out. A rank that can do but one thing at a time puts and acknowledges by turns (`in_turn`): put k of a round, then the
receipt of the put k that comes to it in that round. Put k waits for earlier puts and receipts of other ranks alone, its
receipt for put k, so that one by one nothing blocks for good either.

Empty blocks are not sent, and the numbers of rounds stay what they are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tide_triton.layouts.pacing import Pacing, Wait
from tide_triton.layouts.rails import forwards, receives, sends
from tide_triton.layouts.shards import chunk_size
from tide_triton.layouts.slots import SlotLayout
from tide_triton.layouts.spec import SpecError
from tide_triton.layouts.topology import Topology


@dataclass(frozen=True, slots=True)
class ChunkPut:
    """Chunk `chunk` of rank `block`'s block, `nbytes` bytes, goes to the same place of `peer`'s slot.

    round: ranks whose queues of the same kind are in the same round put to different ranks.
    number: how many puts of this rank to `peer` it makes.
    waits_for: what must have landed before; None for this rank's own block.
    """

    round: int
    peer: int
    block: int
    chunk: int
    nbytes: int
    number: int
    waits_for: Wait | None


@dataclass(frozen=True, slots=True)
class PutQueue:
    """Puts in the order in which they start, `depth` of them unacknowledged at most."""

    puts: tuple[ChunkPut, ...]
    depth: int

    def credit(self, index: int) -> Wait | None:
        """What must have been acknowledged before put `index` starts; None for the first `depth` puts."""
        if index < self.depth:
            return None
        earlier = self.puts[index - self.depth]
        return Wait("acknowledged", earlier.peer, earlier.number)

    @property
    def acknowledged(self) -> tuple[ChunkPut, ...]:
        """The puts whose acknowledgement a later put waits for: all but the last `depth`."""
        return self.puts[: max(len(self.puts) - self.depth, 0)]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Once put `number` of rank `source` to this rank has landed, that rank is told.

    round: that of the put.
    """

    round: int
    source: int
    number: int

    @property
    def waits_for(self) -> Wait:
        return Wait("landed", self.source, self.number)


def block_sizes(layout: SlotLayout) -> tuple[int, ...]:
    """Bytes of each rank's block: of its shards of all the group's tensors."""
    world = layout.spec.world_size
    # By the first rank that has it no more: bytes that all ranks before have of a tensor; and what the last one has.
    whole, rest = [0] * (world + 1), [0] * (world + 1)
    for tensor in layout.spec.tensors:
        steps = tensor.shape[tensor.shard_dim]
        chunk = max(chunk_size(steps, world), 1)
        step_nbytes = tensor.outer * tensor.inner * tensor.itemsize
        whole[steps // chunk] += chunk * step_nbytes
        rest[steps // chunk] += steps % chunk * step_nbytes
    sizes, full = [0] * world, 0
    for rank in range(world, 0, -1):
        full += whole[rank]
        sizes[rank - 1] = full + rest[rank - 1]
    return tuple(sizes)


def rail_queue(topology: Topology, rank: int, sizes: Sequence[int], pacing: Pacing) -> PutQueue:
    """What `rank` puts over its rail.

    sizes: bytes of each rank's block. Raises SpecError unless there is one for each rank of the topology.
    """
    landed = landings(topology, rank, sizes, pacing)
    puts = []
    for send in sends(topology, rank):
        number = 0
        for block in send.blocks:
            for chunk, nbytes in enumerate(pacing.chunk_sizes(sizes[block])):
                number += 1
                wait = landed[block][chunk] if block in landed else None
                puts.append(ChunkPut(send.round, send.peer, block, chunk, nbytes, number, wait))
    return PutQueue(tuple(puts), pacing.depth)


def local_queue(topology: Topology, rank: int, sizes: Sequence[int], pacing: Pacing) -> PutQueue:
    """What `rank` puts inside its node; arguments as for `rail_queue`. Peers take turns, chunk after chunk."""
    landed = landings(topology, rank, sizes, pacing)
    most, number = pacing.chunks(max(sizes)), 0
    puts: list[ChunkPut] = []
    for turn, forward in enumerate(forwards(topology, rank)):
        for chunk, nbytes in enumerate(pacing.chunk_sizes(sizes[forward.block])):
            number += 1
            wait = landed[forward.block][chunk] if forward.block in landed else None
            first = (turn * most + chunk) * len(forward.peers)
            puts += (
                ChunkPut(first + step, peer, forward.block, chunk, nbytes, number, wait)
                for step, peer in enumerate(forward.peers)
            )
    # So many places back is the same peer, `depth` chunks ago.
    return PutQueue(tuple(puts), pacing.depth * max(topology.gpus_per_node - 1, 1))


def rail_receipts(topology: Topology, rank: int, sizes: Sequence[int], pacing: Pacing) -> tuple[Receipt, ...]:
    """What `rank` acknowledges of what comes over its rail, in order; arguments as for `rail_queue`."""
    sources = {receive.source for receive in receives(topology, rank)}
    return _receipts(rank, ((source, rail_queue(topology, source, sizes, pacing)) for source in sorted(sources)))


def local_receipts(topology: Topology, rank: int, sizes: Sequence[int], pacing: Pacing) -> tuple[Receipt, ...]:
    """What `rank` acknowledges of what comes from its own node, in order; arguments as for `rail_queue`."""
    sources = (source for source in topology.local_ranks(topology.node(rank)) if source != rank)
    return _receipts(rank, ((source, local_queue(topology, source, sizes, pacing)) for source in sources))


def _receipts(rank: int, queues: Iterable[tuple[int, PutQueue]]) -> tuple[Receipt, ...]:
    puts = ((source, put) for source, queue in queues for put in queue.acknowledged if put.peer == rank)
    return tuple(sorted((Receipt(put.round, source, put.number) for source, put in puts), key=_place))


def in_turn(queue: PutQueue, receipts: Sequence[Receipt]) -> tuple[tuple[ChunkPut, Wait | None] | Receipt, ...]:
    """`queue`'s puts, each with its credit, and `receipts`, in an order in which a rank may do one after the other."""
    paced = ((put, queue.credit(index)) for index, put in enumerate(queue.puts))
    steps: list[tuple[tuple[int, int, int], tuple[ChunkPut, Wait | None] | Receipt]]
    steps = [(_place(put), (put, credit)) for put, credit in paced]
    steps += ((_place(receipt), receipt) for receipt in receipts)
    return tuple(step for _, step in sorted(steps, key=lambda placed: placed[0]))


def _place(step: ChunkPut | Receipt) -> tuple[int, int, int]:
    return step.round, step.number, int(isinstance(step, Receipt))


def arrivals(topology: Topology, rank: int, sizes: Sequence[int], pacing: Pacing) -> tuple[Wait, ...]:
    """What must have landed for `rank` to hold every block; arguments as for `rail_queue`.

    One entry for each rank that puts anything into its slot: first those of the rail, round by round, then those of the
    node. They are also the only ranks that need to be told when the slot is vacant.
    """
    _check_sizes(topology, sizes)
    counts = [(receive.source, receive.blocks) for receive in receives(topology, rank)]
    peers = (peer for peer in topology.local_ranks(topology.node(rank)) if peer != rank)
    counts += ((peer, topology.rail(topology.gpu(peer))) for peer in peers)
    waits = (Wait("landed", source, sum(pacing.chunks(sizes[block]) for block in blocks)) for source, blocks in counts)
    return tuple(wait for wait in waits if wait.count)


def landings(topology: Topology, rank: int, sizes: Sequence[int], pacing: Pacing) -> dict[int, tuple[Wait, ...]]:
    """Of each block that comes over the rail of `rank`, chunk by chunk: what says that it has.

    Arguments as for `rail_queue`.
    """
    _check_sizes(topology, sizes)
    waits = {}
    for receive in receives(topology, rank):
        before = 0
        for block in receive.blocks:
            chunks = pacing.chunks(sizes[block])
            waits[block] = tuple(Wait("landed", receive.source, before + chunk + 1) for chunk in range(chunks))
            before += chunks
    return waits


def _check_sizes(topology: Topology, sizes: Sequence[int]) -> None:
    if len(sizes) != topology.world_size:
        raise SpecError(
            f"sizes must hold one entry for each of {topology.nodes} nodes x {topology.gpus_per_node} GPUs, "
            f"got {len(sizes)}"
        )
