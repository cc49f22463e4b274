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
    signals   what tells other nodes what has been put, so that the rail's next put need not wait for that
    receipts, local_receipts    acknowledgements of what has landed from other nodes, and from this one

A transport without lanes goes through both queues one after the other, puts and receipts by turns (`queues.in_turn`).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from tide_triton.layouts.slots import align
from tide_triton.paced import PacedTurn, chunks_of_each
from tide_triton.programs import Programs
from tide_triton.traffic import Traffic
from tide_triton.transports import Lane, Mark, Put
from tide_triton.windows import Slot

#: Bytes that cross a link in the time that a put takes beside its own, about.
_TINY_NBYTES: Final = 1 << 20

_RECEIPTS: Final[Mapping[Lane, Lane]] = {"rail": "receipts", "gather": "local_receipts"}

_Steps = tuple[tuple[ChunkPut, Wait | None] | Receipt, ...]
#: What a step puts, each after a piece of the own part; nothing for a receipt.
_Puts = tuple[tuple[int, Put], ...]


class RailAllGather(AllGather):
    """The all-gather of one group on rank `rank` of `topology`, whatever slot it moves through.

    pacing: chunks, and how many are under way at once; they are made larger where a turn could not count them.
    smallest_piece: as for `AllGather`, and the same on all ranks: blocks go in the order of pieces.

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
    ) -> None:
        if topology.world_size != layout.spec.world_size:
            raise SpecError(
                f"topology has {topology.nodes} nodes x {topology.gpus_per_node} GPUs, but the layout is for "
                f"{layout.spec.world_size} ranks"
            )
        super().__init__(layout, rank, smallest_piece=smallest_piece, tiny=_TINY_NBYTES)
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
        #: By block and chunk: its copies, those of the own part by the piece that they wait for.
        self._chunks = {block: self._parts(block) for block in topology.rail(topology.gpu(rank))}
        #: Bytes that this rank puts over its rail, and to all other GPUs of its node.
        self.rail_nbytes = sum(put.nbytes for put in rail.puts)
        self.local_nbytes = sum(put.nbytes for put in local.puts)
        self._prepared: Programs[dict[Lane, list[_Puts]]] = Programs()
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

    def _run(self, paced: PacedTurn, lane: Lane, puts: Sequence[_Puts], filled: Sequence[Mark | None]) -> None:
        """The steps of `lane`, which is the current one. puts: by step. filled: by piece of the own part."""
        transport, receipts = paced.turn.slot.transport, _RECEIPTS[lane]
        after = 0
        for step, prepared in zip(self._steps[lane], puts, strict=True):
            if isinstance(step, Receipt):
                with transport.lane(receipts, joined=False):
                    paced.wait(receipts, step.waits_for)
                    paced.acknowledge(step.source, step.number)
                continue
            put, credit = step
            paced.greet(lane, put.peer)
            for wait in (put.waits_for, credit):
                if wait is not None:
                    paced.wait(lane, wait)
            for piece, part in prepared:
                if put.block == self.rank and piece >= after:
                    transport.after(filled[piece])
                    after = piece + 1
                transport.put(part)
            with transport.lane("signals") if lane == "rail" else nullcontext():
                paced.publish(put.peer, put.number)

    def _parts(self, block: int) -> tuple[tuple[tuple[int, tuple[Copy, ...]], ...], ...]:
        """By chunk of `block`, its copies by the piece of the own part that they wait for."""
        by_piece = [gather_copies(self.layout, block, piece) for piece in self._pieces]
        piece_of = [number if block == self.rank else 0 for number, copies in enumerate(by_piece) for _ in copies]
        chunks = cut([copy for copies in by_piece for copy in copies], self.pacing.chunk_nbytes)
        return tuple(
            tuple(
                (piece, tuple(copy for _, copy in parts))
                for piece, parts in groupby(chunk, key=lambda part: piece_of[part[0]])
            )
            for chunk in chunks
        )

    # --- what is prepared ---

    def _prepare_all(self, slot: Slot) -> dict[Lane, list[_Puts]]:
        memory, transport = slot.window.memory, slot.transport

        def prepare(step: tuple[ChunkPut, Wait | None] | Receipt) -> _Puts:
            if isinstance(step, Receipt):
                return ()
            put, _ = step
            return tuple(
                (piece, transport.prepare(slot.window, put.peer, [(memory, copy) for copy in copies]))
                for piece, copies in self._chunks[put.block][put.chunk]
            )

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
    most = chunks_of_each(topology.nodes)
    return Pacing(max(pacing.chunk_nbytes, align(-(-nbytes // most))), pacing.depth)


def _are_reusable(puts: dict[Lane, list[_Puts]]) -> bool:
    return all(put.is_reusable for of_lane in puts.values() for parts in of_lane for _, put in parts)
