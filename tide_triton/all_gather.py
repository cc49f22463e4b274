"""TIDE-AG: each rank's shard goes straight to its final place in every rank's slot.

    shard (fp32) --cast--> its place in the own slot (bf16) --put--> the same place of every other rank's slot

Nothing is copied in or out: the cast writes the place that the parameter is read from, and the puts start there. Where
the transport overlaps, pieces of the group travel while later ones are still cast. What needs no cast is put from where
it is, into the own slot as well, and then no kernel runs at all:

    shard (bf16)                                    --put--> its place in every rank's slot
    shard (fp32) --cast, once--> a copy that is kept --put--> its place in every rank's slot, as often as it is gathered

Where the transport multicasts, small pieces are put to every rank at once, the own slot included, in one put.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tide_triton.kernels import prepare_place
from tide_triton.kernels.launch import Prepared
from tide_triton.layouts import Copy, Region, SlotLayout
from tide_triton.layouts.pieces import gather_pieces
from tide_triton.layouts.slots import align
from tide_triton.layouts.transfers import between, gather_copies
from tide_triton.programs import Programs
from tide_triton.traffic import Traffic
from tide_triton.transports import Mark, Put, Transport
from tide_triton.views import DTYPES, region_view
from tide_triton.windows import Slot, Turn


@dataclass(slots=True)
class _Program:
    """What a gather does, by piece: a cast or nothing; puts into the own slot; puts to each peer, or one to all ranks.

    reads_shards: whether puts start from the shards, or from what is kept of them, and not from the own slot.
    wire_nbytes, multicast_nbytes: as `Traffic` counts them.
    remark: why nothing is multicast though it was asked for, None where something is or it was not.
    """

    casts: list[Prepared | None]
    own: list[Put | None]
    puts: list[list[Put]]
    reads_shards: bool
    wire_nbytes: int
    multicast_nbytes: int
    remark: str | None = None

    @property
    def is_reusable(self) -> bool:
        casts = all(cast is None or cast.is_reusable for cast in self.casts)
        own = all(put is None or put.is_reusable for put in self.own)
        return casts and own and all(put.is_reusable for to_peers in self.puts for put in to_peers)


def multicast_problem(multicast_nbytes: object) -> str | None:
    """What is wrong with it as an option, None where nothing is."""
    if multicast_nbytes is None or (type(multicast_nbytes) is int and multicast_nbytes >= 1):
        return None
    return (
        f"multicast_nbytes must be an integer >= 1 (bytes of the largest piece that is multicast), or None for no "
        f"multicast; got {multicast_nbytes!r}"
    )


class CastShards:
    """The shards of one group in the dtypes of their slot, kept from one gather to the next.

    `is_fresh` says whether it holds what the shards held when they were last cast, and is the caller's to reset.
    """

    def __init__(self, gather: "AllGather", device: torch.device) -> None:
        sizes = [align(region.nbytes) for region in gather.regions]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        starts = [0, *accumulate(sizes)][:-1]
        self.views = [
            self.memory[start : start + region.nbytes].view(dtype)
            for start, region, dtype in zip(starts, gather.regions, gather.dtypes, strict=True)
        ]
        self.is_fresh = False


class AllGather:
    """The all-gather of one group on rank `rank`: what moves, whatever slot it moves through.

    smallest_piece: bytes of the first piece, for a transport on which casts and puts overlap; None for one piece.
    last: tensors that the last piece begins with.
    multicast_nbytes: pieces of which this rank puts up to so many bytes are multicast on a transport that does, without
    shards of several rows in the slot, and unless a CUDA graph is captured; None for none. Ranks may differ in it.
    """

    def __init__(
        self,
        layout: SlotLayout,
        rank: int,
        *,
        smallest_piece: int | None = None,
        last: Sequence[int] = (),
        multicast_nbytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self._multicast_nbytes = multicast_nbytes or 0
        #: Where this rank's shards lie in a slot, and of which dtype they are there.
        self.regions = [layout.region(index, rank) for index in range(len(layout.places))]
        self.dtypes = [DTYPES[place.tensor.dtype] for place in layout.places]
        self._pieces = gather_pieces(layout, smallest_piece, last)
        #: What this rank puts to each peer, from its own slot, by piece.
        self.copies = tuple(gather_copies(layout, rank, piece) for piece in self._pieces)
        #: Bytes of a slot that this gather may go through.
        self.slot_nbytes = layout.nbytes
        self._programs: Programs[_Program] = Programs()
        #: What graphs have captured, which they need as long as they are replayed.
        self._captured: list[_Program] = []

    def start(
        self, slot: Slot, shards: Sequence[torch.Tensor], what: str, traffic: Traffic, kept: CastShards | None = None
    ) -> "Gathering":
        """Open a turn of `slot`, cast `shards` into it and put them to every peer.

        shards: one per tensor of the group, contiguous, of any float dtype (other dtypes: the tensor's own); elements
        beyond the rank's shard (FSDP2's padding) are ignored.
        what: the group's name, for errors.
        kept: where to keep what was cast, and where to find it while it is fresh.
        """
        transport = slot.transport
        cast_mark: Mark | None = None
        sent: Mark | None = None
        with transport.lane("gather"):
            turn = slot.open(f"all-gather of {what}")
            with transport.lane("cast"):
                program = self._program(slot, shards, kept)
            for number, (cast, own, to_peers) in enumerate(zip(program.casts, program.own, program.puts, strict=True)):
                # Not after the puts before it: casts run ahead of the link, and the own place is filled beside it.
                with transport.lane("cast", joined=False):
                    if cast is not None:
                        cast(transport.stream)
                        cast_mark = transport.mark()
                    if own is not None:
                        transport.put(own)
                        sent = transport.mark()
                if number == 0:
                    # Before any put: one that is multicast needs them all.
                    for peer in turn.peers:
                        turn.await_credit(peer)
                transport.after(cast_mark)
                for put in to_peers:
                    transport.put(put)
            for peer in turn.peers:
                turn.publish(peer)
            if program.reads_shards:
                # The own part is there too, and shards that were put themselves have been read.
                transport.after(sent)
                sent = transport.mark()
        if kept is not None:
            kept.is_fresh = True
            transport.after(cast_mark)
        else:
            # The shards have been read when the caller goes on: an optimizer may change them.
            transport.after(sent if sent is not None else cast_mark)
        traffic.wire_bytes += program.wire_nbytes
        traffic.multicast_bytes += program.multicast_nbytes
        if program.remark is not None:
            traffic.remarks[program.remark] += 1
        traffic.zero_copy += 1
        return Gathering(turn)

    # --- what is prepared ---

    def _program(self, slot: Slot, shards: Sequence[torch.Tensor], kept: CastShards | None) -> _Program:
        if slot.transport.capture is not None:
            self._captured.append(self._prepare(slot, shards, kept))
            return self._captured[-1]
        key = fill_key(slot, shards, kept)
        return self._programs.get(key, lambda: self._prepare(slot, shards, kept), lambda program: program.is_reusable)

    def _prepare(self, slot: Slot, shards: Sequence[torch.Tensor], kept: CastShards | None) -> _Program:
        program = _Program([], [], [], False, 0, 0)
        with slot.transport.here():
            rowed = [self._prepare_piece(program, slot, shards, kept, number) for number in range(len(self._pieces))]
        if self._may_multicast(slot.transport) and program.wire_nbytes and not program.multicast_nbytes:
            smallest = min((nbytes for nbytes in rowed if nbytes), default=None)
            program.remark = (
                "nothing was multicast: every shard is of several rows in the slot"
                if smallest is None
                else f"nothing was multicast: the smallest piece has {smallest} bytes, multicast_nbytes is "
                f"{self._multicast_nbytes}"
            )
        return program

    def _prepare_piece(
        self, program: _Program, slot: Slot, shards: Sequence[torch.Tensor], kept: CastShards | None, number: int
    ) -> int:
        """Append piece `number` to `program`. Returns its bytes in shards of one row, which alone can be multicast."""
        transport, window = slot.transport, slot.window
        cast, own, moves = self.fill(slot, shards, kept, number)
        program.reads_shards |= own is not None
        in_one_row = [move for move in moves if move[1].rows == 1]
        nbytes = sum(copy.nbytes for _, copy in in_one_row)
        puts: list[Put] = []
        if self._may_multicast(transport) and 0 < nbytes <= self._multicast_nbytes:
            moves = [move for move in moves if move[1].rows > 1]
            puts.append(transport.prepare_multicast(window, in_one_row))
            # The multicast reaches the own slot too.
            own = None if own is None or not moves else transport.prepare(window, self.rank, moves)
            program.wire_nbytes += nbytes
            program.multicast_nbytes += nbytes
        if moves or not puts:
            puts += [transport.prepare(window, peer, moves) for peer in slot.peers]
            program.wire_nbytes += sum(copy.nbytes for _, copy in moves) * len(slot.peers)
        program.casts.append(cast)
        program.own.append(own)
        program.puts.append(puts)
        return nbytes

    def _may_multicast(self, transport: Transport) -> bool:
        return self._multicast_nbytes > 0 and transport.multicasts and transport.capture is None

    def fill(
        self, slot: Slot, shards: Sequence[torch.Tensor], kept: CastShards | None, number: int = 0
    ) -> tuple[Prepared | None, Put | None, list[tuple[torch.Tensor, Copy]]]:
        """What fills the own places of piece `number`: a cast or nothing, a put or nothing; and what peers get."""
        piece, memory, transport = self._pieces[number], slot.window.memory, slot.transport
        sources = [
            shards[index].detach().reshape(-1)[: self.regions[index].nbytes // self.dtypes[index].itemsize]
            for index in piece
        ]
        if kept is None and any(s.dtype != self.dtypes[index] for s, index in zip(sources, piece, strict=True)):
            places = [region_view(memory, self.regions[index], self.dtypes[index]) for index in piece]
            return prepare_place(sources, places), None, [(memory, copy) for copy in self.copies[number]]
        cast = None
        if kept is not None:
            if not kept.is_fresh:
                cast = prepare_place(sources, [kept.views[index] for index in piece])
            sources = [kept.views[index] for index in piece]
        moves = [
            (source, copy)
            for source, index in zip(sources, piece, strict=True)
            if (copy := between(Region(0, 1, source.nbytes, source.nbytes).merged(), self.regions[index])) is not None
        ]
        return cast, transport.prepare(slot.window, self.rank, moves), moves

    def views(self, slot: Slot) -> list[torch.Tensor]:
        """The group's unsharded tensors as they lie in `slot`."""
        return [
            slot.window.memory[p.offset : p.offset + p.nbytes].view(DTYPES[p.tensor.dtype]).view(p.tensor.shape)
            for p in self.layout.places
        ]


def fill_key(slot: Slot, shards: Sequence[torch.Tensor], kept: CastShards | None) -> Hashable:
    """All that filling `slot` depends on: fresh casts are read in place of the shards, wherever these are."""
    is_fresh = kept is not None and kept.is_fresh
    addresses = () if is_fresh else tuple(shard.data_ptr() for shard in shards)
    return slot, id(kept), addresses, *(shard.dtype for shard in shards)


class Gathering:
    """An all-gather under way. unpacked: what must be over beside the turn's data."""

    def __init__(self, turn: Turn, unpacked: Mark | None = None) -> None:
        self._turn = turn
        self._unpacked = unpacked

    def wait(self) -> None:
        """Until the unsharded tensors are there, for whatever the caller does next."""
        transport = self._turn.slot.transport
        with transport.lane("gather"):
            self._turn.await_data()
            transport.after(self._unpacked)
            arrived = transport.mark()
        transport.after(arrived)
