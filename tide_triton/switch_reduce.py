"""Sums by a switch: each rank's gradients lie in its slot, and each owner reads the sum of its part.

    gradient (bf16) --put--> its parts in the own slot, at the same place on every rank
                             the switch adds that place of all ranks --load--> average --> fp32 shard

An owner receives one sum instead of a contribution from each rank. What it costs: gradients are copied once, since a
switch reads only symmetric memory; and a sum is rounded to bf16, in whatever order the switch adds
(`tide_triton.kernels.multimem`), so it is not that of `ReduceScatter` bit by bit.

One turn of a slot in two parts, of which the second holds the slot until everyone has read it:

    every rank                                  its peers
    READY = n                              -->
    puts its gradients into its own slot
    WRITTEN = (n, 1): they lie there       -->  wait for all; sum their parts, of this slot too
    waits for (n, 2) from all              <--  WRITTEN = (n, 2): summed
    vacates
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tide_triton.kernels import prepare_multimem, prepare_place
from tide_triton.kernels.launch import Prepared
from tide_triton.kernels.multimem import ALIGNMENT, OUTPUT_DTYPES
from tide_triton.layouts import LandingLayout, SwitchLayout
from tide_triton.programs import Programs
from tide_triton.reduce_scatter import ReduceScatter
from tide_triton.reducers import AtOnce, Reducer, Reduction, Underway
from tide_triton.traffic import Traffic
from tide_triton.transports import Mark, Put
from tide_triton.windows import Ring, Slot

#: Parts of a turn: gradients lie in the slot; their sums were read from it.
_LIE, _READ = 1, 2

#: What leaves bf16 contributions as they are.
_HARMLESS = (None, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Program:
    """What a reduction does: gradients into the own slot, then sums.

    staged: sums of outputs that a sum cannot be written to, which start on no 16 bytes; they are copied from there.
    """

    put: Put
    sums: list[Prepared]
    staged: list[torch.Tensor]

    @property
    def is_reusable(self) -> bool:
        return self.put.is_reusable and all(one.is_reusable for one in self.sums)


class SwitchReduceScatter(Reducer):
    """The reduce-scatter of one group on rank `rank` of a node, by a switch where it can sum, else as `ReduceScatter`.

    Gradients go through a vacant slot of at least `SwitchLayout.nbytes` bytes on a transport that multicasts. What the
    switch does not sum, `why_not` says, goes through a slot or a ring as `ReduceScatter` has it, with a remark.

    ctas: as for `ReduceScatter`, and of each sum.
    """

    def __init__(self, landing: LandingLayout, rank: int, *, ctas: int | None = None) -> None:
        self.landing = landing
        self.rank = rank
        self.layout = SwitchLayout(landing.spec)
        self.by_puts = ReduceScatter(landing, rank, ctas=ctas)
        self.padded_numels = self.by_puts.padded_numels
        self._ctas = ctas
        self._programs: Programs[_Program] = Programs()
        #: What graphs have captured, which they need as long as they are replayed.
        self._captured: list[_Program] = []

    def why_not(self, through: Slot | Ring, outputs: Sequence[torch.Tensor], reduction: Reduction) -> str | None:
        """Why the switch cannot sum these, None where it can; the same on every rank."""
        if any(tensor.dtype != "bfloat16" for tensor in self.landing.tensors):
            return f"gradients are {self.landing.tensors[0].dtype}, and a switch sums bfloat16"
        if reduction.premultiply != 1.0:
            return "contributions are scaled before the sum"
        if reduction.wire_dtype not in _HARMLESS:
            return f"contributions are rounded to {reduction.wire_dtype} before the sum"
        if any(output.dtype not in OUTPUT_DTYPES for output in outputs):
            return f"sums are {outputs[0].dtype}, and a switch gives bfloat16 or float32"
        if isinstance(through, Ring):
            return "gradients go through the ring"
        if through.window.nbytes < self.layout.nbytes:
            return "gradients do not fit into the slot"
        return None

    def start(
        self, through: Slot | Ring, outputs: Mapping[int, torch.Tensor], reduction: Reduction, what: str
    ) -> Underway:
        reason = self.why_not(through, list(outputs.values()), reduction)
        if reason is None:
            assert isinstance(through, Slot)
            return SwitchReducing(self, through, outputs, reduction, what)
        reducing = self.by_puts.start(through, outputs, reduction, what)
        reducing.remark = f"not summed by the switch: {reason}"
        return reducing

    def sent_nbytes(self, index: int) -> int:
        """Bytes of tensor `index` that this rank sends to others: all parts but its own."""
        parts = [self.layout.part(index, owner).nbytes for owner in range(self.layout.spec.world_size)]
        return sum(parts) - parts[self.rank]

    def program(
        self, slot: Slot, gradients: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor], divisor: float
    ) -> _Program:
        """What the reduction of `gradients` into `outputs`, by tensor in the same order, does through `slot`."""
        if slot.transport.capture is not None:
            self._captured.append(self._prepare(slot, gradients, outputs, divisor))
            return self._captured[-1]
        where = [(index, tensor.data_ptr()) for index, tensor in gradients.items()]
        into = [(output.data_ptr(), output.numel(), output.dtype) for output in outputs.values()]
        key: Hashable = (slot, divisor, *where, *into)
        prepare = lambda: self._prepare(slot, gradients, outputs, divisor)  # noqa: E731
        return self._programs.get(key, prepare, lambda program: program.is_reusable)

    def _prepare(
        self, slot: Slot, gradients: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor], divisor: float
    ) -> _Program:
        transport, window = slot.transport, slot.window
        moves = [(gradient, copy) for index, gradient in gradients.items() for copy in self.layout.copies(index)]
        put = transport.prepare(window, self.rank, moves)
        with transport.here():
            direct = {index: output for index, output in outputs.items() if output.data_ptr() % ALIGNMENT == 0}
            staged = {index: torch.empty_like(output) for index, output in outputs.items() if index not in direct}
            parts = [self.layout.part(index, self.rank) for index in outputs]
            sources = [transport.everywhere(window, part.offset, part.nbytes // 2) for part in parts]
            targets = [direct[index] if index in direct else staged[index] for index in outputs]
            sums = [prepare_multimem(sources, targets, divisor=divisor, ctas=self._ctas)]
            if staged:
                sums.append(prepare_place(list(staged.values()), [outputs[index] for index in staged]))
        return _Program(put, sums, list(staged.values()))


class SwitchReducing(AtOnce):
    """A reduction under way."""

    def __init__(
        self,
        reducer: SwitchReduceScatter,
        slot: Slot,
        outputs: Mapping[int, torch.Tensor],
        reduction: Reduction,
        what: str,
    ) -> None:
        super().__init__(slot.transport, outputs, reduction, what)
        self._reducer = reducer
        self._slot = slot

    @property
    def wire_nbytes(self) -> int:
        return sum(map(self._reducer.sent_nbytes, self.outputs))

    def _go(self, gradients: Mapping[int, torch.Tensor]) -> Mark | None:
        transport, slot = self._transport, self._slot
        with transport.lane("reduce"):
            # Joined here, so that sums come after what writes the memory that they write.
            with transport.lane("sum"):
                program = self._reducer.program(slot, gradients, self.outputs, self.reduction.divisor)
            turn = slot.open(self._what, parts=_READ)
            transport.put(program.put)
            for peer in turn.peers:
                turn.publish(peer, _LIE)
            sent = transport.mark()
            with transport.lane("sum", joined=False):
                transport.after(sent)
                for peer in turn.peers:
                    # Given before the peer's gradients lay there: taken, so that none is left over in a captured graph.
                    turn.await_credit(peer)
                turn.await_part(_LIE)
                for add_up in program.sums:
                    add_up(transport.stream)
                done = transport.mark()
                for peer in turn.peers:
                    turn.publish(peer, _READ)
                turn.await_data()
                slot.vacate()
        return done

    def finish(self, traffic: Traffic) -> None:
        super().finish(traffic)
        # Gradients are bf16, and each was copied whole.
        traffic.layout_copy_bytes += sum(self._reducer.landing.tensors[index].nbytes for index in self.outputs)
        traffic.by_switch += 1
