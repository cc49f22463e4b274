"""What training a model holds on one GPU, from shapes alone: with stock FSDP2, with symmetric memory, and with TIDE.

    ModelSpec, Topology --plan_memory--> MemoryPlan --to_json, render (memory_show.py)

| variant    | what                                                                                               |
|------------|----------------------------------------------------------------------------------------------------|
| stock      | FSDP2 as it is: bf16 parameters, fp32 reduction                                                    |
| symm       | the same, all-gather outputs in windows, which are never given back                                |
| tide       | attach(): gradients land in the slot that their group has vacated                                  |
| tide_ring  | attach(slot_reuse=False): they go through a ring of fixed size, group by group                     |
| tide_early | attach(slot_reuse=False, early_reduce=True): blocks' one by one as they are produced; so from the   |
|            | fourth backward on, and as tide_ring before                                                        |

They are those of `bench/variants.py`, on one node. Over several there is but one of TIDE's, `tide`: attach(nodes=N),
whose gradients go through the rings of the hierarchy, group by group.

attach(keep_cast=True) takes half of `shards` once more, and `switch_sums` may make slots some bytes larger.

What is alive when, and how it adds up, is in `memory_moments.py`. Not in any figure: activations, CUDA's and NCCL's
contexts, and what the allocator rounds up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tide_triton.layouts import GroupSpec, GroupUse, SpecError, TensorSpec, Topology, assign, shard
from tide_triton.layouts.pacing import pacing_for, rings_nbytes
from tide_triton.layouts.ring import RING_CHUNK_NBYTES, RING_DEPTH, chunk_for
from tide_triton.layouts.slots import align
from tide_triton.memory_moments import ITEMS, GroupBytes, Item, Moment, Step, sent_with
from tide_triton.models import MODELS, ModelSpec, block_spec
from tide_triton.network import NetworkPlan, plan_network

#: Counters that a window on a GPU has for every rank, and their bytes on one node and over several. The transports have
#: the same and need torch; a test compares them.
COUNTERS: Final = 6
COUNTER_NBYTES: Final = (4, 8)

#: Bytes of a transport's own window, over several nodes. `transports/over_nodes.py` has the same and needs torch.
STAGING_NBYTES: Final = 32 << 20

#: Groups gathered ahead of the one that computes: what FSDP2 does in backward by itself.
PREFETCH: Final = 1

#: GPUs for which the plan gives the buffer of the reduce-scatter.
BUFFER_WORLDS: Final = (16, 32, 64, 1024, 16384)

#: GPUs that a plan may be for.
MAX_GPUS: Final = 1 << 20

#: The dtype of parameters and gradients on the wire.
_WIRE: Final = "bfloat16"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train. how: in words. windowed: the items that lie in symmetric windows."""

    name: str
    how: str
    windowed: tuple[Item, ...]
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
        """Bytes of every item in the moment that has most of it. No moment need have all of these at once."""
        return {item: max(moment.alive.get(item, 0) for moment in self.moments) for item in ITEMS}

    @property
    def windows(self) -> int:
        """Bytes of the peak that lie in symmetric windows, beside torch's allocator."""
        return sum(self.worst.alive.get(item, 0) for item in self.windowed)


