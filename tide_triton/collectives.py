"""The two collectives on their own: on a process group and a layout, without FSDP2.

spec = GroupSpec(world_size, (TensorSpec("w", (7, 3), "bfloat16"), TensorSpec("b", (64,), "bfloat16")))
with Collectives(process_group, spec) as collectives:
    w, b = collectives.all_gather([w_shard, b_shard])          # bf16 views of the slot, no copies
    gw, gb = collectives.reduce_scatter([w_grad, b_grad])      # fresh fp32 shards, averaged
"""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from tide_triton.all_gather import AllGather, multicast_problem
from tide_triton.errors import TideError
from tide_triton.layouts import GroupSpec, LandingLayout, SlotLayout, SpecError, SwitchLayout, Topology, shard
from tide_triton.layouts.ring import RING_CHUNK_NBYTES, RING_DEPTH, chunk_for
from tide_triton.layouts.slots import align
from tide_triton.many_nodes import ManyNodes
from tide_triton.reduce_scatter import ReduceScatter
from tide_triton.reducers import Reducer, Reduction
from tide_triton.switch_reduce import SwitchReduceScatter
from tide_triton.traffic import Traffic
from tide_triton.transports import select
from tide_triton.transports.rendezvous import Rendezvous, timeout_problem, usable_timeout
from tide_triton.views import DTYPES, dtype_name
from tide_triton.windows import Ring, Slot, SlotPool

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Collectives:
    """Zero-copy all-gather and reduce-scatter of the tensors of `spec` over the ranks of `group`.

    group: a process group whose size is `spec.world_size`; every rank makes the same calls in the same order.
    transport, timeout_s: as in `tide_triton.attach`.
    topology: the ranks as nodes x GPUs, rank = node * GPUs + GPU, which both collectives then follow: blocks cross each
    rail once, gradients are summed inside a node before they leave it, in node order after. None for one node.
    wire_dtype: over several nodes, what a node's sum of gradients is rounded to on its way; None for what it is summed
    in (fp32, or fp64). See `tide_triton.hierarchical_reduce` for what that costs in accuracy.

    multicast_nbytes, switch_sums: as in `tide_triton.attach`, on one node. Gradients that a switch sums have a slot of
    their own. Calls that a CUDA graph captures are not multicast.

    What one rank refuses when they are made is raised on all of them. Arguments of the calls are checked on each rank
    before anything moves: a call that one rank refuses is one that the others make.

    One slot holds the gathered tensors; each `all_gather` overwrites what the one before returned. Gradients go through
    a ring of two chunks of at most 64 MiB. Close it, or use it as a context manager, to give the windows back.

    On one node, both can be captured in a CUDA graph once each has run outside of one, and replayed with other contents
    of the same tensors while this is open. Every rank replays the same graphs in the same order; no time limit watches
    replays.

    Raises SpecError where the group's or the topology's size is not the spec's, `wire_dtype` is none that can be summed
    or comes without a topology, or the transport cannot move tensors of `device`; MismatchError where ranks disagree,
    and what `tide_triton.attach` raises about windows and peers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        spec: GroupSpec,
        *,
        transport: select.TransportName = "auto",
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        wire_dtype: torch.dtype | None = None,
        multicast_nbytes: int | None = None,
        switch_sums: bool = False,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise SpecError(
                f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}; call init_process_group "
                f"first, and pass dist.group.WORLD or dist.new_group(...)"
            )
        # A problem that only one rank has must not leave the others waiting for it.
        problem: Exception | None = None
        try:
            device = _device(device)
            _check(group, spec, transport, device, timeout_s, topology, wire_dtype)
            _check_multicast(multicast_nbytes, switch_sums, topology)
        except ValueError as error:
            problem = error
        meeting = Rendezvous(group, usable_timeout(timeout_s))
        found = meeting.first_problem(problem, "opening Collectives")
        if found is not None:
            raise problem or SpecError(f"Collectives failed on rank {found[0]}: {found[1]}")
        self._device = torch.device(device)
        self.spec = spec
        self.rank: int = group.rank()
        self.gather_traffic = Traffic()
        self.reduce_traffic = Traffic()
        self._shards = [shard(tensor, spec.world_size, self.rank) for tensor in spec.tensors]
        self._meeting = meeting
        self._is_open = True
        #: Of the reductions that ranks have compared: dtypes of gradients and of results, and whether they average.
        self._compared: set[tuple[torch.dtype, torch.dtype, bool]] = set()
        self._shapes = [torch.Size(tensor.shape) for tensor in spec.tensors]
        self._reducers: dict[torch.dtype, Reducer] = {}
        parts = [(f"tensor '{t.name}'", f"{list(t.shape)} {t.dtype} Shard({t.shard_dim})") for t in spec.tensors]
        parts += [("transport", repr(transport)), ("device", self._device.type), ("timeout_s", str(float(timeout_s)))]
        parts += [("topology", repr(topology)), ("wire_dtype", repr(wire_dtype))]
        parts += [("multicast_nbytes", repr(multicast_nbytes)), ("switch_sums", repr(switch_sums))]
        meeting.require_equal(repr(parts), parts, "opening Collectives")
        nodes = 1 if topology is None else topology.nodes
        multicast = multicast_nbytes is not None or switch_sums
        chosen, _ = select.make(transport, self._device, group, meeting, timeout_s, nodes, multicast=multicast)
        self._pool = SlotPool(chosen)
        self._nodes: ManyNodes | None = None
        self._gather: AllGather
        self._ring: Ring | Slot
        #: Where gradients lie that a switch sums.
        self._sums: Slot | None = None
        if topology is not None and topology.nodes > 1:
            self._nodes = ManyNodes(topology, RING_CHUNK_NBYTES, RING_DEPTH, wire_dtype)
            self._gather = self._nodes.gatherer(SlotLayout(spec), self.rank, chosen.piece_nbytes)
        else:
            self._gather = AllGather(
                SlotLayout(spec), self.rank, smallest_piece=chosen.piece_nbytes, multicast_nbytes=multicast_nbytes
            )
        try:
            self._slot = self._pool.add(self._gather.slot_nbytes, spec.digest, "the slot of Collectives")
            if self._nodes is None:
                self._ring = self._pool.ring(chunk_for([spec], RING_CHUNK_NBYTES), RING_DEPTH, spec.digest)
            else:
                self._ring = self._nodes.rings(self._pool, [spec])
            if switch_sums and chosen.multicasts:
                self._sums = self._pool.add(SwitchLayout(spec).nbytes, spec.digest, "the slot of sums by the switch")
        except BaseException:
            self._pool.close()
            raise
        self._views = self._gather.views(self._slot)
        # For one that is dropped without `close`. The pool does not know this object.
        self._finalizer = weakref.finalize(self, self._pool.close)
        self._finalizer.atexit = False

    def all_gather(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The unsharded tensors, of the spec's shapes and dtypes, as views of the slot.

        shards: this rank's shard of each tensor, contiguous, with the elements that `torch.chunk` gives it (padding at
        the end is ignored); a float dtype other than the spec's is cast on the way.
        """
        self._check_open()
        self._check_shards(shards)
        self._gather.start(self._slot, shards, "Collectives", self.gather_traffic).wait()
        return [view.detach() for view in self._views]

    def reduce_scatter(
        self, gradients: Sequence[torch.Tensor], *, average: bool = True, dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """This rank's shards of the gradients' sum or average over the ranks, added in rank order.

        Over several nodes: in rank order inside each node, and these sums in node order. By a switch: in any order,
        rounded to bf16.

        The shards are views of one new tensor.

        gradients: one per tensor of the spec, of its shape, all of one float dtype (bf16, fp16, fp32 or fp64).
        dtype: of the result, and what contributions wider than it are rounded to before the sum.

        Ranks compare these two and `average` when one of them sees a combination for the first time. Raises
        MismatchError where they differ then, or WaitTimeoutError where another rank is not there because it has seen
        its own before.
        """
        self._check_open()
        if not self.spec.tensors:
            self._check_tensors(gradients, "gradients", "gradient")
            return []
        grad_dtype = self._check_gradients(gradients, dtype)
        self._agree_on(grad_dtype, dtype, average)
        reducer = self._reducers.get(grad_dtype)
        if reducer is None:
            landing = LandingLayout(self.spec, dtype_name(grad_dtype))
            if self._sums is not None:
                reducer = SwitchReduceScatter(landing, self.rank)
            elif self._nodes is None:
                reducer = ReduceScatter(landing, self.rank)
            else:
                reducer = self._nodes.reducer(landing, self.rank)
            self._reducers[grad_dtype] = reducer
        outputs = self._empty_shards(dtype)
        reduction = Reduction(dtype, divisor=float(self.spec.world_size) if average else 1.0)
        through = self._ring
        if isinstance(reducer, SwitchReduceScatter) and self._sums is not None:
            by_switch = reducer.why_not(self._sums, outputs, reduction) is None
            through = self._sums if by_switch else self._ring
        reducer(
            through,
            [(index, gradient.contiguous()) for index, gradient in enumerate(gradients)],
            outputs,
            reduction,
            "Collectives",
            self.reduce_traffic,
        )
        return [output.view(own.shape) for output, own in zip(outputs, self._shards, strict=True)]

    def close(self) -> None:
        """Give the windows back. Tensors from `all_gather` stay readable. Idempotent."""
        self._is_open = False
        self._views = []
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise TideError("these Collectives are closed; make new ones")

    def _agree_on(self, grad_dtype: torch.dtype, dtype: torch.dtype, average: bool) -> None:
        """Raise MismatchError where ranks reduce what would be of other sizes, or mean something else."""
        combination = grad_dtype, dtype, average
        if combination in self._compared:
            return
        described = [("the dtype of gradients", grad_dtype), ("dtype", dtype), ("average", average)]
        parts = [(name, str(value)) for name, value in described]
        self._meeting.require_equal(repr(parts), parts, "the first reduction of its kind in Collectives")
        self._compared.add(combination)

    def _empty_shards(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for this rank's shard of each tensor, flat. Allocated at once, since many are small."""
        sizes = [align(own.numel) for own in self._shards]
        parts = torch.empty(sum(sizes), dtype=dtype, device=self._device).split_with_sizes(sizes)
        return [
            part if size == own.numel else part[: own.numel]
            for part, size, own in zip(parts, sizes, self._shards, strict=True)
        ]

    def _check_shards(self, shards: Sequence[torch.Tensor]) -> None:
        self._check_tensors(shards, "shards", "shard")
        for tensor, own, given in zip(self.spec.tensors, self._shards, shards, strict=True):
            if not given.is_contiguous() or given.numel() not in (own.numel, own.padded_numel):
                raise SpecError(
                    f"the shard of '{tensor.name}' on rank {self.rank} must be contiguous with shape "
                    f"{list(own.shape)}, got {list(given.shape)} with strides {list(given.stride())}"
                )
            castable = given.dtype in _FLOATS and DTYPES[tensor.dtype] in _FLOATS
            if given.dtype != DTYPES[tensor.dtype] and not castable:
                raise SpecError(
                    f"the shard of '{tensor.name}' on rank {self.rank} is {given.dtype}, which cannot be cast to "
                    f"{tensor.dtype}; pass a float dtype"
                )

    def _check_gradients(self, gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.dtype:
        self._check_tensors(gradients, "gradients", "gradient")
        dtypes = {gradient.dtype for gradient in gradients}
        fit = len(dtypes) == 1 and dtypes <= set(_FLOATS) and [gradient.shape for gradient in gradients] == self._shapes
        if not fit:
            # One by one, to name it: with hundreds of tensors that takes as long as sending them.
            self._refuse_gradients(gradients)
        if dtype not in _FLOATS:
            raise SpecError(f"dtype must be one of {', '.join(map(str, _FLOATS))}, got {dtype!r}")
        return gradients[0].dtype

    def _refuse_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient in zip(self.spec.tensors, gradients, strict=True):
            if tuple(gradient.shape) != tensor.shape:
                raise SpecError(
                    f"the gradient of '{tensor.name}' must have shape {list(tensor.shape)}, got {list(gradient.shape)}"
                )
            if gradient.dtype not in _FLOATS or gradient.dtype != gradients[0].dtype:
                raise SpecError(
                    f"the gradient of '{tensor.name}' is {gradient.dtype}; gradients must share one of "
                    f"{', '.join(map(str, _FLOATS))}, and the first is {gradients[0].dtype}"
                )

    def _check_tensors(self, given: Sequence[torch.Tensor], name: str, kind: str) -> None:
        if not isinstance(given, Sequence):
            raise SpecError(f"{name} must be a list of tensors, one per tensor of the spec, got {type(given).__name__}")
        if len(given) != len(self.spec.tensors):
            raise SpecError(f"{name} has {len(given)} tensors, the spec {len(self.spec.tensors)}")
        if {type(value) for value in given} <= _PLAIN and {value.device for value in given} <= {self._device}:
            return
        for tensor, value in zip(self.spec.tensors, given, strict=True):
            if type(value) not in _PLAIN:
                raise SpecError(f"the {kind} of '{tensor.name}' must be a torch.Tensor, got {type(value).__name__}")
            if value.device != self._device:
                raise SpecError(
                    f"the {kind} of '{tensor.name}' is on {value.device}, these collectives on {self._device}"
                )


def _device(device: torch.device | str) -> torch.device:
    """Raises SpecError where there is no such device."""
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError(f"device={device!r} is none that torch knows; pass 'cpu', or 'cuda'") from error
    if made.type == "cuda" and (made.index or 0) >= torch.cuda.device_count():
        raise SpecError(f"device={str(made)!r} is not here: torch sees {torch.cuda.device_count()} GPUs; pass 'cpu'")
    return torch.device("cuda", torch.cuda.current_device()) if str(made) == "cuda" else made


def _check(
    group: dist.ProcessGroup,
    spec: GroupSpec,
    transport: str,
    device: torch.device,
    timeout_s: object,
    topology: object,
    wire_dtype: object,
) -> None:
    """Raise SpecError for a value that cannot be."""
    if not isinstance(spec, GroupSpec):
        raise SpecError(f"spec must be a GroupSpec, got {type(spec).__name__}")
    if group.size() != spec.world_size:
        raise SpecError(f"spec.world_size is {spec.world_size}, but the process group has {group.size()} ranks")
    if problem := timeout_problem(timeout_s):
        raise SpecError(problem)
    if topology is not None and not isinstance(topology, Topology):
        raise SpecError(f"topology must be a Topology(nodes, gpus_per_node), or None for one node, got {topology!r}")
    if topology is not None and topology.world_size != spec.world_size:
        raise SpecError(
            f"topology has {topology.nodes} nodes x {topology.gpus_per_node} GPUs, but spec.world_size is "
            f"{spec.world_size}"
        )
    if wire_dtype is not None and wire_dtype not in _FLOATS:
        raise SpecError(f"wire_dtype must be one of {', '.join(map(str, _FLOATS))}, or None, got {wire_dtype!r}")
    if wire_dtype is not None and topology is None:
        raise SpecError(
            f"wire_dtype={wire_dtype} is what sums are rounded to between nodes: leave it out, or pass "
            f"topology=Topology(nodes, gpus_per_node)"
        )
    try:
        select.check(transport, device)
    except ValueError as error:
        raise SpecError(str(error)) from error


def _check_multicast(multicast_nbytes: object, switch_sums: object, topology: Topology | None) -> None:
    if problem := multicast_problem(multicast_nbytes):
        raise SpecError(problem)
    if not isinstance(switch_sums, bool):
        raise SpecError(f"switch_sums must be True or False, got {switch_sums!r}")
    if (multicast_nbytes is not None or switch_sums) and topology is not None and topology.nodes > 1:
        asked = "switch_sums=True" if switch_sums else f"multicast_nbytes={multicast_nbytes}"
        raise SpecError(
            f"{asked} works on one node only, and topology has {topology.nodes}: a switch reaches no other node; leave "
            f"it out, or the topology"
        )
