"""attach, detach and report: TIDE's collectives under a model that FSDP2 has sharded."""

import copy
import warnings
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tide_triton.errors import AttachError, PeerError
from tide_triton.fsdp import internals, slot_linear
from tide_triton.fsdp.binding import GroupBinding
from tide_triton.fsdp.checks import (
    CUSTOM,
    NOTHING_TO_DO,
    ONE_RANK,
    StockGroup,
    agree_on_specs,
    agree_that_all_is_well,
    check_free,
    check_options,
    require_idle,
    sites_of,
    stock_reason,
)
from tide_triton.fsdp.comms import TideAllGather, TideReduceScatter
from tide_triton.fsdp.domain import Domain
from tide_triton.fsdp.internals import FSDPParam, FSDPParamGroup, GroupSite
from tide_triton.fsdp.options import Options
from tide_triton.fsdp.params import SlotParam, SlotParamGroup
from tide_triton.fsdp.reference import StockAllGather, StockReduceScatter
from tide_triton.fsdp.report import GroupReport, Report
from tide_triton.layouts.ring import RING_CHUNK_NBYTES, RING_DEPTH
from tide_triton.traffic import Traffic
from tide_triton.transports import select
from tide_triton.transports.rendezvous import Rendezvous, usable_timeout

#: Where an attachment is kept: on the model, so that it lives and dies with it.
_KEY = "_tide_attachment"


@dataclass
class _Attachment:
    """What `attach` has put under a model."""

    domains: list[Domain]
    stock: list[StockGroup]
    order: list[GroupSite]
    comms: dict[int, tuple[object, object]]


