"""TIDE-AG over several nodes: blocks double over the rails, and go on inside each node as they land.

    shard --cast--> its place in the own slot --rail--> the same place on other nodes --node--> on their other GPUs
                                              --node--> on the own node's other GPUs

`layouts.queues` says who puts which chunk when, and what each put waits for; here puts, signals and waits make it
happen. Every chunk lies at its final place wherever it comes to, so that it is put on from there, and each byte crosses
each link once. What lies in many short runs crosses the rail packed (`layouts.packing`), is put on to other nodes as it
is, and goes from there to its places in the slots of its node.

    lane      what runs in it
    cast      the cast of the shards into the own slot
    rail      the rail's queue: waits for what the rail has brought before, and for acknowledgements
    second_rail    about half of each chunk, where the transport's puts go better on two lanes than on one
    gather    the node's queue: likewise; and the end, when everything has landed
    unpack    what is packed goes to its places in the own slot
    signals   what tells other nodes what has been put, so that the rail's next put need not wait for that
    receipts, local_receipts    acknowledgements of what has landed from other nodes, and from this one

A transport without lanes goes through both queues one after the other, puts and receipts by turns (`queues.in_turn`).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from tide_triton.all_gather import AllGather, CastShards, Gathering, fill_key
from tide_triton.kernels.launch import Prepared
from tide_triton.layouts import (
    ChunkPut,
    Copy,
    Pacing,
    Receipt,
    SlotLayout,
    Topology,
    Wait,
    arrivals,
    block_sizes,
    cut,
    gather_copies,
    in_turn,
    landings,
    local_queue,
    local_receipts,
    pack,
    rail_queue,
    rail_receipts,
)
from tide_triton.layouts.pacing import countable
from tide_triton.paced import PacedTurn
from tide_triton.programs import Programs
from tide_triton.traffic import Traffic
from tide_triton.transports import Lane, Mark, Put
from tide_triton.windows import Slot

_RECEIPTS: Final[Mapping[Lane, Lane]] = {"rail": "receipts", "gather": "local_receipts"}

#: Copies of a chunk, by piece of the own part; and chunks of a block.
_Chunk = tuple[tuple[int, tuple[Copy, ...]], ...]
_Chunks = tuple[_Chunk, ...]
_Steps = tuple[tuple[ChunkPut, Wait | None] | Receipt, ...]
#: What a step puts in a lane, each after a piece of the own part; and in all its lanes, nothing for a receipt.
_Puts = tuple[tuple[int, Put], ...]
_PutsByLane = dict[Lane, _Puts]


class RailAllGather(AllGather):
    """The all-gather of one group on rank `rank` of `topology`, whatever slot it moves through.

    pacing: chunks, and how many are under way at once; they are made larger where a turn could not count them.
    smallest_piece: as for `AllGather`, and the same on all ranks: blocks go in the order of pieces.
    run_nbytes: as for `layouts.pack`, and the same on all ranks.

    Raises SpecError where the topology has other ranks than the layout.
    """

    def __init__(
        self,
        layout: SlotLayout,
        rank: int,
        topology: Topology,
        pacing: Pacing,
        *,
        smallest_piece: int | None = None,
        run_nbytes: int | None = None,
    ) -> None:
        self.packing = pack(layout, topology, run_nbytes)
        super().__init__(layout, rank, smallest_piece=smallest_piece, last=self.packing.indices)
        for index, region in self.packing.packed(rank).items():
            self.regions[index] = region
        sizes = block_sizes(layout)
        self.topology = topology
        self.slot_nbytes = self.packing.slot_nbytes
        self._is_packed = frozenset(self.packing.indices)
        self.pacing = countable(pacing, topology, max(sizes))
        arguments = (topology, rank, sizes, self.pacing)
        rail, local = rail_queue(*arguments), local_queue(*arguments)
        self._steps: dict[Lane, _Steps] = {
            "rail": in_turn(rail, rail_receipts(*arguments)),
            "gather": in_turn(local, local_receipts(*arguments)),
        }
        self._sources = {wait.rank: wait.count for wait in arrivals(*arguments)}
        blocks = topology.rail(topology.gpu(rank))
        #: By lane, block and chunk: its copies, those of the own part by the piece that they wait for.
        self._chunks: dict[Lane, dict[int, _Chunks]] = {
            "rail": {block: self._parts(block, self.packing.across(block)) for block in blocks},
            "gather": {block: self._parts(block, self.packing.unpacks(block)) for block in blocks},
        }
        #: What says that a block's packed part has come over the rail; None for this rank's own.
        self._packed: dict[int, Wait | None] = {}
        landed = landings(*arguments)
        for block in blocks:
            chunks = [chunk for chunk, parts in enumerate(self._chunks["rail"][block]) if self._has_packed(parts)]
            if chunks:
                self._packed[block] = landed[block][max(chunks)] if block in landed else None
        #: How often it puts to each other rank over its rail.
        self._puts_to = Counter(put.peer for put in rail.puts)
        #: Bytes that this rank puts over its rail, and to all other GPUs of its node.
        self.rail_nbytes = sum(put.nbytes for put in rail.puts)
        self.local_nbytes = sum(put.nbytes for put in local.puts)
        #: Bytes that it unpacks.
        self.packed_nbytes = sum(self.packing.area(block).nbytes for block in blocks)
        self._prepared: Programs[_Program] = Programs()
        self._fills: Programs[list[tuple[Prepared | None, Put | None]]] = Programs()

    def start(
        self, slot: Slot, shards: Sequence[torch.Tensor], what: str, traffic: Traffic, kept: CastShards | None = None
    ) -> Gathering:
        """Open a turn of `slot`, fill this rank's part of it from `shards`, and put everything on that must go on.

        Arguments as for `AllGather.start`. On a transport without lanes this returns only once all that this rank
        passes on has come to it.
        """
        transport = slot.transport
        with transport.lane("gather"):
            paced = PacedTurn(slot, f"all-gather of {what}", self._sources, marks_vacancy=True)
            filled: list[Mark | None] = []
            with transport.lane("cast", joined=False):
                # Not after what tells others that the slot is vacant, which takes its time over a network.
                transport.after(paced.turn.vacant)
                for cast, own in self._fills_of(slot, shards, kept):
                    if cast is not None:
                        cast(transport.stream)
                    if own is not None:
                        transport.put(own)
                    filled.append(transport.mark())
            program = self._prepared.get(slot, lambda: self._prepare_all(slot), lambda program: program.is_reusable)
            with transport.lane("rail"):
                sent = [*self._run(paced, "rail", program.puts["rail"], filled), transport.mark()]
            self._run(paced, "gather", program.puts["gather"], filled)
            unpacked = self._unpack(paced, program.unpacks, filled)
            if filled:
                transport.after(filled[-1])
            # The next turn's credits come after this lane, and what the rail reads must not be overwritten.
            for mark in sent:
                transport.after(mark)
        if kept is not None:
            kept.is_fresh = True
        # The shards have been read when the caller goes on: an optimizer may change them.
        if filled:
            transport.after(filled[-1])
        traffic.wire_bytes += self.rail_nbytes + self.local_nbytes
        traffic.layout_copy_bytes += self.packed_nbytes
        traffic.packed_bytes += self.packed_nbytes
        traffic.zero_copy += 1
        return Gathering(paced.turn, unpacked)

    def _unpack(self, paced: PacedTurn, unpacks: Mapping[int, Put], filled: Sequence[Mark | None]) -> Mark | None:
        """Put what is packed at its places, once it is there. Returns the mark of it; None where nothing is."""
        if not unpacks:
            return None
        slot = paced.turn.slot
        # Not in the current lane, nor after it: the next turns' credits would wait for all of this one.
        with slot.transport.lane("unpack", joined=False):
            for block, put in unpacks.items():
                landed = self._packed[block]
                if landed is None:
                    slot.transport.after(filled[-1])
                else:
                    paced.wait("unpack", landed)
                slot.transport.put(put)
            unpacked = slot.transport.mark()
        slot.read_until(unpacked)
        return unpacked

    def _run(
        self, paced: PacedTurn, lane: Lane, puts: Sequence[_PutsByLane], filled: Sequence[Mark | None]
    ) -> list[Mark | None]:
        """The steps of `lane`, which is the current one. Returns what else has been put beside it.

        puts: by step. filled: by piece of the own part.
        """
        transport, receipts = paced.turn.slot.transport, _RECEIPTS[lane]
        after: dict[Lane, int] = defaultdict(int)
        beside: dict[Lane, Mark | None] = {}
        for step, by_lane in zip(self._steps[lane], puts, strict=True):
            if isinstance(step, Receipt):
                with transport.lane(receipts, joined=False):
                    paced.wait(receipts, step.waits_for)
                    paced.acknowledge(step.source, step.number)
                continue
            put, credit = step
            # The only put to a rank needs no other lane: nothing to that rank waits behind what tells it of this one.
            tells_here = lane != "rail" or self._puts_to[put.peer] == 1
            # Then the last of its parts is put together with what tells of it.
            last = by_lane[lane][-1][1] if tells_here and len(by_lane) == 1 else None
            for where, parts in by_lane.items():
                with nullcontext() if where == lane else transport.lane(where, joined=False):
                    paced.greet(where, put.peer)
                    for wait in (put.waits_for, credit):
                        if wait is not None:
                            paced.wait(where, wait)
                    for piece, part in parts:
                        if put.block == self.rank and piece >= after[where]:
                            transport.after(filled[piece])
                            after[where] = piece + 1
                        if part is not last:
                            transport.put(part)
                    if where != lane:
                        beside[where] = transport.mark()
            with nullcontext() if tells_here else transport.lane("signals"):
                for where in by_lane:
                    if where != lane:
                        transport.after(beside[where])
                paced.publish(put.peer, put.number, last)
        return [*beside.values()]

    def _parts(self, block: int, packed: Sequence[Copy]) -> _Chunks:
        """The chunks of `block`: what goes from place to place, and `packed` before the last piece of that."""
        direct = [[index for index in piece if index not in self._is_packed] for piece in self._pieces]
        by_piece = [
            [copy for index in piece for copy in gather_copies(self.layout, block, [index])] for piece in direct
        ]
        if packed:
            by_piece[-1] = [*packed, *by_piece[-1]]
        piece_of = [number if block == self.rank else 0 for number, copies in enumerate(by_piece) for _ in copies]
        chunks = cut([copy for copies in by_piece for copy in copies], self.pacing.chunk_nbytes)
        return tuple(
            tuple(
                (piece, tuple(copy for _, copy in parts))
                for piece, parts in groupby(chunk, key=lambda part: piece_of[part[0]])
            )
            for chunk in chunks
        )

    def _has_packed(self, parts: _Chunk) -> bool:
        return any(copy.src_offset >= self.layout.nbytes for _, copies in parts for copy in copies)

    # --- what is prepared ---

    def _prepare_all(self, slot: Slot) -> "_Program":
        memory, transport = slot.window.memory, slot.transport

        def put(peer: int, copies: Sequence[Copy]) -> Put:
            return transport.prepare(slot.window, peer, [(memory, copy) for copy in copies])

        def prepare(lane: Lane, step: tuple[ChunkPut, Wait | None] | Receipt) -> _PutsByLane:
            if isinstance(step, Receipt):
                return {}
            chunk = self._chunks[lane][step[0].block][step[0].chunk]
            lanes = transport.rails if lane == "rail" else (lane,)
            return {
                where: tuple((piece, put(step[0].peer, copies)) for piece, copies in dealt)
                for where, dealt in zip(lanes, deal(chunk, len(lanes)), strict=True)
                if dealt or where == lane
            }

        return _Program(
            {lane: [prepare(lane, step) for step in steps] for lane, steps in self._steps.items()},
            {block: put(self.rank, self.packing.unpacks(block)) for block in self._packed},
        )

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


@dataclass(frozen=True, slots=True)
class _Program:
    """puts: by lane and step. unpacks: by block."""

    puts: dict[Lane, list[_PutsByLane]]
    unpacks: dict[int, Put]

    @property
    def is_reusable(self) -> bool:
        steps = [by_lane for of_queue in self.puts.values() for by_lane in of_queue]
        puts = [put for by_lane in steps for parts in by_lane.values() for _, put in parts]
        return all(put.is_reusable for put in (*puts, *self.unpacks.values()))


def deal(chunk: _Chunk, lanes: int) -> tuple[_Chunk, ...]:
    """The copies of `chunk` in `lanes` parts of about as many bytes, each in the order of the chunk."""
    taken = [0] * lanes
    parts: list[list[tuple[int, tuple[Copy, ...]]]] = [[] for _ in taken]
    for piece, copies in chunk:
        dealt: list[list[Copy]] = [[] for _ in taken]
        for copy in copies:
            lightest = taken.index(min(taken))
            dealt[lightest].append(copy)
            taken[lightest] += copy.nbytes
        for part, own in zip(parts, dealt, strict=True):
            if own:
                part.append((piece, tuple(own)))
    return tuple(map(tuple, parts))
