"""What is checked before anything is changed, and what the ranks agree on.

A problem that only one rank has is raised on every rank: all come to the same meetings, whatever they have found.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tide_triton.errors import AttachError, UnsupportedError
from tide_triton.fsdp import internals
from tide_triton.fsdp.comms import TideAllGather
from tide_triton.fsdp.internals import FSDPParam, FSDPParamGroup, GroupSite
from tide_triton.fsdp.options import Options
from tide_triton.fsdp.params import SlotParamGroup
from tide_triton.fsdp.reference import StockAllGather
from tide_triton.layouts import ITEMSIZES
from tide_triton.traffic import Traffic
from tide_triton.transports import select
from tide_triton.transports.rendezvous import Rendezvous, timeout_problem
from tide_triton.views import dtype_name


@dataclass
class StockGroup:
    """A group that keeps the stock collectives, and why."""

    site: GroupSite
    reason: str
    gather: Traffic = field(default_factory=Traffic)
    reduce: Traffic = field(default_factory=Traffic)


def sites_of(model: nn.Module) -> list[GroupSite]:
    if not isinstance(model, nn.Module):
        raise AttachError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    sites = internals.sites(model)
    if not sites:
        raise AttachError(
            f"model ({type(model).__name__}) has no FSDP2 parameters: call "
            f"torch.distributed.fsdp.fully_shard on it before tide_triton.attach"
        )
    return sites


def check_free(sites: Sequence[GroupSite]) -> None:
    for site in sites:
        comms = (site.group._all_gather_comm, site.group._reduce_scatter_comm)
        if isinstance(site.group, SlotParamGroup) or isinstance(comms[0], (TideAllGather, StockAllGather)):
            raise AttachError(
                f"group '{site.name}' is attached already; call tide_triton.detach on the module it was attached with "
                f"first"
            )
        require_idle(site.group, site.name, "attach")
        for param, name in zip(site.group.fsdp_params, site.param_names, strict=True):
            if type(param) is FSDPParam and internals.is_referred_to(param):
                raise AttachError(
                    f"group '{site.name}' is between a forward and its backward, or something refers to the unsharded "
                    f"'{name}'; run the backward, or drop the loss, before attach()"
                )


def require_idle(group: FSDPParamGroup, name: str, what: str) -> None:
    if group._all_gather_result is not None:
        raise AttachError(
            f"group '{name}' has an unshard(async_op=True) under way; wait for it before {what}(), or call {what}() "
            f"before the first unshard()"
        )


def check_options(
    sites: Sequence[GroupSite],
    stock: Sequence[StockGroup],
    options: Options,
    *,
    transport: str,
    timeout_s: float,
) -> None:
    for site in sites:
        try:
            select.check(transport, site.group.device)
        except ValueError as error:
            raise AttachError(f"group '{site.name}': {error}") from error
    options.check()
    _check_nodes(sites, stock, options.nodes)
    if too_odd := timeout_problem(timeout_s):
        raise AttachError(too_odd)
    refused = [(s.site.name, s.reason) for s in stock if s.reason not in NOTHING_TO_DO]
    refused += [(s.name, "resharded to a smaller mesh after forward") for s in sites if s.group._use_post_forward_mesh]
    if options.strict and refused:
        listing = "; ".join(f"group '{name}': {reason}" for name, reason in refused)
        raise UnsupportedError(f"strict=True, but not every group can be zero-copy: {listing}")
    for site in sites:
        if stock_reason(site.group) is not None:
            continue
        for param, name in zip(site.group.fsdp_params, site.param_names, strict=True):
            for dtype in (internals.slot_dtype(param), param.sharded_param.dtype):
                if dtype_name(dtype) not in ITEMSIZES:
                    raise AttachError(
                        f"parameter '{name}' has dtype {dtype}, for which there is no kernel (there are: "
                        f"{', '.join(ITEMSIZES)}); cast it, or leave it out with fully_shard(ignored_params=...)"
                    )


def _check_nodes(sites: Sequence[GroupSite], stock: Sequence[StockGroup], nodes: int | None) -> None:
    left_alone = {id(entry.site.group) for entry in stock}
    for site in sites:
        process_group = internals.shard_group(site.group)
        if nodes is None or process_group is None or id(site.group) in left_alone:
            continue
        if process_group.size() % nodes:
            raise AttachError(
                f"nodes={nodes} does not divide the {process_group.size()} ranks that group '{site.name}' is sharded "
                f"over; pass the number of nodes that these ranks are on, or None for one"
            )


ONE_RANK = "sharded over one rank: nothing to communicate"
REPLICATED = "replicated, not sharded"
NOTHING_TO_DO = (ONE_RANK, REPLICATED)
#: Opens the reason of a group whose communication the user has customized, and which is left alone.
CUSTOM = "it was given a communication of its own: "


def stock_reason(group: FSDPParamGroup) -> str | None:
    """Why a group keeps the stock collectives, from its spec alone; None where it need not."""
    process_group = internals.shard_group(group)
    if process_group is None:
        return REPLICATED
    if process_group.size() == 1:
        return ONE_RANK
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
    for comm, default in (
        (group._all_gather_comm, DefaultAllGather),
        (group._reduce_scatter_comm, DefaultReduceScatter),
    ):
        if type(comm) is not default:
            return f"{CUSTOM}{type(comm).__name__}"
    return None


# --- agreement between ranks ---


_ELSEWHERE = "attach failed on rank"


def agree_that_all_is_well(meetings: Collection[Rendezvous], problem: Exception | None, what: str) -> None:
    """Raise on every rank where any has a problem; `problem` is this one's."""
    # A problem in one process group reaches the others through ranks that are in both: hence the second round.
    for _ in range(min(2, len(meetings))):
        for meeting in meetings:
            found = meeting.first_problem(problem, what)
            if found is not None and problem is None:
                # Of the rank that has it, also where it has come here by way of another.
                text = found[1] if found[1].startswith(_ELSEWHERE) else f"{_ELSEWHERE} {found[0]}: {found[1]}"
                problem = AttachError(text)
    if problem is not None:
        raise problem


def agree_on_specs(meeting: Rendezvous, members: Sequence[GroupSite], options: Options, **others: object) -> None:
    parts = options.described() + [(f"attach({name}=...)", repr(value)) for name, value in others.items()]
    for site in members:
        # Which slot a group takes follows from it.
        depth = "stays unsharded" if site.depth is None else f"reshards after use (nesting depth {site.depth})"
        parts.append((f"how group '{site.name}' is sharded", depth))
        for param, name in zip(site.group.fsdp_params, site.param_names, strict=True):
            dtype = dtype_name(internals.slot_dtype(param))
            what = f"shape {tuple(param._orig_size)}, {dtype}, Shard({param.fsdp_placement.dim})"
            parts.append((f"parameter '{name}'", f"{what} in group '{site.name}'"))
    meeting.require_equal(_digest(parts), parts, "attach: comparing specs")


def _digest(parts: Sequence[tuple[str, str]]) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