@dataclass(frozen=True, slots=True)
class Buffer:
    """What the reduce-scatter needs beside gradients and shards, on one of `world_size` GPUs.

    ring: bytes of its chunks, over several nodes with the staging of what is put from elsewhere.
    flags: bytes of the counters in front of them, the only part that knows every peer.
    """

    world_size: int
    ring: int
    flags: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one GPU holds while a model trains.

    buffers: at `BUFFER_WORLDS`, over nodes at as many whole nodes as these fill; each for an output of `block.shard`
    bytes on every GPU.
    network: what the collectives of a block move over several nodes, None on one.
    """

    model: str
    layers: int
    topology: Topology
    block: GroupBytes
    root: GroupBytes
    variants: tuple[Variant, ...]
    buffers: tuple[Buffer, ...]
    network: NetworkPlan | None

    def variant(self, name: str) -> Variant:
        """Raises KeyError where there is none of that name."""
        return {variant.name: variant for variant in self.variants}[name]


def model_named(name: str) -> ModelSpec:
    """The published model `name`, in whichever case. Raises SpecError, naming what there is, for an unknown one."""
    if name.lower() not in MODELS:
        raise SpecError(f"model {name[:60]!r} is unknown; use one of {', '.join(MODELS)}")
    return MODELS[name.lower()]


def topology_of(gpus: int, gpus_per_node: int) -> Topology:
    """Raises SpecError unless there are 2 to `MAX_GPUS` GPUs, in whole nodes."""
    if gpus_per_node < 1:
        raise SpecError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
    if not 2 <= gpus <= MAX_GPUS:
        raise SpecError(f"gpus must be 2 to {MAX_GPUS:,} (one has nothing to communicate), got {gpus}")
    if gpus % gpus_per_node:
        raise SpecError(
            f"gpus must be a multiple of gpus_per_node={gpus_per_node}, got {gpus}; give whole nodes, or another "
            f"gpus_per_node"
        )
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

    layers: how many of its blocks are trained, None for all.
    slots, ring_chunk_nbytes (bytes), ring_depth: as `attach` takes them.

    Raises SpecError for layers that the model has not, and SlotShortageError for too few slots.
    """
    layers = model.layers if layers is None else layers
    if not 1 <= layers <= model.layers:
        raise SpecError(f"layers must be 1 to {model.layers} ({model.name} has no more), got {layers}")
    world = topology.world_size
    block, root = block_spec(model, world, _WIRE), root_spec(model, world)
    step = Step(GroupBytes.of(block, topology), GroupBytes.of(root, topology), layers, model.vocab > 0)
    uses = [GroupUse(f"block {number}", step.block.slot, 0) for number in range(layers)]
    slot_nbytes = assign([*uses, GroupUse("root", step.root.slot, None)], PREFETCH, slots).slot_nbytes

    def windows(ring: int = 0, flags: int = 0) -> dict[Item, int]:
        flags += flags_nbytes(world, topology.nodes > 1) * len(slot_nbytes)
        return {"slots": sum(slot_nbytes), "ring": ring, "flags": flags}

    through = _buffer_of([block, root], topology, ring_chunk_nbytes, ring_depth)
    in_ring = windows(through.ring, through.flags)

    # Two outputs of blocks are held at once in forward.
    lent = step.block.padded_nbytes * min(layers, 2) + step.root.padded_nbytes
    limit = ring_chunk_nbytes * ring_depth
    tide: tuple[Item, ...] = ("slots", "ring", "flags")
    variants = [
        Variant("stock", "FSDP2 as it is", (), step.stock()),
        Variant("symm", "FSDP2, all-gather outputs in windows", ("gathered",), step.stock(lent)),
    ]
    if topology.nodes > 1:
        variants.append(Variant("tide", f"attach(nodes={topology.nodes})", tide, step.late(in_ring, limit)))
    else:
        early = step.early(in_ring, limit, sent_with(block, through.ring // ring_depth))
        variants += [
            Variant("tide", "attach()", tide, step.late(windows(), limit)),
            Variant("tide_ring", "attach(slot_reuse=False)", tide, step.late(in_ring, limit)),
            Variant("tide_early", "attach(slot_reuse=False, early_reduce=True)", tide, early),
        ]
    output = [shard(tensor, world, 0).padded_numel for tensor in block.tensors]
    topologies = dict.fromkeys(spread(topology, gpus) for gpus in BUFFER_WORLDS)
    buffers = tuple(reduce_scatter_buffer(output, t, ring_chunk_nbytes, ring_depth) for t in topologies)
    network = None
    if topology.nodes > 1:
        network = plan_network(block, topology, ring_chunk_nbytes, ring_depth, groups=[block, root])
    return MemoryPlan(model.name, layers, topology, step.block, step.root, tuple(variants), buffers, network)


def spread(like: Topology, gpus: int) -> Topology:
    """About so many GPUs, in nodes as those of `like`: one where it has one, else as many whole ones as they fill."""
    return Topology(1, gpus) if like.nodes == 1 else Topology(max(2, gpus // like.gpus_per_node), like.gpus_per_node)


def root_spec(model: ModelSpec, world_size: int) -> GroupSpec:
    """What lies around the blocks: the final norm, and embedding and head where the model has a vocabulary."""
    table, norm = (model.vocab, model.hidden), (model.hidden,)
    shapes = {"embedding": table, "norm": norm, "head": table} if model.vocab else {"norm": norm}
    return GroupSpec(world_size, tuple(TensorSpec(name, shape, _WIRE) for name, shape in shapes.items()))


def flags_nbytes(world_size: int, over_nodes: bool = False) -> int:
    """Bytes of the counters of one window, on one node or over several."""
    return align(world_size * COUNTERS * COUNTER_NBYTES[over_nodes])


def reduce_scatter_buffer(
    output: Sequence[int],
    topology: Topology,
    ring_chunk_nbytes: int = RING_CHUNK_NBYTES,
    ring_depth: int = RING_DEPTH,
) -> Buffer:
    """The buffer of a reduce-scatter after which every rank of `topology` has tensors of `output` elements.

    What is reduced grows with the ranks, so that what each of them gets stays the same.
    """
    world = topology.world_size
    spec = GroupSpec(world, tuple(TensorSpec(f"tensor {i}", (world, numel), _WIRE) for i, numel in enumerate(output)))
    return _buffer_of([spec], topology, ring_chunk_nbytes, ring_depth)


def _buffer_of(specs: Sequence[GroupSpec], topology: Topology, ring_chunk_nbytes: int, ring_depth: int) -> Buffer:
    """The buffer that reductions of the groups `specs` share."""
    world = topology.world_size
    if topology.nodes > 1:
        rings = rings_nbytes(topology, pacing_for(topology, specs, ring_chunk_nbytes, ring_depth))
        return Buffer(world, rings + STAGING_NBYTES, flags_nbytes(world, over_nodes=True) * 2)
    return Buffer(world, chunk_for(specs, ring_chunk_nbytes) * ring_depth, flags_nbytes(world) * ring_depth)