def attach(
    model: nn.Module,
    *,
    transport: select.TransportName = "auto",
    slots: int | None = None,
    strict: bool = False,
    reuse: bool = True,
    slot_reuse: bool = True,
    early_reduce: bool = False,
    keep_cast: bool = False,
    grads_in_slots: bool = False,
    ring_depth: int = RING_DEPTH,
    ring_chunk_nbytes: int = RING_CHUNK_NBYTES,
    nodes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    multicast_nbytes: int | None = None,
    switch_sums: bool = False,
    timeout_s: float = 600.0,
) -> None:
    """Run the FSDP2 collectives of `model` through TIDE: no layout copies on one node, bf16 gradients on the wire.

    Call it on every rank after `fully_shard`, before or between training steps, on the FSDP2 root or on any module that
    contains FSDP2 modules. Results stay what stock FSDP2 computes; gradients are added in rank order.

    transport: "host" for processes of one machine, "host_switch" for the same with an emulated switch that multicasts;
    "auto" picks by the parameters' device. "nccl_rma" and "nvshmem" put to other nodes with NCCL's and NVSHMEM's
    one-sided operations, inside a node as "nccl" and "symm" do.
    slots: in how many slots the groups that reshard take turns; None sizes it from the model and its prefetching.
    strict: raise UnsupportedError instead of falling back to a stock collective where zero-copy is not possible.
    reuse: in backward, gather nothing where the parameters that forward gathered still lie in their slot, as those of
    the last groups do. They are then those of the forward, also if shards were changed in between.
    slot_reuse: let gradients land in the slot that their group has just vacated; False sends them through a ring of
    fixed size, which does not grow with the group or the world. What cannot land (gradients of a group that is not
    resharded, or wider than its parameters) goes through the ring by itself.
    early_reduce: send each gradient through the ring when autograd produces it, once two backwards of a group went
    alike, and drop it when it is summed. Costs host time for each. Groups that hold no other groups only: those of a
    parent come mixed with its children's, in an order that ranks need not share. On one node only.
    keep_cast: keep each shard as it was cast for forward, so that backward gathers without a kernel; takes the bytes of
    all shards once more, in the parameters' dtype.
    grads_in_slots: with `early_reduce`, let `nn.Linear` layers write the gradients of their weights over the weights in
    the slot, so that none is allocated; `fsdp.slot_linear` says when not. The layers are `SlotLinear` meanwhile.
    ring_depth, ring_chunk_nbytes: chunks of the ring, and the bytes of each; smaller where no group fills one.
    nodes: how many nodes the ranks of every process group are on, equally many on each, in rank order; None for one.
    Over several, shards cross each rail once, those in short runs packed, and gradients are summed inside a node before
    they leave it, in node order after. `slot_reuse` then has no effect, since gradients leave through the ring once
    their group's last one is there; the ring is that of `tide_triton.hierarchical_reduce`. All-gathers go in chunks of
    a quarter of a block, or of the ring's where these are larger.
    wire_dtype: what a node's sums are rounded to on their way to other nodes, torch.bfloat16 say; None for what they
    are summed in. One node rounds nothing.
    multicast_nbytes: where the transport can multicast, all-gathers put pieces of up to so many bytes to all ranks at
    once; larger ones, for which it has been seen to be slower, and shards that lie in several rows go to each peer, and
    `report()` says where nothing was multicast for that. None asks no library for multicast. Where it was asked for and
    cannot be had, a warning and `report()` say why.
    switch_sums: where the transport can multicast, let the switch sum bf16 gradients: each rank's are copied into its
    slot, and each owner reads the sum of its part. **Sums are then rounded to bf16 and in an order of the switch's**,
    so that they are neither stock's bits nor need repeat; `tide_triton.kernels.multimem` gives the bound. What it
    cannot sum goes as without it, and `report()` says so. Works with `slot_reuse` and without `early_reduce`.
    timeout_s: seconds that any rank waits for another before all of them raise.

    Raises, on every rank and with nothing changed: AttachError (no FSDP2 module below `model`, attached already, a
    dtype without a kernel, a device without a transport), UnsupportedError (strict), SlotShortageError (`slots` too
    small; it says how many are needed), MismatchError (ranks disagree on shapes or options), SharedMemoryError (no room
    for the windows), WaitTimeoutError (a rank did not come).
    """
    sites = sites_of(model)
    by_group: dict[dist.ProcessGroup, list[GroupSite]] = {}
    stock: list[StockGroup] = []
    for site in sites:
        reason = stock_reason(site.group)
        if reason is None:
            process_group = internals.shard_group(site.group)
            assert process_group is not None
            by_group.setdefault(process_group, []).append(site)
        else:
            stock.append(StockGroup(site, reason))

    # A problem that only one rank has must not leave the others waiting for it, so every rank comes to the meetings,
    # whatever it has found so far.
    problem: Exception | None = None
    options = Options(
        slots,
        strict,
        reuse,
        slot_reuse,
        early_reduce,
        keep_cast,
        grads_in_slots,
        ring_depth,
        ring_chunk_nbytes,
        nodes,
        wire_dtype,
        multicast_nbytes,
        switch_sums,
    )
    try:
        check_free(sites)
        check_options(sites, stock, options, transport=transport, timeout_s=timeout_s)
    except ValueError as error:
        problem = error
    meetings = {pg: Rendezvous(pg, usable_timeout(timeout_s)) for pg in internals.process_groups(sites)}
    agree_that_all_is_well(meetings.values(), problem, "attach: checking options")

    prefetch = internals.prefetch_depth(model)
    domains: list[Domain] = []
    try:
        for process_group, members in by_group.items():
            meeting = meetings[process_group]
            try:
                agree_on_specs(
                    meeting, members, options, transport=transport, timeout_s=float(timeout_s), prefetch=prefetch
                )
                device = members[0].group.device
                nodes, multicast = options.nodes or 1, options.wants_multicast
                made, why = select.make(
                    transport, device, process_group, meeting, timeout_s, nodes, multicast=multicast
                )
                domain = Domain(process_group, made, why, members, meeting, options)
                domains.append(domain)
                domain.allocate(prefetch)
            except PeerError:
                # Whoever is missing here would be missing below.
                raise
            except Exception as error:
                # Whatever it is, the other ranks wait for this one: they are told at the next meeting.
                problem = problem or error
        agree_that_all_is_well(meetings.values(), problem, "attach: allocating slots")
    except BaseException:
        for domain in domains:
            domain.close()
        raise
    if len(domains) > 1:
        for domain in domains:
            domain.label = f" of ranks {dist.get_process_group_ranks(domain.process_group)}"
    _install(model, _Attachment(domains, stock, sites, {}))


