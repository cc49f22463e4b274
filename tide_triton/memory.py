"""What training holds on one GPU, from shapes alone: with stock FSDP2, with symmetric memory, and with TIDE.

A model is blocks that are one FSDP group each and reshard after forward, and a root group (embedding, final norm, head)
that stays unsharded until its backward is over. Shards, both states of AdamW (fused) and the reduction are fp32, what
is gathered and autograd's gradients bf16. One group is gathered ahead in backward.

Bytes change hands during a step, so a variant is a list of *moments*, each with what is alive in it, and its peak is
the worst of them. b is a block, r the root, W the number of ranks, n a group's parameters, padded as torch.chunk pads:

| item              | a group takes | in                                                                              |
|-------------------|---------------|---------------------------------------------------------------------------------|
| shards            | 4 n / W       | every variant, always                                                           |
| optimizer         | 8 n / W       | every variant, always                                                           |
| sharded_gradients | 4 n / W       | every variant, from the group's reduction until the optimizer has stepped       |
| gathered          | 2 n           | stock, symm: the all-gather's flat output; with symm a window, never given back |
| casts             | 2 n / W       | stock, symm: shards cast to bf16, until they are copied into the output         |
| parameters        | 2 n           | stock, symm: what is copied out of it                                           |
| reduce_input      | 4 n           | stock, symm: until the next group's backward is over                            |
| gradients         | 2 n, unpadded | every variant; TIDE reads them in place, which takes until the next one comes   |
| slots             | 2 n, aligned  | TIDE: what takes the place of the four above                                    |
| ring              |               | TIDE without slot_reuse: gradients on their way, of fixed size                  |
| flags             |               | TIDE: four counters a peer in front of every window                             |

Where FSDP2 allocates and frees was read in torch 2.13: `_fsdp_collectives.py` (foreach_all_gather, foreach_reduce),
`_fsdp_param_group.py` (wait_for_unshard, post_backward) and `_fsdp_state.py`. Figures are rank 0's, whose shards are the
largest. Not in them: activations, CUDA's and NCCL's contexts, and what the allocator rounds up.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tide_triton.layouts import GroupSpec, GroupUse, SlotLayout, SpecError, TensorSpec, Topology, assign, shard
from tide_triton.layouts.ring import chunk_for
from tide_triton.layouts.slots import align
from tide_triton.models import ModelSpec, block_spec

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
    "gradients",
    "reduce_input",
]
ITEMS: Final[tuple[Item, ...]] = get_args(Item)

#: What `tide_triton.attach` takes where it is not told otherwise. Those who have them need torch; a test compares.
RING_CHUNK_NBYTES: Final = 64 << 20
RING_DEPTH: Final = 2
#: 32-bit counters that a window has for each rank (`transports/base.py`), of the GPU transports.
COUNTERS: Final = 4

#: Groups gathered ahead of the one that computes, as FSDP2 does in backward by itself.
PREFETCH: Final = 1

#: Ranks for which a plan gives the buffer of the reduce-scatter.
BUFFER_WORLDS: Final = (16, 32, 64, 1024, 16384)

_WIRE: Final = "bfloat16"
_FP32: Final = 4


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of one parameter group on one GPU, in the forms that it takes.

    nbytes: unsharded, in the dtype on the wire, without padding. padded_nbytes: with it, which is what is gathered.
    shard: fp32. cast: the same in the dtype on the wire. slot: the group's slot.
    reduce_input: what stock FSDP2 reduces, fp32, unsharded, with padding.
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
    def of(cls, spec: GroupSpec) -> "GroupBytes":
        """Of the group `spec`, whose dtypes are those on the wire."""
        shards = [shard(tensor, spec.world_size, 0) for tensor in spec.tensors]
        fp32, cast = sum(s.padded_numel * _FP32 for s in shards), sum(s.padded_nbytes for s in shards)
        gradients = tuple(tensor.nbytes for tensor in spec.tensors)
        return cls(
            nbytes=sum(gradients),
            padded_nbytes=cast * spec.world_size,
            shard=fp32,
            cast=cast,
            slot=SlotLayout(spec).nbytes,
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
class Variant:
    """One way to train. how: what makes it, in words."""

    name: str
    how: str
    moments: tuple[Moment, ...]

    @property
    def worst(self) -> Moment:
        """The moment that holds most, the first of them where several do."""
        return max(self.moments, key=lambda moment: moment.nbytes)

    @property
    def peak(self) -> int:
        """Bytes on one GPU in the worst moment."""
        return self.worst.nbytes

    @property
    def items(self) -> Mapping[Item, int]:
        """Bytes of every item in the moment that has most of it: no single moment need have all of these."""
        return {item: max(moment.alive.get(item, 0) for moment in self.moments) for item in ITEMS}

    @property
    def windows(self) -> int:
        """Bytes of the peak that lie in symmetric windows, outside of torch's allocator."""
        windows: Iterable[Item] = ("gathered",) if self.name == "symm" else ("slots", "ring", "flags")
        return sum(self.items[item] for item in windows)


