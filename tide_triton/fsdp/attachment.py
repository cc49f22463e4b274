"""attach, detach and report: TIDE's collectives under a model that FSDP2 has sharded."""

import copy
import hashlib
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import CPUOffloadPolicy

from tide_triton.errors import AttachError, PeerError, TideError, UnsupportedError
from tide_triton.fsdp import internals
from tide_triton.fsdp.binding import GroupBinding
from tide_triton.fsdp.comms import TideAllGather, TideReduceScatter
from tide_triton.fsdp.domain import Domain
from tide_triton.fsdp.internals import FSDPParam, FSDPParamGroup, GroupSite
from tide_triton.fsdp.params import SlotParam, SlotParamGroup
from tide_triton.fsdp.reference import StockAllGather, StockReduceScatter
from tide_triton.fsdp.report import GroupReport, Report
from tide_triton.layouts import ITEMSIZES
from tide_triton.traffic import Traffic
from tide_triton.transports import select
from tide_triton.transports.rendezvous import Rendezvous
from tide_triton.views import dtype_name

#: Where an attachment is kept: on the model, so that it lives and dies with it.
_KEY = "_tide_attachment"


@dataclass
class _StockGroup:
    """A group that keeps the stock collectives, and why."""

    site: GroupSite
    reason: str
    gather: Traffic = field(default_factory=Traffic)
    reduce: Traffic = field(default_factory=Traffic)


@dataclass
class _Attachment:
    """What `attach` has put under a model."""

    domains: list[Domain]
    stock: list[_StockGroup]
    order: list[GroupSite]
    comms: dict[int, tuple[object, object]]


def attach(
    model: nn.Module,
    *,
    transport: select.TransportName = "auto",
    slots: int | None = None,
    strict: bool = False,
    reuse: bool = True,
    timeout_s: float = 600.0,
) -> None:
    """Run the FSDP2 collectives of `model` through TIDE: no layout copies, bf16 gradients on the wire.

    Call it on every rank after `fully_shard`, before or between training steps, on the FSDP2 root or on any module that
    contains FSDP2 modules. Results stay what stock FSDP2 computes; gradients are added in rank order.

    transport: "host" for processes of one machine; "auto" picks by the parameters' device.
    slots: in how many slots the groups that reshard take turns; None sizes it from the model and its prefetching.
    strict: raise UnsupportedError instead of falling back to a stock collective where zero-copy is not possible.
    reuse: in backward, gather nothing where the parameters that forward gathered still lie in their slot, as those of
    the last groups do. They are then those of the forward, also if shards were changed in between.
    timeout_s: seconds that any rank waits for another before all of them raise.

    Raises, on every rank and with nothing changed: AttachError (no FSDP2 module below `model`, attached already, a
    dtype without a kernel, a device without a transport), UnsupportedError (strict), SlotShortageError (`slots` too
    small; it says how many are needed), MismatchError (ranks disagree on shapes or options), SharedMemoryError (no room
    for the windows), WaitTimeoutError (a rank did not come).
    """
    sites = _sites_of(model)
    by_group: dict[dist.ProcessGroup, list[GroupSite]] = {}
    stock: list[_StockGroup] = []
    for site in sites:
        reason = _stock_reason(site.group)
        if reason is None:
            process_group = internals.shard_group(site.group)
            assert process_group is not None
            by_group.setdefault(process_group, []).append(site)
        else:
            stock.append(_StockGroup(site, reason))

    # A problem that only one rank has must not leave the others waiting for it, so every rank comes to the meetings,
    # whatever it has found so far.
    problem: Exception | None = None
    try:
        _check_free(sites)
        _check_options(sites, stock, transport=transport, slots=slots, strict=strict, timeout_s=timeout_s)
    except ValueError as error:
        problem = error
    meetings = {pg: Rendezvous(pg, _usable_timeout(timeout_s)) for pg in internals.process_groups(sites)}
    _agree_that_all_is_well(meetings.values(), problem, "attach: checking options")

    prefetch = internals.prefetch_depth(model)
    domains: list[Domain] = []
    try:
        for process_group, members in by_group.items():
            meeting = meetings[process_group]
            try:
                _agree_on_specs(
                    meeting, members, slots=slots, strict=strict, reuse=reuse, timeout_s=timeout_s, prefetch=prefetch
                )
                made, why = select.make(transport, members[0].group.device, process_group, meeting, timeout_s)
                domain = Domain(process_group, made, why, members, meeting, strict=strict, reuse=reuse)
                domains.append(domain)
                domain.allocate(prefetch, slots)
            except PeerError:
                # Whoever is missing here would be missing below.
                raise
            except (TideError, ValueError, OSError) as error:
                # All ranks of this group are here with it; those of the next one wait for this rank.
                problem = problem or error
        _agree_that_all_is_well(meetings.values(), problem, "attach: allocating slots")
    except BaseException:
        for domain in domains:
            domain.close()
        raise
    _install(model, _Attachment(domains, stock, sites, {}))


