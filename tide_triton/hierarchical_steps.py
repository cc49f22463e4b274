"""One reduction over several nodes, step by step: what `hierarchical_reduce` does when all gradients are there.

    lane      steps                                                  signals when done
    reduce    LocalPut: own slices to the GPU that sums them         WRITTEN
    sum       LocalSum: the node's slices, in GPU order              VACATED to those who may put the next slices
    rail      RailPut: the node's partial to the shard's owner       WRITTEN
    final     FinalSum: partials, in node order                      ACKNOWLEDGED, then VACATED to who puts the next one

A transport without lanes does one step after the other. What a step puts or starts was prepared before.
"""

from contextlib import AbstractContextManager

from tide_triton.hierarchical_plan import Plan
from tide_triton.hierarchical_program import LANES, Program, SourcedPut, Work
from tide_triton.layouts import FinalSum, LocalPut, LocalSum, RailPut, Step
from tide_triton.paced import PacedTurn
from tide_triton.transports import Lane, Mark
from tide_triton.windows import Slot


class Execution:
    """The steps of `plan`, prepared in `program`, through the rings in `slot`."""

    def __init__(self, plan: Plan, program: Program, slot: Slot) -> None:
        self.plan = plan
        self.program = program
        self.slot = slot
        self.transport = slot.transport

    def run(self, what: str) -> Mark | None:
        """Take every step. Returns the mark after which gradients are free and outputs are there."""
        transport, done = self.transport, None
        others = [lane for lane in LANES.values() if lane != "reduce"]
        with transport.lane("reduce"):
            with self._in("sum"):
                # Outputs may be ready in the order of sums.
                ready = transport.mark()
            transport.after(ready)
            for (_, steps), works in zip(self.plan.turns, self.program.works, strict=True):
                # Neighbours are told that the window is vacant; each step waits for what it needs of them.
                paced = PacedTurn(self.slot, what, dict.fromkeys(self.plan.neighbours, 0))
                paced.turn.is_complete = True
                for lane in others:
                    with transport.lane(lane):
                        pass
                for step, work in zip(steps, works, strict=True):
                    self._take(paced, step, work)
                for lane in others:
                    with self._in(lane):
                        done = transport.mark()
                    transport.after(done)
                done = self.slot.vacate()
            if self.program.padding is not None:
                with transport.lane("final"):
                    self.program.padding(transport.stream)
                    done = transport.mark()
                transport.after(done)
        return done

    def _in(self, lane: Lane) -> AbstractContextManager[None]:
        return self.transport.lane(lane, joined=False)

    def _take(self, paced: PacedTurn, step: Step, work: Work) -> None:
        lane = LANES[type(step)]
        with self._in(lane):
            for wait in step.waits_for:
                paced.wait(lane, wait)
            if isinstance(step, (LocalPut, RailPut)):
                assert isinstance(work, SourcedPut)
                peer = step.peer if isinstance(step, LocalPut) else step.owner
                paced.greet(lane, peer)
                paced.publish(peer, step.number, last=work.put)
                return
            assert not isinstance(work, SourcedPut)
            if isinstance(step, FinalSum) and step.source != self.plan.rank:
                paced.acknowledge(step.source, step.chunk + 1)
            for add_up in work:
                add_up(self.transport.stream)
            if isinstance(step, LocalSum):
                paced.count("summed")
                if step.into == "partials":
                    paced.count("landed")
            for rank in step.vacates:
                paced.vacate(rank)
