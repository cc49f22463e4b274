"""The steps of the reduce-scatter over many nodes, and what each waits for (see `hierarchy`).

    LocalPut    own gradient -> contributions of the rank of the node that sums the slice
    LocalSum    contributions and own gradient -> outbox, or own partials
    RailPut     outbox -> partials of the rank that owns the shard
    FinalSum    partials -> own shard

A step that frees the slot of a buffer says which ranks it vacates it for: each gets one credit.
"""

from dataclasses import dataclass
from typing import Literal

from tide_triton.layouts.pacing import Wait


@dataclass(frozen=True, slots=True)
class LocalPut:
    """The own slice of chunk `chunk` of `owner`'s shard goes into slot `slot` of `peer`'s contributions.

    peer: the rank of the own node that sums it.
    number: how many puts of this rank to `peer` it makes.
    """

    round: int
    owner: int
    chunk: int
    peer: int
    slot: int
    number: int
    waits_for: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class LocalSum:
    """The node's slices of chunk `chunk` of `owner`'s shard are added, in GPU order.

    contributions: by GPU, the slot of the own contributions in which its slice lies; None for the own gradient.
    into: the outbox, from where a RailPut takes the partial; or the own partials, where the shard is this rank's (it
    counts as a put of this rank to itself); or the shard itself, where there is but one node.
    slot: the slot of either; None for the shard.
    vacates: the ranks that get a credit afterwards.
    """

    round: int
    owner: int
    chunk: int
    contributions: tuple[int | None, ...]
    into: Literal["outbox", "partials", "shard"]
    slot: int | None
    waits_for: tuple[Wait, ...]
    vacates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RailPut:
    """The node's partial of chunk `chunk` of `owner`'s shard goes into slot `slot` of `owner`'s partials.

    outbox: the slot of the outbox from which it goes; None where it goes from the own gradient, the node's only one.
    number: how many puts of this rank to `owner` it makes.
    """

    round: int
    owner: int
    chunk: int
    outbox: int | None
    slot: int
    number: int
    waits_for: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class FinalSum:
    """The partial of `source`'s node is added to chunk `chunk` of the own shard; that of node 0 starts it.

    slot: the slot of the own partials in which it lies; None for the own gradient, the node's only one.
    vacates: the ranks that get a credit afterwards: the one whose partial goes into that slot next, or none.
    """

    round: int
    source: int
    chunk: int
    slot: int | None
    waits_for: tuple[Wait, ...]
    vacates: tuple[int, ...]


Step = LocalPut | LocalSum | RailPut | FinalSum