def detach(model: nn.Module) -> None:
    """Give `model` its stock collectives back, and all windows to the system.

    Raises AttachError where `attach` was not called on this very module, or between a forward and its backward.
    """
    attachment = _attachment_of(model)
    bindings = [b for domain in attachment.domains for b in domain.bindings]
    for binding in bindings:
        _require_idle(binding.group, binding.name, "detach")
    for binding in bindings:
        if binding.group.is_unsharded:
            binding.group._to_sharded()
        if not binding.is_movable():
            raise AttachError(
                f"group '{binding.name}' is between a forward and its backward; run the backward, or drop the loss, "
                f"before detach()"
            )
    for binding in bindings:
        binding.release()
        group = binding.group
        for param in group.fsdp_params:
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
    result = Report(
        attachment.domains[0].transport.name if attachment.domains else "none",
        attachment.domains[0].why_transport if attachment.domains else "no group is sharded over ranks",
        tuple(d.transport.world_size for d in attachment.domains),
        tuple(rows[id(site.group)] for site in attachment.order),
        sum(d.pool.nbytes for d in attachment.domains),
        sum(d.grown for d in attachment.domains),
    )
    if not quiet and (not dist.is_initialized() or dist.get_rank() == 0):
        print(result)
    return result


# --- checks, before anything is changed ---


def _sites_of(model: nn.Module) -> list[GroupSite]:
    if not isinstance(model, nn.Module):
        raise AttachError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    sites = internals.sites(model)
    if not sites:
        raise AttachError(
            f"model ({type(model).__name__}) has no FSDP2 parameters: call "
            f"torch.distributed.fsdp.fully_shard on it before tide_triton.attach"
        )
    return sites


def _check_free(sites: Sequence[GroupSite]) -> None:
    for site in sites:
        comms = (site.group._all_gather_comm, site.group._reduce_scatter_comm)
        if isinstance(site.group, SlotParamGroup) or isinstance(comms[0], (TideAllGather, StockAllGather)):
            raise AttachError(
                f"group '{site.name}' is attached already; call tide_triton.detach on the module it was attached with "
                f"first"
            )
        _require_idle(site.group, site.name, "attach")


def _require_idle(group: FSDPParamGroup, name: str, what: str) -> None:
    if group._all_gather_result is not None:
        raise AttachError(
            f"group '{name}' has an unshard(async_op=True) under way; wait for it before {what}(), or call {what}() "
            f"before the first unshard()"
        )


def _check_options(
    sites: Sequence[GroupSite],
    stock: Sequence[_StockGroup],
    *,
    transport: str,
    slots: int | None,
    strict: bool,
    timeout_s: float,
) -> None:
    for site in sites:
        try:
            select.check(transport, site.group.device)
        except ValueError as error:
            raise AttachError(f"group '{site.name}': {error}") from error
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise AttachError(f"slots must be an integer >= 1, or None to size it from the model; got {slots!r}")
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise AttachError(f"timeout_s must be a positive number of seconds, got {timeout_s!r}")
    refused = [s for s in stock if s.reason not in _NOTHING_TO_DO]
    if strict and refused:
        listing = "; ".join(f"group '{s.site.name}': {s.reason}" for s in refused)
        raise UnsupportedError(f"strict=True, but not every group can be zero-copy: {listing}")
    for site in sites:
        if _stock_reason(site.group) is not None:
            continue
        for param, name in zip(site.group.fsdp_params, site.param_names, strict=True):
            for dtype in (internals.slot_dtype(param), param.sharded_param.dtype):
                if dtype_name(dtype) not in ITEMSIZES:
                    raise AttachError(
                        f"parameter '{name}' has dtype {dtype}, for which there is no kernel (there are: "
                        f"{', '.join(ITEMSIZES)}); cast it, or leave it out with fully_shard(ignored_params=...)"
                    )


def _usable_timeout(timeout_s: float) -> float:
    return float(timeout_s) if isinstance(timeout_s, (int, float)) and timeout_s > 0 else 60.0


