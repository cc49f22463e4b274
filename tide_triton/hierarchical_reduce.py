"""TIDE-RS over several nodes: sum inside the node, one put over the rail, sum over the nodes.

    gradients --node--> contributions --sum--> outbox --rail--> partials --sum--> accumulator --> shard

`layouts.hierarchy` says which rank takes which step when, and what each step waits for; `hierarchical_program` prepares
the steps, and `hierarchical_steps` makes them happen, chunk by chunk through three rings in one window, whose size
hangs on neither group nor world.

**What is rounded where**, with `Reduction`'s three knobs and everything to nearest even:

    x_r          gradient of rank r, rounded to the reduction's wire_dtype, times premultiply, rounded to it again
    partial[n]   (x_first + x_second) + ... over the GPUs of node n, in fp32 (fp64 where fp64 is reduced); then rounded
                 to `wire`, where that is narrower: the one rounding that a single node does not have
    sum          (partial[0] + partial[1]) + ..., in fp32 (or fp64)
    shard        sum / divisor, rounded to the output's dtype

Where u is the unit roundoff of `wire` (2**-8 for bfloat16), that rounding moves a shard by at most
u * (|partial[0]| + |partial[1]| + ...) / divisor, barring underflow; the fp32 roundings of the sums come on top.

Where nodes have one GPU, and `wire` is not narrower than the gradients, they go over the rail as they are, and `x` is
made of them where they are added. Then the order is rank order, and no partial is rounded.
"""

from collections.abc import Mapping

import torch

from tide_triton.hierarchical_plan import Plan, plan
from tide_triton.hierarchical_program import Memory, Program, empty_accumulator
from tide_triton.hierarchical_steps import Execution
from tide_triton.layouts import Hierarchy, LandingLayout, Pacing, SpecError, Topology, shard
from tide_triton.paced import refuse_capture
from tide_triton.programs import Programs
from tide_triton.reducers import AtOnce, Reducer, Reduction
from tide_triton.transports import Mark
from tide_triton.views import DTYPES, dtype_name
from tide_triton.windows import Ring, Slot


class HierarchicalReduceScatter(Reducer):
    """The reduce-scatter of one group on rank `rank` of `topology`, for gradients of one dtype.

    Gradients go through a slot of at least `layouts.pacing.rings_nbytes(topology, pacing)` bytes.

    pacing: bytes of a chunk in the wider of gradients' and partials' dtypes, and how many each ring holds a sender.
    wire: what partials are rounded to on their way; None for the dtype they are summed in.
    ctas: CTAs of a sum at most, None for as many as there are blocks.

    Raises SpecError where the topology has other ranks than the landing, and for dtypes that cannot be summed.
    """

    def __init__(
        self,
        landing: LandingLayout,
        rank: int,
        topology: Topology,
        pacing: Pacing,
        wire: torch.dtype | None = None,
        ctas: int | None = None,
    ) -> None:
        world = landing.spec.world_size
        if topology.world_size != world:
            raise SpecError(
                f"topology has {topology.nodes} nodes x {topology.gpus_per_node} GPUs, but the landing is for {world} "
                f"ranks"
            )
        self.landing = landing
        self.rank = rank
        self.topology = topology
        self.pacing = pacing
        self.wire = wire
        self.ctas = ctas
        self.padded_numels = [shard(tensor, world, rank).padded_numel for tensor in landing.tensors]
        self._plans: Programs[Plan] = Programs()
        self._programs: Programs[Program] = Programs()

    def start(
        self, through: Slot | Ring, outputs: Mapping[int, torch.Tensor], reduction: Reduction, what: str
    ) -> "HierarchicalReducing":
        """As for every reducer. Raises ValueError where `through` is too small, TypeError where it is no slot."""
        if not isinstance(through, Slot):
            raise TypeError("over several nodes gradients go through one slot that holds their rings, not a Ring")
        return HierarchicalReducing(self, through, outputs, reduction, what)

    def plan(self, indices: tuple[int, ...], reduction: Reduction) -> Plan:
        """How the gradients of tensors `indices` travel."""
        wide = self.wide(reduction)

        def prepare() -> Plan:
            dtype, wire = self.landing.tensors[0].dtype, dtype_name(self.wire or wide)
            return plan(Hierarchy(self.topology, self.pacing, dtype, wire), self.landing, indices, self.rank)

        return self._plans.get((indices, wide), prepare, lambda plan: True)

    def program(self, slot: Slot, memory: Memory, reduction: Reduction) -> Program:
        """What was prepared for the plan of these tensors, moved to `memory`."""
        plan = self.plan(tuple(memory.outputs), reduction)
        program = self._programs.get(
            (slot, reduction, memory.key()),
            lambda: Program(plan, slot, memory, reduction, self.ctas),
            lambda program: program.is_reusable,
        )
        program.move(memory)
        return program

    def wide(self, reduction: Reduction) -> torch.dtype:
        """What is summed in."""
        added = reduction.wire_dtype or DTYPES[self.landing.tensors[0].dtype]
        return torch.float64 if added == torch.float64 else torch.float32


class HierarchicalReducing(AtOnce):
    """A reduction under way. It goes at once, since its chunks cross from tensor to tensor."""

    def __init__(
        self,
        reducer: HierarchicalReduceScatter,
        slot: Slot,
        outputs: Mapping[int, torch.Tensor],
        reduction: Reduction,
        what: str,
    ) -> None:
        super().__init__(slot.transport, outputs, reduction, what)
        self._reducer = reducer
        self._slot = slot
        self._plan = reducer.plan(tuple(outputs), reduction) if outputs else None
        if self._plan is not None and self._plan.hierarchy.nbytes > slot.window.nbytes:
            raise ValueError(
                f"{self._what} needs a slot of {self._plan.hierarchy.nbytes} bytes, got one of {slot.window.nbytes}"
            )

    @property
    def wire_nbytes(self) -> int:
        return 0 if self._plan is None else self._plan.rail_nbytes + self._plan.local_nbytes

    def _go(self, gradients: Mapping[int, torch.Tensor]) -> Mark | None:
        assert self._plan is not None
        refuse_capture(self._transport, self._what)
        accumulator = empty_accumulator(self._plan, self._transport, self._reducer.wide(self.reduction))
        memory = Memory(gradients, self.outputs, accumulator)
        program = self._reducer.program(self._slot, memory, self.reduction)
        return Execution(self._plan, program, self._slot).run(self._what)