def detach(model: nn.Module) -> None:
    """Give `model` its stock collectives back, and all windows to the system.

    After a PeerError the step that raised it is lost, and so is whatever still refers to its parameters.

    Raises AttachError where `attach` was not called on this very module, or between a forward and its backward.
    """
    attachment = _attachment_of(model)
    bindings = [b for domain in attachment.domains for b in domain.bindings]
    gave_up = any(domain.transport.gave_up for domain in attachment.domains)
    for binding in bindings:
        if gave_up:
            binding.group._all_gather_result = None
        else:
            require_idle(binding.group, binding.name, "detach")
    for binding in bindings:
        if binding.group.is_unsharded:
            binding.group._to_sharded()
        if not gave_up and not binding.is_movable():
            raise AttachError(
                f"group '{binding.name}' is between a forward and its backward; run the backward, or drop the loss, "
                f"before detach()"
            )
    for binding in bindings:
        binding.release()
        group = binding.group
        for param in group.fsdp_params:
            slot_linear.restore(param._module_info.module)
            if hasattr(param, "_tide_cast"):
                param.param_dtype = param._tide_cast
            param.__class__ = FSDPParam
            for name in ("_tide_binding", "_tide_index", "_tide_cast"):
                param.__dict__.pop(name, None)
        group.__class__ = FSDPParamGroup
        del group._tide_binding
    for site in attachment.order:
        site.group._all_gather_comm, site.group._reduce_scatter_comm = attachment.comms[id(site.group)]
    for domain in attachment.domains:
        domain.close()
    del model.__dict__[_KEY]


def report(model: nn.Module, *, quiet: bool = False) -> Report:
    """What went which way since `attach`, per parameter group, on this rank.

    quiet: only return it; otherwise rank 0 prints it as a table too.

    Raises AttachError where `attach` was not called on this very module.
    """
    attachment = _attachment_of(model)
    rows = {id(b.group): _row(b) for domain in attachment.domains for b in domain.bindings}
    rows |= {id(s.site.group): _stock_row(s) for s in attachment.stock}
    late = [site for site in internals.sites(model) if id(site.group) not in rows]
    rows |= {id(site.group): _stock_row(StockGroup(site, "sharded after attach")) for site in late}
    result = Report(
        attachment.domains[0].transport.name if attachment.domains else "none",
        attachment.domains[0].why_transport if attachment.domains else "no group is sharded over ranks",
        tuple(d.transport.world_size for d in attachment.domains),
        tuple(rows[id(site.group)] for site in (*attachment.order, *late)),
        sum(d.pool.nbytes for d in attachment.domains),
        sum(d.grown for d in attachment.domains),
        sum(d.ring_nbytes for d in attachment.domains),
        sum(b.cast_nbytes for d in attachment.domains for b in d.bindings),
        tuple(d.topology for d in attachment.domains),
        attachment.domains[0].options.wire_dtype if attachment.domains else None,
    )
    if not quiet and (not dist.is_initialized() or dist.get_rank() == 0):
        print(result)
    return result


# --- putting it under the model ---