@dataclass(frozen=True, slots=True)
class Buffer:
    """What the reduce-scatter of one group needs beside gradients and shards, on one of `world_size` GPUs.

    ring: bytes of its chunks. flags: bytes of their counters, of every peer.
    """

    world_size: int
    ring: int
    flags: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one GPU holds while a model trains.

    buffers: at `BUFFER_WORLDS`, for shards of `block.shard` bytes whatever the number of ranks.
    """

    model: str
    layers: int
    topology: Topology
    block: GroupBytes
    root: GroupBytes
    variants: tuple[Variant, ...]
    buffers: tuple[Buffer, ...]

    def __getitem__(self, name: str) -> Variant:
        """The variant of that name. Raises KeyError where there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(name)


def topology_of(gpus: int, gpus_per_node: int) -> Topology:
    """Raises SpecError unless there are at least two GPUs, and whole nodes of them."""
    if gpus < 2:
        raise SpecError(f"gpus must be at least 2, got {gpus}; FSDP2 has nothing to communicate with fewer")
    if gpus_per_node < 1:
        raise SpecError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
    if gpus % gpus_per_node:
        raise SpecError(f"gpus must be a multiple of gpus_per_node ({gpus_per_node}), got {gpus}; give whole nodes")
    return Topology(gpus // gpus_per_node, gpus_per_node)


def plan_memory(
    model: ModelSpec,
    topology: Topology,
    *,
    layers: int | None = None,
    slots: int | None = None,
    ring_chunk_nbytes: int = RING_CHUNK_NBYTES,
    ring_depth: int = RING_DEPTH,
) -> MemoryPlan:
    """What one GPU of `topology` holds while `model` trains.

    layers: how many of its blocks are trained, None for all. slots, ring_chunk_nbytes, ring_depth: as `attach` takes
    them.

    Raises SpecError for layers that the model has not, and SlotShortageError for too few slots.
    """
    if layers is None:
        layers = model.layers
    if not 1 <= layers <= model.layers:
        raise SpecError(f"layers must be 1 to {model.layers}, which is what {model.name} has, got {layers}")
    block, root = block_spec(model, topology.world_size, _WIRE), root_spec(model, topology.world_size)
    step = _Step(GroupBytes.of(block), GroupBytes.of(root), layers, model.vocab > 0)
    uses = [GroupUse(f"block {i}", step.block.slot, 0) for i in range(layers)]
    rotation = assign([*uses, GroupUse("root", step.root.slot, None)], PREFETCH, slots)
    chunk = chunk_for([block, root], ring_chunk_nbytes)
    header = flags_nbytes(topology.world_size)
    number = len(rotation.slot_nbytes)
    in_slots: dict[Item, int] = {"slots": sum(rotation.slot_nbytes), "flags": header * number}
    in_ring: dict[Item, int] = {
        "slots": in_slots["slots"],
        "ring": chunk * ring_depth,
        "flags": header * (number + ring_depth),
    }
    lent = step.block.padded_nbytes * min(layers, 2) + step.root.padded_nbytes
    limit = ring_chunk_nbytes * ring_depth
    return MemoryPlan(
        model.name,
        layers,
        topology,
        step.block,
        step.root,
        (
            Variant("stock", "FSDP2 as it is", step.stock(None)),
            Variant("symm", "FSDP2 with all-gather outputs in windows", step.stock(lent)),
            Variant("tide_slot_reuse", "attach(slot_reuse=True)", step.late(in_slots, limit)),
            Variant("tide_ring", "attach(slot_reuse=False, early_reduce=False)", step.late(in_ring, limit)),
            Variant("tide_early", "attach(slot_reuse=False, early_reduce=True)", step.early(in_ring, limit)),
        ),
        tuple(
            reduce_scatter_buffer(
                [shard(tensor, topology.world_size, 0).padded_numel for tensor in block.tensors],
                world_size,
                ring_chunk_nbytes,
                ring_depth,
            )
            for world_size in BUFFER_WORLDS
        ),
    )


def root_spec(model: ModelSpec, world_size: int) -> GroupSpec:
    """What lies around the blocks: the final norm, between embedding and head where there is a vocabulary."""
    table = (model.vocab, model.hidden)
    around = (("embedding", table), ("norm", (model.hidden,)), ("head", table)) if model.vocab else None
    tensors = around or (("norm", (model.hidden,)),)
    return GroupSpec(world_size, tuple(TensorSpec(name, shape, _WIRE) for name, shape in tensors))


def flags_nbytes(world_size: int) -> int:
    """Bytes of one window's counters."""
    return align(world_size * COUNTERS * 4)


def reduce_scatter_buffer(
    numels: Sequence[int],
    world_size: int,
    ring_chunk_nbytes: int = RING_CHUNK_NBYTES,
    ring_depth: int = RING_DEPTH,
) -> Buffer:
    """The buffer of a reduce-scatter whose output on each of `world_size` ranks is tensors of `numels` elements.

    The tensors grow with the ranks, so that what a rank gets stays the same. Takes as long for many ranks as for few.
    """
    group = GroupSpec(world_size, tuple(TensorSpec(str(i), (world_size, n), _WIRE) for i, n in enumerate(numels)))
    return Buffer(
        world_size, chunk_for([group], ring_chunk_nbytes) * ring_depth, flags_nbytes(world_size) * ring_depth
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """The moments of a step of `layers` blocks and a root."""

    block: GroupBytes
    root: GroupBytes
    layers: int
    has_vocab: bool

    @property
    def _early_root(self) -> int:
        """The root's gradients that come before the blocks': all but the embedding's."""
        return sum(self.root.gradients[1:] if self.has_vocab else self.root.gradients)

    def _moment(self, name: str, reduced: int, *, root: bool = False, **alive: int) -> Moment:
        """reduced: how many blocks are. root: whether the root is. alive: what is beside shards and optimizer."""
        shards = self.block.shard * self.layers + self.root.shard
        gradients = self.block.shard * reduced + (self.root.shard if root else 0)
        always: dict[Item, int] = {"shards": shards, "optimizer": 2 * shards, "sharded_gradients": gradients}
        return Moment(name, always | {item: alive[item] for item in ITEMS if alive.get(item)})

    def stock(self, lent: int | None) -> tuple[Moment, ...]:
        """lent: bytes of the windows in which all-gather outputs lie, None where the allocator has them."""
        b, r, layers, before = self.block, self.root, self.layers, self._early_root

        def moment(name: str, reduced: int, *, gathered: int = 0, root: bool = False, **alive: int) -> Moment:
            held = gathered if lent is None else lent
            return self._moment(name, reduced, gathered=held, root=root, **alive)

        # wait_for_unshard keeps an output until the next group's has come.
        previous = b.padded_nbytes if layers > 1 else r.padded_nbytes
        moments = [
            moment(
                "forward: a block is gathered, the output before it still held",
                0,
                gathered=previous + b.padded_nbytes,
                casts=b.cast,
                parameters=r.padded_nbytes,
            )
        ]
        if layers > 1:
            moments += [
                moment(
                    "backward: all gradients of the last block but one are there, the last is gathered ahead",
                    layers - 2,
                    gathered=b.padded_nbytes,
                    parameters=r.padded_nbytes + b.padded_nbytes,
                    gradients=b.nbytes + before,
                    reduce_input=b.reduce_input if layers > 2 else 0,
                ),
                moment(
                    "backward: the last block but one is copied into its reduction, the last is gathered ahead",
                    layers - 2,
                    gathered=b.padded_nbytes,
                    parameters=r.padded_nbytes,
                    gradients=b.nbytes + before,
                    reduce_input=b.reduce_input,
                ),
            ]
        # post_backward keeps its reduce input until the next group's post_backward.
        reducing = b.reduce_input if layers > 1 else 0
        return (
            *moments,
            moment(
                "backward: the last block is copied out, the one before it reduces",
                layers - 1,
                gathered=b.padded_nbytes,
                parameters=r.padded_nbytes + b.padded_nbytes,
                gradients=before,
                reduce_input=reducing,
            ),
            moment(
                "backward: all gradients of the last block are there, the one before it reduces",
                layers - 1,
                parameters=r.padded_nbytes + b.padded_nbytes,
                gradients=b.nbytes + before,
                reduce_input=reducing,
            ),
            moment(
                "backward: the last block is copied into its reduction",
                layers - 1,
                parameters=r.padded_nbytes,
                gradients=b.nbytes + before,
                reduce_input=b.reduce_input,
            ),
            moment(
                "backward: all gradients of the root are there, the last block reduces",
                layers,
                parameters=r.padded_nbytes,
                gradients=r.nbytes,
                reduce_input=b.reduce_input,
            ),
            moment(
                "backward: the root is copied into its reduction",
                layers,
                gradients=r.nbytes,
                reduce_input=r.reduce_input,
            ),
            moment("the optimizer steps", layers, root=True),
        )

    def late(self, windows: Mapping[Item, int], limit: int) -> tuple[Moment, ...]:
        """TIDE's, where a group is reduced once its backward is over.

        limit: bytes of gradients still being read that may outlive the next gradient (`Domain.drop_read`).
        """
        b, r, before = self.block, self.root, self._early_root
        # The next gradient is there before the reduced ones are dropped; few enough are not dropped for it.
        both = b.nbytes + max(*b.gradients, min(b.nbytes, limit))
        moments = [
            self._moment("forward", 0, **windows),
            self._moment(
                "backward: the last block's first gradient comes, those before it are being read",
                self.layers - 1,
                gradients=(both if self.layers > 1 else b.nbytes) + before,
                **windows,
            ),
            self._moment("backward: the last block reduces", self.layers, gradients=b.nbytes + before, **windows),
        ]
        if self.has_vocab:
            moments.append(
                self._moment(
                    "backward: the embedding's gradient comes, those of the last block are being read",
                    self.layers,
                    gradients=b.nbytes + r.nbytes,
                    **windows,
                )
            )
        return (
            *moments,
            self._moment("backward: the root reduces", self.layers, root=True, gradients=r.nbytes, **windows),
            self._moment("the optimizer steps", self.layers, root=True, **windows),
        )

    def early(self, windows: Mapping[Item, int], limit: int) -> tuple[Moment, ...]:
        """TIDE's, where each gradient leaves as autograd produces it, in the reverse of the parameters' order.

        A group's sharded gradients are allocated when its first gradient comes, so the root's are there from the start.
        limit: as for `late`.
        """
        blocks = self.block.gradients[::-1] * min(self.layers, 2)
        passing = {"the last block's gradients pass": blocks}
        if self.has_vocab:
            passing["the embedding's gradient passes"] = (*blocks, self.root.gradients[0])
        return (
            self._moment("forward", 0, **windows),
            *(
                self._moment(
                    f"backward: {name}", self.layers, root=True, gradients=in_flight(order, limit), **windows
                )
                for name, order in passing.items()
            ),
            self._moment("the optimizer steps", self.layers, root=True, **windows),
        )


def in_flight(gradients: Sequence[int], limit: int) -> int:
    """Bytes of gradients alive at most, where they come in this order and are read as they come.

    When one has come, those before it are dropped, oldest first, until `limit` bytes are left (`Domain.drop_read`).
    """
    kept: deque[int] = deque()
    total = most = 0
    for nbytes in gradients:
        most = max(most, total + nbytes)
        while kept and total > limit:
            total -= kept.popleft()
        kept.append(nbytes)
        total += nbytes
    return most
