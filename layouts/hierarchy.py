"""The reduce-scatter over many nodes: sum inside the node, one put over the rail, sum over the nodes.

    rank (n, h) --LocalPut--+
    own slice --------------+--LocalSum--> partial of node n --RailPut--> rank (d, g) --FinalSum--> its shard
    rank (n, k) --LocalPut--+  on (n, g)

Rank (n, g) sums its node's slices of the shards of all ranks (d, g) of its rail. **One order**: inside a node in GPU
order, then over the nodes in node order, whoever owns the shard:

    partial[n] = round_wire((x[n,0] + x[n,1]) + ...)        shard = (partial[0] + partial[1]) + ...

both in fp32 (fp64 where gradients are). The owner's own partial is rounded like all others; on a single node, where no
partial travels, nothing is rounded. The sum over nodes is kept in the shard, to which partials are added one by one.

Node order and rings of a fixed size leave one way to go. All nodes take the destinations in the same order, chunk 0 of
nodes 0, 1, ..., then chunk 1 of each, and every node is one round behind the one before it (d.c: node d's chunk c):

    round   0    1    2    3    4    5    6    7         (3 nodes, 2 chunks a shard)
    node 0  0.0  1.0  2.0  0.1  1.1  2.1
    node 1       0.0  1.0  2.0  0.1  1.1  2.1
    node 2            0.0  1.0  2.0  0.1  1.1  2.1

No column names a destination twice: no two nodes put to the same one. A diagonal is one chunk, and its partials come
in node order. In round t, nodes n and d with n + d = t (mod nodes) exchange partials. The price is the nodes - 1 rounds
by which the last node starts later, so a chunk should be small beside a shard. Starting every node with another
destination would save them, but then either partials come in an order of its own at each owner, or they must be kept,
a chunk for each node: that is what a `depth` of as many chunks as there are nodes does.

No clock keeps the rounds, only credits do. Partial number p = chunk * nodes + n of a shard goes to slot p % depth of
its owner's ring, once the owner has added number p - depth. So at most `depth` partials come to a rank at a time, and
as many leave it, which keeps rails busy where rounds drift apart; with a depth of 1 no two ever come at once.

Whatever a step waits for belongs to an earlier round, or to the same one and an earlier kind of step (put, sum, put,
sum), and nothing else holds up a signal. So nothing blocks for good, whether a rank does its steps one by one, in the
order that `steps` gives, or lets the four kinds run beside each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tide_triton.layouts.pacing import Pacing, Wait
from tide_triton.layouts.slots import align
from tide_triton.layouts.spec import ITEMSIZES, SpecError
from tide_triton.layouts.steps import FinalSum, LocalPut, LocalSum, RailPut, Step
from tide_triton.layouts.topology import Topology

#: What can be summed.
FLOATS: Final = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Buffer:
    """`slots` slots of `slot_nbytes` bytes, one after the other from `offset` on."""

    offset: int
    slots: int
    slot_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_nbytes

    def at(self, slot: int) -> int:
        """Where `slot` starts."""
        return self.offset + slot * self.slot_nbytes


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """How gradients of one dtype are reduced over a topology.

    pacing: bytes of a chunk in the wider of the two dtypes, and how many chunks each ring holds a sender.
    dtype: the gradients'.
    wire: the partials'; None for the one they are summed in: fp64 for fp64 gradients, else fp32.

    Raises SpecError for dtypes that cannot be summed.
    """

    topology: Topology
    pacing: Pacing
    dtype: str
    wire: str | None = None

    def __post_init__(self) -> None:
        for what, dtype in (("gradient", self.dtype), ("wire", self.wire)):
            if dtype not in FLOATS and not (what == "wire" and dtype is None):
                raise SpecError(f"{what} dtype {dtype!r} cannot be summed; use one of {', '.join(FLOATS)}")

    @property
    def is_in_place(self) -> bool:
        """Whether gradients go over rails as they are: nodes have one GPU each, and the wire is not narrower."""
        lone = self.topology.gpus_per_node == 1 and self.topology.nodes > 1
        return lone and ITEMSIZES[self.dtype] <= ITEMSIZES[self._wire]

    @property
    def partial_dtype(self) -> str:
        """What travels over rails."""
        return self.dtype if self.is_in_place else self._wire

    @property
    def _wire(self) -> str:
        return self.wire or ("float64" if self.dtype == "float64" else "float32")

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk; the last of a shard may have fewer."""
        return self.pacing.chunk_nbytes // max(ITEMSIZES[self.dtype], ITEMSIZES[self.partial_dtype])

    def chunks(self, numel: int) -> int:
        """How many chunks a shard of `numel` elements makes."""
        return -(-numel // self.chunk_numel)

    @property
    def contributions(self) -> Buffer:
        """Where slices of the node's other GPUs land: `depth` slots for each of them."""
        slots = self.pacing.depth * (self.topology.gpus_per_node - 1)
        return Buffer(0, slots, align(self.chunk_numel * ITEMSIZES[self.dtype]))

    @property
    def partials(self) -> Buffer:
        """Where partials land: `depth` slots, however many nodes there are."""
        slots = self.pacing.depth if self.topology.nodes > 1 else 0
        return Buffer(self.contributions.nbytes, slots, align(self.chunk_numel * ITEMSIZES[self.partial_dtype]))

    @property
    def outbox(self) -> Buffer:
        """Where partials wait until they have been put."""
        partials = self.partials
        return Buffer(
            partials.offset + partials.nbytes, 0 if self.is_in_place else partials.slots, partials.slot_nbytes
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the three rings together, at the same offsets on every rank."""
        return self.outbox.offset + self.outbox.nbytes

    def steps(self, rank: int, numels: Sequence[int]) -> tuple[Step, ...]:
        """What `rank` does, in an order in which it may do one step after the other.

        numels: elements of each rank's shard.

        Raises SpecError unless there is one for each rank of the topology.
        """
        topology, nodes = self.topology, self.topology.nodes
        if len(numels) != topology.world_size:
            raise SpecError(
                f"numels must hold one entry for each of {nodes} nodes x {topology.gpus_per_node} GPUs, "
                f"got {len(numels)}"
            )
        chunks = [[self.chunks(numels[owner]) for owner in topology.local_ranks(node)] for node in range(nodes)]
        node, gpu = topology.node(rank), topology.gpu(rank)
        work = _Work(self, node, gpu, sum(of_node[gpu] for of_node in chunks), chunks[node][gpu])
        for chunk in range(self.chunks(max(numels))):
            for other, of_node in enumerate(chunks):
                for step in range(1, topology.gpus_per_node):
                    peer = (gpu + step) % topology.gpus_per_node
                    if chunk < of_node[peer]:
                        work.put(other, peer, chunk)
                if chunk < of_node[gpu]:
                    work.sum_up(other, chunk)
                if nodes > 1 and chunk < chunks[node][gpu]:
                    work.add(other, chunk)
        return tuple(work.steps)


@dataclass(slots=True)
class _Work:
    """The steps of GPU `gpu` of node `node` as they are made.

    total: how many chunks it sums for its rail; own: how many its shard has.
    """

    hierarchy: Hierarchy
    node: int
    gpu: int
    total: int
    own: int
    steps: list[Step] = field(default_factory=list)
    #: Chunks put so far into each GPU's contributions, and how many of the own were summed (or, in place, passed over).
    put_to: dict[int, int] = field(default_factory=dict)
    taken: int = 0
    #: Owner and number of each put over the rail so far.
    rail: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.hierarchy.topology.rank(self.node, self.gpu)

    def put(self, other: int, peer: int, chunk: int) -> None:
        """Put the own slice of node `other`'s chunk to GPU `peer`, whose rail it is of."""
        topology, depth = self.hierarchy.topology, self.hierarchy.pacing.depth
        index = self.put_to.get(peer, 0)
        self.put_to[peer] = index + 1
        to = topology.rank(self.node, peer)
        waits = (Wait("vacated", to, index - depth + 1),) if index >= depth else ()
        slot = self._contribution(index, self.gpu, peer)
        owner = topology.rank(other, peer)
        self.steps.append(LocalPut(self._round(other, chunk), owner, chunk, to, slot, index + 1, waits))

    def sum_up(self, other: int, chunk: int) -> None:
        """Sum the own node's slices of node `other`'s chunk, and send the partial on its way."""
        if not self.hierarchy.is_in_place:
            self._sum(other, chunk)
        if other != self.node:
            self._send(other, chunk)

    def _sum(self, other: int, chunk: int) -> None:
        topology, depth = self.hierarchy.topology, self.hierarchy.pacing.depth
        index = self.taken
        self.taken += 1
        peers = [peer for peer in topology.local_ranks(self.node) if peer != self.rank]
        waits = [Wait("landed", peer, index + 1) for peer in peers]
        into: Literal["outbox", "partials", "shard"]
        if topology.nodes == 1:
            into, slot = "shard", None
        elif other == self.node:
            into, slot = "partials", self._number(chunk, self.node) % depth
            waits += self._credit(self.rank, chunk)
        else:
            into, slot = "outbox", len(self.rail) % depth
            waits += self._acknowledged()
        self.steps.append(
            LocalSum(
                self._round(other, chunk),
                topology.rank(other, self.gpu),
                chunk,
                tuple(
                    None if source == self.gpu else self._contribution(index, source, self.gpu)
                    for source in range(topology.gpus_per_node)
                ),
                into,
                slot,
                tuple(waits),
                tuple(peers) if index + depth < self.total else (),
            )
        )

    def _send(self, other: int, chunk: int) -> None:
        depth, in_place = self.hierarchy.pacing.depth, self.hierarchy.is_in_place
        owner = self.hierarchy.topology.rank(other, self.gpu)
        # A sum into the outbox has waited for the put that was there before; without one the put does.
        waits = self._acknowledged() if in_place else (Wait("summed", self.rank, self.taken),)
        self.steps.append(
            RailPut(
                self._round(other, chunk),
                owner,
                chunk,
                None if in_place else len(self.rail) % depth,
                self._number(chunk, self.node) % depth,
                chunk + 1,
                (*waits, *self._credit(owner, chunk)),
            )
        )
        self.rail.append((owner, chunk + 1))

    def add(self, other: int, chunk: int) -> None:
        """Add node `other`'s partial of the own chunk."""
        topology, depth = self.hierarchy.topology, self.hierarchy.pacing.depth
        number = self._number(chunk, other)
        source = topology.rank(other, self.gpu)
        from_gradient = self.hierarchy.is_in_place and other == self.node
        following = number + depth
        following_node = following % topology.nodes
        # Whose partial does not go through the ring needs no credit.
        needed = following < self.own * topology.nodes and not (
            self.hierarchy.is_in_place and following_node == self.node
        )
        self.steps.append(
            FinalSum(
                self._round(other, chunk),
                source,
                chunk,
                None if from_gradient else number % depth,
                () if from_gradient else (Wait("landed", source, chunk + 1),),
                (topology.rank(following_node, self.gpu),) if needed else (),
            )
        )

    def _round(self, other: int, chunk: int) -> int:
        return self._number(chunk, other) + self.node

    def _number(self, chunk: int, node: int) -> int:
        """Which of the partials of a shard `node`'s is."""
        return chunk * self.hierarchy.topology.nodes + node

    def _contribution(self, index: int, source: int, peer: int) -> int:
        """The slot of GPU `peer`'s contributions for the slice that is GPU `source`'s number `index`."""
        gpus = self.hierarchy.topology.gpus_per_node
        return index % self.hierarchy.pacing.depth * (gpus - 1) + (source - peer - 1) % gpus

    def _credit(self, owner: int, chunk: int) -> tuple[Wait, ...]:
        """The credit of `owner` without which the own node's partial may not go into its ring."""
        nodes, depth = self.hierarchy.topology.nodes, self.hierarchy.pacing.depth
        # The first turns of the ring's slots are free: those of this node's partials whose number is below the depth.
        free = max(-(-(depth - self.node) // nodes), 0)
        return (Wait("vacated", owner, chunk + 1 - free),) if chunk >= free else ()

    def _acknowledged(self) -> tuple[Wait, ...]:
        """That the put over the rail `depth` puts ago has landed."""
        depth = self.hierarchy.pacing.depth
        if len(self.rail) < depth:
            return ()
        return (Wait("acknowledged", *self.rail[len(self.rail) - depth]),)
