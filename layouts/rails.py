"""The all-gather over many nodes, block by block: recursive doubling over each rail, then on inside the node.

The nodes of a rail form a ring. Before round k a node holds its own block and the 2^k - 1 after it, and puts the first
of them, as many as are still missing there, to the node 2^k before it:

    round   0          1            2              (5 nodes, one rail; block m is node m's)
    node 0  0 -> 4     0 1 -> 3     0 -> 1
    node 1  1 -> 0     1 2 -> 4     1 -> 2
    node 2  2 -> 1     2 3 -> 0     2 -> 3
    node 3  3 -> 2     3 4 -> 1     3 -> 4
    node 4  4 -> 3     4 0 -> 2     4 -> 0

Any number of nodes takes ceil(log2 nodes) rounds. In each, a node puts to one node and is put to by one, and every
block arrives once, so a GPU puts nodes - 1 blocks over its rail: fewer cannot do. A block lies at its final place on
every rank, so nothing is rotated afterwards, as Bruck's algorithm must.

Inside the node each GPU passes its own block, and each block that its rail brought, on to the others. GPU g starts with
g + 1, so that no two GPUs put to the same one at a time (`schedule.flat`).
"""

from dataclasses import dataclass

from tide_triton.layouts.schedule import flat
from tide_triton.layouts.spec import SpecError
from tide_triton.layouts.topology import Topology


@dataclass(frozen=True, slots=True)
class Send:
    """In round `round`, the blocks of ranks `blocks` go over the rail to `peer`, in that order.

    waits_for: those of them that must have arrived before, which are all but the sender's own.
    """

    round: int
    peer: int
    blocks: tuple[int, ...]
    waits_for: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """In round `round`, the blocks of ranks `blocks` come over the rail from `source`, in that order."""

    round: int
    source: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """The block of rank `block` goes to each of `peers`, in that order; to all of them at once where multicast can.

    waits_for: the block again where it must have arrived before, none where it is the sender's own.
    """

    block: int
    peers: tuple[int, ...]
    waits_for: tuple[int, ...]


def rounds(nodes: int) -> int:
    """Rounds of an all-gather over `nodes` nodes: ceil(log2 nodes). Raises SpecError where there are none."""
    if nodes < 1:
        raise SpecError(f"nodes must be an integer >= 1, got {nodes}")
    return (nodes - 1).bit_length()


def sends(topology: Topology, rank: int) -> tuple[Send, ...]:
    """What `rank` puts over its rail, round by round."""
    node, rail = topology.node(rank), topology.rail(topology.gpu(rank))
    result = []
    for number in range(rounds(topology.nodes)):
        blocks = _blocks(rail, node, number)
        result.append(Send(number, rail[(node - (1 << number)) % topology.nodes], blocks, blocks[1:]))
    return tuple(result)


def receives(topology: Topology, rank: int) -> tuple[Receive, ...]:
    """What comes to `rank` over its rail, round by round, from another rank in each."""
    node, rail = topology.node(rank), topology.rail(topology.gpu(rank))
    result = []
    for number in range(rounds(topology.nodes)):
        source = (node + (1 << number)) % topology.nodes
        result.append(Receive(number, rail[source], _blocks(rail, source, number)))
    return tuple(result)


def _blocks(rail: tuple[int, ...], node: int, number: int) -> tuple[int, ...]:
    """What `node` puts in round `number`: of what it holds, the first that its peer lacks."""
    nodes, held = len(rail), 1 << number
    return tuple(rail[(node + step) % nodes] for step in range(min(held, nodes - held)))


def forwards(topology: Topology, rank: int) -> tuple[Forward, ...]:
    """What `rank` passes on inside its node: its own block, then those that its rail brings, in the order they come.

    Empty where the node has no other GPU.
    """
    node, gpu = topology.node(rank), topology.gpu(rank)
    local = topology.local_ranks(node)
    peers = tuple(local[peer] for peer in flat(topology.gpus_per_node, gpu))
    if not peers:
        return ()
    rail = topology.rail(gpu)
    landed = (rail[(node + step) % topology.nodes] for step in range(1, topology.nodes))
    return Forward(rank, peers, ()), *(Forward(block, peers, (block,)) for block in landed)


def source(topology: Topology, rank: int, block: int) -> int:
    """The rank that puts `block`'s block into `rank`'s slot: over the rail, or inside the node; itself for its own."""
    node, gpu = topology.node(rank), topology.gpu(rank)
    if topology.gpu(block) != gpu:
        return topology.rank(node, topology.gpu(block))
    distance = (topology.node(block) - node) % topology.nodes
    if distance == 0:
        return rank
    # Round k brings the blocks that are 2^k to 2^(k+1) - 1 nodes further on.
    return topology.rank((node + (1 << distance.bit_length() - 1)) % topology.nodes, gpu)
