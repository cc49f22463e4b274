"""Layouts as Python values: what is sharded, where it lies, and which bytes move.

Everything here is pure Python: it knows nothing of CUDA, of `torch.distributed` or of FSDP, so that the same values can
drive copy engines, Triton kernels, torch views, a memory plan and a simulator, and property tests can hold those
derivations to each other.

    spec.TensorSpec, spec.GroupSpec     what is sharded over how many ranks
    shards.Shard                        which elements a rank owns, as `torch.chunk` cuts them
    slots.SlotLayout                    where a group's tensors lie in a slot
    slots.LandingLayout                 where a group's gradient slices land before they are summed
    switch.SwitchLayout                 where its gradients lie for a switch to sum them
    transfers.Copy                      one strided copy: offsets, rows, width and pitches in bytes
    topology.Topology                   ranks as nodes x GPUs, and the rails between nodes
    schedule.flat                       who sends to whom, in which order
    rotation.assign                     which group uses which slot

Over many nodes:

    rails.sends, rails.forwards         the all-gather, block by block: over rails, and on inside the node
    packing.pack                        what crosses nodes packed, and where it lies then
    pacing.Pacing, pacing.cut           how much is under way at once: chunks, and a window over them
    queues.rail_queue, .local_queue     the all-gather, chunk by chunk, and what each put waits for
    queues.rail_receipts, .in_turn      what it acknowledges, and both in an order for one thing at a time
    hierarchy.Hierarchy                 the reduce-scatter: node by node, in rings of a fixed size
    loads.gather_load, .reduce_load     what they cost a rank: rounds, bytes, memory
"""

from tide_triton.layouts.hierarchy import Buffer, Hierarchy
from tide_triton.layouts.loads import Load, gather_load, reduce_load
from tide_triton.layouts.pacing import Pacing, Wait, cut, cut_slices
from tide_triton.layouts.packing import Packing, pack
from tide_triton.layouts.queues import (
    ChunkPut,
    PutQueue,
    Receipt,
    arrivals,
    block_sizes,
    in_turn,
    landings,
    local_queue,
    local_receipts,
    rail_queue,
    rail_receipts,
)
from tide_triton.layouts.rails import Forward, Receive, Send, forwards, receives, rounds, sends
from tide_triton.layouts.rotation import GroupUse, Rotation, SlotShortageError, assign
from tide_triton.layouts.schedule import flat
from tide_triton.layouts.shards import Region, Shard, chunk_size, shard
from tide_triton.layouts.slots import ALIGNMENT, LandingLayout, Place, SlotLayout
from tide_triton.layouts.spec import ITEMSIZES, GroupSpec, SpecError, TensorSpec
from tide_triton.layouts.steps import FinalSum, LocalPut, LocalSum, RailPut, Step
from tide_triton.layouts.switch import SwitchLayout
from tide_triton.layouts.topology import Topology
from tide_triton.layouts.transfers import Copy, execute, gather_copies, merge, scatter_copies

__all__ = [
    "ALIGNMENT",
    "ITEMSIZES",
    "Buffer",
    "ChunkPut",
    "Copy",
    "FinalSum",
    "Forward",
    "GroupSpec",
    "GroupUse",
    "Hierarchy",
    "LandingLayout",
    "Load",
    "LocalPut",
    "LocalSum",
    "Pacing",
    "Packing",
    "Place",
    "PutQueue",
    "RailPut",
    "Receipt",
    "Receive",
    "Region",
    "Rotation",
    "Send",
    "Shard",
    "SlotLayout",
    "SlotShortageError",
    "SpecError",
    "Step",
    "SwitchLayout",
    "TensorSpec",
    "Topology",
    "Wait",
    "arrivals",
    "assign",
    "block_sizes",
    "chunk_size",
    "cut",
    "cut_slices",
    "execute",
    "flat",
    "forwards",
    "gather_copies",
    "gather_load",
    "in_turn",
    "landings",
    "local_queue",
    "local_receipts",
    "merge",
    "pack",
    "rail_queue",
    "rail_receipts",
    "receives",
    "reduce_load",
    "rounds",
    "scatter_copies",
    "sends",
    "shard",
]
