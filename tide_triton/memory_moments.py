"""What is alive on one GPU in every moment of a training step that may be its worst.

A model is blocks that are one FSDP group each and reshard after forward, and a root group (embedding, final norm, head)
that stays unsharded until its backward is over. Shards, both states of AdamW (fused) and the reduction are fp32, what
is gathered and autograd's gradients bf16. One group is gathered ahead in backward. W is the number of ranks, n a
group's parameters, padded as torch.chunk pads:

| item              | a group takes | in                                                                              |
|-------------------|---------------|---------------------------------------------------------------------------------|
| shards            | 4 n / W       | every variant, always                                                           |
| optimizer         | 8 n / W       | every variant, always                                                           |
| sharded_gradients | 4 n / W       | every variant, from the group's reduction until the optimizer has stepped       |
| slots             | 2 n, aligned  | TIDE: each slot always, whichever group uses it; over several nodes with areas  |
|                   |               | of what is packed                                                               |
| ring              |               | TIDE without slot_reuse or over several nodes, always: gradients on their way,  |
|                   |               | of fixed size; over nodes also the staging of what is put from elsewhere        |
| flags             |               | TIDE, always: counters of every peer in front of every window                   |
| gathered          | 2 n           | stock, symm: the all-gather's flat output; with symm a window, never given back |
| casts             | 2 n / W       | stock, symm: shards cast to bf16, until they are copied into that output        |
| parameters        | 2 n           | stock, symm: what is copied out of it                                           |
| reduce_input      | 4 n           | stock, symm: until the next group's backward is over                            |
| gradients         | 2 n, unpadded | every variant: copied into reduce_input, or read in place until the next comes  |

Backward ends with block 0, so that is where most is alive: gradients of all others are sharded by then. Where FSDP2
allocates and frees was read in torch 2.13: `_fsdp_collectives.py` (foreach_all_gather, foreach_reduce),
`_fsdp_param_group.py` (wait_for_unshard, post_backward) and `_fsdp_state.py` (the callback that ends backward).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tide_triton.layouts import GroupSpec, LandingLayout, SlotLayout, Topology, pack, shard
from tide_triton.layouts.ring import RingLayout

Item = Literal[
    "shards",
    "optimizer",
    "sharded_gradients",
    "slots",
    "ring",
    "flags",
    "gathered",
    "casts",
    "parameters",
    "reduce_input",
    "gradients",
]
ITEMS: Final[tuple[Item, ...]] = get_args(Item)

#: Bytes of an element of shards, optimizer states and reductions.
_FP32: Final = 4


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of one parameter group on one GPU, in the forms that it takes: rank 0's, whose shards are the largest.

    nbytes: unsharded, in the dtype on the wire, without padding. padded_nbytes: with it, which is what is gathered.
    shard: fp32. cast: the same in the dtype on the wire. slot: the group's slot.
    reduce_input: what stock FSDP2 reduces: fp32, unsharded, with padding.
    gradients: of each parameter, unsharded and without padding, in the parameters' order.
    """

    nbytes: int
    padded_nbytes: int
    shard: int
    cast: int
    slot: int
    reduce_input: int
    gradients: tuple[int, ...]

    @classmethod
    def of(cls, spec: GroupSpec, topology: Topology | None = None) -> "GroupBytes":
        """Of the group `spec`, whose dtypes are those on the wire. topology: None for one node."""
        shards = [shard(tensor, spec.world_size, 0) for tensor in spec.tensors]
        fp32, cast = sum(s.padded_numel * _FP32 for s in shards), sum(s.padded_nbytes for s in shards)
        gradients = tuple(tensor.nbytes for tensor in spec.tensors)
        return cls(
            nbytes=sum(gradients),
            padded_nbytes=cast * spec.world_size,
            shard=fp32,
            cast=cast,
            slot=pack(SlotLayout(spec), topology or Topology(1, spec.world_size)).slot_nbytes,
            reduce_input=fp32 * spec.world_size,
            gradients=gradients,
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the step, and the bytes of each item that is alive in it."""

    name: str
    alive: Mapping[Item, int]

    @property
    def nbytes(self) -> int:
        return sum(self.alive.values())


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `layers` blocks and a root, whose first parameter is the embedding where it has one."""

    block: GroupBytes
    root: GroupBytes
    layers: int
    has_embedding: bool

    def stock(self, lent: int | None = None) -> tuple[Moment, ...]:
        """FSDP2's. lent: bytes of the windows in which all-gather outputs lie, None where the allocator has them."""
        b, r, layers, before = self.block, self.root, self.layers, self._before

        def moment(
            name: str,
            reduced: int,
            *,
            gathered: int = 0,
            casts: int = 0,
            parameters: int = 0,
            reduce_input: int = 0,
            gradients: int = 0,
            root: bool = False,
        ) -> Moment:
            alive: dict[Item, int] = {
                "gathered": gathered if lent is None else lent,
                "casts": casts,
                "parameters": parameters,
                "reduce_input": reduce_input,
                "gradients": gradients,
            }
            return self._moment(name, reduced, alive, root=root)

        unsharded = r.padded_nbytes + b.padded_nbytes
        # A group's reduce_input lives until the next group's post_backward.
        of_block_1 = b.reduce_input if layers > 1 else 0
        of_block_2 = b.reduce_input if layers > 2 else 0
        # wait_for_unshard keeps an output until the next group's has come.
        previous = max(r.padded_nbytes, b.padded_nbytes if layers > 1 else 0)
        moments = [
            moment("forward: the root is gathered", 0, gathered=r.padded_nbytes, casts=r.cast),
            moment(
                "forward: a block is gathered, the output before it is still held",
                0,
                gathered=previous + b.padded_nbytes,
                casts=b.cast,
                parameters=r.padded_nbytes,
            ),
        ]
        if layers > 1:
            moments += [
                moment(
                    "backward: block 1 has all gradients, block 2 reduces, block 0 is gathered ahead",
                    layers - 2,
                    gathered=b.padded_nbytes,
                    parameters=unsharded,
                    reduce_input=of_block_2,
                    gradients=b.nbytes + before,
                ),
                moment(
                    "backward: block 1 is copied into its reduction, block 0 is gathered ahead",
                    layers - 2,
                    gathered=b.padded_nbytes,
                    parameters=r.padded_nbytes,
                    reduce_input=of_block_1,
                    gradients=b.nbytes + before,
                ),
            ]
        # foreach_reduce drops gradients before it allocates the output, but for the one that a loop's variable holds.
        return (
            *moments,
            moment(
                "backward: block 0 is copied out, block 1 reduces",
                layers - 1,
                gathered=b.padded_nbytes,
                parameters=unsharded,
                reduce_input=of_block_1,
                gradients=before,
            ),
            moment(
                "backward: block 0 has all gradients, block 1 reduces",
                layers - 1,
                parameters=unsharded,
                reduce_input=of_block_1,
                gradients=b.nbytes + before,
            ),
            moment(
                "backward: block 0 is copied into its reduction",
                layers - 1,
                parameters=r.padded_nbytes,
                reduce_input=b.reduce_input,
                gradients=b.nbytes + before,
            ),
            moment(
                "backward: block 0 reduces, its last parameter's gradient is still held",
                layers,
                parameters=r.padded_nbytes,
                reduce_input=b.reduce_input,
                gradients=b.gradients[-1] + before,
            ),
            moment(
                "backward: the root has all gradients, block 0 reduces",
                layers,
                parameters=r.padded_nbytes,
                reduce_input=b.reduce_input,
                gradients=r.nbytes,
            ),
            moment(
                "backward: the root is copied into its reduction",
                layers,
                reduce_input=r.reduce_input,
                gradients=r.nbytes,
            ),
            moment(
                "backward: the root reduces, its last parameter's gradient is still held",
                layers,
                reduce_input=r.reduce_input,
                gradients=r.gradients[-1],
                root=True,
            ),
            moment("optimizer", layers, root=True),
        )

    def late(self, windows: Mapping[Item, int], limit: int) -> tuple[Moment, ...]:
        """TIDE's, where a group is reduced once its backward is over.

        limit: bytes of gradients still being read that may outlive the next gradient (`Domain.drop_read`).
        """
        b, r, before = self.block, self.root, self._before
        # The next gradient is there before those being read are dropped; few enough are not dropped for it.
        being_read = b.nbytes if self.layers > 1 else 0
        coming = max(*b.gradients, min(b.nbytes, limit)) if self.layers > 1 else b.nbytes

        backward = {
            "backward: block 0's first gradient comes, block 1's are being read": (
                self.layers - 1,
                being_read + coming + before,
            ),
            "backward: block 0 reduces": (self.layers, b.nbytes + before),
        }
        if self.has_embedding:
            backward["backward: the embedding's gradient comes, block 0's are being read"] = (
                self.layers,
                b.nbytes + r.nbytes,
            )
        return self._tide(windows, backward)

    def early(self, windows: Mapping[Item, int], limit: int, block_sent: Sequence[int]) -> tuple[Moment, ...]:
        """TIDE's, where each gradient of a block leaves as autograd produces it, and the root's at the end.

        A block's sharded gradients are allocated when its first gradient comes.
        limit: as for `late`. block_sent: `sent_with` of a block.
        """
        b, r, before = self.block, self.root, self._before
        order = b.gradients[::-1]
        # Two blocks are as good as all.
        coming = [
            (nbytes, start + sent)
            for start in range(0, min(self.layers, 2) * len(order), len(order))
            for nbytes, sent in zip(order, block_sent, strict=True)
        ]
        # Nothing more comes at the end: what is there then is still being read.
        *alive, being_read = in_flight([*coming, (0, len(coming))], limit)

        passing = max(alive[-len(order) :]) + before
        backward = {"backward: block 0's gradients pass": (self.layers, passing)}
        if self.has_embedding:
            backward["backward: the embedding's gradient comes, block 0's last are being read"] = (
                self.layers,
                being_read + r.nbytes,
            )
        return self._tide(windows, backward)

    def _tide(self, windows: Mapping[Item, int], backward: Mapping[str, tuple[int, int]]) -> tuple[Moment, ...]:
        """TIDE's moments. backward: by name, how many blocks have sharded gradients, and bytes of gradients."""

        def moment(name: str, reduced: int, gradients: int = 0, *, root: bool = False) -> Moment:
            return self._moment(name, reduced, {**windows, "gradients": gradients}, root=root)

        return (
            moment("forward", 0),
            *(moment(name, reduced, gradients) for name, (reduced, gradients) in backward.items()),
            moment("backward: the root reduces", self.layers, self.root.nbytes, root=True),
            moment("optimizer", self.layers, root=True),
        )

    @property
    def _before(self) -> int:
        """Bytes of the root's gradients that come before the blocks': all but the embedding's."""
        return sum(self.root.gradients[1:] if self.has_embedding else self.root.gradients)

    def _moment(self, name: str, reduced: int, alive: Mapping[Item, int], *, root: bool) -> Moment:
        """reduced: how many blocks have sharded gradients. root: whether the root has. alive: what is there besides."""
        shards = self.block.shard * self.layers + self.root.shard
        gradients = self.block.shard * reduced + (self.root.shard if root else 0)
        always: dict[Item, int] = {"shards": shards, "optimizer": 2 * shards, "sharded_gradients": gradients}
        everything = {**always, **alive}
        return Moment(name, {item: everything[item] for item in ITEMS if everything.get(item)})


def sent_with(spec: GroupSpec, chunk_nbytes: int) -> tuple[int, ...]:
    """With which gradient each one is whole on its way, where a group's come in the reverse of its parameters' order.

    chunk_nbytes: bytes of a chunk of the ring. What fills less than half of a piece waits for the next gradient.
    """
    order = range(len(spec.tensors))[::-1]
    sent = list(range(len(order)))
    upto = 0
    for piece in RingLayout(LandingLayout(spec), chunk_nbytes).pieces(order):
        places = [order.index(part.index) for part in piece.ranges]
        upto = max(upto, *places)
        for place in places:
            sent[place] = upto
    return tuple(sent)


def in_flight(coming: Sequence[tuple[int, int]], limit: int) -> list[int]:
    """Bytes of gradients alive when each one comes.

    coming: bytes of each in the order in which they come, and the place of the one with which it is on its way whole.
    limit: bytes of those on their way that may outlive the next one; the oldest are dropped first.
    """
    sending = [0] * len(coming)
    for nbytes, at in coming:
        sending[at] += nbytes
    alive: list[int] = []
    kept: deque[int] = deque()
    read = waiting = 0
    for place, (nbytes, _) in enumerate(coming):
        waiting += nbytes
        alive.append(read + waiting)
        while read > limit:
            read -= kept.popleft()
        kept.append(sending[place])
        read += sending[place]
        waiting -= sending[place]
    return alive
