"""The groups that share one process group: their transport, their slots, and which of them uses which.

Windows belong to a process group, not to a size: two meshes over different ranks never share a slot or a counter.
"""

from collections.abc import Sequence

import torch.distributed as dist

from tide_triton.fsdp.binding import GroupBinding
from tide_triton.fsdp.internals import GroupSite
from tide_triton.layouts import GroupUse, assign
from tide_triton.transports import Transport
from tide_triton.transports.rendezvous import Rendezvous
from tide_triton.windows import Slot, SlotPool


class Domain:
    """Bindings of the groups at `sites`, all sharded over `process_group`, moving through `transport`."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        transport: Transport,
        why_transport: str,
        sites: Sequence[GroupSite],
        meeting: Rendezvous,
        *,
        strict: bool,
        reuse: bool,
    ) -> None:
        self.process_group = process_group
        self._meeting = meeting
        self.transport = transport
        self.why_transport = why_transport
        #: Tells this domain's slots from those of others in reports; empty where there is but one domain.
        self.label = ""
        self.pool = SlotPool(transport)
        self.bindings = [GroupBinding(site, self, strict=strict, reuse=reuse) for site in sites]
        #: Slots in which groups take turns, at the depth of nesting that has most.
        self.slot_count = 0
        #: How many slots were added because groups were held longer than planned.
        self.grown = 0

    def allocate(self, prefetch: int, slots: int | None) -> None:
        """Give every group its slot. Raises SlotShortageError, and what `Transport.allocate` raises."""
        # Groups of one module, split by mesh, are unsharded together, so each index rotates for itself as well.
        depths = sorted({(b.depth, b.index_in_module) for b in self.bindings if b.depth is not None})
        uses = [
            GroupUse(b.name, b.layout.nbytes, None if b.depth is None else depths.index((b.depth, b.index_in_module)))
            for b in self.bindings
        ]
        rotation = assign(uses, prefetch, slots)
        names = [
            [b.name for b, s in zip(self.bindings, rotation.slot_of, strict=True) if s == i]
            for i in range(len(rotation.slot_nbytes))
        ]
        made = [
            self.pool.add(nbytes, self.bindings[0].layout.spec.digest, f"a slot of group {', '.join(map(repr, used))}")
            for nbytes, used in zip(rotation.slot_nbytes, names, strict=True)
        ]
        for binding, index in zip(self.bindings, rotation.slot_of, strict=True):
            binding.slot = made[index]
        taken = {(use.depth, index) for use, index in zip(uses, rotation.slot_of, strict=True) if use.depth is not None}
        self.slot_count = max((sum(d == depth for d, _ in taken) for depth in range(len(depths))), default=0)

    def grow(self, binding: GroupBinding) -> Slot:
        """A slot for `binding` alone."""
        self.grown += 1
        return self.pool.add(binding.layout.nbytes, binding.layout.spec.digest, f"a slot of group '{binding.name}'")

    def on_every_rank(self, holds: bool, what: str) -> bool:
        """Whether `holds` is true on every rank: for choices that hang on what each process sees by itself.

        Takes a message to and from every rank, so it is only for what is rare.
        """
        return "" not in self._meeting.exchange("yes" if holds else "", what)

    def shares_slot(self, binding: GroupBinding) -> bool:
        """Whether another group uses the same slot."""
        return any(b is not binding and b.slot is binding.slot for b in self.bindings)

    def close(self) -> None:
        """Give the slots and the transport back. The bindings must have released theirs."""
        self.pool.close()
