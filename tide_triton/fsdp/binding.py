"""One parameter group while attached: its layout, its slot, its gathers and its reductions.

A binding decides nothing by timing: which path a call takes follows from the group's spec and from FSDP2's own state,
both the same on every rank.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from tide_triton.all_gather import CastShards, Gathering
from tide_triton.errors import AttachError, SlotConflictError, UnsupportedError
from tide_triton.fsdp import internals
from tide_triton.fsdp.group_reduce import GradientHook, GroupReduce
from tide_triton.fsdp.internals import FSDPParam, GroupSite
from tide_triton.layouts import GroupSpec, SlotLayout, TensorSpec
from tide_triton.traffic import Traffic
from tide_triton.views import dtype_name
from tide_triton.windows import Slot

if TYPE_CHECKING:
    from tide_triton.fsdp.domain import Domain


class GroupBinding:
    """A parameter group, the domain whose slots it uses, and what it has moved."""

    def __init__(self, site: GroupSite, domain: "Domain") -> None:
        self.group = site.group
        self.name = site.name
        self.param_names = site.param_names
        self.depth = site.depth
        self.index_in_module = site.index
        self.site = site
        self.domain = domain
        self.gather = Traffic()
        self.reduce = Traffic()
        self.reduction = GroupReduce(self)
        self.slot: Slot | None = None
        #: What says that a slot holds these parameters whole. Slots outlive the model, and so must not know it.
        self._content = object()
        self._gathering: Gathering | None = None
        self._deferred = False
        self._reusing = False
        self._bound = False
        self._cast: CastShards | None = None
        #: How often each parameter had been written when forward gathered it.
        self._gathered: list[int] = []
        self._hooks: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._warned: set[str] = set()
        self.plan()

    @property
    def params(self) -> list[FSDPParam]:
        return list(self.group.fsdp_params)

    def plan(self) -> None:
        """Lay the group out from the shapes and dtypes its parameters have now."""
        transport = self.domain.transport
        world = transport.world_size
        spec = GroupSpec(
            world,
            tuple(
                TensorSpec(name, tuple(p._orig_size), dtype_name(internals.slot_dtype(p)), p.fsdp_placement.dim)
                for name, p in zip(self.param_names, self.params, strict=True)
            ),
        )
        self.layout = SlotLayout(spec)
        self.slot_nbytes = self.domain.slot_nbytes(self.layout)
        self._gatherer = self.domain.gatherer(self.layout)
        self._cast = None
        self.reduction.replan()

    def dtypes_changed(self) -> None:
        """FSDP2 looked at the parameters' dtypes again; follow if a cast or a load has changed them."""
        planned = [place.tensor.dtype for place in self.layout.places]
        if planned != [dtype_name(internals.slot_dtype(p)) for p in self.params]:
            self.plan()
            self._bound = False
            if self.slot is not None and self.slot.window.nbytes < self.slot_nbytes:
                self.move_to(self.domain.grow(self))

    def require_comms(self) -> None:
        """Raise AttachError where the group was given another communication since `attach`."""
        comms = (self.group._all_gather_comm, self.group._reduce_scatter_comm)
        for comm in comms:
            if getattr(comm, "binding", None) is not self:
                raise AttachError(
                    f"group '{self.name}' was given {type(comm).__name__} while attached; call tide_triton.detach "
                    f"first, and attach again where TIDE is wanted: groups with a communication of their own are left "
                    f"alone"
                )

    # --- the slot ---

    @property
    def is_held(self) -> bool:
        """Whether the slot holds, or is about to hold, this group's parameters."""
        return internals.is_held(self.group)

    def rivals(self) -> list["GroupBinding"]:
        """The groups that hold the slot at this moment; one whose gather was put off does not yet."""
        others = (b for b in self.domain.bindings if b is not self and b.slot is self.slot)
        return [b for b in others if b.is_held and not b._deferred]

    def is_movable(self) -> bool:
        """Whether nothing but FSDP2 itself refers to the parameters' storage.

        Autograd saves views of parameters between forward and backward; until they are gone the address is fixed.
        """
        return not any(map(internals.is_referred_to, self.params))

    def move_to(self, slot: Slot) -> None:
        """Use `slot` from now on."""
        self.slot = slot
        self._bound = False

    def bind(self) -> None:
        """Let the parameters lie in the slot."""
        if self._bound:
            return
        assert self.slot is not None
        for param, place in zip(self.params, self.layout.places, strict=True):
            dtype = internals.slot_dtype(param)
            rebind(param, self.slot.window.tensor(place.offset, place.padded_nbytes // dtype.itemsize, dtype))
        self._bound = True

    def listen(self, index: int) -> None:
        """Hear when autograd has added up the gradient of parameter `index`, which has an unsharded form now."""
        unsharded = self.group.fsdp_params[index]._unsharded_param
        heard = self._hooks.get(index)
        if (heard is not None and heard[0]() is unsharded) or isinstance(unsharded, DTensor):
            return
        if unsharded.requires_grad and unsharded.is_leaf:
            handle = unsharded.register_post_accumulate_grad_hook(GradientHook(self.reduction, index))
            self._hooks[index] = weakref.ref(unsharded), handle

    def overwrite(self) -> None:
        """The slot's memory is written other than by a turn, in the order that is current."""
        if self.slot is not None:
            self.slot.await_vacant()
            self.slot.content = None

    def place_of(self, index: int) -> torch.Tensor | None:
        """Parameter `index` as it lies in the slot, None where it does not."""
        if not self._bound or self.slot is None or not self.group.is_unsharded:
            return None
        place = self.layout.places[index]
        memory = self.slot.window.memory[place.offset : place.offset + place.nbytes]
        return memory.view(internals.slot_dtype(self.group.fsdp_params[index])).view(place.tensor.shape)

    def is_in_slot(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the slot."""
        if self.slot is None:
            return False
        start = self.slot.window.memory.data_ptr()
        return start <= tensor.data_ptr() < start + self.slot.window.nbytes

    def used(self) -> None:
        """A backward is over: the next may want other parameters, for an optimizer may step before it."""
        if self.slot is not None:
            self.slot.content = None
        if self._cast is not None:
            self._cast.is_fresh = False

    @property
    def cast_nbytes(self) -> int:
        """Bytes of the shards that are kept as they were cast."""
        return 0 if self._cast is None else self._cast.memory.nbytes

    def vacate(self) -> None:
        """The parameters were resharded: what has been enqueued so far is the last to read them from the slot."""
        if self._bound and self.slot is not None:
            self.slot.vacate()

    def release(self) -> None:
        """Give the resharded parameters storages of their own again, freed as stock FSDP2 leaves them."""
        if self._bound:
            for param in self.params:
                own = torch.empty_like(param.all_gather_outputs[0])
                rebind(param, own)
                own.untyped_storage().resize_(0)
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._cast = None
        self._bound = False
        self.slot = None

    def take_slot(self, *, may_defer: bool) -> bool:
        """Make the slot this group's, moving to another where it is in use. False: not now, once the holder is done.

        Raises SlotConflictError where the slot is in use, this group cannot move, and it must have its slot now.
        """
        crowded = self.depth is not None and internals.stays_unsharded(self.group) and self.domain.shares_slot(self)
        rivals = self.rivals()
        if rivals or crowded:
            # Only this process sees who refers to its memory, and either all ranks move or none does.
            if self.domain.on_every_rank(self.is_movable(), f"a slot for group '{self.name}'"):
                self.move_to(self.domain.grow(self))
            elif rivals and may_defer:
                return False
            elif not all(rival.can_be_put_off for rival in rivals):
                raise self._conflict(rivals[0])
            else:
                for rival in rivals:
                    rival.put_off()
        self._deferred = False
        self.bind()
        assert self.slot is not None
        self.slot.settle()
        return True

    def _conflict(self, rival: "GroupBinding") -> SlotConflictError:
        place = self.depth, self.index_in_module
        own_slots = sum((b.depth, b.index_in_module) == place for b in self.domain.bindings)
        return SlotConflictError(
            f"groups '{self.name}' and '{rival.name}' share {self.slot.label if self.slot else 'a slot'} and must both "
            f"be unsharded now: '{rival.name}' stays so until the backward is over, or was unsharded by hand. Pass "
            f"slots={own_slots} to attach(), one for each such group (fewer may do), or set "
            f"reshard_after_forward/backward before the forward pass that needs it. A backward that this has ended "
            f"cannot be taken up again, nor the model trained on, as with any error in a backward of FSDP2"
        )

    @property
    def can_be_put_off(self) -> bool:
        """Whether its gather is under way over the zero-copy path, and nobody reads what it brings yet."""
        return (self._gathering is not None or self._reusing) and not self.group.is_unsharded

    def put_off(self) -> None:
        """Leave the slot to a group that needs it sooner, and gather again once these parameters are waited for."""
        self._deferred, self._gathering, self._reusing = True, None, False

    @property
    def slot_label(self) -> str:
        """What its slot is called in reports; with several meshes, with the ranks that share it."""
        if self.slot is None:
            return "-"
        return f"{self.slot.label}{self.domain.label}"

    # --- the all-gather, in FSDP2's steps ---

    def gather_fallback(self) -> str | None:
        """Why this gather cannot be zero-copy, None where it can."""
        if self.group.is_sharded_post_forward:
            return "resharded to a smaller mesh after forward"
        return None

    def start_gather(self) -> None:
        """Cast the shards into the own slot and put them to the peers, as soon as the slot is this group's."""
        if self._is_still_there():
            self._warn_of_changes()
            self._reusing = True
            self.gather.zero_copy += 1
            self.gather.reused += 1
            return
        if not self.take_slot(may_defer=True):
            self._deferred = True
            return
        self._put_shards()

    def _is_still_there(self) -> bool:
        """Whether backward wants what forward gathered, and nothing has been written over it since.

        A backward uses the parameters of its forward, so nothing needs to move. Like every choice it follows from
        FSDP2's state and the slot's history, which are the same on every rank.
        """
        return (
            self.domain.options.reuse
            and self._bound
            and self.slot is not None
            and self.slot.content is self._content
            and internals.is_in_backward(self.group)
            and not self.rivals()
        )

    def _put_shards(self) -> None:
        assert self.slot is not None
        self._deferred = False
        # Read now, not at attach: loading and `to_empty` replace them.
        shards = [p._sharded_param_data for p in self.params]
        if internals.is_in_backward(self.group):
            if self._cast is not None and self._cast.is_fresh:
                self._warn_of_changes()
        else:
            self._gathered = self._versions()
            if self._cast is not None:
                self._cast.is_fresh = False
        self._gathering = self._gatherer.start(self.slot, shards, f"'{self.name}'", self.gather, self._kept(shards))
        self.slot.content = self._content

    def _versions(self) -> list[int]:
        """How often each sharded parameter has been written: torch counts it for the DTensor, not for its memory."""
        sharded = [p.sharded_param for p in self.params]
        return [0 if parameter.is_inference() else parameter._version for parameter in sharded]

    def _warn_of_changes(self) -> None:
        """Say so, once, where parameters are no more what forward gathered and backward is about to use.

        It is not a reason to gather: ranks may see it differently, and the gradients of a forward are those of its
        parameters.
        """
        if self._gathered and self._versions() != self._gathered:
            self._warn_once(
                f"the parameters of group '{self.name}' have changed between a forward and its backward, which uses "
                f"them as they were; FSDP2 uses the new ones: for that, pass reuse=False, keep_cast=False"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"tide_triton: {message}", stacklevel=3)

    def _kept(self, shards: Sequence[torch.Tensor]) -> CastShards | None:
        """Where the shards are kept as they are cast, with that option and where they are cast at all."""
        if self.domain.options.keep_cast and self._cast is None:
            dtypes = [internals.slot_dtype(p) for p in self.params]
            if any(shard.dtype != dtype for shard, dtype in zip(shards, dtypes, strict=True)):
                self._cast = CastShards(self._gatherer, self.domain.transport.device)
        return self._cast

    def finish_gather(self) -> None:
        """Until every peer's shards are in the slot."""
        if self._deferred:
            try:
                self.take_slot(may_defer=False)
            except SlotConflictError:
                # As if it had not been asked for, so that its owner can go on.
                self._deferred, self.group._all_gather_result = False, None
                raise
            self._put_shards()
        assert self._reusing or self._gathering is not None
        if self._gathering is not None:
            self._gathering.wait()
        self._gathering, self._reusing = None, False

    # --- falling back ---

    def fall_back(self, traffic: Traffic, reason: str, wire_bytes: int, layout_copy_bytes: int) -> None:
        """Count a call of the stock collective, say so once, and raise UnsupportedError under `strict`."""
        if self.domain.options.strict:
            raise UnsupportedError(f"group '{self.name}' would fall back to the stock collective: {reason}")
        traffic.fell_back(reason, wire_bytes, layout_copy_bytes)
        self._warn_once(f"group '{self.name}' falls back to the stock collective: {reason}")


def rebind(param: FSDPParam, flat: torch.Tensor) -> None:
    """Make `flat` (1-D, padded, its own storage) the memory of the unsharded parameter.

    The parameter object stays the same, and with it its `.grad`, its hooks and autograd's leaf.
    """
    param.all_gather_outputs = [flat]
    unsharded = getattr(param, "_unsharded_param", None)
    if unsharded is None:
        return
    view = torch.as_strided(flat, param._orig_size, param._contiguous_orig_stride, storage_offset=0)
    local = unsharded._local_tensor if isinstance(unsharded, DTensor) else unsharded
    if local.dtype == view.dtype:
        local.data = view
    else:
        # A cast after the first forward: FSDP2 makes a new parameter at the next all-gather.
        del param._unsharded_param