_ONE_RANK = "sharded over one rank: nothing to communicate"
_REPLICATED = "replicated, not sharded"
_NOTHING_TO_DO = (_ONE_RANK, _REPLICATED)


def _stock_reason(group: FSDPParamGroup) -> str | None:
    """Why a group keeps the stock collectives, from its spec alone; None where it need not."""
    process_group = internals.shard_group(group)
    if process_group is None:
        return _REPLICATED
    if process_group.size() == 1:
        return _ONE_RANK
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        return "parameters are offloaded to the CPU"
    for param in group.fsdp_params:
        if internals.wraps_subclass(param):
            kind = type(param._sharded_local_tensor).__name__
            return f"parameter {param._module_info.param_name} is a {kind} with all-gather extensions of its own"
        if type(param) is not FSDPParam:
            return f"a parameter is managed by {type(param).__name__}"
    if type(group) is not FSDPParamGroup:
        return f"the group is a {type(group).__name__}"
    return None


# --- agreement between ranks ---


def _agree_that_all_is_well(meetings: Collection[Rendezvous], problem: Exception | None, what: str) -> None:
    """Raise on every rank where any has a problem; `problem` is this one's."""
    # A problem in one process group reaches the others through ranks that are in both: hence the second round.
    for _ in range(min(2, len(meetings))):
        for meeting in meetings:
            texts = meeting.exchange("" if problem is None else str(problem) or repr(problem), what)
            for rank, text in zip(meeting.global_ranks, texts, strict=True):
                if text and problem is None:
                    problem = AttachError(f"attach failed on rank {rank}: {text}")
    if problem is not None:
        raise problem


def _agree_on_specs(meeting: Rendezvous, members: Sequence[GroupSite], **options: object) -> None:
    parts = [(f"attach({name}=...)", repr(value)) for name, value in options.items()]
    for site in members:
        # Which slot a group takes follows from it.
        depth = "stays unsharded" if site.depth is None else f"reshards after use, inside {site.depth} that do"
        parts.append((f"how group '{site.name}' is sharded", depth))
        for param, name in zip(site.group.fsdp_params, site.param_names, strict=True):
            dtype = dtype_name(internals.slot_dtype(param))
            what = f"shape {tuple(param._orig_size)}, {dtype}, Shard({param.fsdp_placement.dim})"
            parts.append((f"parameter '{name}'", f"{what} in group '{site.name}'"))
    meeting.require_equal(_digest(parts), parts, "attach: comparing specs")


def _digest(parts: Sequence[tuple[str, str]]) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


# --- putting it under the model ---


def _install(model: nn.Module, attachment: _Attachment) -> None:
    for site in attachment.order:
        attachment.comms[id(site.group)] = (site.group._all_gather_comm, site.group._reduce_scatter_comm)
    for entry in attachment.stock:
        _set_comms(
            entry.site,
            StockAllGather(entry.gather, entry.reason),
            StockReduceScatter(entry.reduce, entry.reason),
        )
        if entry.reason not in _NOTHING_TO_DO:
            warnings.warn(
                f"tide_triton: group '{entry.site.name}' keeps the stock collectives: {entry.reason}", stacklevel=3
            )
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
    model.__dict__[_KEY] = attachment
    for domain in attachment.domains:
        # For a model that is dropped without detach. The pool knows no group, so that it does not keep the model.
        weakref.finalize(attachment, domain.pool.close).atexit = False


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
        binding.slot.label if binding.slot else "-",
        binding.slot.window.nbytes if binding.slot else 0,
    )


def _stock_row(entry: _StockGroup) -> GroupReport:
    path = "local" if entry.reason == _ONE_RANK else "stock"
    gather, reduce = copy.deepcopy(entry.gather), copy.deepcopy(entry.reduce)
    return GroupReport(entry.site.name, path, path, entry.reason, gather, reduce, "-", 0)


def _path(traffic: Traffic) -> str:
    if not traffic.fallback:
        return "zero-copy"
    return "mixed" if traffic.zero_copy else "stock"


def _why(gather: Traffic, reduce: Traffic) -> str:
    reasons = [
        f"{name}: {reason} (x{count})"
        for name, traffic in (("gather", gather), ("reduce", reduce))
        for reason, count in traffic.fallback_reasons.items()
    ]
    if gather.layout_copy_bytes + reduce.layout_copy_bytes and not reasons:
        reasons.append("reduce: gradients that were not contiguous were packed")
    return "; ".join(reasons)