def _install(model: nn.Module, attachment: _Attachment) -> None:
    for site in attachment.order:
        attachment.comms[id(site.group)] = (site.group._all_gather_comm, site.group._reduce_scatter_comm)
    by_reason: dict[str, list[str]] = {}
    for entry in attachment.stock:
        if not entry.reason.startswith(CUSTOM):
            _set_comms(
                entry.site,
                StockAllGather(entry.gather, entry.reason),
                StockReduceScatter(entry.reduce, entry.reason),
            )
        if entry.reason not in NOTHING_TO_DO:
            by_reason.setdefault(entry.reason, []).append(f"'{entry.site.name}'")
    for reason, names in by_reason.items():
        warnings.warn(f"tide_triton: {', '.join(names)} keep the stock collectives: {reason}", stacklevel=3)
    sites = {id(site.group): site for site in attachment.order}
    for domain in attachment.domains:
        for binding in domain.bindings:
            group = binding.group
            if group.is_unsharded:
                group._to_sharded()
            group.__class__ = SlotParamGroup
            group._tide_binding = binding
            for index, param in enumerate(group.fsdp_params):
                param.__class__ = SlotParam
                param._tide_binding, param._tide_index = binding, index
                if hasattr(param, "param_dtype"):
                    param._tide_cast, param.param_dtype = param.param_dtype, None
            _set_comms(sites[id(group)], TideAllGather(binding), TideReduceScatter(binding))
            if domain.options.grads_in_slots:
                _convert(binding)
    model.__dict__[_KEY] = attachment
    for domain in attachment.domains:
        # For a model that is dropped without detach. The pool knows no group, so that it does not keep the model.
        weakref.finalize(attachment, domain.pool.close).atexit = False


def _convert(binding: GroupBinding) -> None:
    """Let the linear layers of the group write gradients into the slot; tied weights stay as they are."""
    for index, param in enumerate(binding.group.fsdp_params):
        info = param._module_info
        if info.param_name == "weight" and not info.shared_modules and isinstance(info.module, nn.Module):
            slot_linear.convert(info.module, binding.reduction, index)


def _set_comms(site: GroupSite, gather: object, reduce: object) -> None:
    if len(internals.groups_of(site.module)) == 1:
        site.module.set_custom_all_gather(gather)
        site.module.set_custom_reduce_scatter(reduce)
    else:
        # The public setters refuse a module with several meshes, for which one comm would not do.
        site.group._all_gather_comm, site.group._reduce_scatter_comm = gather, reduce


def _attachment_of(model: nn.Module) -> _Attachment:
    attachment = getattr(model, "__dict__", {}).get(_KEY)
    if attachment is None:
        raise AttachError(
            f"tide_triton.attach was not called on this module ({type(model).__name__}); pass the module that was "
            f"attached"
        )
    assert isinstance(attachment, _Attachment)
    return attachment


# --- rows of the report ---


def _row(binding: GroupBinding) -> GroupReport:
    return GroupReport(
        binding.name,
        _path(binding.gather),
        _path(binding.reduce),
        _why(binding.gather, binding.reduce),
        copy.deepcopy(binding.gather),
        copy.deepcopy(binding.reduce),
        binding.slot_label,
        binding.slot.window.nbytes if binding.slot else 0,
    )


def _stock_row(entry: StockGroup) -> GroupReport:
    path = "local" if entry.reason == ONE_RANK else "stock"
    gather, reduce = copy.deepcopy(entry.gather), copy.deepcopy(entry.reduce)
    return GroupReport(entry.site.name, path, path, entry.reason, gather, reduce, "-", 0)


def _path(traffic: Traffic) -> str:
    if not traffic.fallback:
        return "zero-copy"
    return "mixed" if traffic.zero_copy else "stock"


def _why(gather: Traffic, reduce: Traffic) -> str:
    traffics = ("gather", gather), ("reduce", reduce)
    said = [(name, traffic.fallback_reasons) for name, traffic in traffics]
    said += [(name, traffic.remarks) for name, traffic in traffics]
    return "; ".join(f"{name}: {text} (x{count})" for name, counts in said for text, count in counts.items())
