"""The groups that share one process group: their transport, their slots, and which of them uses which.

Windows belong to a process group, not to a size: two meshes over different ranks never share a slot or a counter.
"""

import hashlib
import json
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from tide_triton.all_gather import AllGather
from tide_triton.fsdp.binding import GroupBinding
from tide_triton.fsdp.internals import GroupSite
from tide_triton.fsdp.options import Options
from tide_triton.layouts import GroupUse, LandingLayout, SlotLayout, SwitchLayout, Topology, assign
from tide_triton.layouts.ring import chunk_for
from tide_triton.many_nodes import ManyNodes
from tide_triton.reduce_scatter import ReduceScatter
from tide_triton.reducers import Kept, Reducer
from tide_triton.switch_reduce import SwitchReduceScatter
from tide_triton.transports import Transport
from tide_triton.transports.rendezvous import Rendezvous
from tide_triton.windows import Ring, Slot, SlotPool


class Domain:
    """Bindings of the groups at `sites`, all sharded over `process_group`, moving through `transport`."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        transport: Transport,
        why_transport: str,
        sites: Sequence[GroupSite],
        meeting: Rendezvous,
        options: Options,
    ) -> None:
        self.process_group = process_group
        self._meeting = meeting
        self.transport = transport
        self.why_transport = why_transport
        #: Tells this domain's slots from those of others in reports; empty where there is but one domain.
        self.label = ""
        self.options = options
        nodes = options.nodes or 1
        self.topology = Topology(nodes, transport.world_size // nodes)
        self._nodes: ManyNodes | None = None
        if nodes > 1:
            chunk, depth = options.ring_chunk_nbytes, options.ring_depth
            self._nodes = ManyNodes(self.topology, chunk, depth, options.wire_dtype)
        self.pool = SlotPool(transport)
        self.bindings = [GroupBinding(site, self) for site in sites]
        #: How many slots were added because groups were held longer than planned.
        self.grown = 0
        self._ring: Ring | Slot | None = None
        self._kept: deque[weakref.ref[Kept]] = deque()

    def allocate(self, prefetch: int) -> None:
        """Give every group its slot. Raises SlotShortageError, and what `Transport.allocate` raises."""
        # Groups of one module, split by mesh, are unsharded together, so each index rotates for itself as well.
        depths = sorted({(b.depth, b.index_in_module) for b in self.bindings if b.depth is not None})
        uses = [
            GroupUse(b.name, b.slot_nbytes, None if b.depth is None else depths.index((b.depth, b.index_in_module)))
            for b in self.bindings
        ]
        rotation = assign(uses, prefetch, self.options.slots)
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
        if self.options.early_reduce or not self.may_reuse_slots:
            self.ring()

    def gatherer(self, layout: SlotLayout) -> AllGather:
        """The all-gather of a group that is laid out so."""
        smallest = self.transport.piece_nbytes
        if self._nodes is not None:
            return self._nodes.gatherer(layout, self.transport.rank, smallest)
        return AllGather(
            layout,
            self.transport.rank,
            smallest_piece=smallest,
            multicast_nbytes=self.options.multicast_nbytes,
        )

    def reducer(self, landing: LandingLayout, ctas: int) -> Reducer:
        """The reduce-scatter of a group whose gradients land so."""
        if self._nodes is not None:
            return self._nodes.reducer(landing, self.transport.rank, ctas)
        if self.sums_by_switch:
            return SwitchReduceScatter(landing, self.transport.rank, ctas=ctas)
        return ReduceScatter(landing, self.transport.rank, ctas=ctas)

    @property
    def sums_by_switch(self) -> bool:
        """Whether a switch sums gradients where it can."""
        return self.options.switch_sums and self.transport.multicasts

    def slot_nbytes(self, layout: SlotLayout) -> int:
        """Bytes of a slot for a group that is laid out so, with all else that goes through it.

        That is what crosses nodes packed, and gradients that a switch sums.
        """
        if self._nodes is not None:
            return self._nodes.slot_nbytes(layout)
        return max(layout.nbytes, SwitchLayout(layout.spec).nbytes) if self.sums_by_switch else layout.nbytes

    @property
    def may_reuse_slots(self) -> bool:
        """Whether gradients may land in the slot that their group has vacated: of one node's ranks, if asked to."""
        return self.options.slot_reuse and self._nodes is None

    @property
    def ring_nbytes(self) -> int:
        """Bytes of what gradients go through, beside slots, on this rank."""
        return self.pool.ring_nbytes if self._nodes is None else self._nodes.rings_nbytes

    def ring(self) -> Ring | Slot:
        """The ring through which gradients go, as large as asked for, but not larger than the largest group needs.

        Over several nodes: the slot that holds the three rings of the hierarchy.
        """
        # Asked for by every reduction: sized once.
        if self._ring is None:
            specs = [b.layout.spec for b in self.bindings]
            if self._nodes is not None:
                self._ring = self._nodes.rings(self.pool, specs)
            else:
                chunk = chunk_for(specs, self.options.ring_chunk_nbytes)
                self._ring = self.pool.ring(chunk, self.options.ring_depth, specs[0].digest)
        return self._ring

    def grow(self, binding: GroupBinding) -> Slot:
        """A slot for `binding` alone."""
        self.grown += 1
        return self.pool.add(binding.slot_nbytes, binding.layout.spec.digest, f"a slot of group '{binding.name}'")

    def on_every_rank(self, holds: bool, what: str) -> bool:
        """Whether `holds` is true on every rank: for choices that hang on what each process sees by itself.

        Takes a message to and from every rank, so it is only for what is rare.
        """
        return "" not in self._meeting.exchange("yes" if holds else "", what)

    # --- gradients that are being read ---

    def keep(self, kept: Kept) -> None:
        """`kept` may be dropped once a later gradient is there."""
        self._kept.append(weakref.ref(kept))

    def drop_read(self) -> None:
        """Autograd has produced one more gradient: drop those that it waits for last, all but a ring's worth.

        Compute waits for their sums, which had the time of a gradient to end. So how much memory gradients take does
        not hang on how far the host runs ahead.
        """
        if not self._kept:
            return
        alive = [kept for reference in self._kept if (kept := reference()) is not None and kept.gradients]
        total = sum(kept.nbytes for kept in alive)
        limit = self.options.ring_depth * self.options.ring_chunk_nbytes
        while alive and total > limit:
            oldest = alive.pop(0)
            total -= oldest.nbytes
            self.transport.after(oldest.mark)
            oldest.gradients.clear()
        self._kept = deque(map(weakref.ref, alive))

    def agree_on_habits(self) -> None:
        """Let groups reduce early from now on, in an order that every rank shares: rank 0's."""
        pending = [b.reduction for b in self.bindings if b.reduction.candidate is not None]
        orders = [reduction.candidate.order for reduction in pending if reduction.candidate is not None]
        digest = hashlib.blake2b(repr(orders).encode(), digest_size=16).hexdigest()
        what = "agreeing on the order of gradients"
        if len(set(self._meeting.exchange(digest, what))) > 1:
            everyones = [json.loads(text) for text in self._meeting.exchange(json.dumps(orders), what)]
            same = all([set(o) for o in other] == [set(o) for o in everyones[0]] for other in everyones)
            orders = [tuple(order) for order in everyones[0]] if same else []
        for number, reduction in enumerate(pending):
            candidate, reduction.candidate = reduction.candidate, None
            if candidate is not None and orders:
                reduction.habit = replace(candidate, order=orders[number])

    def encloses(self, binding: GroupBinding) -> bool:
        """Whether another of these groups lies within `binding`'s modules, or beside it in the same one.

        Then gradients of both may come mixed, and nothing makes FSDP2's ranks mix them alike.
        """
        inside = {id(module) for own in binding.group.modules for module in own.modules()}
        return any(b is not binding and any(id(m) in inside for m in b.group.modules) for b in self.bindings)

    def shares_slot(self, binding: GroupBinding) -> bool:
        """Whether another group uses the same slot."""
        return any(b is not binding and b.slot is binding.slot for b in self.bindings)

    def close(self) -> None:
        """Give the slots and the transport back. The bindings must have released theirs."""
        self.pool.close()
