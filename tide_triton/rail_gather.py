"""TIDE-AG over several nodes: blocks double over the rails, and go on inside each node as they land.

    shard --cast--> its place in the own slot --rail--> the same place on other nodes --node--> on their other GPUs
                                              --node--> on the own node's other GPUs

`layouts.queues` says who puts which chunk when, and what each put waits for; here puts, signals and waits make it
happen. Every chunk lies at its final place wherever it comes to, so that it is put on from there, and each byte crosses
each link once.

    lane      what runs in it
    cast      the cast of the shards into the own slot
    rail      the rail's queue: waits for what the rail has brought before, and for acknowledgements
    gather    the node's queue: likewise; and the end, when everything has landed
    receipts  acknowledgements of what has landed

A transport without lanes goes through both queues one after the other, puts and receipts by turns (`queues.in_turn`).
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch

from tide_triton.all_gather import AllGather, CastShards, Gathering, fill_key
from tide_triton.kernels.launch import Prepared
from tide_triton.layouts import (
    ChunkPut,
    Pacing,
    Receipt,
    SlotLayout,
    SpecError,
    Topology,
    Wait,
    arrivals,
    block_sizes,
    cut,
    gather_copies,
    in_turn,
    local_queue,
    local_receipts,
    rail_queue,
    rail_receipts,
)
from tide_triton.layouts.pieces import growing
from tide_triton.layouts.slots import align
from tide_triton.paced import PacedTurn
from tide_triton.programs import Programs
from tide_triton.traffic import Traffic
from tide_triton.transports import Lane, Mark, Put
from tide_triton.windows import PARTS, Slot

_Steps = tuple[tuple[ChunkPut, Wait | None] | Receipt, ...]


class RailAllGather(AllGather):
    """The all-gather of one group on rank `rank` of `topology`, whatever slot it moves through.

    pacing: chunks, and how many are under way at once; they are made larger where a turn could not count them.

    Raises SpecError where the topology has other ranks than the layout.
    """

    def __init__(self, layout: SlotLayout, rank: int, topology: Topology, pacing: Pacing) -> None:
        if topology.world_size != layout.spec.world_size:
            raise SpecError(
                f"topology has {topology.nodes} nodes x {topology.gpus_per_node} GPUs, but the layout is for "
                f"{layout.spec.world_size} ranks"
            )
        super().__init__(layout, rank)
        sizes = block_sizes(layout)
        self.topology = topology
        self.pacing = countable(pacing, topology, max(sizes))
        arguments = (topology, rank, sizes, self.pacing)
        rail, local = rail_queue(*arguments), local_queue(*arguments)
        self._steps: dict[Lane, _Steps] = {
            "rail": in_turn(rail, rail_receipts(*arguments)),
            "gather": in_turn(local, local_receipts(*arguments)),
        }
        self._sources = {wait.rank: wait.count for wait in arrivals(*arguments)}
        self._chunks = {
            block: tuple(tuple(copy for _, copy in parts) for parts in cut(gather_copies(layout, block), self._chunk))
            for block in topology.rail(topology.gpu(rank))
        }
        #: The own part is filled piece by piece, in the order in which its chunks leave.
        sizes_here = [region.nbytes for region in self.regions]
        self._go_in(growing(range(len(sizes_here)), sizes_here, self._chunk))
        ends = [max(self.regions[index].end for index in piece) for piece in self._pieces]
        own = self._chunks[rank]
        #: After which piece each chunk of the own block is there.
        self._piece_of = [bisect_left(ends, max(copy.src.end for copy in copies)) for copies in own]
        #: Bytes that this rank puts over its rail, and to all other GPUs of its node.
        self.rail_nbytes = sum(put.nbytes for put in rail.puts)
        self.local_nbytes = sum(put.nbytes for put in local.puts)
        self._prepared: Programs[dict[Lane, list[Put | None]]] = Programs()
        self._fills: Programs[list[tuple[Prepared | None, Put | None]]] = Programs()

    @property
    def _chunk(self) -> int:
        return self.pacing.chunk_nbytes

    def start(
        self, slot: Slot, shards: Sequence[torch.Tensor], what: str, traffic: Traffic, kept: CastShards | None = None
    ) -> Gathering:
        """Open a turn of `slot`, fill this rank's part of it from `shards`, and put everything on that must go on.

        Arguments as for `AllGather.start`. On a transport without lanes this returns only once all that this rank
        passes on has come to it.
        """
        transport = slot.transport
        with transport.lane("gather"):
            paced = PacedTurn(slot, f"all-gather of {what}", self._sources)
            filled: list[Mark | None] = []
            with transport.lane("cast"):
                for cast, own in self._fills_of(slot, shards, kept):
                    if cast is not None:
                        cast(transport.stream)
                    if own is not None:
                        transport.put(own)
                    filled.append(transport.mark())
            puts = self._prepared.get(slot, lambda: self._prepare_all(slot), _are_reusable)
            with transport.lane("rail"):
                self._run(paced, "rail", puts["rail"], filled)
                sent = transport.mark()
            self._run(paced, "gather", puts["gather"], filled)
            if filled:
                transport.after(filled[-1])
            # The next turn's credits come after this lane, and what the rail reads must not be overwritten.
            transport.after(sent)
        if kept is not None:
            kept.is_fresh = True
        # The shards have been read when the caller goes on: an optimizer may change them.
        if filled:
            transport.after(filled[-1])
        traffic.wire_bytes += self.rail_nbytes + self.local_nbytes
        traffic.zero_copy += 1
        return Gathering(paced.turn)

    def _run(self, paced: PacedTurn, lane: Lane, puts: Sequence[Put | None], filled: Sequence[Mark | None]) -> None:
        """The steps of `lane`, which is the current one. puts: by step, None for a receipt. filled: by own piece."""
        transport = paced.turn.slot.transport
        after = 0
        for step, prepared in zip(self._steps[lane], puts, strict=True):
            if isinstance(step, Receipt):
                with transport.lane("receipts", joined=False):
                    paced.wait("receipts", step.waits_for)
                    paced.acknowledge(step.source, step.number)
                continue
            put, credit = step
            if put.block == self.rank and self._piece_of[put.chunk] >= after:
                transport.after(filled[self._piece_of[put.chunk]])
                after = self._piece_of[put.chunk] + 1
            paced.greet(lane, put.peer)
            for wait in (put.waits_for, credit):
                if wait is not None:
                    paced.wait(lane, wait)
            assert prepared is not None
            transport.put(prepared)
            paced.publish(put.peer, put.number)

    # --- what is prepared ---

    def _prepare_all(self, slot: Slot) -> dict[Lane, list[Put | None]]:
        memory, transport = slot.window.memory, slot.transport

        def prepare(step: tuple[ChunkPut, Wait | None] | Receipt) -> Put | None:
            if isinstance(step, Receipt):
                return None
            put, _ = step
            moves = [(memory, copy) for copy in self._chunks[put.block][put.chunk]]
            return transport.prepare(slot.window, put.peer, moves)

        return {lane: [prepare(step) for step in steps] for lane, steps in self._steps.items()}

    def _fills_of(
        self, slot: Slot, shards: Sequence[torch.Tensor], kept: CastShards | None
    ) -> list[tuple[Prepared | None, Put | None]]:
        """What fills this rank's part of `slot`, by piece: a cast, or a put into the own slot, or both."""

        def prepare() -> list[tuple[Prepared | None, Put | None]]:
            with slot.transport.here():
                return [self.fill(slot, shards, kept, number)[:2] for number in range(len(self._pieces))]

        def are_reusable(fills: list[tuple[Prepared | None, Put | None]]) -> bool:
            return all(part is None or part.is_reusable for fill in fills for part in fill)

        return self._fills.get(fill_key(slot, shards, kept), prepare, are_reusable)


def countable(pacing: Pacing, topology: Topology, nbytes: int) -> Pacing:
    """`pacing`, with chunks so large that a turn can count those of a block of `nbytes` bytes from every node.

    Raises SpecError where there are more nodes than a turn can count.
    """
    most = (PARTS - 1) // topology.nodes
    if not most:
        raise SpecError(f"nodes must be at most {PARTS - 1}, got {topology.nodes}")
    return Pacing(max(pacing.chunk_nbytes, align(-(-nbytes // most))), pacing.depth)


def _are_reusable(puts: dict[Lane, list[Put | None]]) -> bool:
    return all(put is None or put.is_reusable for of_lane in puts.values() for put in of_lane)
