"""The reductions of one parameter group, in FSDP2's steps: early where the last one showed how, else when it asks."""

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide_triton.errors import UnsupportedError
from tide_triton.fsdp.early import EarlyReduction, Habit, may_begin, settings_of, split_output
from tide_triton.layouts import LandingLayout
from tide_triton.reducers import Kept, Reducer, Reduction
from tide_triton.views import dtype_name
from tide_triton.windows import Ring, Slot

if TYPE_CHECKING:
    from tide_triton.fsdp.binding import GroupBinding

#: CTAs of a sum at most, on a GPU: enough to keep ahead of the link, few enough to leave the SMs to compute.
SUM_CTAS = 32


class GroupReduce:
    """How the gradients of `binding`'s group reach the ranks that own them."""

    def __init__(self, binding: "GroupBinding") -> None:
        self._binding = binding
        #: Gradients of the reduction in progress, each with the index of its parameter, in FSDP2's order.
        self.gradients: list[tuple[int, torch.Tensor]] = []
        #: How the last reduction went, once the ranks have agreed that the next may begin early.
        self.habit: Habit | None = None
        #: The same while they have not.
        self.candidate: Habit | None = None
        self._allocations = 0
        self._predivision = 1.0
        self._reducers: dict[torch.dtype, Reducer] = {}
        self._produced: list[int] = []
        self._early: EarlyReduction | None = None
        self._last: Habit | None = None
        self._encloses: bool | None = None
        self._kept: list[Kept] = []
        #: How often forwards have used each weight since the last backward, where that is counted.
        self.uses: Counter[int] = Counter()
        self._expected: dict[int, torch.Tensor] = {}
        #: Weights to whose gradient more than their layer contributes.
        self._shared: set[int] = set()
        #: Parameters in whose `.grad` FSDP2 finds a placeholder.
        self._placed: set[int] = set()

    def replan(self) -> None:
        """The group's layout has changed."""
        self._reducers.clear()
        self.habit = self.candidate = None

    # --- while autograd runs ---

    def ready(self, index: int) -> None:
        """Autograd has added up the gradient of parameter `index`."""
        expected = self._expected.pop(index, None)
        if expected is not None and self._binding.group.reduce_grads:
            found = self._binding.group.fsdp_params[index]._unsharded_param.grad
            if found is None or not torch.equal(expected, found):
                self._shared.add(index)
        if self._early is not None and self._early.has(index):
            self._shared.add(index)
        if not self._is_early():
            if self._binding.group.reduce_grads:
                self._produced.append(index)
            return
        unsharded = self._binding.group.fsdp_params[index]._unsharded_param
        gradient = unsharded.grad
        if self._early is not None and self._early.wants(index, gradient):
            unsharded.grad = None
            self._keep(self._early.offer(index, self._packed(gradient)))

    def claim(self, index: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The place of weight `index` in the slot, if its gradient may be written there; see `slot_linear`."""
        binding = self._binding
        if (
            index in self._shared
            or self.uses[index] != 1
            or not self._is_early()
            or not binding.group.reshard_after_backward
        ):
            return None
        unsharded = binding.group.fsdp_params[index]._unsharded_param
        if self._early is None or unsharded.grad is not None or dtype != unsharded.dtype:
            return None
        place = binding.place_of(index)
        return place if place is not None and self._early.wants(index, place) else None

    def expect(self, index: int, gradient: torch.Tensor) -> None:
        """A layer hands `gradient` of weight `index` to autograd. Noted while it is not known whether it is all."""
        if self.habit is None:
            self._expected[index] = gradient

    def deliver(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of weight `index` was written into the place that was claimed."""
        binding = self._binding
        assert self._early is not None
        assert binding.slot is not None
        binding.slot.content = None
        binding.reduce.in_slot += 1
        self._keep(self._early.offer(index, gradient))

    def _is_early(self) -> bool:
        """A gradient is there: whether this reduction begins, or has begun, early."""
        self._binding.domain.drop_read()
        if self.candidate is not None:
            self._binding.domain.agree_on_habits()
        if self._early is None and self.habit is not None and may_begin(self._binding.group, self.habit):
            self._early = self._begin(self.habit)
            self._binding.reduce.early += 1
        return self._early is not None

    def _begin(self, habit: Habit) -> EarlyReduction:
        domain = self._binding.domain
        reducer = self._reducer(habit.gradient_dtype)
        what = f"'{self._binding.name}'"
        return EarlyReduction(reducer, domain.ring(), habit, domain.transport.device, domain.transport, what)

    def abandon(self) -> None:
        """A forward begins: what a backward that failed has left behind is of no use."""
        self._early = None
        self._kept = []
        self._produced = []
        self._expected.clear()
        self._placed.clear()

    # --- when FSDP2 asks ---

    def begin(self) -> None:
        """FSDP2's post-backward begins: it collects gradients, reshards, and reduces."""
        self.gradients.clear()
        self._allocations = 0
        self._predivision = 1.0
        self._placed.clear()
        if self._early is None:
            return
        for index, param in enumerate(self._binding.group.fsdp_params):
            if self._early.has(index) and param._unsharded_param.grad is None:
                param._unsharded_param.grad = _placeholder(param._unsharded_param)
                self._placed.add(index)

    def end(self) -> None:
        self.gradients.clear()
        self._placed.clear()
        self._expected.clear()
        self.uses.clear()

    def allocates_input(self) -> bool:
        """FSDP2 asks for the flat input first, for the output second."""
        self._allocations += 1
        return self._allocations == 1

    def expected_output(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The output that an early reduction has filled, where FSDP2 asks for what it did before."""
        early = self._early
        if early is None or not early.is_as_expected([index for index, _ in self.gradients]):
            return None
        fits = early.output.numel() == numel and early.output.dtype == dtype
        return early.output if fits else None

    def predivide(self, factor: float) -> None:
        self._predivision *= factor

    def fallback(self, wire_dtype: torch.dtype) -> str | None:
        """Why this reduction cannot be zero-copy, None where it can.

        Raises UnsupportedError where it cannot and has begun already.
        """
        reason = self._fallback(wire_dtype)
        if reason is not None and self._early is not None:
            raise UnsupportedError(
                f"group '{self._binding.name}': {reason}, after other gradients of it were sent already; pass "
                f"early_reduce=False to attach()"
            )
        return reason

    def _fallback(self, wire_dtype: torch.dtype) -> str | None:
        for _, gradient in self.gradients:
            if type(gradient) is not torch.Tensor:
                return f"a gradient is a {type(gradient).__name__}"
            if not gradient.dtype.is_floating_point or gradient.dtype.itemsize < 2:
                return f"no kernel adds gradients of {gradient.dtype}"
        if not wire_dtype.is_floating_point or wire_dtype.itemsize < 2:
            return f"no kernel reduces in {wire_dtype}"
        return None

    def reduce(self, output: torch.Tensor, wire_dtype: torch.dtype, op: Any) -> list[Kept]:
        """Reduce the collected gradients into FSDP2's flat, padded output.

        Returns what holds the gradients that are read meanwhile, which must live until FSDP2's stream has passed the
        reduction.
        """
        reduction = reduction_of(op, self._binding.domain.transport.world_size, wire_dtype, self._predivision)
        early, self._early = self._early, None
        collected = tuple(index for index, _ in self.gradients)
        late = {index: gradient for index, gradient in self.gradients if index not in self._placed}
        reducer = self._reducer(self.gradients[0][1].dtype)
        parts = split_output(output, collected, reducer)
        if early is None:
            self._reduce(reducer, late, parts, reduction)
            self._note(collected, output, reduction)
        elif reduction != early.habit.reduction:
            raise RuntimeError(
                f"group '{self._binding.name}': FSDP2 asks for {reduction}, after gradients were sent for "
                f"{early.habit.reduction}; pass early_reduce=False to attach(), and report this"
            )
        else:
            self._complete(early, reducer, output, parts, late)
        self._produced = []
        kept, self._kept = self._kept, []
        return kept

    def _complete(
        self,
        early: EarlyReduction,
        reducer: Reducer,
        output: torch.Tensor,
        parts: dict[int, torch.Tensor],
        late: Mapping[int, torch.Tensor],
    ) -> None:
        """Reduce what did not go early."""
        missing = {index: gradient for index, gradient in late.items() if not early.has(index)}
        if output is early.output:
            for index, gradient in missing.items():
                self._keep(early.offer(index, self._packed(gradient)))
            early.finish(self._binding.reduce)
        else:
            self._binding.reduce.remarks["other parameters had gradients than in the backward before"] += 1
            done, waiting = early.salvage()
            for index in done.keys() & parts.keys():
                parts[index].copy_(done[index])
                self._binding.reduce.layout_copy_bytes += done[index].nbytes
            unsent = {index: {**waiting, **missing}[index] for index in parts if index in waiting or index in missing}
            self._reduce(reducer, unsent, parts, early.habit.reduction, self._binding.domain.ring())
        # A parameter whose gradient autograd produced in two goes: the sum is linear.
        seconds = {index: gradient for index, gradient in late.items() if early.has(index)}
        if seconds:
            extra = {index: torch.empty_like(parts[index]) for index in seconds}
            self._reduce(reducer, seconds, extra, early.habit.reduction, self._binding.domain.ring())
            for index, shard in extra.items():
                parts[index].add_(shard)

    def _reduce(
        self,
        reducer: Reducer,
        gradients: Mapping[int, torch.Tensor],
        outputs: Mapping[int, torch.Tensor],
        reduction: Reduction,
        through: Slot | Ring | None = None,
    ) -> None:
        """Reduce `gradients` through what suits them, or through `through`: the slot may hold gradients itself."""
        if not gradients:
            return
        into = {index: outputs[index] for index in gradients}
        through = through or self._through(reducer.landing)
        reducing = reducer.start(through, into, reduction, f"'{self._binding.name}'")
        for index, gradient in gradients.items():
            self._keep(reducing.offer(index, self._packed(gradient)))
        reducing.finish(self._binding.reduce)

    def _through(self, landing: LandingLayout) -> Slot | Ring:
        """With `slot_reuse` the own slot, where it is vacant and large enough; else the ring."""
        binding = self._binding
        slot, domain = binding.slot, binding.domain
        if not domain.may_reuse_slots:
            return domain.ring()
        if slot is None or binding.is_held or binding.rivals():
            reason = "its parameters are not resharded"
        elif landing.nbytes > slot.window.nbytes:
            reason = f"gradients of {landing.dtype} do not fit into its slot"
        else:
            return slot
        binding.reduce.remarks[f"through the ring, {reason}"] += 1
        return domain.ring()

    def _packed(self, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
            self._binding.reduce.layout_copy_bytes += gradient.nbytes
            self._binding.reduce.remarks["gradients that were not contiguous were packed"] += 1
        return gradient

    def _keep(self, kept: Kept | None) -> None:
        if kept is None:
            return
        if self._binding.slot is not None and any(map(self._binding.is_in_slot, kept.gradients)):
            # Nobody may gather into the slot before this was read, and memory is not taken by it.
            self._binding.slot.read_until(kept.mark)
            kept = Kept([one for one in kept.gradients if not self._binding.is_in_slot(one)], kept.mark)
        if kept.gradients:
            self._kept.append(kept)
            self._binding.domain.keep(kept)

    def _reducer(self, dtype: torch.dtype) -> Reducer:
        reducer = self._reducers.get(dtype)
        if reducer is None:
            landing = LandingLayout(self._binding.layout.spec, dtype_name(dtype))
            reducer = self._reducers[dtype] = self._binding.domain.reducer(landing, SUM_CTAS)
        return reducer

    def _note(self, collected: tuple[int, ...], output: torch.Tensor, reduction: Reduction) -> None:
        """The next reduction may begin early if it goes as this one: likely, where this one went as the one before."""
        options = self._binding.domain.options
        if self.habit is not None or self.candidate is not None or not options.early_reduce:
            return
        if self._encloses is None:
            self._encloses = self._binding.domain.encloses(self._binding)
        if self._encloses:
            return
        # Each gradient came once, and in this backward.
        once = len(self._produced) == len(collected) and set(self._produced) == set(collected)
        last, self._last = self._last, None
        if once:
            self._last = Habit(
                tuple(self._produced),
                collected,
                reduction,
                settings_of(self._binding.group),
                self.gradients[0][1].dtype,
                output.numel(),
                output.dtype,
                torch.cuda.current_stream(output.device) if output.device.type == "cuda" else None,
            )
            if self._last == last:
                self.candidate, self._last = self._last, None


class GradientHook:
    """Tells a group's reductions that autograd has added up the gradient of parameter `index`.

    Holds them weakly: autograd keeps hooks where Python's garbage collector does not see them.
    """

    def __init__(self, group_reduce: GroupReduce, index: int) -> None:
        self._to = weakref.ref(group_reduce)
        self._index = index

    def __call__(self, _: torch.Tensor) -> None:
        to = self._to()
        if to is not None:
            to.ready(self._index)


def _placeholder(unsharded: torch.Tensor) -> torch.Tensor:
    """What stands in `.grad` for a gradient that is on its way: its shape and dtype, and next to no memory."""
    return torch.empty((), dtype=unsharded.dtype, device=unsharded.device).expand(unsharded.shape)


def reduction_of(op: Any, world_size: int, wire_dtype: torch.dtype, predivision: float) -> Reduction:
    """FSDP2's reduce op as a `Reduction`. Raises ValueError for an op that is no sum."""
    # A ReduceOp carries a factor; its plain kinds also claim to be instances of it.
    kinds: Any = dist.ReduceOp.RedOpType
    plain = isinstance(op, kinds) or not isinstance(op, dist.ReduceOp)
    kind, factor = (op, None) if plain else op.__getstate__()
    premultiply = 1.0 / predivision
    if kind == kinds.SUM:
        return Reduction(wire_dtype, premultiply)
    if kind == kinds.AVG:
        return Reduction(wire_dtype, premultiply, float(world_size))
    if kind == kinds.PREMUL_SUM and factor is not None:
        return Reduction(wire_dtype, premultiply * float(factor))
    raise ValueError(f"FSDP2 asked to reduce with {op}; only SUM, AVG and PREMUL_SUM are sums")
