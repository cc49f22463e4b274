"""Layouts as Python values: what is sharded, where it lies, and which bytes move.

Everything here is pure Python: it knows nothing of CUDA, of `torch.distributed` or of FSDP, so that the same values can
drive copy engines, Triton kernels, torch views, a memory plan and a simulator, and property tests can hold those
derivations to each other.

    spec.TensorSpec, spec.GroupSpec     what is sharded over how many ranks
    shards.Shard                        which elements a rank owns, as `torch.chunk` cuts them
    slots.SlotLayout                    where a group's tensors lie in a slot
    slots.LandingLayout                 where a group's gradient slices land before they are summed
    transfers.Copy                      one strided copy: offsets, rows, width and pitches in bytes
    topology.Topology                   ranks as nodes x GPUs, and the rails between nodes
    schedule.flat                       who sends to whom, in which order
    rotation.assign                     which group uses which slot
"""

from tide_triton.layouts.rotation import GroupUse, Rotation, SlotShortageError, assign
from tide_triton.layouts.schedule import flat
from tide_triton.layouts.shards import Region, Shard, chunk_size, shard
from tide_triton.layouts.slots import ALIGNMENT, LandingLayout, Place, SlotLayout
from tide_triton.layouts.spec import ITEMSIZES, GroupSpec, SpecError, TensorSpec
from tide_triton.layouts.topology import Topology
from tide_triton.layouts.transfers import Copy, execute, gather_copies, merge, scatter_copies

__all__ = [
    "ALIGNMENT",
    "ITEMSIZES",
    "Copy",
    "GroupSpec",
    "GroupUse",
    "LandingLayout",
    "Place",
    "Region",
    "Rotation",
    "Shard",
    "SlotLayout",
    "SlotShortageError",
    "SpecError",
    "TensorSpec",
    "Topology",
    "assign",
    "chunk_size",
    "execute",
    "flat",
    "gather_copies",
    "merge",
    "scatter_copies",
    "shard",
]
